import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.adapter.plain import LeftOut, from_text, to_text

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("stepfold"), inner)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_data_come_back_as_they_were(value):
    again = from_text(to_text(value))
    assert again == value
    assert repr(again) == repr(value)


def test_numpy_stays_numpy_and_jax_stays_jax():
    again = from_text(to_text({"a": np.arange(3, dtype=np.int8), "b": jnp.ones(2), "c": np.nan}))
    assert isinstance(again["a"], np.ndarray)
    assert again["a"].dtype == np.int8
    assert isinstance(again["b"], jax.Array)
    assert np.isnan(again["c"])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_come_back_as_keys(impl):
    key = jax.random.key(3, impl=impl)
    again = from_text(to_text(key))
    assert jax.random.key_impl(again) == impl
    assert (jax.random.key_data(again) == jax.random.key_data(key)).all()


def test_a_mesh_comes_back_where_its_devices_are():
    mesh = sf.make_mesh((2, -1), ("a", "b"))
    assert from_text(to_text(mesh)) == mesh
    elsewhere = to_text(mesh).replace("7", "70")
    assert from_text(elsewhere).what == "mesh of 8 devices, of which 8 are here"


def test_what_json_cannot_hold_says_so_when_it_is_used():
    gone = from_text(to_text({"step": max}))["step"]
    assert repr(gone) == "LeftOut('builtin_function_or_method max')"
    with pytest.raises(sf.ConfigError, match="max: JSON holds no such thing, only its name; make"):
        gone(1, 2)
    with pytest.raises(sf.ConfigError, match="only its name"):
        list(LeftOut("generator"))
    assert to_text(gone) == to_text(max)


@pytest.mark.parametrize("text", ["", "[", '{"stepfold": "array"}', '{"stepfold": "what"}'])
def test_anything_else_is_refused(text):
    with pytest.raises(sf.ConfigError, match="from_json: expected what to_json wrote, got"):
        from_text(text)


def test_a_record_is_only_made_of_a_type_that_is_one():
    harm = '{"stepfold": "record", "of": "os:system", "fields": {"command": "true"}}'
    assert isinstance(from_text(harm), LeftOut)
