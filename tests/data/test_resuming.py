"""Positions that belong to other batches."""

import pytest

import stepfold as sf
from stepfold.data.resuming import check_position

LIKE = {"step": 0, "pipeline": {"seed": 0, "source": None}}


def test_a_position_in_the_same_batches_passes():
    check_position({"step": 9, "pipeline": {"seed": 0, "source": None}}, LIKE)


def test_what_differs_is_said_with_both_values():
    says = "seed was 1 and is 0; source was 'a' and is None; epoch was 2 and is None; begin at 9$"
    with pytest.raises(sf.DataError, match=says):
        check_position(
            {"step": 9, "pipeline": {"seed": 1, "source": "a", "epoch": 2}}, LIKE, "begin at {step}"
        )


@pytest.mark.parametrize("state", [None, b"", {}, {"step": 1}, {"step": 1, "pipeline": None}])
def test_what_is_no_position_is_refused(state):
    with pytest.raises(sf.DataError, match="with step, pipeline, got .* another kind of iterator"):
        check_position(state, LIKE)
