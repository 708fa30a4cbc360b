"""Leaves as arrays of numbers in one dtype, and what fills them up."""

import numpy as np
import pytest

import stepfold as sf
from stepfold.data.leaves import (
    arrays_of,
    check_truncate,
    narrowed,
    pad_value,
    pads_of,
    shortened,
)

PATH = ("x",)


@pytest.mark.parametrize(
    ("leaves", "dtype"),
    [
        ([[1, 2], []], np.int32),
        ([[1.5], [2.0]], np.float32),
        ([[True], [False]], np.bool_),
        ([np.ones(2), np.ones(3)], np.float64),
        ([np.ones(2, np.int8), np.ones(0, np.int8)], np.int8),
        ([np.ones(2, np.uint64)], np.uint64),
    ],
)
def test_arrays_keep_their_dtype_and_numbers_get_that_of_jax(leaves, dtype):
    assert {array.dtype for array in arrays_of(PATH, leaves)} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (["a"], "example 5, x: expected numbers in one shape, got str 'a'; encode it as integers"),
        ([[1], [None]], r"example 6, x: expected numbers in one shape, got list \[None\]"),
        ([[[1], [2, 3]]], "example 5, x: expected numbers in one shape"),
        ([[], []], "example 5, x: expected a number somewhere, got only empty lists"),
        ([[1], [1.5]], "example 6, x: expected the dtype int32 of example 5, got float32; a dtype"),
    ],
)
def test_what_is_no_column_of_numbers_is_refused(leaves, message):
    with pytest.raises(sf.DataError, match=message):
        arrays_of(PATH, leaves, start=5)


def test_wide_integers_are_made_narrow_or_refused():
    fits = np.array([2**31 - 1, -(2**31)])
    assert narrowed(PATH, fits, [fits]).dtype == np.int32
    wide = np.array([1, 2**31])
    with pytest.raises(sf.DataError, match="example 0, x: expected integers that fit int32, which"):
        narrowed(PATH, wide, [wide])
    unsigned = np.array([2**32 - 1], np.uint64)
    assert narrowed(PATH, unsigned, [unsigned]).dtype == np.uint32


def test_one_end_is_kept():
    rows, lengths = [[1, 2, 3], [4]], [3, 1]
    assert shortened(rows, lengths, 2, "keep_end") == [[2, 3], [4]]
    assert shortened(rows, lengths, 2, "keep_start") == [[1, 2], [4]]


def test_padding_is_by_key_and_has_to_fit():
    paths = [("a",), ("text", "b")]
    assert pads_of("collate", {"text/b": -100}, paths) == {("a",): 0, ("text", "b"): -100}
    with pytest.raises(sf.ConfigError, match=r"collate: pad: expected some of \['a', 'text/b'\]"):
        pads_of("collate", {"b": 1}, paths)
    with pytest.raises(sf.ConfigError, match="pad: expected a number for a, got 'none'"):
        pads_of("collate", {"a": "none"}, paths)
    for value, dtype in ((0.5, "int32"), (-1, "uint8"), (2, "bool"), (2**31, "int64")):
        with pytest.raises(sf.ConfigError, match="pad: expected a value of .* for x, got"):
            pad_value(PATH, value, np.dtype(dtype))
    assert pad_value(PATH, float("nan"), np.dtype("float32")) != 0


def test_ways_to_truncate_are_three():
    for way in ("keep_end", "keep_start", None):
        check_truncate("pack", way)
    with pytest.raises(sf.ConfigError, match="pack: truncate: expected 'keep_end', 'keep_start'"):
        check_truncate("pack", "keep_both")
