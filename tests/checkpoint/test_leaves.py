"""Leaves: how they are described, stored and made again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.arrays import ArrayReader
from stepfold.checkpoint.leaves import (
    arrays_of,
    leaf_of,
    make_leaf,
    regions_of,
)
from stepfold.checkpoint.store import open_store
from stepfold.errors import ConfigError, TreeMismatchError

from .sameness import check_same


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
        ({"a": {"b": 1}, "a.b": 2}, "got 'a/b' and 'a.b', which are stored under one; rename a k"),
        ({"a": 1, "a/b": 2}, "state: expected a leaf or a branch at 'a', got both, since there is"),
        ({"a": np.zeros((0, 3))}, "state: expected arrays to save, got none with elements"),
        ({"a": 1 << 70}, "a: expected a dtype that can be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(state, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        arrays_of(state)
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, state, step=1)
    assert sf.checkpoint.verify(tmp_path) == {}


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
        parts = reader.read_regions("a", regions_of("a", leaf_of(leaf), like))
        return make_leaf("a", leaf_of(leaf), like, parts)

    return through


def on(spec, dims=(1, 4, 2, 1)):
    return NamedSharding(sf.make_mesh(dims), spec)


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


def test_floats_are_rounded_when_cast(loaded):
    values = np.array([1.0, 1.0039, 3e38, -np.inf, np.nan, -0.0, 1e-40], np.float32)
    got = loaded(values, jnp.zeros(7, jnp.bfloat16))
    check_same(got, jnp.asarray(values).astype(jnp.bfloat16))


@pytest.mark.parametrize(("value", "dtype"), [(300, jnp.int8), (-1, jnp.uint8), (8, jnp.int4)])
def test_integers_that_do_not_fit_are_refused(loaded, value, dtype):
    wanted = jnp.dtype(dtype).name
    words = rf"a: saved int32\[3\], wanted {wanted}\[3\], but not every value fits; use the dt"
    with pytest.raises(TreeMismatchError, match=words):
        loaded(jnp.array([0, 1, value], jnp.int32), jnp.zeros(3, dtype))


def test_a_weak_number_stays_weak():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    found = make_leaf("w", leaf_of(weak), weak, {(): np.array(3.0, np.float32)})
    assert (float(found), found.weak_type) == (3.0, True)
