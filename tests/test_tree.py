import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepfold import tree

TREE = {"a": [jnp.zeros(2), jnp.zeros((), jnp.int32)], "k": jax.random.key(0)}


def test_paths_are_spelled_as_people_do():
    assert [name for name, _ in tree.named_leaves(TREE)] == ["a/0", "a/1", "k"]
    assert tree.named_leaves(TREE, "params")[0][0] == "params/a/0"
    assert tree.named_leaves(jnp.zeros(2), "params")[0][0] == "params"


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.zeros((2, 3), np.int8), "int8[2,3]"),
        (jax.ShapeDtypeStruct((), jnp.bfloat16), "bfloat16[]"),
        (3, "int 3"),
        ("x" * 100, "str 'xxx"),
    ],
)
def test_leaves_are_spelled_in_short(leaf, text):
    assert tree.spell(leaf).startswith(text)
    assert len(tree.spell(leaf)) < 80


@pytest.mark.parametrize(
    ("got", "line"),
    [
        ({"a": jnp.zeros(2)}, "r/b: missing, expected int32[3]"),
        (
            {"a": jnp.zeros(2), "b": jnp.zeros(3, int), "c": jnp.zeros(1)},
            "r/c: unexpected float32[1]",
        ),
        ({"a": jnp.zeros(4), "b": jnp.zeros(3, int)}, "r/a: expected float32[2], got float32[4]"),
        ({"a": jnp.zeros(2), "b": jnp.zeros(3)}, "r/b: expected int32[3], got float32[3]"),
        ({"a": jnp.zeros(2), "b": "text"}, "r/b: expected int32[3], got str 'text'"),
    ],
)
def test_diff_names_path_wanted_and_got(got, line):
    assert tree.diff({"a": jnp.zeros(2), "b": jnp.zeros(3, int)}, got, "r") == [line]


def test_diff_sees_containers_and_overlooks_how_a_number_is_held():
    assert "expected the containers" in tree.diff([1.0], (1.0,))[0]
    assert tree.diff({"a": 1.0}, {"a": jnp.ones(())}) == []


def test_cast_leaves_all_but_floats_alone():
    mixed = TREE | {"wide": np.zeros(2, np.float64), "text": "x", "half": jnp.zeros(2, jnp.float16)}
    cast = tree.cast_floats(mixed, jnp.bfloat16)
    assert cast["a"][0].dtype == cast["half"].dtype == cast["wide"].dtype == jnp.bfloat16
    assert cast["a"][1].dtype == jnp.int32
    assert cast["k"] is mixed["k"]
    assert cast["text"] == "x"


def test_cast_to_float32_widens_only_and_keeps_what_it_is_told():
    mixed = {"wide": np.zeros(2, np.float64), "half": jnp.zeros(2, jnp.float16)}
    assert tree.cast_floats(mixed, jnp.float32)["wide"].dtype == np.float64
    assert tree.cast_floats(mixed, jnp.float32)["half"].dtype == jnp.float32
    kept = tree.cast_floats(mixed, jnp.float32, keep="^batch/ha", root="batch")
    assert kept["half"].dtype == jnp.float16


def test_select_takes_every_bit_and_no_nan_from_the_other():
    old = {"x": jnp.array([-0.0, 1.0]), "k": jax.random.key(1)}
    new = {"x": jnp.array([jnp.nan, 2.0]), "k": jax.random.key(2)}
    kept = tree.select(jnp.array(False), new, old)
    assert np.asarray(kept["x"]).tobytes() == np.asarray(old["x"]).tobytes()
    assert (jax.random.key_data(kept["k"]) == jax.random.key_data(old["k"])).all()


@pytest.mark.parametrize("leaf", [1, 0.5, True, np.int8(1), jnp.ones(2, jnp.bfloat16), np.ones(1)])
def test_what_is_real(leaf):
    assert tree.is_real(leaf)


def test_an_abstract_array_is_data_where_it_may_stand_for_it():
    form = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert not tree.is_data(form)
    assert tree.is_data(form, abstract=True)
    assert not tree.is_data("x", abstract=True)


@pytest.mark.parametrize("leaf", [None, "x", 1j, jnp.ones(2, complex), jax.random.key(0)])
def test_what_is_not_real(leaf):
    assert not tree.is_real(leaf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn])
def test_widen_is_float32_for_what_is_narrower(dtype):
    assert tree.widen(dtype) == jnp.float32
    assert tree.widen(np.float64) == np.float64
    assert tree.widen(np.complex64) == np.complex64


@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.dtype(np.float32)])
def test_a_floating_dtype_is_read_in_any_form(dtype):
    assert tree.floating(dtype) == np.dtype(np.float32)


@pytest.mark.parametrize("dtype", [None, "float99", 3, int, complex, bool])
def test_what_is_no_floating_dtype_is_none(dtype):
    assert tree.floating(dtype) is None


def test_strong_drops_a_weak_type_alone():
    assert jnp.asarray(1.0).weak_type
    assert not tree.strong(jnp.asarray(1.0)).weak_type
    assert tree.strong("x") == "x"
    assert re.fullmatch("float32", tree.strong(jnp.asarray(1.0)).dtype.name)
