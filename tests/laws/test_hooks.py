"""Hooks do not change a run, and after a resume they are where an uninterrupted run has them."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf

pytestmark = pytest.mark.not_optimized

TOTAL = 36


class Epochs:
    """Batches that can be resumed and have epochs."""

    steps_per_epoch = 9

    def __init__(self):
        data = np.random.default_rng(0).normal(size=(36, 3)).astype(np.float32)
        self._batches = sf.batches(data, 4, seed=0)
        self.get_state, self.set_state = self._batches.get_state, self._batches.set_state

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._batches)


class Memory:
    def __init__(self):
        self.rows = {}

    def write_scalars(self, step, scalars):
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(scalars)

    def resume(self, step):
        self.rows = {at: row for at, row in self.rows.items() if at <= step}


def make_hooks(writer, epochs):
    return [
        sf.hooks.every(10, lambda event: {"seen": event.step}),
        sf.hooks.only_warn(sf.hooks.on_spike(window=10, deviations=1e6)),
        sf.progress("json", file=io.StringIO()),
        sf.log_to(writer, every=8),
        sf.hooks.stop_early("eval/loss", patience=1000),
        sf.hooks.watchdog(600),
        sf.hooks.callback(lambda trainer, epoch, metrics: epochs.append((epoch, metrics))),
    ]


class Cut(Exception):
    pass


def cut_at(step):
    def hook(event):
        if event.step >= step:
            raise Cut

    return hook


TX = optax.adam(0.1)
STEP = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] * b + jax.random.normal(key)) ** 2), TX)
MEASURE = sf.Evaluation(lambda state: {"loss": jnp.abs(state.params["w"]).sum()}, every=7)


def run(hooks, directory=None, epochs=TOTAL // Epochs.steps_per_epoch):
    return sf.fit(
        *(STEP, sf.init_state({"w": jnp.ones(3)}, TX, jax.random.key(0)), Epochs()),
        epochs=epochs,
        log_every=4,
        evaluation=MEASURE,
        hooks=hooks,
        checkpoints=directory and sf.Checkpoints(directory, every=5),
    )


def test_a_run_with_all_hooks_has_the_bits_of_one_with_none():
    bare, hooked = run([]), run(make_hooks(Memory(), []))
    jax.tree.map(np.testing.assert_array_equal, bare.state.params, hooked.state.params)
    assert bare.history["eval/loss"] == hooked.history["eval/loss"]


def states_of(result):
    """Return the states of hooks at the end, but those in memory alone."""
    without = lambda state: {key: x for key, x in state.items() if not key.startswith("_")}
    states = result.hooks.items()
    return {name: without(x) if isinstance(x, dict) else x for name, x in states}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """Return what an uninterrupted run has written, its epochs, and the states of its hooks."""
    writer, epochs = Memory(), []
    result = run(make_hooks(writer, epochs), tmp_path_factory.mktemp("uncut"))
    states = states_of(result)
    assert len([state for state in states.values() if state]) >= 6
    return writer.rows, epochs, states


@pytest.mark.parametrize("step", full_but([7], [4, 7, 8, 16, 22, 30]))
def test_after_a_cut_hooks_are_where_an_uninterrupted_run_has_them(tmp_path, uncut, step):
    writer, epochs = Memory(), []
    with pytest.raises(Cut):
        run([*make_hooks(writer, epochs), cut_at(step)], tmp_path)
    resumed = run(make_hooks(writer, epochs), tmp_path)
    assert (writer.rows, epochs, states_of(resumed)) == uncut


def test_a_second_run_with_the_same_hooks_is_like_the_first():
    """Nothing that belongs to a run leaks into the next one."""
    writer, epochs = Memory(), []
    hooks = make_hooks(writer, epochs)
    first = states_of(run(hooks)), dict(writer.rows), list(epochs)
    epochs.clear()
    assert (states_of(run(hooks)), writer.rows, epochs) == first
