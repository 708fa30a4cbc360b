"""Paths, descriptions, differences and casts of trees."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import ones

from stepfold import tree

TREE = {"a": [jnp.zeros(2), jnp.zeros((), jnp.int32)], "k": jax.random.key(0)}


def test_paths_of_leaves():
    assert [name for name, _ in tree.named_leaves(TREE)] == ["a/0", "a/1", "k"]
    assert tree.named_leaves(TREE, "params")[0][0] == "params/a/0"
    assert tree.named_leaves(jnp.zeros(2), "params")[0][0] == "params"


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.zeros((2, 3), np.int8), "int8[2,3]"),
        (jax.ShapeDtypeStruct((), jnp.bfloat16), "bfloat16[]"),
        (3, "int 3"),
        (test_paths_of_leaves, "function <function test_paths_of_leaves>"),  # without an address
        ("x" * 100, "str 'xxx"),
    ],
)
def test_leaves_are_described_briefly(leaf, text):
    assert tree.describe_value(leaf).startswith(text)
    assert len(tree.describe_value(leaf)) < 80


@pytest.mark.parametrize(
    ("got", "line"),
    [
        ({"a": ones(2)}, "r/b: missing, expected int32[3]"),
        (
            {"a": ones(2), "b": ones(3, np.int32), "c": ones(1)},
            "r/c: unexpected float32[1]",
        ),
        ({"a": ones(4), "b": ones(3, np.int32)}, "r/a: expected float32[2], got float32[4]"),
        ({"a": ones(2), "b": ones(3)}, "r/b: expected int32[3], got float32[3]"),
        ({"a": ones(2), "b": "text"}, "r/b: expected int32[3], got str 'text'"),
    ],
)
def test_diff_names_path_expected_and_actual(got, line):
    assert tree.diff({"a": jnp.zeros(2), "b": jnp.zeros(3, int)}, got, "r") == [line]


def test_diff_compares_containers_but_not_kinds_of_scalars():
    assert "expected the containers" in tree.diff([1.0], (1.0,))[0]
    assert tree.diff({"a": 1.0}, {"a": jnp.ones(())}) == []


def test_diff_sees_each_of_the_leaves_whose_paths_coincide():
    wanted = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
    assert tree.diff(wanted, wanted) == []
    changed = {"a/b": jnp.ones(4), "a": {"b": jnp.ones(3)}}
    assert tree.diff(wanted, changed) == ["a/b: expected float32[2], got float32[4]"]
    assert tree.diff(wanted, {"a": {"b": jnp.ones(3)}}) != []


def test_cast_floats_changes_only_floats():
    mixed = TREE | {"wide": np.zeros(2, np.float64), "text": "x", "half": jnp.zeros(2, jnp.float16)}
    cast = tree.cast_floats(mixed, jnp.bfloat16)
    assert cast["a"][0].dtype == cast["half"].dtype == cast["wide"].dtype == jnp.bfloat16
    assert cast["a"][1].dtype == jnp.int32
    assert cast["k"] is mixed["k"]
    assert cast["text"] == "x"


def test_cast_to_float32_only_widens_and_respects_keep():
    mixed = {"wide": np.zeros(2, np.float64), "half": jnp.zeros(2, jnp.float16)}
    assert tree.cast_floats(mixed, jnp.float32)["wide"].dtype == np.float64
    assert tree.cast_floats(mixed, jnp.float32)["half"].dtype == jnp.float32
    kept = tree.cast_floats(mixed, jnp.float32, keep="^batch/ha", root="batch")
    assert kept["half"].dtype == jnp.float16


def test_select_keeps_every_bit_and_no_nan():
    old = {"x": jnp.array([-0.0, 1.0]), "k": jax.random.key(1)}
    new = {"x": jnp.array([jnp.nan, 2.0]), "k": jax.random.key(2)}
    kept = tree.select(jnp.array(False), new, old)
    assert np.asarray(kept["x"]).tobytes() == np.asarray(old["x"]).tobytes()
    assert (jax.random.key_data(kept["k"]) == jax.random.key_data(old["k"])).all()


@pytest.mark.parametrize("leaf", [1, 0.5, True, np.int8(1), ones(2, jnp.bfloat16), np.ones(1)])
def test_is_real(leaf):
    assert tree.is_real(leaf)


@pytest.mark.parametrize("dtype", ["S1", "U1", "O", "M8[s]", "m8[s]", "V4", [("a", "i4")]])
def test_arrays_that_jax_cannot_take_are_not_data(dtype):
    assert not tree.is_data(np.zeros(2, dtype))


def test_variable_width_text_is_not_data():
    assert not tree.is_data(np.array(["a"], np.dtypes.StringDType()))


@pytest.mark.parametrize("dtype", [bool, np.int64, complex, jnp.bfloat16, jnp.float8_e4m3fn])
def test_arrays_of_numbers_are_data(dtype):
    assert tree.is_data(np.zeros(2, dtype))
    assert tree.is_data(jnp.zeros(2, jnp.int4))


def test_abstract_arrays_are_data_only_if_allowed():
    form = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert not tree.is_data(form)
    assert tree.is_data(form, abstract=True)
    assert not tree.is_data("x", abstract=True)


KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))


@pytest.mark.parametrize("leaf", [None, "x", 1j, ones(2, np.complex64), KEY])
def test_is_not_real(leaf):
    assert not tree.is_real(leaf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn])
def test_widen_gives_at_least_float32(dtype):
    assert tree.widen(dtype) == jnp.float32
    assert tree.widen(np.float64) == np.float64
    assert tree.widen(np.complex64) == np.complex64


@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.dtype(np.float32)])
def test_floating_accepts_any_form_of_dtype(dtype):
    assert tree.floating(dtype) == np.dtype(np.float32)


@pytest.mark.parametrize("dtype", [None, "float99", 3, int, complex, bool])
def test_floating_is_none_for_other_dtypes(dtype):
    assert tree.floating(dtype) is None


def test_strong_drops_only_the_weak_type():
    assert jnp.asarray(1.0).weak_type
    assert not tree.strong(jnp.asarray(1.0)).weak_type
    assert tree.strong("x") == "x"
    assert re.fullmatch("float32", tree.strong(jnp.asarray(1.0)).dtype.name)
