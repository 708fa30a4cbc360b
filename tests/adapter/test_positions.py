import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter.positions import go_to_step, position_of


def test_batches_that_are_a_function_of_the_step_go_to_it():
    made = sf.batches(np.arange(8), 2, seed=0)
    go_to_step(made, None, 3)
    assert made.get_state()["step"] == 3
    assert position_of(made, 1)["step"] == 1
    assert made.get_state()["step"] == 3


def test_a_saved_position_is_gone_to():
    made = sf.batches(np.arange(8), 2, seed=0)
    saved = {**made.get_state(), "step": 2}
    go_to_step(made, saved, 2)
    assert made.get_state() == saved


def test_what_cannot_be_sent_goes_on_from_where_it_is():
    made = iter([1, 2])
    go_to_step(made, None, 3)
    assert next(made) == 1
    assert position_of(made, 3) is None
    with pytest.raises(sf.CheckpointError, match="expected batches that can go to step 3, got"):
        go_to_step(made, {"step": 3}, 3)


def test_a_stream_is_only_sent_where_it_was():
    made = sf.batches(iter(range(8)), 2)
    next(made)
    before = made.get_state()
    go_to_step(made, None, 3)
    assert made.get_state() == before
