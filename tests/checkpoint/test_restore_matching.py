"""Saved leaves match wanted ones exactly, and an error lists every path that does not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import ones

import stepfold as sf
from stepfold.checkpoint.leaves import Leaf, leaves_of
from stepfold.checkpoint.restore import match
from stepfold.errors import ConfigError, TreeMismatchError


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def refused(saved, like, **options):
    """Give the message, which has to name every path once, as a list of rows besides."""
    with pytest.raises(TreeMismatchError) as caught:
        match(leaves_of(saved), like, **options)
    head, _, _, *rows = str(caught.value).split("\n")
    return head, [re.split("  +", row) for row in rows]


def train_state(tx, params=None):
    params = params or {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    return sf.init_state(params, tx, jax.random.key(0))


KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
KEYS = jax.random.wrap_key_data(np.zeros((2, 2), np.uint32))
RBG_KEY = jax.random.wrap_key_data(np.zeros(4, np.uint32), impl="rbg")
MISMATCHES = {
    "shape": (ones((2, 3)), ones((3, 2)), "float32[2,3]", "float32[3,2]"),
    "rank": (ones(1), ones(), "float32[1]", "float32[]"),
    "dtype": (ones(2), ones(2, jnp.bfloat16), "float32[2]", "bfloat16[2]"),
    "sign": (ones(2, np.int32), ones(2, np.uint32), "int32[2]", "uint32[2]"),
    "bool": (ones(2, bool), ones(2, np.uint8), "bool[2]", "uint8[2]"),
    "typed for raw key": (KEY, ones(2, np.uint32), "key<threefry2x32>[]", "uint32[2]"),
    "raw for typed key": (ones(2, np.uint32), KEY, "uint32[2]", "key<threefry2x32>[]"),
    "kind of key": (KEY, RBG_KEY, "key<threefry2x32>[]", "key<rbg>[]"),
    "keys": (KEY, KEYS, "key<threefry2x32>[]", "key<threefry2x32>[2]"),
    "None": (ones(2), None, "float32[2]", "None"),
    "nothing": (None, ones(2), "nothing", "float32[2]"),
    "a number": (3, 3.0, "int64[]", "float64[]"),
    "a number for an array": (ones(), 1.0, "float32[]", "float64[]"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_differs_is_told_as_saved_and_wanted(name):
    saved, wanted, have, want = MISMATCHES[name]
    head, rows = refused({"a": saved, "b": jnp.ones(1)}, {"a": wanted, "b": jnp.ones(1)})
    assert head.startswith("restore: expected the tree that was saved, got one that differs at 1 ")
    assert rows == [["a", have, want]]


def test_every_path_that_differs_is_told():
    saved = {"a": jnp.ones(2), "b": [jnp.ones(1), jnp.ones(2)], "only": jnp.ones(3)}
    like = {"a": jnp.ones(3), "b": {"x": jnp.ones(1), "y": jnp.ones(2)}, "new": jnp.ones(4)}
    head, rows = refused(saved, like)
    assert "differs at 7 paths; rename=, cast=, parts= or partial= load what differs" in head
    assert sorted(rows) == [
        ["a", "float32[2]", "float32[3]"],
        ["b/0", "float32[1]", "nothing"],
        ["b/1", "float32[2]", "nothing"],
        ["b/x", "nothing", "float32[1]"],
        ["b/y", "nothing", "float32[2]"],
        ["new", "nothing", "float32[4]"],
        ["only", "float32[3]", "nothing"],
    ]


def test_another_optimizer_is_said_in_words():
    saved, like = train_state(optax.adam(0.1)), train_state(optax.sgd(0.1, momentum=0.9))
    head, rows = refused(saved, like)
    assert ": it was saved with another optimizer; make the state with the same, or leave" in head
    assert all(path.startswith("opt_state/") for path, _, _ in rows)
    parts = ("params", "model_state", "step", "key")
    assert repr(parts) in head
    found = match(leaves_of(saved), like, parts=parts)
    assert set(found.sources) == {"step", "params/w", "params/b", "key"}


def test_dtypes_alone_are_said_in_words():
    saved = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32), "c": jnp.ones(1)}
    like = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.int8), "c": jnp.ones(1)}
    head, rows = refused(saved, like)
    assert head.endswith("differs at 2 paths; only dtypes differ: cast=True converts them")
    assert len(rows) == 2
    assert len(match(leaves_of(saved), like, cast=True).sources) == 3


def test_renamed_leaves_are_found():
    saved = {"old": {"w": jnp.ones(2), "b": jnp.ones(3)}}
    like = {"new": {"w": jnp.ones(2), "b": jnp.ones(3)}}
    rename = {"old/b": "new/b", "old/w": "new/w"}
    for way in (rename, {"old": "new"}, lambda name: name.replace("old", "new")):
        found = match(leaves_of(saved), like, rename=way)
        assert found.sources == {"new/b": "old/b", "new/w": "old/w"}


@pytest.mark.parametrize("new", ["c", "cd"])
def test_names_that_could_be_either_are_not_guessed(new):
    head, _ = refused({name: jnp.ones(2) for name in "ab"}, {name: jnp.ones(2) for name in new})
    assert "if they were renamed" not in head


def test_the_longest_branch_renames():
    saved = leaves_of({"a": {"b": {"w": jnp.ones(1)}, "c": jnp.ones(2)}, "ab": jnp.ones(3)})
    like = {"x": {"c": abstract(2)}, "y": {"w": abstract(1)}, "ab": abstract(3)}
    found = match(saved, like, rename={"a": "x", "a/b": "y"})
    assert found.sources == {"x/c": "a/c", "y/w": "a/b/w", "ab": "ab"}


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"c": "d"}, "rename: expected a saved path, got 'c'; saved are a, b/w"),
        (lambda _: None, "rename: expected a path for 'a', got None"),
        ({"a": 3}, "rename: expected a path for 'a', got int 3"),
        (lambda _: "x", "rename: expected one path each, got 'x' for 'a' and 'b/w'"),
        ({"a": "b/w"}, "rename: expected one path each, got 'b/w' for 'a' and 'b/w'"),
    ],
)
def test_what_is_no_renaming_is_refused(rename, words):
    saved = leaves_of({"a": jnp.ones(1), "b": {"w": jnp.ones(1)}})
    with pytest.raises(ConfigError, match=words):
        match(saved, {"a": abstract(1)}, rename=rename)


@pytest.mark.parametrize(
    ("parts", "loaded"),
    [
        (("params",), {"params/w", "params/b"}),
        (["params/w"], {"params/w"}),
        (("params/[bx]", "step"), {"params/b", "step"}),
        ((".*w",), {"params/w", "new/w"}),
        (("par",), None),
    ],
)
def test_parts_are_branches(parts, loaded):
    saved = {"params": {"w": jnp.ones(1), "b": jnp.ones(2)}, "step": 1, "new": {"w": jnp.ones(2)}}
    if loaded is None:
        with pytest.raises(TreeMismatchError, match=r"got none that fits; saved are new/w, params"):
            match(leaves_of(saved), saved, parts=parts)
        return
    found = match(leaves_of(saved), saved, parts=parts)
    assert set(found.sources) == loaded
    others = {"params/w", "params/b", "step", "new/w"} - loaded
    assert found.not_loaded == dict.fromkeys(others, "not among the parts")


def test_a_part_that_matches_nothing_is_refused():
    saved = {"w": jnp.ones(1), "v": jnp.ones(1), "stats": ()}
    with pytest.raises(ConfigError, match="parts: expected patterns of paths, got 'vv', which mat"):
        match(leaves_of(saved), saved, parts=("w", "vv"))
    # A branch without leaves is there.
    assert set(match(leaves_of(saved), saved, parts=("w", "stats")).sources) == {"w"}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("params", r"parts: expected a tuple of paths such as \('params',\), got 'params'"),
        ((3,), r"parts: expected a tuple of paths such as \('params',\), got \(3,\)"),
        (("params", "("), r"parts: expected regular expressions, got .*\(.*: missing \)"),
    ],
)
def test_what_are_no_parts_is_refused(parts, words):
    with pytest.raises(ConfigError, match=words):
        match(leaves_of({"params": jnp.ones(1)}), {"params": abstract(1)}, parts=parts)


def test_nothing_at_all_is_never_loaded_in_silence():
    words = "restore: expected paths to load, got none that fits; saved are a, wanted b, parts None"
    with pytest.raises(TreeMismatchError, match=words):
        match(leaves_of({"a": jnp.ones(1)}), {"b": abstract(1)}, partial=True)


@pytest.mark.parametrize(
    ("have", "want"), [("float32", "int32"), ("int32", "float32"), ("float32", "complex64")]
)
def test_kinds_of_numbers_stay_apart(have, want):
    saved, like = {"a": Leaf((2,), have)}, {"a": abstract(2, dtype=jnp.dtype(want))}
    with pytest.raises(TreeMismatchError, match=rf"a +{have}\[2\] +{want}\[2\]"):
        match(saved, like, cast=True)


def test_names_alone_are_said_in_words_that_work():
    saved = {"old": {"w": jnp.ones(2), "b": jnp.ones(3)}}
    like = {"new": {"w": jnp.ones(2), "b": jnp.ones(3)}}
    head, _ = refused(saved, like)
    rename = {"old/b": "new/b", "old/w": "new/w"}
    assert head.endswith(f"; if they were renamed, give rename={rename}")
    match(leaves_of(saved), like, rename=rename)
