"""How much of the library one step passes through: files between two pulls of a batch.

A bound on what has to be read to follow a step. Counted in the main thread, after everything is
compiled, without hooks of the user: those of `fit` stop at a NaN, show progress, and write the
metrics, `run.json` and the report. What happens between two steps is a part in a file of its own.
The files of `internals` are not counted: they stand for the jax and the orbax that they wrap.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
import stepfold.core.metrics  # as each step does on first use
import stepfold.runs.files
import stepfold.runs.resume  # and these, as `fit` does

_ = [getattr(sf, name) for name in sf.__all__]  # or the bodies of modules would count
pytestmark = pytest.mark.not_optimized
LIB = str(Path(sf.__file__).parent)
LOG, SAVE = 10, 20
TX = optax.adam(1e-3)
DATA = {
    "x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32),
    "y": np.zeros(64, np.int32),
}


def loss(params, batch, key):
    logits = jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


class Segments:
    """Batches that note which functions were called since the one before was pulled."""

    def __init__(self, calls):
        self.batches, self.calls, self.segments, self.start = (
            iter(sf.batches(DATA, 32)),
            calls,
            [],
            0,
        )

    def __iter__(self):
        return self

    def __next__(self):
        self.segments.append(self.calls[self.start :])
        batch = next(self.batches)
        self.start = len(self.calls)
        return batch

    def get_state(self):
        return self.batches.get_state()

    def set_state(self, state):
        self.batches.set_state(state)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run 70 steps; return the files that each step passes, and those of the whole run."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIB):
            calls.append(frame.f_code)

    params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 3))}
    state = sf.init_state(params, TX, jax.random.key(0))
    held_out = list(sf.batches(DATA, 32, epochs=1, remainder="keep"))
    batches = Segments(calls)
    sys.setprofile(note)
    try:
        sf.fit(
            sf.make_train_step(loss, TX),
            state,
            batches,
            steps=70,
            run_dir=tmp_path_factory.mktemp("run"),
            evaluation=sf.Evaluation(sf.make_eval_step(loss), lambda: held_out, every=SAVE),
            checkpoints=sf.Checkpoints(every=SAVE),
            log_every=LOG,
        )
    finally:
        sys.setprofile(None)

    def files(segment):
        names = {str(Path(code.co_filename).relative_to(LIB)) for code in segment}
        return {name for name in names if not name.startswith("internals/")}

    return [files(segment) for segment in batches.segments], files(calls)


def test_a_plain_step_passes_few_files(run):
    period = run[0][SAVE + 1 : 2 * SAVE]
    assert len(min(period, key=len)) <= 5, sorted(min(period, key=len))


def test_a_log_point_passes_few_files(run):
    """Its metrics are read at a later step, which counts too."""
    period = run[0][SAVE + 1 : 2 * SAVE]
    assert len(max(period, key=len)) <= 20, sorted(max(period, key=len))


def test_an_evaluation_and_a_save_pass_few_files(run):
    assert len(run[0][2 * SAVE]) <= 33, sorted(run[0][2 * SAVE])
    # The evaluation is traced and compiled as well.
    assert len(run[0][SAVE]) <= 37, sorted(run[0][SAVE])


def test_a_run_passes_few_files(run):
    assert len(run[1]) <= 62, sorted(run[1])
