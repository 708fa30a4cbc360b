"""Sources: arrays, sequences, datasets of Hugging Face and grain, and how they are told apart."""

import sys
from collections import OrderedDict
from types import MappingProxyType
from typing import NamedTuple

import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold import tree
from stepfold.data.sources import (
    ArraySource,
    SequenceSource,
    is_stream,
    read_source,
    stack,
)

X = np.arange(24).reshape(8, 3)
INDICES = np.array([6, 0, 6])


# Kinds


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("text", "got str 'text'; cut the text into a list of examples"),
        (b"text", "cut the text"),
        ({1, 2}, "got set {1, 2}; a set has no order: give a list of it, sorted"),
        ((x for x in X), "got generator .* a stream has no random access: give a list of it"),
        ({"a": 1}.keys(), "got dict_keys .* give a list of it"),
        (lambda: X, "got function .* give a list of it"),
        (MappingProxyType({"train": X, "test": X}), "one of its values, .* called 'train', 'test'"),
        ({"train": [1, 2], "test": 3}, "or give a list of examples, or one source alone"),
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
def test_invalid_sources_are_refused(source, says):
    with pytest.raises(sf.errors.DataError, match=says):
        read_source(source)


class InOrder:
    """A stream that has `[i]` but no length, like a streaming Hugging Face dataset."""

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(3))


def test_sources_of_rows_and_streams_are_told_apart():
    arrays, sequences = [X, jnp.asarray(X), {"x": X}, (X, X)], [[1, 2], range(3), Loaded(X)]
    assert {type(read_source(source)) for source in arrays} == {ArraySource}
    assert {type(read_source(source)) for source in sequences} == {SequenceSource}
    mixture = sf.mix([(X, 1)])
    assert read_source(mixture) is mixture
    iterators = [iter([1]), (x for x in [1]), {"a": 1}.values(), InOrder(), lambda: [1], list]
    assert all(map(is_stream, iterators))
    assert not any(map(is_stream, [*arrays, *sequences, mixture, "text", b"text", {1}, None, 3]))


# Arrays


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@pytest.mark.parametrize(
    "array",
    [X, jax.device_put(X), np.asfortranarray(X), X[::-1], np.arange(48).reshape(8, 6)[:, ::2]],
    ids=["numpy", "jax", "fortran", "reversed", "strided"],
)
def test_arrays_of_any_layout_have_rows(array):
    rows = ArraySource(array)
    assert rows.length == 8
    np.testing.assert_array_equal(rows.take(INDICES), np.asarray(array)[INDICES])
    np.testing.assert_array_equal(rows.take(slice(2, 4)), np.asarray(array)[2:4])
    np.testing.assert_array_equal(rows.examples(INDICES), np.asarray(array)[INDICES])


def test_rows_in_order_are_read_only_views():
    source = {"x": X.copy()}
    batch = ArraySource(source).take(slice(1, 3))
    assert np.shares_memory(batch["x"], source["x"])
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 0
    source["x"][0] = 1  # the source itself is as it was


@pytest.mark.parametrize(
    "source",
    [(X, X[:, 0]), Pair(X, X[:, 0]), OrderedDict(b=X, a=X[:, 0]), {"x": {"z": X}, "nothing": None}],
    ids=lambda source: type(source).__name__,
)
def test_batch_has_the_structure_of_the_source(source):
    batch = ArraySource(source).take(INDICES)
    assert type(batch) is type(source)
    assert tree.diff(batch, jax.tree.map(lambda leaf: leaf[INDICES], source)) == []


def test_text_is_read_but_not_batched():
    rows = ArraySource({"text": np.array(["a", "b"])})
    assert rows.examples(slice(0, 1)) == [{"text": "a"}]
    with pytest.raises(
        sf.errors.DataError, match=r"source/text: expected numbers .* with transform=…"
    ):
        rows.take(slice(0, 1))


# Sequences


class Loaded:
    """A source with `len()` and `[i]`, as `tfds.data_source` is one."""

    def __init__(self, examples):
        self.examples, self.requested = examples, []

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.requested.append(index)
        return self.examples[index]


class AtOnce(Loaded):
    def __getitems__(self, indices):
        self.requested.append(indices)
        return [self.examples[index] for index in indices]


@pytest.mark.parametrize("kind", [list, Loaded, AtOnce])
def test_examples_are_read_by_python_integers_at_once_if_possible_and_stacked(kind):
    source = kind([{"x": row, "y": (int(row[0]), 0.5), "ids": row.tolist()} for row in X])
    batch = SequenceSource(source).take(INDICES)
    np.testing.assert_array_equal(batch["x"], X[INDICES])
    np.testing.assert_array_equal(batch["ids"], X[INDICES])
    np.testing.assert_array_equal(batch["y"][0], X[INDICES, 0])
    if kind is not list:
        assert source.requested == ([6, 0, 6] if kind is Loaded else [[6, 0, 6]])
        assert {type(index) for index in np.ravel(source.requested).tolist()} == {int}


def test_missing_examples_are_refused():
    with pytest.raises(
        sf.errors.DataError, match="got None as example 6 of the source; filter out .*to_"
    ):
        SequenceSource([0, 1, 2, 3, 4, 5, None]).take(INDICES)
    short = type("Short", (AtOnce,), {"__getitems__": lambda self, indices: [X[0]]})
    with pytest.raises(
        sf.errors.DataError, match=r"3 examples of __getitems__\(\[6, 0, 6\]\), got 1"
    ):
        SequenceSource(short(list(X))).take(INDICES)


