"""Packing keeps every token, in order, and fills rows; masks keep examples apart."""

import re
from itertools import count

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import ones

import stepfold as sf
from stepfold.data.packing import block_diagonal_mask, pack, plan_rows


def refuses(message, error=sf.DataError):
    return pytest.raises(error, match=re.escape(message))


def numbered(lengths):
    """Make sequences whose tokens hold the index of their example and their position in it."""
    return [
        {"ids": np.full(n, i, np.int32), "at": np.arange(n, dtype=np.int32)}
        for i, n in enumerate(lengths)
    ]


def segments(row):
    """Split a row into its examples by `segment_ids`."""
    ids = row["segment_ids"]
    return [
        {name: row[name][ids == n] for name in row if name not in ("segment_ids", "mask")}
        for n in range(1, ids.max() + 1)
    ]


def same(these, those):
    return jax.tree.all(jax.tree.map(np.array_equal, these, those))


sizes = st.lists(st.integers(1, 16), min_size=1, max_size=60)


@given(sizes, st.integers(1, 70), st.integers(16, 40))
def test_every_example_is_in_one_segment_in_order(lengths, window, length):
    found = {}
    for row in pack(numbered(lengths), length=length, window=window):
        assert {array.shape for array in row.values()} == {(length,)}
        for segment in segments(row):
            (index,) = set(segment["ids"].tolist())
            assert index not in found
            found[index] = segment["at"].tolist()
            assert segment["positions"].tolist() == segment["at"].tolist()
        ids = row["segment_ids"]
        real = int((ids > 0).sum())
        assert not ids[real:].any()
        assert not row["positions"][real:].any()
        assert (row["mask"] == (ids > 0)).all()
        assert (ids[0], set(np.diff(ids[:real])) <= {0, 1}) == (1, True)
        assert (np.diff(row["ids"][:real]) >= 0).all()  # in input order
        assert ids.dtype == row["positions"].dtype == np.int32
        assert row["mask"].dtype == bool
    assert found == {i: list(range(n)) for i, n in enumerate(lengths)}


def test_rows_are_nearly_full():
    lengths = np.clip(np.random.default_rng(0).exponential(200, 8192), 1, 1024).astype(int)
    rows = sum(1 for _ in pack(numbered(lengths), length=1024))
    assert lengths.sum() / (rows * 1024) > 0.995


@given(sizes, st.integers(1, 70), st.integers(1, 7))
def test_batches_contain_the_same_rows(lengths, window, rows):
    options = {"length": 16, "window": window, "pad": {"ids": -1}}
    alone = list(pack(numbered(lengths), **options))
    batches = list(pack(iter(numbered(lengths)), rows=rows, **options))
    assert all(len(batch["ids"]) == rows for batch in batches)
    flat = [{name: batch[name][i] for name in batch} for batch in batches for i in range(rows)]
    assert same(flat[: len(alone)], alone)
    rest = flat[len(alone) :]
    assert len(rest) < rows
    for row in rest:
        assert (row["ids"] == -1).all()
        assert not any(row[name].any() for name in ("at", "segment_ids", "positions", "mask"))


@given(sizes, st.integers(1, 30))
def test_each_window_is_packed_independently(lengths, window):
    examples = numbered(lengths)
    whole = list(pack(examples, length=16, window=window))
    parts = [examples[i : i + window] for i in range(0, len(examples), window)]
    assert same(whole, [row for part in parts for row in pack(part, length=16, window=len(part))])


@pytest.mark.parametrize("rows", [None, 2, 5])
def test_only_one_window_is_read_ahead(rows):
    read = []

    def source():
        for i in count():
            read.append(i)
            yield [i] * 5

    packed = pack(source(), length=10, window=6, rows=rows)
    assert read == []
    made = 0
    for _ in range(12):
        next(packed)
        made += rows or 1
        assert len(read) == -(-made // 3) * 6  # a window makes three rows


def test_rows_are_in_the_order_of_their_longest_examples():
    lengths = [2, 9, 1, 10, 8]
    rows = [sorted(set(row["ids"][row["mask"]])) for row in pack(numbered(lengths), length=10)]
    assert rows == [[1, 2], [3], [0, 4]]


def test_each_key_has_its_own_padding():
    example = {"text": {"ids": [1, 2], "labels": [2, 3]}, "weight": [0.5, 1.0]}
    (row,) = pack([example], length=3, pad={"text/labels": -100, "weight": -1})
    assert row["text"]["ids"].tolist() == [1, 2, 0]
    assert row["text"]["labels"].tolist() == [2, 3, -100]
    assert row["weight"].tolist() == [0.5, 1, -1]
    assert row["weight"].dtype == np.float64


def test_sequences_of_vectors_are_packed_along_their_first_axis():
    frames = [np.full((n, 2), n, np.float16) for n in (2, 3)]
    (batch,) = pack(frames, length=6, rows=2, pad=9)
    assert batch["tokens"].dtype == np.float16
    assert batch["tokens"][0, :, 1].tolist() == [2, 2, 3, 3, 3, 9]
    assert (batch["tokens"][1] == 9).all()


def test_longer_sequences_are_split():
    rows = list(pack([list(range(11)), [20, 21]], length=4, split=True))
    tokens = sorted(s["tokens"].tolist() for row in rows for s in segments(row))
    assert tokens == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [20, 21]]
    assert all(row["positions"][0] == 0 for row in rows)


