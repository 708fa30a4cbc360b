"""A function or an abstract state in place of the initial state: a resume does not run it."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import STEP, TX, batches, full_but, loss_fn, start

import stepfold as sf

from .runs import Cut, cut_at


def count_calls(make):
    """Return a function of no arguments, and the list of its calls outside of a trace."""
    calls = []

    def function():
        state = make()
        if not isinstance(jax.tree.leaves(state)[0], jax.core.Tracer):
            calls.append(True)
        return state

    return function, calls


def train(state, run_dir, steps=8, step=STEP, **options):
    options = {"checkpoints": sf.Checkpoints(every=2), **options}
    return sf.fit(step, state, batches(), steps=steps, run_dir=run_dir, **options)


def seed(run_dir):
    return json.loads((run_dir / "run.json").read_text())["seed"]["key"]


def test_a_function_makes_the_state_of_a_start_and_not_of_a_resume(tmp_path):
    whole = train(start(), tmp_path / "whole")
    make, calls = count_calls(start)
    with pytest.raises(Cut):
        train(make, tmp_path / "cut", hooks=cut_at(5), log_every=1)
    assert len(calls) == 1
    first_seed = seed(tmp_path / "cut")
    result = train(make, tmp_path / "cut")
    assert len(calls) == 1
    assert (result.resumed, result.steps) == (6, 8)
    assert jax.tree.all(jax.tree.map(np.array_equal, result.state.params, whole.state.params))
    assert seed(tmp_path / "cut") == first_seed == seed(tmp_path / "whole")
    info = json.loads((tmp_path / "cut/run.json").read_text())
    assert (info["parameters"]["count"], info["parameters"]["bytes"]) == (1, 4)


def test_an_abstract_state_resumes_and_cannot_start(tmp_path):
    train(start(), tmp_path, 4)
    shape = jax.eval_shape(start)
    result = train(shape, tmp_path)
    assert (result.resumed, result.steps) == (4, 8)
    for options in ({}, {"checkpoints": None}, {"resume": ("params", "step", "key")}):
        with pytest.raises(
            sf.errors.ConfigError, match="state: expected .*give the state, or a function"
        ):
            train(shape, tmp_path / "other", **options)


def test_a_function_of_a_later_step_counts_epochs_from_there(tmp_path):
    make = lambda: start()._replace(step=jnp.int32(8))
    results = [
        sf.fit(
            STEP, state, batches(), epochs=2, run_dir=tmp_path / name,
            checkpoints=sf.Checkpoints(every=2), hooks=hooks, log_every=1,
        ).steps
        for name, state, hooks in [
            ("arrays", make(), ()),
            ("function", make, [lambda event: "enough" if event.step == 12 else None]),
            ("function", make, ()),
        ]
    ]  # fmt: skip
    assert results == [16, 12, 16]


def test_a_resume_compares_the_hyperparameters_that_a_function_sets(tmp_path):
    def make_parts(rate):
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        make = lambda: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
        return make, sf.make_train_step(loss_fn, tx)

    make, step = make_parts(0.1)
    train(make, tmp_path, 4, step)
    make, step = make_parts(0.2)
    with pytest.warns(UserWarning, match="learning_rate: expected 0.1 as in the checkpoint"):
        train(make, tmp_path, 8, step)


def test_parts_of_a_checkpoint_need_the_rest_of_the_state(tmp_path):
    train(start(), tmp_path, 4)
    make, calls = count_calls(start)
    result = train(make, tmp_path, resume=("params", "step", "key"))
    assert (result.resumed, result.steps, len(calls)) == (4, 8, 1)


MESH = partial(sf.make_mesh, devices=jax.devices()[:4])


def init(key):
    return {"w": jnp.ones(()), "m": jax.random.normal(key, (16, 8))}


def plan():
    make = lambda: sf.init_state(init, TX, jax.random.key(0))
    return sf.make_sharding(jax.eval_shape(make), MESH(), sf.sharding.fsdp(min_size=1))


def make_sharded():
    return sf.init_state(init, TX, jax.random.key(0), sharding=plan())


def make_placed():
    return jax.device_put(sf.init_state(init, TX, jax.random.key(0)), plan())


def shardings(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


@pytest.mark.parametrize("make", full_but([make_sharded], [make_sharded, make_placed]))
def test_a_resume_restores_to_the_devices_of_the_function(make, tmp_path):
    train(make, tmp_path, 2)
    function, calls = count_calls(make)
    result = train(function, tmp_path, 4)
    assert (result.resumed, calls) == (2, [])
    assert shardings(result.state) == shardings(make())


def make_hidden():
    """Place the state where tracing does not show it."""
    state = make_sharded()
    return state._replace(params=jax.tree.map(lambda leaf: 1 * leaf, state.params))


def test_a_function_that_hides_where_its_state_is_cannot_start(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError,
        match="state: expected state/params/m on devices that tracing .* shows",
    ):
        train(make_hidden, tmp_path)


def test_a_function_has_to_be_traceable(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="state: expected a function that jax can trace"
    ):
        train(lambda: jax.tree.map(lambda x: np.asarray(x + 0), make_sharded()), tmp_path)


def test_a_function_that_fails_raises_its_error(tmp_path):
    def make():
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        train(make, tmp_path)
