import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.leaves import (
    Leaf,
    arrays_of,
    checksum,
    impl_of,
    leaf_of,
    leaves_of,
    region,
    shards_of,
)
from stepfold.errors import ConfigError


def test_leaves_are_called_as_everywhere_else():
    tx = optax.adam(0.1)
    state = sf.init_state({"w": jnp.ones((2, 3))}, tx, jax.random.key(0))
    leaves = leaves_of(state)
    assert list(leaves) == list(arrays_of(state))
    assert leaves["params/w"] == leaves["opt_state/0/mu/w"] == Leaf((2, 3), "float32")
    assert leaves["step"] == Leaf((), "int32")
    assert leaves["key"] == Leaf((2,), "uint32", "threefry2x32")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_is_known_by_its_kind(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    abstract = jax.eval_shape(lambda: keys)
    size = 2 if impl == "threefry2x32" else 4
    for key in (keys, abstract):
        assert impl_of(key) == impl
        assert leaf_of(key) == Leaf((3, size), "uint32", impl)
        assert str(leaf_of(key)) == f"key<{impl}>[3]"


def test_a_raw_key_is_an_array_of_numbers():
    raw = jax.random.key_data(jax.random.key(0))
    assert leaf_of(raw) == Leaf((2,), "uint32")
    assert str(leaf_of(raw)) == "uint32[2]"


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (3, "int64[]"),
        (True, "bool[]"),
        (0.5, "float64[]"),
        (1j, "complex128[]"),
        (np.float32(1), "float32[]"),
        (np.ones((2, 0), ml_dtypes.bfloat16), "bfloat16[2,0]"),
        (jnp.ones((), jnp.float8_e4m3fn), "float8_e4m3fn[]"),
        (jax.ShapeDtypeStruct((2,), jnp.int4), "int4[2]"),
    ],
)
def test_leaves_are_spelled_as_arrays(leaf, words):
    assert str(leaf_of(leaf)) == words


def test_bytes_are_counted():
    assert Leaf((3, 4), "bfloat16").bytes == 24
    assert Leaf((), "complex64").bytes == 8
    assert Leaf((1 << 20, 1 << 20), "float32").bytes == 1 << 42


def test_what_numpy_holds_is_copied():
    array = np.arange(3)
    arrays = arrays_of({"a": array})
    array[:] = 0
    assert arrays["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"f": print}, "f: expected an array, got builtin_function_or_method .*extra=…"),
        ({"a": {"b": "x"}}, "a/b: expected an array, got str 'x'; keep functions and settings out"),
        ({"a": np.array(["x"])}, "a: expected an array, got <U1.1.; keep"),
        ({"a": np.array([None])}, "a: expected an array, got object.1.; keep"),
        ({"a": [jax.ShapeDtypeStruct((2,), jnp.int32)]}, "a/0: expected an array, got int32.2.;"),
        (
            {"a": {"b": 1}, "a/b": 2},
            "state: expected a name of its own for every leaf, got 'a/b' and 'a/b', which are",
        ),
        (
            {"a": {"b": 1}, "a.b": 2},
            "state: expected a name of its own for every leaf, got 'a/b' and 'a.b', which are "
            "stored under one; rename a key",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(state, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        arrays_of(state)
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, state, step=1)
    assert sf.verify(tmp_path) == {}


def test_an_index_is_spelled_out():
    assert region((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert region((slice(4, None),), (8, 5)) == ((4, 8), (0, 5))
    assert region((), ()) == ()


def test_each_part_is_accounted_for_once():
    mesh = sf.make_mesh((1, 4, 2, 1))
    array = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("fsdp")))
    parts = shards_of(array)
    assert list(parts) == [((2 * i, 2 * i + 2), (0, 2)) for i in range(4)]
    assert all(
        np.array_equal(part, np.asarray(array)[slice(*index[0])]) for index, part in parts.items()
    )
    assert list(shards_of(jax.device_put(array, NamedSharding(mesh, P())))) == [((0, 8), (0, 2))]
    assert list(shards_of(np.ones((2, 3)))) == [((0, 2), (0, 3))]


def test_a_checksum_is_of_the_elements_in_order():
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    assert checksum(array) == zlib.crc32(array.tobytes())
    assert checksum(array.T) == zlib.crc32(array.T.tobytes())
    assert checksum(array[::2, 1:3]) == zlib.crc32(array[::2, 1:3].tobytes())
    assert checksum(np.float32(-0.0)) != checksum(np.float32(0.0))
    assert checksum(np.array(2.0, ml_dtypes.bfloat16)) == zlib.crc32(b"\x00\x40")
    assert checksum(np.ones((3, 0))) == 0