def test_a_source_that_has_grown_is_refused():
    rows = list(X)
    stream = sf.batches(AtOnce(rows), 2)
    next(stream)
    rows.append(X[0])
    with pytest.raises(
        sf.errors.DataError, match="expected the 8 examples it had when.*got 9; make new"
    ):
        next(stream)


def test_error_of_the_source_names_the_example():
    with pytest.raises(KeyError) as caught:
        SequenceSource(Loaded({0: X[0], 1: X[1]})).take(np.array([1, 5]))
    assert caught.value.__notes__ == ["reading index 5 of the source, row 1 of those requested"]
    with pytest.raises(KeyError) as caught:
        SequenceSource(AtOnce({0: X[0], 1: X[1]})).take(np.arange(20))
    assert caught.value.__notes__ == [
        "reading indices [0, 1, 2, 3, 4, 5, 6, 7, …] of the source at once"
    ]


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
    with pytest.raises(sf.errors.DataError, match=says):
        stack(examples, [7, 9])


VALUES = [
    *(1, -1, 2**63, 2**64, True, 0.5, 1j, None, "text", b"", [], [1, 2], [3, 4], [[1], [2, 3]]),
    *((1, 2), {"a": 1}, {"a": 2}, {"b": 1}, np.int32(1), np.int64(1), np.uint64(1), np.float16(1)),
    *(np.bool_(1), np.timedelta64(1, "s"), np.datetime64(1, "s"), np.str_("x"), np.array(1)),
    *(np.array([1, 2]), np.array([1, 2], ">i8"), np.ones((2, 1)), np.array(["x"]), jnp.ones(2)),
]


def stacked_one_by_one(examples):
    """Flatten each example and convert each leaf; return None if they do not stack."""
    is_row = lambda node: isinstance(node, list)
    flat = [jax.tree.flatten(example, is_leaf=is_row) for example in examples]
    if any(structure != flat[0][1] for _, structure in flat):
        return None
    batch = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        try:
            arrays = [np.asarray(leaf) for leaf in leaves]
        except ValueError:
            return None
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) > 1 or not all(tree.is_data(array) for array in arrays):
            return None
        batch.append(np.stack(arrays))
    return flat[0][1].unflatten(batch)


@given(st.data())
def test_stacking_equals_converting_each_leaf(data):
    columns = [data.draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=2)) for _ in "xy"]
    example = st.fixed_dictionaries(
        {name: st.sampled_from(column) for name, column in zip("xy", columns, strict=True)}
    )
    examples = data.draw(st.lists(example, min_size=1, max_size=4))
    expected = stacked_one_by_one(examples)
    if expected is None:
        with pytest.raises(sf.errors.DataError, match="expected"):
            stack(examples, range(len(examples)))
        return
    batch = stack(examples, range(len(examples)))
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


# Hugging Face and grain


FACES = datasets.Dataset.from_dict(
    {"x": list(range(8)), "ids": [[i, i + 1] for i in range(8)], "text": list("abcdefgh")}
)


@pytest.mark.parametrize("form", [None, "numpy", "jax"])
def test_dataset_of_hugging_face_is_a_source(form):
    source = FACES.select_columns(["x", "ids"]).with_format(form)
    batch = SequenceSource(source).take(INDICES)
    assert batch["x"].tolist() == [6, 0, 6]
    assert batch["ids"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert type(batch["ids"]) is np.ndarray
    stream = sf.batches(source, 3, seed=0, epochs=1, remainder="pad")
    assert sorted(x for b in stream for x in b["x"][b["mask"]].tolist()) == list(range(8))


def test_text_of_hugging_face_is_encoded_by_a_transform():
    encode = lambda example: {"code": ord(example["text"])}
    assert next(sf.batches(FACES, 3, transform=encode))["code"].tolist() == [97, 98, 99]
    with pytest.raises(sf.errors.DataError, match="text: expected numbers, got str 'a' at index 0"):
        next(sf.batches(FACES, 3))
    splits = datasets.DatasetDict(train=FACES, test=FACES)
    with pytest.raises(
        sf.errors.DataError, match="give one of its values, which are called 'train', 't"
    ):
        sf.batches(splits, 3)


def test_infinite_dataset_of_grain_has_its_own_order():
    endless = grain.MapDataset.range(10).shuffle(seed=4).repeat()
    assert SequenceSource(endless).length == sys.maxsize
    stream = sf.batches(endless, 5, start=10**9)
    assert next(stream).tolist() == [endless[5 * 10**9 + i] for i in range(5)]
    with pytest.raises(
        sf.errors.ConfigError, match="no seed and no epochs for an infinite source, .* got seed=0"
    ):
        sf.batches(endless, 5, seed=0)
    noisy = sf.batches(endless, 5, seed=0, transform=lambda x, rng: rng.normal(x))
    assert next(noisy).shape == (5,)


def test_filtered_dataset_of_grain_is_refused():
    squares = grain.MapDataset.range(10).map(lambda x: {"x": x * x})
    assert SequenceSource(squares).take(INDICES)["x"].tolist() == [36, 0, 36]
    even = grain.MapDataset.range(10).filter(lambda x: x % 2 == 0)
    with pytest.raises(sf.errors.DataError, match="got None as example 1 of .*to_iter_dataset"):
        next(sf.batches(even, 4))
    assert next(sf.batches(even.to_iter_dataset(), 4)).tolist() == [0, 2, 4, 6]
