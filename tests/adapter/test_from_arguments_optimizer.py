"""The schedule and the optimizer of the arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import stepfold as sf
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import make_optimizer, make_schedule, optimizer_of
from stepfold.adapter.optimizers import SCHEDULES, optimizer_names
from stepfold.core.optimizer import as_optimizer

# The schedule


@pytest.fixture
def standard_promotion():
    """Promote dtypes as around an optimizer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def schedule_of(steps=110, **fields):
    return make_schedule(TrainingArguments(learning_rate=0.1, **fields), steps)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_every_schedule_warms_up_to_its_peak_and_falls(name):
    schedule = schedule_of(scheduler=name, warmup_steps=10, learning_rate_end=0.001)
    assert [float(schedule(step)) for step in (0, 5, 10)] == pytest.approx([0.0, 0.05, 0.1])
    values = [float(schedule(step)) for step in range(10, 111)]
    assert min(values) >= 0.001 - 1e-6
    assert max(values) <= 0.1 + 1e-6
    if name != "inverse_sqrt":
        assert values[-1] == pytest.approx(0.001)


@pytest.mark.usefixtures("standard_promotion")
def test_a_schedule_is_that_of_optax():
    ours = schedule_of(scheduler="cosine", warmup_steps=10, learning_rate_end=0.01)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 110, 0.01)
    for step in range(0, 111, 5):
        assert float(ours(step)) == pytest.approx(float(theirs(step)), rel=1e-6)


def test_a_constant_schedule_needs_no_length():
    assert float(schedule_of(None)(7)) == pytest.approx(0.1)
    warmup = schedule_of(None, scheduler="warmup_constant", warmup_steps=10)
    assert float(warmup(5)) == pytest.approx(0.05)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("polynomial", {"power": 1.0}),
        ("cosine", {"exponent": 2.0}),
        ("inverse_sqrt", {"timescale": 10}),
        ("wsd", {"decay": 0.5}),
        ("cosine_restarts", {"cycles": 2}),
    ],
)
def test_scheduler_options_reach_the_schedule(name, options):
    default = schedule_of(scheduler=name)
    changed = schedule_of(scheduler=name, scheduler_kwargs=options)
    assert any(float(default(step)) != float(changed(step)) for step in range(110))


@pytest.mark.usefixtures("standard_promotion")
def test_wsd_is_constant_and_then_falls():
    schedule = schedule_of(100, scheduler="wsd", scheduler_kwargs={"decay": 0.2})
    assert [float(schedule(step)) for step in (0, 79, 90, 100)] == pytest.approx(
        [0.1, 0.1, 0.05, 0]
    )


def test_a_custom_scheduler_is_a_schedule_or_makes_one():
    for custom in (
        optax.constant_schedule(0.3),
        lambda steps: optax.linear_schedule(0.3, 0, steps),
    ):
        schedule = make_schedule(TrainingArguments(custom_scheduler=custom), 10)
        assert float(schedule(0)) == pytest.approx(0.3)
    assert float(schedule(10)) == 0.0


def test_a_schedule_that_depends_on_an_unknown_length_is_refused():
    with pytest.raises(
        sf.ConfigError,
        match=r"scheduler: .* number of steps is unknown, got 'linear'; .* max_steps",
    ):
        schedule_of(None, scheduler="linear")
    arguments = TrainingArguments(custom_scheduler=lambda n: optax.linear_schedule(1, 0, n))
    with pytest.raises(
        sf.ConfigError, match="custom_scheduler: .* number of steps is unknown, .* max_steps"
    ):
        make_schedule(arguments, None)
    endless = TrainingArguments(custom_scheduler=optax.constant_schedule(0.3))
    assert float(make_schedule(endless, None)(0)) == pytest.approx(0.3)


def test_a_warmup_has_to_end():
    with pytest.raises(
        sf.ConfigError, match="warmup_steps: expected fewer than the 10 steps of the run, got 10"
    ):
        schedule_of(10, warmup_steps=10)


@pytest.mark.parametrize(
    ("name", "options"), [("wsd", {"decay": 1.5}), ("cosine_restarts", {"cycles": 0})]
)
def test_scheduler_options_out_of_range_are_refused(name, options):
    with pytest.raises(sf.ConfigError, match="scheduler_kwargs"):
        schedule_of(scheduler=name, scheduler_kwargs=options)


# The optimizer

PARAMS = {"embed": jnp.arange(12.0).reshape(3, 4) / 7, "w": jnp.ones((4, 4)) / 3}
REQUIRED = {
    "galore": {"rank": 2},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": 0},
    "sophia": {"hessian_diagonal_fn": optax.trace(0.9)},
}


def params_after(tx, steps=3):
    """Train for some steps on a quadratic loss."""

    def loss_fn(params, batch, key):
        return sum(((leaf - 1.5) ** 2).sum() for leaf in jax.tree.leaves(params))

    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx))
    for _ in range(steps):
        state, _ = step(state, None)
    return state.params


def pairs(left, right):
    return zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)


