"""What is a source, what is none, and how rows are taken."""

import tracemalloc
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold import tree
from stepfold.data.sources import read_source, stack


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Loaded:
    """A source with `len()` and `[i]`, as `tfds.data_source` is one."""

    def __init__(self, examples):
        self.examples, self.asked = examples, []

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.examples[index]


class AtOnce(Loaded):
    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self.examples[index] for index in indices]


X = np.arange(24).reshape(8, 3)
INDICES = np.array([6, 0, 6])


@pytest.mark.parametrize(
    "array",
    [X, jnp.asarray(X), np.asfortranarray(X), X[::-1], np.arange(48).reshape(8, 6)[:, ::2]],
    ids=["numpy", "jax", "fortran", "reversed", "strided"],
)
def test_arrays_give_rows(array):
    rows = read_source(array)
    assert rows.length == 8
    np.testing.assert_array_equal(rows.take(INDICES), np.asarray(array)[INDICES])
    np.testing.assert_array_equal(rows.take(slice(2, 4)), np.asarray(array)[2:4])
    np.testing.assert_array_equal(rows.examples(INDICES), np.asarray(array)[INDICES])


def test_a_few_rows_of_an_array_in_another_order_do_not_copy_it():
    rows = read_source(np.ones((1000, 1000), order="F"))
    tracemalloc.start()
    rows.take(INDICES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # of the eight million bytes


def test_rows_in_order_are_views_that_cannot_be_written_to():
    source = {"x": X.copy()}
    batch = read_source(source).take(slice(1, 3))
    assert np.shares_memory(batch["x"], source["x"])
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 0
    source["x"][0] = 1  # the source itself is as it was
    shuffled = read_source(source).take(INDICES)
    shuffled["x"][0] = 0


@pytest.mark.parametrize(
    "source",
    [
        {"x": X, "y": {"z": X[:, 0]}},
        (X, X[:, 0]),
        Pair(X, X[:, 0]),
        OrderedDict(b=X, a=X[:, 0]),
        {"x": X, "nothing": None},
    ],
    ids=lambda source: type(source).__name__,
)
def test_a_tree_of_arrays_gives_the_same_tree(source):
    batch = read_source(source).take(INDICES)
    assert type(batch) is type(source)
    assert tree.diff(batch, jax.tree.map(lambda leaf: leaf[INDICES], source)) == []


@pytest.mark.parametrize("kind", [list, Loaded, AtOnce])
def test_examples_are_stacked(kind):
    source = kind([{"x": row, "y": (int(row[0]), 0.5), "ids": row.tolist()} for row in X])
    batch = read_source(source).take(INDICES)
    np.testing.assert_array_equal(batch["x"], X[INDICES])
    np.testing.assert_array_equal(batch["ids"], X[INDICES])
    np.testing.assert_array_equal(batch["y"][0], X[INDICES, 0])
    assert batch["y"][1].dtype == np.float64


def test_indices_are_python_integers_and_are_asked_at_once_where_that_works():
    one, several = Loaded(list(X)), AtOnce(list(X))
    read_source(one).take(INDICES)
    read_source(several).take(slice(2, 5))
    assert (one.asked, several.asked) == ([6, 0, 6], [[2, 3, 4]])
    assert {type(index) for index in one.asked + several.asked[0]} == {int}


def test_text_can_be_read_and_not_batched():
    rows = read_source({"text": np.array(["a", "b"])})
    assert rows.examples(slice(0, 1)) == [{"text": "a"}]
    with pytest.raises(sf.DataError, match=r"source/text: expected numbers .* with transform=…"):
        rows.take(slice(0, 1))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("text", "got str 'text'; cut the text into a list of examples"),
        (b"text", "cut the text"),
        ({1, 2}, "got set {1, 2}; a set has no order: give a list of it, sorted"),
        ((x for x in X), "got generator .* read only once .* give a list of it"),
        (iter([1, 2]), "got list_iterator .* give a list of it"),
        ({"a": 1}.keys(), "what can only be read in order cannot be shuffled"),
        (lambda: X, "got function .* give what the function returns"),
        (3, "got int 3; give it __len__ and __getitem__"),
        (None, "got NoneType None; give it"),
        ([], r"source: expected examples, got none: list \[\]"),
        ({}, "source: expected examples, got none: dict {}"),
        (X[:0], r"source: expected examples, got none: int64\[0,3\]"),
        ({"x": X, "y": X[:5]}, r"got source/x int64\[8,3\], source/y int64\[5,3\]; give arrays"),
        ({"x": X, "y": 3}, "source/y: expected an array .* got int 3; convert it with np.asarray"),
        ({"x": X, "y": np.array(3)}, r"source/y: .* got the scalar int64\[\]; give every example"),
        ({"x": np.ma.masked_array(X)}, "source/x: expected an array whose leading axis"),
        ({"x": "text"}, "source/x: .* got str 'text'"),
    ],
)
def test_what_is_no_source_is_refused(source, says):
    with pytest.raises(sf.DataError, match=says):
        read_source(source)


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


def test_missing_examples_are_refused():
    with pytest.raises(sf.DataError, match="expected an example at index 6, got None; leave out"):
        read_source([0, 1, 2, 3, 4, 5, None]).take(INDICES)


def test_a_source_that_answers_too_little_is_refused():
    source = AtOnce(list(X))
    source.__class__ = type("Short", (AtOnce,), {"__getitems__": lambda self, indices: [X[0]]})
    says = r"expected 3 examples of __getitems__\(\[6, 0, 6\]\), got 1"
    with pytest.raises(sf.DataError, match=says):
        read_source(source).take(INDICES)


def test_a_source_of_another_length_is_noticed():
    examples = list(X)
    rows = read_source(examples)
    rows.check()
    examples.append(X[0])
    with pytest.raises(sf.DataError, match="expected the 8 examples .* got 9; make new batches"):
        rows.check()


def test_an_error_of_the_source_says_where():
    with pytest.raises(KeyError) as caught:
        read_source(Loaded({0: X[0], 1: X[1]})).take(np.array([1, 5]))
    assert caught.value.__notes__ == ["reading index 5 of the source, row 1 of those asked for"]
    with pytest.raises(KeyError) as caught:
        read_source(AtOnce({0: X[0], 1: X[1]})).take(np.arange(20))
    assert caught.value.__notes__ == [
        "reading indices [0, 1, 2, 3, 4, 5, 6, 7, …] of the source at once"
    ]
