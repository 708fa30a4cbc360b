"""Hooks, bars and timers of a trainer count and show what happened."""

import io
import json
import time

import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import Watcher
from stepfold.adapter.hooks import (
    EpochHistory,
    ProgressBar,
    StopOnSkipped,
    Timers,
    add_advice,
    check_watchers,
)
from stepfold.data.epochs import EpochEnds

ENDS = EpochEnds.of_length(4)


def event(step, skipped):
    return sf.Event(step, None, {}, None, {"train/skipped": np.array(skipped)})


def test_skipped_steps_in_a_row_are_counted_over_events_and_a_resume():
    hook = StopOnSkipped(3)
    assert hook(event(4, [1, 0, 1, 1])) is None
    resumed = StopOnSkipped(3)
    resumed.set_state(hook.get_state())
    stop = resumed(event(6, [1, 0]))
    assert stop.kind == "nonfinite"
    message = "the loss or a gradient was not finite in step 5, which was skipped"
    assert str(stop) == f"{message}, the last of 3 in a row"
    hook.reset(0)  # as a run from a checkpoint without its state does
    assert hook(event(2, [1, 1])) is None
    assert hook(event(3, [1])) is not None
    assert StopOnSkipped()(sf.Event(5, None, {}, None)) is None


def test_an_out_of_memory_error_gets_advice_in_terms_of_the_arguments():
    errors = (
        RuntimeError("INTERNAL: something else"),
        sf.errors.OutOfMemoryError("XLA: Out of memory"),
    )
    for error in errors:
        add_advice(error)
    assert not hasattr(errors[0], "__notes__")
    assert "raise gradient_accumulation_steps" in errors[1].__notes__[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", len, 1), "name: expected the name of a watcher, got"),
        (("norm", 3, 1), "function: expected a function of the state, got"),
        (("norm", len, 0), "every: expected an integer of at least 1, got 0"),
    ],
)
def test_a_watcher_of_other_values_is_refused(values, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        check_watchers([Watcher(*values)])


def train_event(step, losses, weights):
    rows = {"train/loss": np.array(losses)}, {"train/loss": np.array(weights)}
    metrics = {"train/loss": 0.0, "train/note": float(step)}
    return sf.Event(step, None, metrics, None, rows[0], weights=rows[1])


def test_the_mean_of_an_epoch_is_weighted_by_the_examples_of_its_own_steps():
    """A log point may be in the middle of an epoch, or after one that was skipped."""
    hook = EpochHistory(lambda: ENDS)
    hook(train_event(3, [1.0, 5.0, np.nan], [3, 1, 0]))
    hook(train_event(6, [4.0, 2.0, 8.0], [4, 1, 2]))
    hook(sf.Event(6, None, {"eval/loss": 9.0}, None, kind="eval"))
    resumed = EpochHistory(lambda: ENDS)
    resumed.open(6, None)
    resumed.set_state(json.loads(json.dumps(hook.get_state())))
    resumed(train_event(14, [2.0, 2.0, *[np.nan] * 4, 1.0, 1.0], [1, 1, 0, 0, 0, 0, 1, 1]))
    means = resumed.by_name()
    assert means.pop("train_loss") == pytest.approx([3.0, 22 / 5, np.nan, 1.0], nan_ok=True)
    assert means == {"train_note": [3.0, 6.0, 14.0], "eval_loss": [9.0]}
    ahead = EpochHistory(lambda: ENDS, offset=2)  # of the batches
    ahead(train_event(4, [1.0, 3.0, 7.0, 9.0], [1, 1, 1, 1]))
    assert ahead.by_name()["train_loss"] == [2.0, 8.0]


# Bars


def lines(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_bar_advances_by_steps_and_shows_the_numbers_set_before():
    file = io.StringIO()
    bar = ProgressBar("json", 20, file=file)
    bar.set_postfix({"train/loss": 4.0}, accuracy=0.5)
    bar.update(5)
    bar.update()
    bar.close()
    bar.close()
    assert [line["step"] for line in lines(file)] == [5, 6]
    assert lines(file)[0]["accuracy"] == 0.5
    assert "accuracy" not in lines(file)[1]


def test_the_running_average_of_a_bar_is_resumed():
    first, second = (ProgressBar("json", 20, file=io.StringIO()) for _ in range(2))
    first.set_postfix({"train/loss": 4.0})
    first.update(5)
    second.set_state(first.get_state())
    second.open(5)
    assert second.get_state() == first.get_state()


def test_reset_starts_a_bar_again():
    file = io.StringIO()
    bar = ProgressBar("json", None, file=file)
    bar.update(5)
    bar.reset()
    bar.update(2)
    assert [line["step"] for line in lines(file)] == [5, 2]


# Trackers


def test_a_block_inside_one_of_the_same_name_is_timed_once_and_one_that_fails_too():
    timer = Timers()
    with timer("wait"):
        with timer("wait"):
            time.sleep(0.01)
        assert timer.running("wait") >= 0.01
        assert timer.seconds == {}
    assert timer.seconds["wait"] >= 0.01
    with pytest.raises(OSError, match="cut"), timer("fail"):
        raise OSError("cut")
    assert timer.seconds["fail"] > 0
