"""The reported learning rate is the one that the update used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold.core import step as step_module
from stepfold.core.optimizer import learning_rates

pytestmark = pytest.mark.not_optimized

SCHEDULE = optax.piecewise_constant_schedule(0.5, {2: 0.5, 5: 0.5})  # exact in float32
DATA = np.ones((64, 4), np.float32)
INJECTED = optax.inject_hyperparams(optax.sgd)
WRAPPERS = {
    "alone": lambda tx: tx,
    "chained": lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx),
    "averaged": lambda tx: sf.ema_params(tx, 0.9),
    "scaled": lambda tx: sf.dynamic_loss_scale(sf.ema_params(tx, 0.9)),
}


def loss_terms(params, batch, key):
    return {"fit": sf.mean(batch @ params["w"]), "b": params["b"]}


def new_state(tx, plan=None):
    params = {"w": jnp.ones(4), "b": jnp.ones(())}
    return sf.init_state(params, tx, jax.random.key(0), sharding=plan)


def rates_of_updates(tx, steps, **options):
    """Run steps; the gradient of `b` is 1, so that an update of it is the rate."""
    step, state, rates = jax.jit(sf.make_train_step(loss_terms, tx, **options)), new_state(tx), []
    for _ in range(steps):
        before = state.params["b"]
        state, metrics = step(state, DATA[:8])
        rates.append((float(before - state.params["b"]), metrics))
    return rates


@pytest.mark.parametrize("wrapper", full_but(["alone"], WRAPPERS))
def test_the_rate_is_that_of_the_update(wrapper):
    tx = WRAPPERS[wrapper](INJECTED(learning_rate=SCHEDULE))
    for used, metrics in rates_of_updates(tx, 7, accumulate=2):
        assert float(metrics["learning_rate"].compute()) == pytest.approx(used, rel=1e-5)


def test_the_rate_of_the_next_update_fails_the_same_law(monkeypatch):
    @jax.numpy_dtype_promotion("standard")
    def next_rate(opt_state, but):
        return {"learning_rate": SCHEDULE(opt_state.count)}

    monkeypatch.setattr(step_module, "learning_rates", next_rate)
    with pytest.raises(AssertionError):
        test_the_rate_is_that_of_the_update("alone")


def test_a_skipped_step_does_not_count_and_a_hook_may_change_it():
    tx = INJECTED(learning_rate=0.5)
    step = jax.jit(sf.make_train_step(loss_terms, tx, skip_nonfinite=True))
    state, first = step(new_state(tx), DATA[:8])
    state, bad = step(state, DATA[:8] * np.nan)
    rates = {"learning_rate": jnp.float32(0.25)}
    state = state._replace(opt_state=state.opt_state._replace(hyperparams=rates))
    _, last = step(state, DATA[:8])
    assert bad["learning_rate"].count == 0
    merged = first["learning_rate"].merge(bad["learning_rate"]).merge(last["learning_rate"])
    assert merged.compute() == 0.375


@pytest.mark.parametrize("layout", full_but(["one"], ["one", "fsdp", "ordered"]))
def test_a_run_logs_it_resumed_and_in_calls_of_several_steps(tmp_path, layout):
    tx, plan, grad = INJECTED(learning_rate=SCHEDULE), None, {}
    if layout != "one":
        mesh = sf.make_mesh((8,), ("fsdp",))
        plan = sf.make_sharding(
            jax.eval_shape(lambda: new_state(tx)), mesh, sf.sharding.fsdp(min_size=1)
        )
        grad = {"grad": sf.sharding.ordered(plan)} if layout == "ordered" else {}
    for steps in (5, 8):
        result = sf.fit(
            sf.make_train_step(loss_terms, tx, **grad), new_state(tx, plan), sf.batches(DATA, 8),
            steps=steps, run_dir=tmp_path, checkpoints=sf.Checkpoints(every=3), log_every=1,
            steps_per_call=2,
        )  # fmt: skip
    assert result.resumed == 5
    assert result.history["train/learning_rate"] == [float(SCHEDULE(i)) for i in range(8)]


def test_several_rates_are_told_apart():
    tx = optax.multi_transform(
        {"slow": INJECTED(learning_rate=0.25), "fast": INJECTED(learning_rate=1.0)},
        {"w": "slow", "b": "fast"},
    )
    (used, metrics), *_ = rates_of_updates(tx, 1)
    rates = {name: float(m.compute()) for name, m in metrics.items() if "rate" in name}
    assert rates == {"learning_rate/slow": 0.25, "learning_rate/fast": 1.0}
    assert used == 1.0
    chain = optax.chain(INJECTED(learning_rate=1.0), INJECTED(learning_rate=2.0))
    assert learning_rates(chain.init({})).keys() == {"learning_rate/0", "learning_rate/1"}
    crossed = {"a": {"b": chain.init({})[0]}, "b": {"a": chain.init({})[1]}}
    assert learning_rates(crossed).keys() == {"learning_rate/a/b", "learning_rate/b/a"}
    nested = optax.inject_hyperparams(lambda learning_rate: INJECTED(learning_rate=learning_rate))
    assert len(learning_rates(nested(learning_rate=0.5).init({"w": jnp.ones(2)}))) == 2


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(SCHEDULE),  # its state has a count alone
        optax.inject_hyperparams(optax.scale)(step_size=0.5),
        optax.inject_hyperparams(lambda learning_rate: optax.sgd(0.1))(learning_rate=np.ones(3)),
    ],
)
def test_a_rate_that_the_state_does_not_hold_is_not_reported(tx):
    step = sf.make_train_step(loss_terms, tx)
    _, metrics = jax.eval_shape(step, new_state(tx), DATA[:8])
    assert sorted(metrics) == ["b", "fit", "grad_norm", "loss"]


def test_a_metric_of_that_name_takes_its_place():
    tx = INJECTED(learning_rate=0.5)
    own = lambda *args: (loss_terms(*args), {"learning_rate": 3.0})
    _, metrics = jax.jit(sf.make_train_step(own, tx))(new_state(tx), DATA[:8])
    assert metrics["learning_rate"].compute() == 3.0
    step = sf.observe(sf.make_train_step(loss_terms, tx), learning_rate=lambda state: 4.0)
    _, metrics = jax.jit(step)(new_state(tx), DATA[:8])
    assert metrics["learning_rate"].compute() == 4.0
