"""Collating pads, truncates and stacks, and refuses examples that make no batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.collate import collate

ROWS = [np.array([1, 2, 3], np.int32), np.array([4, 5, 6, 7, 8], np.int32)]


def refuses(message, error=sf.errors.DataError):
    return pytest.raises(error, match=re.escape(message))


def simple(rows, length, truncate, side, pad):
    """Truncate and pad row by row."""
    batch, mask = [], []
    for row in rows:
        kept = list(row)[:length] if truncate == "keep_start" else list(row)[-length:]
        fill, real, none = [pad] * (length - len(kept)), [True] * len(kept), []
        none = [False] * len(fill)
        batch.append(kept + fill if side == "right" else fill + kept)
        mask.append(real + none if side == "right" else none + real)
    return batch, mask


ragged = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12), min_size=1, max_size=6)
either_end = st.sampled_from(["keep_end", "keep_start"])
either_side = st.sampled_from(["right", "left"])


@given(ragged.filter(any), st.integers(1, 14), either_end, either_side, st.integers(-100, 9))
@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.float64, jnp.float32])
def test_rows_equal_those_of_a_simple_implementation(kind, rows, length, truncate, side, pad):
    if kind is jnp.float32:
        made = [jnp.asarray(np.array(row, kind)) for row in rows]
        rows = [row.tolist() for row in made]
    else:
        made = [kind(row) if kind in (list, tuple) else np.array(row, kind) for row in rows]
    batch = collate(made, length=length, truncate=truncate, side=side, pad=pad)
    tokens, mask = simple(rows, length, truncate, side, pad)
    assert batch["tokens"].tolist() == tokens
    assert batch["mask"].tolist() == mask
    assert batch["mask"].sum() == sum(min(len(row), length) for row in rows)
    assert batch["mask"].dtype == bool
    assert batch["mask"].flags.c_contiguous
    assert batch["tokens"].shape == batch["mask"].shape == (len(rows), length)
    assert batch["tokens"].dtype == (np.int64 if kind in (list, tuple) else np.dtype(kind))


def test_each_key_is_padded_with_its_own_value():
    examples = [{"ids": row, "labels": row, "at": {"w": row / 2}} for row in ROWS]
    batch = collate(examples, length=5, pad={"labels": -100, "at/w": float("nan")})
    assert batch["ids"][0].tolist() == [1, 2, 3, 0, 0]
    assert batch["labels"][0].tolist() == [1, 2, 3, -100, -100]
    assert np.isnan(batch["at"]["w"][0, 3:]).all()
    assert list(batch) == ["ids", "labels", "at", "mask"]
    flags = [np.array([True])]
    assert collate(flags, length=2, pad=True)["tokens"].tolist() == [[True, True]]
    with refuses("pad: expected a value of bool for tokens, got 2", sf.errors.ConfigError):
        collate(flags, length=2, pad=2)


def test_sequences_of_vectors_are_padded_along_their_first_axis():
    frames = [np.ones((2, 3, 4), np.float32), np.ones((5, 3, 4), np.float32)]
    tokens = collate(frames, length=4, pad=-1)["tokens"]
    assert (tokens.shape, tokens.sum()) == ((2, 4, 3, 4), 12 * (2 + 4) - 12 * 2)
    nested = collate([[[1, 2]], [[3, 4], [5, 6]]], length=2)["tokens"]
    assert nested.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_leaves_not_named_in_keys_are_stacked():
    image = np.zeros((4, 4), np.uint8)
    examples = [{"ids": row, "image": image, "text": {"a": row, "b": row}} for row in ROWS]
    batch = collate(examples, length=8, keys=["ids", "text"])
    assert (batch["image"].shape, batch["text"]["b"].shape) == ((2, 4, 4), (2, 8))
    fixed = collate([{"ids": row, "image": image} for row in ROWS], length=8, keys="ids")
    assert (fixed["image"].shape, fixed["image"].dtype) == ((2, 4, 4), np.uint8)
    batch = collate([{"x": [1, 2]}, {"x": [3, 4]}], length=8, keys=())  # nor is a mask added
    assert {name: array.tolist() for name, array in batch.items()} == {"x": [[1, 2], [3, 4]]}


@given(ragged.filter(any), st.data())
def test_structure_does_not_depend_on_the_lengths(rows, data):
    length = data.draw(st.integers(1, 12))

    def shapes(rows):
        examples = [{"ids": row, "label": 1} for row in rows]
        return jax.tree.map(lambda x: (x.shape[1:], x.dtype), collate(examples, length=length))

    assert shapes(rows) == shapes([[1] * length] * 3) == shapes([[1]])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", jnp.bfloat16, "complex64"])
def test_dtypes_of_arrays_are_kept_and_numbers_have_those_of_numpy(dtype):
    rows = [row.astype(dtype) for row in ROWS]
    examples = [{"x": row, "one": row[0], "a": 1, "b": 0.5, "c": True} for row in rows]
    batch = collate(examples, length=4)
    dtypes = [batch[name].dtype for name in ("x", "one", "a", "b", "c")]
    assert dtypes == [dtype, dtype, np.int64, np.float64, np.bool_]
    assert {batch[name].shape for name in ("one", "a", "b", "c")} == {(2,)}


def test_integers_that_jax_wraps_around_are_refused():
    for rows in ([[1], [2, 2**31]], [np.array([1]), np.array([2, -(2**40)])], [[1], [2**31, 1]]):
        value = min(rows[1]) if min(rows[1]) < 0 else 2**31
        with refuses(
            "example 1, tokens: expected integers that fit int32, which jax reads them as, "
            f"got {value}; make them smaller, or floats, or enable x64"
        ):
            collate(rows, length=2)
    with refuses("example 0, a: expected integers that fit int32"):
        collate([{"ids": [1], "a": 2**40}], length=2)
    with refuses("example 0, tokens: expected integers that fit uint32"):
        collate([np.array([2**32], np.uint64)], length=2)
    fitting = [np.array([2**31 - 1]), np.array([-(2**31)])]
    assert collate(fitting, length=1)["tokens"].tolist() == [[2**31 - 1], [-(2**31)]]
    with jax.enable_x64(True):
        assert collate([[2**40]], length=1, pad=2**40)["tokens"].tolist() == [[2**40]]


def test_lists_have_the_dtypes_of_numpy():
    def dtype(row):
        return collate([row], length=2)["tokens"].dtype

    assert dtype([1, 2.5]) == dtype([0.5, 1]) == np.float64
    assert dtype([True, False]) == np.bool_
    assert dtype([np.int64(3), 4]) == dtype([3, np.int64(4)]) == dtype(range(3)) == np.int64


def test_empty_sequence_is_a_row_of_padding():
    batch = collate([[], [1.5], np.zeros(0)], length=2, pad=-1)
    assert batch["tokens"].tolist() == [[-1, -1], [1.5, -1], [-1, -1]]
    assert batch["mask"].sum() == 1
    assert collate([[], [[1, 2]]], length=2)["tokens"].shape == (2, 2, 2)


def test_dict_of_columns_is_accepted():
    class Ragged:
        def to_list(self):
            return [[1, 2, 3], [4]]

    columns = {"ids": Ragged(), "text": {"n": np.array([7, 8], np.int32)}}
    batch = collate(columns, length=2)
    assert batch["ids"].tolist() == [[2, 3], [4, 0]]
    assert batch["text"]["n"].tolist() == [7, 8]
    with refuses("examples: expected columns of one length, got {'a': 2, 'b': 1}"):
        collate({"a": [[1], [2]], "b": [[1]]}, length=2)


def test_examples_are_not_changed():
    rows = [row.copy() for row in ROWS]
    batch = collate(rows, length=3)
    batch["tokens"][:] = 0
    assert all((a == b).all() for a, b in zip(rows, ROWS, strict=True))


def test_longer_sequence_is_refused_without_truncate():
    assert collate(ROWS, length=5, truncate=None)["mask"].sum() == 8
    with refuses("example 1: expected at most length=4 tokens, got 5; give truncate='keep_end' or"):
        collate(ROWS, length=4, truncate=None)


SEVERAL = "give every example the same keys"


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "examples: expected at least one with at least one key, got none"),
        ([{}], "examples: expected at least one with at least one key, got none"),
        ({"ids": []}, "examples: expected at least one with at least one key, got none"),
        (None, "examples: expected a list of them, or a dict of columns, got NoneType None; put a"),
        ({"ids": [1], "n": 1}, "a dict of columns, got int 1 under 'n'; put a single example in a"),
        ([{"a": [1]}, {"b": [1]}], f"example 1, a: missing, but example 0 has it; {SEVERAL}"),
        ([{"a": [1]}, {"a": [1], "b": 1}], "example 1, b: unexpected, for example 0 lacks it; giv"),
        ([{"t": {"a": [1]}}, {"t": {"c": [1]}}], "example 1, t/a: missing, but example 0 has it"),
        ([{"t": {"a": [1]}}, {"t": [1]}], "example 1, t: expected a dict with the keys ['a'], got"),
        ([{"mask": [1]}], "examples: the key 'mask' is reserved for an added column; rename yours"),
        ([[1], "abc"], "example 1, tokens: expected a sequence, got str 'abc'; give every "),
        ([{"a": "abc"}], "examples: expected a sequence to pad, got only scalars under ['a']; giv"),
        ([{"i": [1], "s": "x"}], "example 0, s: expected numbers in one shape, got str 'x'"),
        ([[1], ["a"]], "example 1, tokens: expected numbers in one shape, got list ['a']"),
        ([[1], [2**70]], "example 1, tokens: expected numbers in one shape, got list [118059"),
        ([[[1, 2], [3]]], "example 0, tokens: expected numbers in one shape, got list [[1, 2], ["),
        ([np.array([b"x"])], "example 0, tokens: expected numbers in one shape, got |S1[1]"),
        ([ROWS[0], 3], "example 1, tokens: expected a sequence, got int 3; give every example"),
        ([[], []], "example 0, tokens: expected a number somewhere, got only empty lists, which h"),
        ([{"a": [1], "b": [1]}, {"a": [1, 2], "b": [1]}], "example 1, b: expected the length 2 of"),
        ([[1], [0.5]], "example 1, tokens: expected the dtype int64 of example 0, got float64; a "),
        ([[[1, 2]], [[3, 4, 5]]], "example 1, tokens: expected the shape (n, 2) as example 0 has,"),
        ([[1, 2], [[3]]], "example 1, tokens: expected the shape (n) as example 0 has, got (1, 1)"),
    ],
)
def test_examples_that_make_no_batch_are_refused(examples, message):
    with refuses(message):
        collate(examples, length=2)


def test_leaves_that_do_not_stack_are_refused():
    examples = [{"ids": [1], "image": np.ones((4, 4))}, {"ids": [1], "image": np.ones((5, 4))}]
    with refuses("example 1, image: expected the shape (4, 4) of example 0, got (5, 4); name the"):
        collate(examples, length=2, keys="ids")
    with refuses("example 0, image: expected the length 1 of ids, got 4"):
        collate(examples, length=2)
    with refuses("example 0, label: expected a sequence, got int 1"):
        collate([{"label": 1}], length=2, keys="label")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "collate: length: expected an integer of at least 1, got 0"),
        ({"length": True}, "collate: length: expected an integer of at least 1, got True"),
        ({"truncate": "end"}, "collate: truncate: expected 'keep_end', 'keep_start' or None, got"),
        ({"side": "top"}, "collate: side: expected one of 'right', 'left', got 'top'"),
        ({"pad": {"lables": 1}}, "collate: pad: expected some of ['ids', 'w'], got 'lables'"),
        ({"pad": "x"}, "collate: pad: expected a number for ids, got 'x'"),
        ({"pad": {"ids": 0.5}}, "pad: expected a value of int32 for ids, got 0.5; give pad= a di"),
        ({"pad": float("nan")}, "pad: expected a value of int32 for ids, got nan"),
        ({"pad": -1}, "pad: expected a value of uint8 for w, got -1; give pad= a dict of values"),
        ({"pad": {"ids": 2**31}}, "pad: expected a value of int32 for ids, got 2147483648"),
        ({"keys": ["ids", "x"]}, "collate: keys: expected some of ['ids', 'w'], got 'x'"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    example = {"ids": np.array([1, 2]), "w": np.array([1, 2], np.uint8)}
    with refuses(message, sf.errors.ConfigError):
        collate([example], **{"length": 3, **options})


# Under jax's transformations


def in_numpy(tree):
    """Return what jax's arrays hold, and the dtypes that jax reads others as."""
    return jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), tree)


