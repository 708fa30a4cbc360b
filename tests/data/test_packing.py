"""Packing keeps every token, in order, and fills rows; masks keep examples apart."""

import json
import re
from itertools import count

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import ones

import stepfold as sf
from stepfold.data.packing import assign_rows, block_diagonal_mask, pack


def refuses(message, error=sf.errors.DataError):
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
    with refuses(message, sf.errors.ConfigError):
        pack([[1]], **{"length": 3, **options})
    with refuses("pack: pad: expected some of ['tokens'], got 'ids'", sf.errors.ConfigError):
        next(pack([[1]], length=3, pad={"ids": 1}))


# Bin packing


def test_plan_is_first_fit_where_best_fit_takes_more_rows():
    lengths = [26, 24, 24, 22, 18, 16, 15, 15, 14, 14, 13, 11, 8, 5, 3, 3, 2]
    assert len(assign_rows(lengths, 39)) == 6


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


class Lengths:
    """A stream of examples that knows its position, and fails once at some of them."""

    def __init__(self, lengths, fails=()):
        self.examples, self.fails, self.at = numbered(lengths), set(fails), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at in self.fails:
            self.fails.remove(self.at)
            raise OSError("unreadable")
        if self.at == len(self.examples):
            raise StopIteration
        self.at += 1
        return self.examples[self.at - 1]

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = state


LENGTHS = [3, 6, 2, 5, 1, 4, 6, 6]


def test_a_seed_gives_each_epoch_its_own_order():
    packed = pack(numbered(LENGTHS), length=6, window=3, seed=0)
    orders = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        orders.append(np.concatenate([row["ids"][row["mask"]] for row in packed]).tolist())
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == np.repeat(range(8), LENGTHS).tolist()


def test_without_epochs_batches_repeat_what_a_function_packs_and_read_other_rows_once():
    make = lambda: pack(numbered(LENGTHS), length=6, window=3)
    rows = len(list(make()))
    assert len(list(sf.batches(make(), 1))) == rows
    stream = sf.batches(make, 1)
    repeated = [next(stream) for _ in range(2 * rows)]
    assert same(repeated[:rows], repeated[rows:])


def test_an_error_of_a_stream_loses_nothing():
    whole = list(pack(Lengths(LENGTHS), length=6, window=3))
    packed = pack(Lengths(LENGTHS, fails=[1, 4]), length=6, window=3)
    rows, states = [], []
    while len(rows) < len(whole):
        try:
            rows.append(next(packed))
        except OSError:
            states.append((len(rows), packed.get_state()))
    assert same(rows, whole)
    assert len(states) == 2
    for start, state in states:
        resumed = pack(Lengths(LENGTHS), length=6, window=3)
        resumed.set_state(state)
        assert same(list(resumed), whole[start:])


def test_a_generator_that_raised_is_not_taken_for_one_that_ended():
    def source():
        yield [1, 2]
        raise OSError("unreadable")

    packed = pack(source(), length=4)
    with pytest.raises(OSError, match="unreadable"):
        next(packed)
    with refuses("source: expected a stream that continues after an error, got one that ended"):
        next(packed)


@pytest.mark.parametrize("bad", [[], [1] * 7])
def test_bad_examples_are_refused_after_a_resume_too(bad):
    make = lambda: pack([[1, 2, 3], [4, 5, 6, 7], bad], length=6, window=2)
    packed, resumed = make(), make()
    next(packed)
    resumed.set_state(packed.get_state())
    next(resumed)
    for _ in range(2):
        with refuses("example 2"):
            next(resumed)


def test_a_stream_without_a_state_is_saved_but_not_resumed():
    make = lambda: sf.batches(pack(iter(numbered(LENGTHS)), length=6), 1)
    stream = make()
    start = stream.get_state()
    next(stream)
    make().set_state(start)
    message = "pack: expected a position that can be restored, got example 0 of a stream, but a "
    with refuses(f"{message}stream of type list_iterator has no state of its own; give examples"):
        make().set_state(stream.get_state())


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"window": 4}, "window was 3 and is 4"),
        ({"seed": 1}, "seed was None and is 1"),
        ({"rows": 2}, "rows was None and is 2"),
        ({"examples": numbered([1, 2])}, "examples was 8 and is 2"),
    ],
)
def test_positions_of_other_packings_are_refused(options, got):
    default = {"examples": numbered(LENGTHS), "length": 6, "window": 3}
    packed = pack(**default)
    next(packed)
    with refuses(f"pack: expected the settings that the position was saved with, got {got}"):
        pack(**{**default, **options}).set_state(packed.get_state())
    with refuses("pack: expected a state that get_state() of sf.pack gave, got"):
        packed.set_state({"step": 3})
    with refuses("pack: expected a state that get_state() of sf.pack gave, got"):
        packed.set_state({**packed.get_state(), "settings": None})


def test_a_position_in_a_mixture_of_other_weights_is_refused():
    make = lambda weight: pack(sf.mix([(numbered(LENGTHS), 1), (numbered([4]), weight)]), length=6)
    packed = make(1)
    next(packed)
    resumed = make(1)
    resumed.set_state(json.loads(json.dumps(packed.get_state())))
    assert same([next(packed)], [next(resumed)])
    with refuses("pack: expected the settings that the position was saved with, got source was"):
        make(2).set_state(packed.get_state())


def test_a_position_past_the_rows_of_its_window_is_refused():
    packed = pack(numbered(LENGTHS), length=6)
    list(packed)
    changed = pack(numbered([1] * len(LENGTHS)), length=6)
    changed.set_state(packed.get_state())
    with refuses("pack: expected a window of at least 6 rows from example 0 on, got 2; give the"):
        next(changed)


def test_a_seed_is_refused_where_the_order_is_that_of_the_source():
    with refuses(
        "pack: seed: expected none for a stream, which has its own order", sf.errors.ConfigError
    ):
        pack(Lengths(LENGTHS), length=6, seed=0)
    mixture = sf.mix([(numbered(LENGTHS), 1), (numbered(LENGTHS), 1)])
    with refuses("pack: seed: expected none for an infinite source", sf.errors.ConfigError):
        pack(mixture, length=6, seed=0)


def test_packed_rows_have_no_random_access():
    packed = pack(numbered(LENGTHS), length=6, rows=2)
    with refuses("workers: expected sf.batches, or an iterator with get_state"):
        sf.workers(packed, 2)
    with refuses("a stream has no random access: give a list of it"):
        sf.mix([(packed, 1), (numbered(LENGTHS), 1)])
