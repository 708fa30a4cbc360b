"""Hooks change nothing of a run, and know after a resume what they would have known."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

TOTAL = 36


class Epochs:
    """Batches that can be resumed, and know how many make an epoch."""

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


def hooks(writer, told):
    return [
        sf.every(10, lambda event: {"seen": event.step}),
        sf.only_warn(sf.stop_on_spike(window=10, deviations=1e6)),
        sf.progress("json", file=io.StringIO()),
        sf.log_to(writer, every=8),
        sf.stop_early("eval/loss", patience=1000),
        sf.watchdog(600),
        sf.callback(lambda trainer, epoch, metrics: told.append((epoch, metrics))),
    ]


class Cut(Exception):
    pass


def cut_at(step):
    def hook(event):
        if event.step >= step:
            raise Cut

    return hook


def run(shown, tmp_path=None, epochs=TOTAL // Epochs.steps_per_epoch):
    tx = optax.adam(0.1)
    state = sf.init_state({"w": jnp.ones(3)}, tx, jax.random.key(0))
    loss_fn = lambda p, b, key: sf.mean((p["w"] * b + jax.random.normal(key)) ** 2)
    measure = sf.Evaluation(lambda state: {"loss": jnp.abs(state.params["w"]).sum()}, every=7)
    return sf.fit(
        *(sf.make_train_step(loss_fn, tx), state, Epochs()),
        epochs=epochs,
        log_every=4,
        evaluation=measure,
        hooks=shown,
        checkpoints=tmp_path and sf.Checkpoints(tmp_path, every=5),
    )


def test_a_run_with_all_hooks_has_the_bits_of_one_with_none():
    bare, shown = run([]), run(hooks(Memory(), []))
    jax.tree.map(np.testing.assert_array_equal, bare.state.params, shown.state.params)
    assert bare.history["eval/loss"] == shown.history["eval/loss"]


@pytest.mark.parametrize("step", [4, 7, 8, 16, 22, 30])
def test_after_a_cut_hooks_know_what_they_would_have_known(tmp_path, step):
    whole, whole_told, pieces, told = Memory(), [], Memory(), []
    uncut, resumed = hooks(whole, whole_told), hooks(pieces, told)
    run(uncut, tmp_path / "whole")
    with pytest.raises(Cut):
        run([*hooks(pieces, told), cut_at(step)], tmp_path / "cut")
    run(resumed, tmp_path / "cut")
    assert pieces.rows == whole.rows
    assert told == whole_told
    for one, other in zip(resumed, uncut, strict=True):
        if hasattr(one, "get_state"):
            assert one.get_state() == other.get_state(), type(one).__name__
