"""Leaves: how they are described, stored and made again."""

import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.arrays import ArrayReader
from stepfold.checkpoint.leaves import (
    Leaf,
    arrays_of,
    checksum,
    leaf_of,
    leaves_of,
    make_leaf,
    region,
    regions_of,
    shards_of,
)
from stepfold.checkpoint.store import open_store
from stepfold.errors import ConfigError, TreeMismatchError

from .sameness import check_same


def test_leaves_are_called_as_everywhere_else():
    tx = optax.adam(0.1)
    state = sf.init_state({"w": jnp.ones((2, 3))}, tx, jax.random.key(0))
    leaves = leaves_of(state)
    assert list(leaves) == list(arrays_of(state))
    assert leaves["params/w"] == leaves["opt_state/0/mu/w"] == Leaf((2, 3), "float32")
    assert leaves["step"] == Leaf((), "int32")
    assert leaves["key"] == Leaf((2,), "uint32", "threefry2x32")


SIZES = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def keys_of(impl, seed, count=8):
    """Make keys of any data, without compiling a split."""
    data = np.random.default_rng(seed).integers(2**32, size=(count, SIZES[impl]), dtype=np.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


@pytest.mark.parametrize(("impl", "size"), SIZES.items())
def test_a_key_is_known_by_its_kind(impl, size):
    keys = keys_of(impl, 0, count=3)
    abstract = jax.eval_shape(lambda: keys)
    for key in (keys, abstract):
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
            "state: expected a different name for every leaf, got 'a/b' and 'a/b', which are",
        ),
        (
            {"a": {"b": 1}, "a.b": 2},
            "state: expected a different name for every leaf, got 'a/b' and 'a.b', which are "
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


ZEROS = np.zeros((8, 4), np.float32)
VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture(scope="module")
def saved_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    sf.save(folder, {"a": VALUES}, step=0)
    return folder


@pytest.fixture
def loaded(saved_values, tmp_path):
    """Save a leaf, and load it as another is."""

    def through(leaf, like):
        if leaf is not VALUES:
            sf.save(tmp_path, {"a": leaf}, step=0)
        step = (saved_values if leaf is VALUES else tmp_path) / "0"
        reader = ArrayReader(step, open_store(step.parent).read_manifest(int(step.name)))
        parts = reader.parts("a", regions_of("a", leaf_of(leaf), like))
        return make_leaf("a", leaf_of(leaf), like, parts)

    return through


def on(spec, dims=(1, 4, 2, 1)):
    return NamedSharding(sf.make_mesh(dims), spec)


LIKES = {
    "uncommitted": lambda: jnp.asarray(ZEROS),
    "on a device": lambda: jax.device_put(ZEROS, jax.devices()[3]),
    "replicated": lambda: jax.device_put(ZEROS, on(P())),
    "in rows": lambda: jax.device_put(ZEROS, on(P("fsdp"))),
    "in columns": lambda: jax.device_put(ZEROS, on(P(None, "tp"))),
    "in both": lambda: jax.device_put(ZEROS, on(P(("fsdp", "tp")))),
}


@pytest.mark.parametrize("name", LIKES)
def test_an_array_comes_where_the_other_is(loaded, name):
    like = LIKES[name]()
    got = loaded(VALUES, like)
    check_same(got, jax.device_put(VALUES, like.sharding if like.committed else None))


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "tp"), P("tp", "fsdp")])
def test_an_abstract_array_says_where(loaded, spec):
    like = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=on(spec))
    check_same(loaded(VALUES, like), jax.device_put(VALUES, like.sharding))


def test_an_abstract_array_without_a_place_is_committed_nowhere(loaded):
    got = loaded(VALUES, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    check_same(got, jnp.asarray(VALUES))


def test_each_copy_has_memory_of_its_own(loaded):
    got = loaded(VALUES, jax.device_put(ZEROS, on(P())))
    places = {part.data.unsafe_buffer_pointer() for part in got.addressable_shards}
    assert len(places) == 8


def test_numbers_come_back_as_numbers(tmp_path):
    numbers = [True, 3, -(1 << 62), 0.1, float("nan"), -0.0, 2j, np.int8(-3), np.float16(0.1)]
    sf.save(tmp_path, numbers, step=0)
    like = [type(number)(0) for number in numbers]
    check_same(sf.restore(tmp_path, like).state, numbers)


def test_what_numpy_holds_comes_back_to_be_written_to(loaded):
    got = loaded(VALUES, np.zeros((8, 4), np.float32))
    check_same(got, VALUES)
    got[:] = 0


@pytest.mark.parametrize(
    ("impl", "place"),
    [("rbg", "uncommitted"), ("threefry2x32", "in rows"), ("unsafe_rbg", "on a device")],
)
def test_keys_come_back_as_keys(loaded, impl, place):
    keys, like = keys_of(impl, 0), keys_of(impl, 1)
    if place != "uncommitted":
        like = jax.device_put(like, LIKES[place]().sharding)
    got = loaded(keys, like)
    check_same(got, keys if place == "uncommitted" else jax.device_put(keys, like.sharding))


def test_abstract_keys_say_where(loaded):
    keys = keys_of("threefry2x32", 0)
    like = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=on(P("fsdp")))
    check_same(loaded(keys, like), jax.device_put(keys, like.sharding))


def test_floats_are_rounded_when_cast(loaded):
    values = np.array([1.0, 1.0039, 3e38, -np.inf, np.nan, -0.0, 1e-40], np.float32)
    got = loaded(values, jnp.zeros(7, jnp.bfloat16))
    check_same(got, jnp.asarray(values).astype(jnp.bfloat16))


@pytest.mark.parametrize("sharded", [False, True])
def test_integers_that_fit_are_cast(loaded, sharded):
    values = np.arange(-4, 4, dtype=np.int32)
    like = jnp.asarray(np.zeros(8, jnp.int4))
    like = jax.device_put(like, on(P("fsdp"))) if sharded else like
    got = loaded(values, like)
    assert (got.dtype, got.sharding) == (jnp.int4, like.sharding)
    assert np.asarray(got).astype(int).tolist() == values.tolist()


@pytest.mark.parametrize(("value", "dtype"), [(300, jnp.int8), (-1, jnp.uint8), (8, jnp.int4)])
def test_integers_that_do_not_fit_are_refused(loaded, value, dtype):
    wanted = jnp.dtype(dtype).name
    words = rf"a: saved int32\[3\], wanted {wanted}\[3\], but not every value fits; use the dt"
    with pytest.raises(TreeMismatchError, match=words):
        loaded(jnp.array([0, 1, value], jnp.int32), jnp.zeros(3, dtype))


def test_a_place_on_one_device_is_kept(loaded):
    like = jax.ShapeDtypeStruct(
        (8, 4), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[5])
    )
    got = loaded(VALUES, like)
    assert got.devices() == {jax.devices()[5]}
    assert got.committed


def test_a_weak_number_stays_weak():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    found = make_leaf("w", leaf_of(weak), weak, {(): np.array(3.0, np.float32)})
    assert (float(found), found.weak_type) == (3.0, True)
