"""An evaluation with `ema=True` is one of a state whose parameters are the average."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.laws import random_runs
from tests.small import full_but

import stepfold as sf

evaluate_module = importlib.import_module("stepfold.loop.evaluate")

pytestmark = pytest.mark.not_optimized

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(64, 8)).astype(np.float32), "y": RNG.normal(size=64)}
DATA["y"] = DATA["y"].astype(np.float32)
SGD = optax.sgd(0.05, momentum=0.9)
TX = sf.ema_params(SGD, 0.8, debias=True)


def loss_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def init(key):
    return {"w": jax.random.normal(key, (8,))}


def new_state(plan=None, tx=TX):
    return sf.init_state(init, tx, jax.random.key(0), sharding=plan)


MEASURE = sf.make_eval_step(loss_fn)


def by_hand(state, batch):
    return MEASURE(state._replace(params=sf.get_ema(state)), batch)


def held_out():
    return sf.batches(DATA, 16, epochs=1)


class Cut(Exception):
    """The run was cut."""


make_step = functools.cache(functools.partial(sf.make_train_step, loss_fn))


def run(folder=None, layout="one", cut=None, spike=False, **options):
    """Run with three evaluations: of the parameters, and twice of their average."""
    plan, grad = None, {}
    if layout != "one":
        mesh = sf.make_mesh((8,), ("fsdp",))
        plan = sf.make_sharding(jax.eval_shape(new_state), mesh, sf.sharding.fsdp(min_size=1))
        grad = {"grad": sf.sharding.ordered(plan)} if layout == "ordered" else {"accumulate": 2}
    cuts = [] if cut is None else [cut]

    def hook(event):
        if cuts and event.step == cuts[0] and event.kind == "train":
            cuts.pop()
            raise Cut
        if spike and event.step == 8 and event.kind == "eval":
            return sf.hooks.GoBack(skip=2, limit=1)
        return None

    for _ in range(1 + len(cuts)):
        with contextlib.suppress(Cut):
            return sf.fit(
                make_step(TX, **grad),
                new_state(plan),
                sf.batches(DATA, 16, seed=0),
                steps=12,
                run_dir=folder,
                checkpoints=None if folder is None else sf.Checkpoints(every=3),
                evaluation=[
                    sf.Evaluation(MEASURE, held_out, every=2, at_start=True),
                    sf.Evaluation(by_hand, held_out, every=2, at_start=True, name="hand"),
                    sf.Evaluation(MEASURE, held_out, every=2, at_start=True, name="ema", ema=True),
                ],
                hooks=hook,
                log_every=2,
                **options,
            )


def check(result):
    ema, hand, plain = (result.history[f"{name}/loss"] for name in ("ema", "hand", "eval"))
    assert ema.steps == hand.steps == plain.steps
    np.testing.assert_allclose(ema, hand, rtol=2e-6)
    assert not np.allclose(ema[2:], plain[2:], rtol=1e-3)


@pytest.mark.parametrize("mutant", [lambda state: state.params, lambda state: state.opt_state.ema])
def test_what_is_nearly_right_fails_the_same_law(mutant, monkeypatch):
    """Of a debiased average, the state holds the sum without its weight."""
    monkeypatch.setattr(evaluate_module, "get_ema", mutant)
    with pytest.raises(AssertionError):
        check(run())


@pytest.mark.full
@pytest.mark.parametrize("layout", full_but(["ordered"], ["fsdp", "ordered"]))
def test_it_is_evaluated_on_a_mesh(layout):
    check(run(layout=layout))


@pytest.mark.parametrize("options", [{"spike": True}, {"cut": 10, "steps_per_call": 4}])
def test_it_is_evaluated_after_a_resume_and_after_going_back(tmp_path, options):
    result = run(tmp_path, **options)
    assert result.resumed is not None
    check(result)


def test_a_compiled_step_evaluates_it_as_sharded_as_the_parameters():
    mesh = sf.make_mesh((8,), ("fsdp",))
    plan = sf.make_sharding(jax.eval_shape(new_state), mesh, sf.sharding.fsdp(min_size=1))
    state = new_state(plan)
    step = sf.compile_step(MEASURE, state, sf.shard_batch(next(held_out()), mesh))
    evaluation = sf.Evaluation(step, held_out, ema=True)
    state, _ = jax.jit(make_step(TX))(state, sf.shard_batch(next(held_out()), mesh))
    expected = sf.evaluate(by_hand, state, held_out())["loss"]
    assert evaluation(state)["eval/loss"] == pytest.approx(expected, rel=2e-6)


def test_a_function_of_the_state_gets_the_average():
    state = new_state(tx=sf.ema_params(SGD, 0.8))
    state = state._replace(params={"w": jnp.zeros(8)})
    square = sf.Evaluation(lambda state: {"w": jnp.vdot(*2 * [state.params["w"]])}, ema=True)
    average = np.asarray(sf.get_ema(state)["w"])
    with jax.transfer_guard_host_to_device("disallow"):
        assert square(state)["eval/w"] == pytest.approx(average @ average)


def test_the_trainer_passes_it_on(tmp_path):
    evaluations = [
        sf.Evaluation(MEASURE, held_out, every=2, name="ema", ema=True),
        sf.Evaluation(by_hand, held_out, every=2, name="hand"),
        sf.Evaluation(MEASURE, held_out, every=2),
    ]
    parts = random_runs.SimpleNamespace(
        task="plain", mesh="one", step=make_step(TX), state=new_state(), folder=tmp_path,
        batches=sf.batches(DATA, 16), checkpoints=None, evaluations=evaluations, hooks=[],
        log_every=2, steps_per_call=1, length={"steps": 6},
    )  # fmt: skip
    check(random_runs.call_trainer(parts))


def test_a_state_without_one_average_is_refused_before_the_first_step():
    seen = []
    measure = lambda state: seen.append(state) or {"a": 1.0}
    evaluation = sf.Evaluation(measure, every=1, at_start=True, ema=True)
    for tx, count in ((SGD, 0), (optax.chain(TX, TX), 2)):
        step, state = sf.make_train_step(loss_fn, tx), new_state(tx=tx)
        with pytest.raises(
            sf.errors.ConfigError, match=f"get_ema: expected one average.*got {count}"
        ):
            sf.fit(step, state, sf.batches(DATA, 16), steps=1, evaluation=evaluation)
        with pytest.raises(sf.errors.ConfigError, match="get_ema: expected one average"):
            evaluation(state)
    with pytest.raises(
        sf.errors.ConfigError, match="eval: ema=True: expected a TrainState, got dict"
    ):
        evaluation({"params": 1})
    with pytest.raises(sf.errors.ConfigError, match="ema: expected True or False"):
        sf.Evaluation(measure, ema="average")
    assert not seen
