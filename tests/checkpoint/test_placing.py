import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.arrays import Reader
from stepfold.checkpoint.leaves import leaf_of
from stepfold.checkpoint.manifest import read_manifest
from stepfold.checkpoint.placing import placed, regions_of
from stepfold.errors import TreeMismatchError

from .sameness import check_same

ZEROS = np.zeros((8, 4), np.float32)
VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def loaded(tmp_path):
    """Save a leaf, and load it as another is."""

    def through(leaf, like):
        sf.save(tmp_path, {"a": leaf}, step=0)
        manifest = read_manifest(tmp_path / "0")
        reader = Reader(tmp_path / "0", manifest.leaves, manifest.shards)
        regions = regions_of("a", leaf_of(leaf), like)
        parts = dict(zip(regions, reader.parts("a", regions), strict=True))
        return placed("a", leaf_of(leaf), like, parts)

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


@pytest.mark.parametrize(
    "value", [True, 3, -(1 << 62), 0.1, float("nan"), -0.0, 2j, np.int8(-3), np.float16(0.1)]
)
def test_numbers_come_back_as_numbers(loaded, value):
    check_same(loaded(value, type(value)(0)), value)


def test_what_numpy_holds_comes_back_to_be_written_to(loaded):
    got = loaded(VALUES, np.zeros((8, 4), np.float32))
    check_same(got, VALUES)
    got[:] = 0


@pytest.mark.parametrize(
    ("impl", "place"),
    [("rbg", "uncommitted"), ("threefry2x32", "in rows"), ("unsafe_rbg", "on a device")],
)
def test_keys_come_back_as_keys(loaded, impl, place):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    like = jax.random.split(jax.random.key(1, impl=impl), 8)
    if place != "uncommitted":
        like = jax.device_put(like, LIKES[place]().sharding)
    got = loaded(keys, like)
    check_same(got, keys if place == "uncommitted" else jax.device_put(keys, like.sharding))


def test_abstract_keys_say_where(loaded):
    keys = jax.random.split(jax.random.key(0), 8)
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
    words = rf"a: saved int32\[3\], wanted {wanted}\[3\], but not every value fits; wish for the dt"
    with pytest.raises(TreeMismatchError, match=words):
        loaded(jnp.array([0, 1, value], jnp.int32), jnp.zeros(3, dtype))


def test_a_place_on_one_device_is_kept(loaded):
    like = jax.ShapeDtypeStruct(
        (8, 4), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[5])
    )
    got = loaded(VALUES, like)
    assert got.devices() == {jax.devices()[5]}
    assert got.committed
