"""Saves on demand: by `Checkpoints.request`, from hooks, threads and loops, and by SIGUSR1."""

import os
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tests.laws import course
from tests.small import STEP, batches, full_but, start

import stepfold as sf
from stepfold.errors import CheckpointError

from .runs import assert_same


def never(**options):
    return sf.Checkpoints(every=10_000, keep=None, **options)


def steps_in(folder):
    return [*sf.checkpoint.verify(folder / "checkpoints")]


@pytest.mark.parametrize("number", full_but([13], [1, 13]))
def test_a_resume_from_a_requested_save_ends_as_if_there_had_been_no_cut(tmp_path, number):
    """The step is the first, and inside an interval."""
    checkpoints = never()

    class Asks:
        def __init__(self):
            self.inner = course.batches()
            self.get_state, self.set_state = self.inner.get_state, self.inner.set_state

        def __iter__(self):
            return self

        def __next__(self):
            step = self.get_state()["step"]
            if step == number - 1:
                checkpoints.request()
            if step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            return next(self.inner)

    with pytest.raises(SystemExit):
        course.run(tmp_path, checkpoints=checkpoints, data=Asks())
    saved = steps_in(tmp_path)
    assert number in saved
    folder = tmp_path / "checkpoints"
    for step in saved:
        if step > number:  # resume from the requested one
            (folder / f"{step}").rename(tmp_path / f"later-{step}")
    result = course.run(tmp_path, checkpoints=never())
    assert result.resumed == number
    assert course.told(result) == course.whole()


def run_and_request(folder, values, number, checkpoints, **options):
    """Run batches of these values, and request a save before one is pulled."""

    def pulled():
        for i, value in enumerate(values):
            if i == number:
                checkpoints.request()
            yield {"x": np.full(4, value, np.float32)}

    options |= {"log_every": 100, "run_dir": folder, "checkpoints": checkpoints}
    with pytest.warns(UserWarning, match="get_state"):
        return sf.fit(STEP, start(), pulled(), **options)


def test_with_several_steps_in_a_call_it_saves_after_the_call(tmp_path):
    run_and_request(tmp_path, range(12), 5, never(), steps_per_call=4, steps=12)
    assert steps_in(tmp_path) == [8, 12]


def run(folder, checkpoints, hook, **options):
    options |= {"run_dir": folder, "checkpoints": checkpoints, "hooks": hook}
    return sf.fit(STEP, start(), batches(), **options)


def test_a_save_that_was_made_at_the_step_is_not_repeated(tmp_path):
    checkpoints = sf.Checkpoints(every=5, keep=None)
    hook = lambda event: checkpoints.request() if event.step == 10 else None
    run(tmp_path, checkpoints, hook, steps=20)
    assert steps_in(tmp_path) == [5, 10, 15, 20]


def test_a_request_where_a_save_is_due_anyway_counts_as_scheduled(tmp_path):
    """It comes from a hook, in the evaluation before that save at the end of an epoch."""
    checkpoints = sf.Checkpoints(every_epochs=1, keep=1)

    def hook(event):
        if event.kind == "eval" and event.step == 8:
            checkpoints.request()

    sf.fit(
        STEP, start(), sf.batches({"x": np.ones(16, np.float32)}, 4, seed=0), steps=12, hooks=hook,
        evaluation=sf.Evaluation(lambda state: {"n": 1}, every=4), run_dir=tmp_path,
        checkpoints=checkpoints,
    )  # fmt: skip
    assert steps_in(tmp_path) == [12]


@pytest.mark.parametrize("how", ["request", "signal"])
def test_a_storm_of_requests_pushes_no_scheduled_save_out(tmp_path, how):
    checkpoints = sf.Checkpoints(every=10, keep=2)

    def storm(event):
        if event.is_train and event.step > 20:
            checkpoints.request() if how == "request" else os.kill(os.getpid(), signal.SIGUSR1)

    run(tmp_path, checkpoints, storm, log_every=1, steps=29)
    saved = steps_in(tmp_path)
    assert (saved[0], saved[-1]) == (20, 29)
    assert len(saved) <= 4


def test_sigusr1_without_checkpoints_warns_once_and_changes_nothing():
    hook = lambda event: os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.warns(UserWarning, match="SIGUSR1") as caught:
        result = run(None, None, hook, steps=30)
    messages = [str(warning.message) for warning in caught]
    assert messages == ["SIGUSR1 ignored: fit has no checkpoints; give checkpoints=…"]
    quiet = run(None, None, (), steps=30)
    assert_same(result.state, quiet.state)
    assert result.history == quiet.history


def test_a_nan_is_not_saved_by_request(tmp_path):
    result = run_and_request(tmp_path, [1, 1, 1, np.nan, 1, 1, 1], 4, never())
    assert (result.stop_reason.kind, result.steps) == ("nonfinite", 5)
    assert result.capsule.step == 4
    assert steps_in(tmp_path) == []


def test_a_loop_of_its_own_saves_at_the_next_due(tmp_path):
    checkpoints, state = sf.Checkpoints(tmp_path, every=100), {"w": jnp.ones(2)}
    with checkpoints as series, checkpoints.open(tmp_path) as other:
        assert not series.due(3)
        checkpoints.request()  # reaches every open copy
        assert series.due(4)
        assert series.due(4)  # until it is saved
        series.save(state, step=4)
        assert not series.due(5)
        assert other.due(4)
        series.request()
        assert series.due(5)


def test_a_request_without_an_open_series_is_an_error(tmp_path):
    checkpoints = sf.Checkpoints(tmp_path, every=100)
    with pytest.raises(CheckpointError, match="Checkpoints.request: no series is open; request"):
        checkpoints.request()
    with checkpoints as series:
        checkpoints.request()
    for closed, message in ((checkpoints, "no series is open"), (series, "the series is closed")):
        with pytest.raises(CheckpointError, match=message):
            closed.request()


def test_requests_from_a_thread_during_a_run_change_nothing(tmp_path):
    checkpoints, is_over, requests = sf.Checkpoints(every=7, keep=2), threading.Event(), []

    def ask():
        while len(requests) < 10 and not is_over.wait(0.02):
            try:
                checkpoints.request()
                requests.append(time.monotonic())
            except CheckpointError:  # not opened yet, or closed
                pass

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        result = course.run(tmp_path, checkpoints=checkpoints)
    finally:
        is_over.set()
        thread.join()
    assert requests
    assert course.told(result) == course.whole()
    assert not any(sf.checkpoint.verify(tmp_path / "checkpoints").values())