def is_same(one, two):
    one, two = in_numpy(one), in_numpy(two)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


DTYPES = [
    np.bool_,
    np.int8,
    np.uint16,
    np.int32,
    np.float16,
    jnp.bfloat16,
    np.float32,
    np.complex64,
]
SPACE = {
    "length": st.integers(1, 6),
    "truncate": either_end,
    "side": either_side,
    "pad": st.sampled_from([0, 1]),
    "keys": st.sampled_from([None, ["ids", "in"]]),
}


def transforms_change_nothing(lengths, options, dtype):
    rng = np.random.default_rng(len(lengths))
    make = lambda *shape: rng.integers(0, 2, (3, *shape)).astype(dtype)
    many = [
        {"ids": make(n), "in": {"w": make(n, 2)}, "one": make(), "fixed": make(2)} for n in lengths
    ]
    if options["keys"] is None:
        many = [{name: x for name, x in each.items() if name != "fixed"} for each in many]
    collates = lambda examples: collate(examples, **options)
    single = [jax.tree.map(lambda x, row=row: x[row], many) for row in range(3)]
    wanted = [collates(examples) for examples in single]
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(wanted))
    arrays = jax.tree.map(jnp.asarray, single[0])
    is_same(collates(arrays), wanted[0])
    assert isinstance(collates(arrays)["in"]["w"], jax.Array)
    is_same(jax.jit(collates)(single[0]), wanted[0])
    is_same(jax.vmap(collates)(many), jax.tree.map(lambda *rows: np.stack(rows), *wanted))


