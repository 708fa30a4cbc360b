"""Examples that become a batch, leaf by leaf, or do not."""

import numpy as np
import pytest

import stepfold as sf
from stepfold.data.sources.stacking import stack


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([{"x": 1}, {"y": 1}], r"of one structure, got .*'x'.* at index 7 and .*'y'.* at index 9"),
        ([{"x": [1]}, {"x": [1, 2]}], r"x: .* got int64\[1\] at index 7 and int64\[2\] at index 9"),
        ([{"x": 1}, {"x": 1.5}], r"x: .* dtype to stack, got int64\[\] at index 7 and float64\[\]"),
        ([{"x": "a"}, {"x": "b"}], "x: expected numbers, got str 'a' at index 7; make numbers"),
        ([[[1], [1, 2]], [[1], [1]]], r"example: expected rows of one length, got list \[\[1\], "),
        ([1, object()], "example: expected numbers, got object .* at index 9"),
    ],
)
def test_examples_that_do_not_stack_are_refused(examples, says):
    with pytest.raises(sf.DataError, match=says):
        stack(examples, [7, 9])


def test_lists_in_examples_are_rows_of_numbers():
    batch = stack([{"x": [1, 2], "y": ([1.5], 2)}, {"x": [3, 4], "y": ([2.5], 3)}], [0, 1])
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch["y"][0].tolist() == [[1.5], [2.5]]
    np.testing.assert_array_equal(batch["y"][1], [2, 3])
