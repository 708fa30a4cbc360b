"""Examples as columns, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.columns import at, columns_of, is_sequence, lengths_of, name_of, nested

NAMES = st.sampled_from("abc")
SHAPES = st.recursive(
    st.just(None), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=6
)


def filled(shape, value):
    if shape is None:
        return value
    return {name: filled(inner, value) for name, inner in shape.items()}


@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=3), st.integers(1, 4))
def test_columns_hold_each_example_once_and_nest_as_it_does(shape, count):
    examples = [filled(shape, i) for i in range(count)]
    columns = columns_of(examples)
    assert all(column == list(range(count)) for column in columns.values())
    assert nested({path: column[-1] for path, column in columns.items()}) == examples[-1]


def test_a_dict_of_columns_is_the_same_as_its_examples():
    table = {"x": [1, 2], "more": {"y": [3, 4]}}
    rows = [{"x": 1, "more": {"y": 3}}, {"x": 2, "more": {"y": 4}}]
    assert columns_of(table) == columns_of(rows) == {("x",): [1, 2], ("more", "y"): [3, 4]}


def test_bare_sequences_are_tokens():
    assert columns_of([[1], [2, 3]]) == {("tokens",): [[1], [2, 3]]}


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "examples: expected at least one with at least one key, got none"),
        ([{}], "examples: expected at least one with at least one key, got none"),
        ([{"x": 1}, {}], "example 8, x: missing, but example 7 has it; give every example"),
        ([{"x": 1}, {"x": 1, "y": 2}], "example 8, y: unexpected, for example 7 lacks it"),
        ([{"x": 1}, 3], r"example 8: expected a dict with the keys \['x'\], got int 3"),
        ({"x": [1], "y": [1, 2]}, "examples: expected columns of one length, got {'x': 1, 'y': 2}"),
        ([{"mask": 1}], "examples: the key 'mask' is for what is added; rename yours"),
    ],
)
def test_examples_that_make_no_columns_are_refused(examples, message):
    with pytest.raises(sf.DataError, match=message):
        columns_of(examples, start=7, reserved=("mask",))


@pytest.mark.parametrize(
    ("leaf", "yes"),
    [([1], True), ((), True), (np.ones(2), True), (np.float32(1), False), (1, False), ("a", False)],
)
def test_what_has_an_axis_is_a_sequence(leaf, yes):
    assert is_sequence(leaf) is yes


def test_sequences_of_an_example_have_one_length():
    columns = {("a",): [[1, 2], [3]], ("b",): [[1, 2], [3]]}
    assert lengths_of(columns) == [2, 1]
    with pytest.raises(sf.DataError, match=r"example 1, b: expected the length 1 of a, got 2"):
        lengths_of(columns | {("b",): [[1, 2], [3, 4]]})
    with pytest.raises(sf.DataError, match=r"example 4, a: expected a sequence, got int 3"):
        lengths_of({("a",): [[1, 2], 3]}, start=3)


def test_places_are_spelled():
    assert name_of(("text", "ids")) == "text/ids"
    assert (at(3, ("text", "ids")), at(3, ())) == ("example 3, text/ids", "example 3")
