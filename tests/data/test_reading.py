"""Rows that become batches."""

import numpy as np
import pytest

import stepfold as sf
from stepfold.data.reading import Making, Reading, with_mask
from stepfold.data.sources.kinds import read_source
from stepfold.data.transforming import read_transform

ROWS = read_source({"x": np.arange(6)})
SOME = np.array([4, 1, 1])


def reading(transform=None, collate=None, masked=False):
    return Reading(ROWS, Making(read_transform(transform, None), collate, masked))


def test_rows_are_taken_transformed_and_put_together():
    assert reading()(SOME, 0, None)["x"].tolist() == [4, 1, 1]
    doubled = reading(lambda example: {"y": 2 * example["x"]})
    assert doubled(SOME, 0, None)["y"].tolist() == [8, 2, 2]
    listed = reading(collate=lambda examples: [int(e["x"]) for e in examples])
    assert listed(SOME, 0, None) == [4, 1, 1]


def test_a_mask_says_which_rows_are_real():
    valid = np.array([True, True, False])
    assert reading(masked=True)(SOME, 0, valid)["mask"].tolist() == valid.tolist()
    negative = reading(lambda example: {"x": -example["x"]}, masked=True)(SOME, 0, valid)
    assert (negative["mask"].tolist(), negative["x"].tolist()) == (valid.tolist(), [-4, -1, -1])
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


def test_it_is_known_whether_random_numbers_are_drawn():
    assert not Making().draws
    assert not Making(read_transform(lambda example: example, 0)).draws
    assert Making(read_transform(lambda example, rng: example, 0)).draws
