import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter.stopping import (
    StopOnSkipped,
    StopTraining,
    advise,
    refuse_late,
    refuse_nonfinite,
)


def event(step, skipped):
    return sf.Event(step, None, {}, None, {"train/skipped": np.array(skipped)})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_ends_the_run(value):
    with pytest.raises(StopTraining, match=f"train/loss is {value}"):
        refuse_nonfinite({"train/loss": value})
    refuse_nonfinite({"eval/loss": value})


def test_the_time_limit_ends_the_run():
    with pytest.raises(StopTraining, match="the time limit of 20 s was reached"):
        refuse_late(20.5, 20.0)


def test_steps_in_a_row_are_counted_over_events_and_a_resume():
    hook = StopOnSkipped(3)
    assert hook(event(4, [1, 0, 1, 1])) is None
    resumed = StopOnSkipped(3)
    resumed.set_state(hook.get_state())
    said = resumed(event(6, [1, 0]))
    assert said.startswith("the loss or a gradient was not finite in step 5, which was left out")
    assert said.endswith(", the last of 3 in a row")
    assert StopOnSkipped()(sf.Event(5, None, {}, None)) is None


def test_other_errors_are_left_as_they_are():
    error = RuntimeError("INTERNAL: something else")
    advise(error)
    assert not hasattr(error, "__notes__")


def test_a_step_that_does_not_fit_is_advised_on_in_the_words_of_the_arguments():
    error = sf.OutOfMemoryError("the step cannot be run; XLA said: Out of memory")
    advise(error)
    assert "raise gradient_accumulation_steps" in error.__notes__[0]