def test_jit_and_vmap_give_what_numpy_gives(count):
    lengths = st.lists(st.integers(0, 8), min_size=1, max_size=4)
    cases = given(lengths, st.fixed_dictionaries(SPACE), st.sampled_from(DTYPES))
    settings(max_examples=count(1, 30))(cases(transforms_change_nothing))()


def test_lists_and_columns_may_be_traced():
    rows, columns = [[1, 2, 3], [4]], {"ids": np.arange(6).reshape(2, 3), "y": [1, 2]}
    pad = lambda examples: collate(examples, length=2, side="left")
    for examples in (rows, columns, [{"a": [0.5], "b": [1]}, {"a": [], "b": []}]):
        is_same(jax.jit(pad)(examples), pad(examples))
    assert not jax.eval_shape(pad, rows)["tokens"].weak_type
    mixed = jax.jit(lambda x: pad([x, [7, 8, 9], np.array([10]), []]))(jnp.arange(1))
    assert mixed["tokens"].tolist() == [[0, 0], [8, 9], [0, 10], [0, 0]]
    assert mixed["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([ROWS[0], 3], "example 1, tokens: expected a sequence, got "),
        ([[1], [0.5]], "example 1, tokens: expected the dtype int32 of example 0, got float32; a "),
        ([[[1, 2]], [[3, 4, 5]]], "example 1, tokens: expected the shape (n, 2) as example 0 has,"),
        ([[[1, 2], [3]]], "example 0, tokens: expected numbers in one shape, got list"),
        ([jax.random.split(jax.random.key(0))], "example 0, tokens: expected numbers, to make bat"),
    ],
)
def test_traced_examples_that_make_no_batch_are_refused(examples, message):
    with refuses(message):
        jax.jit(lambda examples: collate(examples, length=2))(examples)


def test_numbers_beside_traced_ones_have_to_fit_too():
    with refuses("example 1, tokens: expected integers that fit int32, which jax reads them as"):
        jax.jit(lambda x: collate([x, [2**40]], length=2))(jnp.arange(2))
    with refuses("pad: expected a value of int32 for tokens, got 0.5", sf.errors.ConfigError):
        jax.jit(lambda x: collate([x], length=3, pad=0.5))(jnp.arange(2))