@pytest.mark.parametrize(("truncate", "kept"), [("keep_end", [3, 4]), ("keep_start", [1, 2])])
def test_longer_sequences_are_truncated(truncate, kept):
    examples = [{"a": [1, 2, 3, 4], "b": np.array([1, 2, 3, 4])}, {"a": [9], "b": np.array([9])}]
    first, second = pack(examples, length=2, truncate=truncate)
    assert first["a"].tolist() == first["b"].tolist() == kept
    assert second["a"].tolist() == [9, 0]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ([1, 2**40], "example 4, tokens: expected integers that fit int32, which jax reads"),
        ([[1]], "example 4, tokens: expected the shape (n) as example 3 has, got (1, 1)"),
        ([0.5], "example 4, tokens: expected the dtype int64 of example 3, got float64"),
    ],
)
def test_errors_name_the_example_although_others_are_split(last, message):
    rows = pack([[1], [1], [1], list(range(9)), last], length=2, window=3, split=True)
    with refuses(message):
        list(rows)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ({"ids": [[1]]}, "pack: expected an iterable of examples, got a dict of columns"),
        ([[1], [], [2]], "example 1: expected at least one token, got none; leave empty examples"),
        ([[1], [2], [1] * 5], "example 2: expected at most length=4 tokens, got 5; give split=True,"
                              " truncate='keep_end' or 'keep_start', or a greater length"),
        ([{"a": [1], "b": [1, 2]}], "example 0, b: expected the length 1 of a, got 2"),
        ([{"a": [1]}, {"a": [1]}, {"b": [1]}], "example 2, a: expected int64 in rows of shape (4,) "
         "as in the windows before, got nothing; give all examples the same keys, dtypes and "),
        ([[1], [2], [0.5]], "example 2, tokens: expected int64 in rows of shape (4,) as in the "
                            "windows before, got float64 in rows of shape (4,)"),
        *(([{name: [1]}], f"examples: the key '{name}' is reserved for an added column")
          for name in ("segment_ids", "positions", "mask")),
    ],
)  # fmt: skip
def test_examples_that_cannot_be_packed_are_refused(examples, message):
    with refuses(message):
        list(pack(examples, length=4, window=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "pack: length: expected an integer of at least 1, got 0"),
        ({"window": 0.5}, "pack: window: expected an integer of at least 1, got 0.5"),
        ({"rows": 0}, "pack: rows: expected an integer of at least 1, got 0"),
        ({"truncate": "left"}, "pack: truncate: expected 'keep_end', 'keep_start' or None, got"),
        ({"truncate": "keep_end", "split": True}, "pack: expected split=True or truncate='keep_e"),
    ],
)
def test_invalid_arguments_are_refused_when_given(options, message):
    with refuses(message, sf.ConfigError):
        pack([[1]], **{"length": 3, **options})
    with refuses("pack: pad: expected some of ['tokens'], got 'ids'", sf.ConfigError):
        next(pack([[1]], length=3, pad={"ids": 1}))


# Bin packing


def test_plan_is_first_fit_where_best_fit_takes_more_rows():
    lengths = [26, 24, 24, 22, 18, 16, 15, 15, 14, 14, 13, 11, 8, 5, 3, 3, 2]
    assert len(plan_rows(lengths, 39)) == 6


# Attention masks


def mask_by_hand(ids, causal):
    return [
        [(a == b and a > 0 and (not causal or j <= i)) or i == j for j, b in enumerate(ids)]
        for i, a in enumerate(ids)
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_batches_are_the_same_under_jit(causal):
    ids = np.array([[[1, 1, 2, 0]], [[1, 2, 2, 2]]])
    mask = jax.jit(lambda ids: block_diagonal_mask(ids, causal=causal))(ids)
    assert isinstance(mask, jax.Array)
    assert mask.tolist() == [[mask_by_hand(row, causal) for row in batch] for batch in ids]
    eager = block_diagonal_mask(ids, causal=causal)
    assert (eager.tolist(), eager.dtype, type(eager)) == (mask.tolist(), bool, np.ndarray)


@pytest.mark.parametrize(
    ("ids", "got"),
    [(np.ones(3), "float64[3]"), (np.array(1), "int64[]"), (ones(2, bool), "bool[")],
)
def test_invalid_segment_ids_are_refused(ids, got):
    with refuses(f"block_diagonal_mask: expected integers of shape (…, length), got {got}"):
        block_diagonal_mask(ids)
