"""Rows that become batches."""

import numpy as np
import pytest

import stepfold as sf
from stepfold.data.reading import Reading, with_mask
from stepfold.data.sources import read_source

ROWS = read_source({"x": np.arange(6)})
SOME = np.array([4, 1, 1])


def test_rows_are_taken_transformed_and_put_together():
    plain = Reading(ROWS, None, None, masked=False)
    assert plain(SOME, None)["x"].tolist() == [4, 1, 1]
    doubled = Reading(ROWS, lambda example: {"y": 2 * example["x"]}, None, masked=False)
    assert doubled(SOME, None)["y"].tolist() == [8, 2, 2]
    listed = Reading(ROWS, None, lambda examples: [int(e["x"]) for e in examples], masked=False)
    assert listed(SOME, None) == [4, 1, 1]


def test_a_mask_says_which_rows_are_real():
    valid = np.array([True, True, False])
    assert Reading(ROWS, None, None, masked=True)(SOME, valid)["mask"].tolist() == valid.tolist()
    batch = {"x": np.ones((3, 2)), "mask": np.array([[1.0, np.nan], [0.5, 1.0], [np.nan, 1.0]])}
    mask = with_mask(batch, valid)["mask"]
    assert mask[2].tolist() == [0, 0]
    assert mask.dtype == np.float64
    assert np.isnan(mask[0, 1])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (np.ones(3), "expected batches that are a dict, to add a mask to, got float64\\[3\\]"),
        ({"x": np.ones(4)}, "expected batches of 3 rows, to add a mask to, got none"),
        ({"x": np.ones(3), "mask": np.ones(4)}, "expected a mask of 3 rows to combine with"),
    ],
)
def test_what_cannot_be_masked_is_refused(batch, says):
    with pytest.raises(sf.DataError, match=says):
        with_mask(batch, np.array([True, True, False]))


def test_an_error_on_the_way_names_the_example():
    broken = Reading(ROWS, lambda example: 1 // int(example["x"] - 1), None, masked=False)
    with pytest.raises(ZeroDivisionError) as caught:
        broken(SOME, None)
    assert caught.value.__notes__ == [
        "transforming index 1 of the source, row 1 of those asked for"
    ]