def optimizer(steps=100, **fields):
    arguments = TrainingArguments(**fields)
    return make_optimizer(arguments, make_schedule(arguments, steps))


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")  # by optax
def test_every_optimizer_of_optax_trains_with_a_schedule():
    before = PARAMS["embed"]
    optimizers = {
        name: as_optimizer(
            optimizer(
                optimizer=name,
                extra_optimizer_kwargs=REQUIRED.get(name, {}),
                learning_rate=0.1,
                scheduler="linear",
            )
        )
        for name in optimizer_names()
    }

    @jax.jit  # one program for all of them compiles several times faster than one for each
    def train():
        trained = {}
        for name, tx in optimizers.items():
            state, params = tx.init(before), before
            for _ in range(2):
                updates, state = tx.update(2 * (params - 1.5), state, params, value=jnp.array(3.0))
                params = optax.apply_updates(params, updates)
            trained[name] = params
        return trained

    trained = train()
    assert len(trained) > 40
    assert [name for name, params in trained.items() if not np.isfinite(params).all()] == []
    assert [name for name, params in trained.items() if (params == before).all()] == []


def test_the_chain_is_as_written_by_hand():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100, 0.01)
    by_hand = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.8, weight_decay=0.1)
    )
    tx = optimizer(
        learning_rate=0.1,
        learning_rate_end=0.01,
        scheduler="cosine",
        warmup_steps=10,
        clip_grad=0.5,
        weight_decay=0.1,
        extra_optimizer_kwargs={"b1": 0.8},
    )
    for ours, theirs in pairs(params_after(tx), params_after(by_hand)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_weight_decay_is_added_to_the_gradient_if_the_optimizer_has_none():
    tx = optimizer(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)
    by_hand = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    for ours, theirs in pairs(params_after(tx), params_after(by_hand)):
        np.testing.assert_array_equal(ours, theirs)


def test_the_weight_decay_of_an_optimizer_is_its_own_by_default():
    tx, by_hand = optimizer(optimizer="lion", learning_rate=0.1), optax.lion(0.1)
    for ours, theirs in pairs(params_after(tx), params_after(by_hand)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [("adam", {}), ("sgd", {"momentum": 0.9}), ("adafactor", {"momentum": 0.9})],
)
def test_the_dtype_of_the_first_moment(name, options):
    tx = optimizer(optimizer=name, tx_mu_dtype="bf16", extra_optimizer_kwargs=options)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(tx.init(PARAMS))}
    assert "bfloat16" in dtypes


def test_frozen_parameters_stay_despite_weight_decay():
    tx = optimizer(frozen_parameters="^embed", weight_decay=0.1, learning_rate=0.1)
    params = params_after(tx)
    np.testing.assert_array_equal(params["embed"], PARAMS["embed"])
    assert (params["w"] != PARAMS["w"]).all()


def test_pruning_wraps_the_optimizer():
    class Pruner:
        def wrap_optax(self, tx):
            return optax.chain(tx, optax.scale(0.0))

    for module in (Pruner(), lambda tx: optax.chain(tx, optax.scale(0.0))):
        params = params_after(optimizer(pruning_module=module))
        np.testing.assert_array_equal(params["w"], PARAMS["w"])


def test_float16_has_a_loss_scale_around_the_chain():
    tx = optimizer(mixed_precision="fp16", frozen_parameters="embed")
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    assert float(state.opt_state.scale) == 2.0**15
    assert not hasattr(optimizer(mixed_precision="bf16").init(PARAMS), "scale")


def test_optimizers_of_contrib_are_found():
    params = params_after(optimizer(optimizer="acprop", learning_rate=1e-3))
    np.testing.assert_array_equal(params["w"], params_after(contrib.acprop(1e-3))["w"])


# An optimizer or a schedule in place of those of the arguments


def test_a_custom_optimizer_is_returned_as_it_is():
    tx = optax.sgd(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx) == (tx, None)
    schedule = optax.constant_schedule(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx, schedule) == (tx, schedule)


def test_a_custom_schedule_is_that_of_the_optimizer_of_the_arguments():
    halving = optax.linear_schedule(1.0, 0.5, 1)
    tx, schedule = optimizer_of(TrainingArguments(optimizer="sgd"), 10, None, halving)
    params = jnp.ones(())
    updates, _ = tx.update(params, tx.init(params), params)
    assert (schedule, float(updates)) == (halving, -1.0)


@pytest.mark.parametrize(
    "fields", [{"learning_rate": 1.0}, {"clip_grad": 1.0}, {"optimizer": "lion"}]
)
def test_fields_without_an_effect_are_refused(fields):
    (name,) = fields
    with pytest.raises(
        sf.ConfigError, match=f"^tx: expected arguments that do not set .* got {name}=.*; leave out"
    ):
        optimizer_of(TrainingArguments(**fields), 10, optax.sgd(0.1))
    schedule = optax.constant_schedule(0.1)
    with pytest.raises(sf.ConfigError, match="^scheduler: .* do not set .* got learning_rate=1.0;"):
        optimizer_of(TrainingArguments(learning_rate=1.0), 10, None, schedule)


def test_pruning_wraps_a_custom_optimizer_too():
    arguments = TrainingArguments(pruning_module=lambda tx: optax.chain(tx, optax.scale(0.0)))
    tx, _ = optimizer_of(arguments, 10, optax.sgd(0.1))
    updates, _ = tx.update(jnp.ones(()), tx.init(jnp.ones(())))
    assert float(updates) == 0.0
