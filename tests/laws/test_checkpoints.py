"""Whatever tree is saved comes back as it was, on any devices, or not at all."""

import itertools
import random
import tempfile
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.checkpoint.sameness import check_same
from tests.small import full_but

import stepfold as sf

pytestmark = pytest.mark.not_optimized

DTYPES = (
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"),
    *("int4", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
)
WIDE = ("float64", "int64", "uint64", "complex128")
SIZES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text("abcXYZ019 _-+~%ü", min_size=1, max_size=4)


class Pair(NamedTuple):
    left: Any
    right: Any


class Module(eqx.Module):
    weight: Any
    inner: Any
    act: Any
    size: int = eqx.field(static=True)


def random_bits(dtype, shape, seed):
    """Give any bits that the dtype has, among them NaNs, infinities and what is below normal."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype.name in ("bool", "int4"):
        low, high = (0, 2) if dtype.name == "bool" else (-8, 8)
        return rng.integers(low, high, shape).astype(dtype)
    count = int(np.prod(shape))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


@st.composite
def arrays(draw):
    place = draw(st.sampled_from(["numpy", "here", "there", "everywhere", "in parts"]))
    dtype = draw(st.sampled_from((*DTYPES, *WIDE) if place == "numpy" else DTYPES))
    shape = draw(SIZES)
    if place == "in parts":
        shape = (8, *shape)
    values = random_bits(dtype, shape, draw(st.integers(0, 99)))
    if place == "numpy":
        return values.copy()
    if place == "here":
        return jax.device_put(values)
    if place == "there":
        return jax.device_put(values, jax.devices()[3])
    spec = P(("fsdp", "tp")) if place == "in parts" else P()
    return jax.device_put(values, NamedSharding(sf.make_mesh((1, 4, 2, 1)), spec))


@st.composite
def keys(draw):
    impl = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
    key = jax.random.key(draw(st.integers(0, 99)), impl=impl)
    shape = draw(st.sampled_from([(), (1,), (2, 3), (8,)]))
    key = jax.random.split(key, shape) if shape else key
    if draw(st.booleans()):
        return jax.random.key_data(key)
    spec = P("fsdp") if shape == (8,) else P()
    place = NamedSharding(sf.make_mesh(), spec)
    return jax.device_put(key, place) if draw(st.booleans()) else key


NUMBERS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.integers(-128, 127).map(np.int8)
    | st.floats(width=32).map(np.float32)
)
LEAVES = arrays() | keys() | NUMBERS | st.none()


def adam_state(seed):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1)))
    params = {"w": jnp.full((3,), seed, jnp.bfloat16), "b": jnp.zeros(())}
    return jax.tree.map(jnp.asarray, tx.init(jax.tree.map(jax.device_put, params)))


def containers(inner):
    modules = st.builds(Module, inner, inner, st.just(jnp.tanh), st.integers(0, 3))
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | modules.map(lambda module: eqx.filter(module, lambda leaf: not callable(leaf)))
    )


TREES = st.recursive(LEAVES | st.integers(0, 3).map(adam_state), containers, max_leaves=8)


def other(leaf):
    """Give a leaf of the same kind and place with other values in it."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(leaf))
            made = jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=impl)
        else:
            made = np.zeros(leaf.shape, leaf.dtype)
        return jax.device_put(made, leaf.sharding if leaf.committed else None)
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)(0)


def test_any_tree_comes_back_as_it_was(count):
    settings(max_examples=count(8, 100))(given(TREES)(check_tree))()


def check_tree(tree):
    tree = {"tree": tree, "anchor": 1}
    with tempfile.TemporaryDirectory() as folder:
        sf.save(folder, tree, step=1)
        assert sf.checkpoint.verify(folder) == {1: []}
        check_same(sf.restore(folder, jax.tree.map(other, tree)).state, tree)


SPECS = {
    "rows": P("fsdp"),
    "columns": P(None, "tp"),
    "both in one": P(("fsdp", "tp")),
    "both": P("fsdp", "tp"),
    "turned": P("tp", "fsdp"),
    "whole": P(),
}
FROM = {8: (1, 4, 2, 1), 4: (1, 2, 2, 1), 2: (1, 2, 1, 1), 1: (1, 1, 1, 1)}
ONTO = {8: (1, 2, 4, 1), 4: (2, 1, 2, 1), 2: (1, 1, 2, 1), 1: (1, 1, 1, 1)}


def placed(count, dims):
    """Give a state on so many devices, in each way that it may lie there."""
    mesh = sf.make_mesh(dims, devices=jax.devices()[-count:])
    rng = np.random.default_rng(0)
    state, places = {}, {}
    for name, spec in SPECS.items():
        state[name] = rng.normal(size=(16, 8)).astype(jnp.bfloat16 if "both" in name else "f4")
        places[name] = NamedSharding(mesh, spec)
    state["keys"] = jax.random.split(jax.random.key(0), 8)
    places["keys"] = NamedSharding(mesh, P("fsdp"))
    state["count"] = np.int32(7)
    places["count"] = NamedSharding(mesh, P())
    return jax.device_put(state, places)


PAIRS = list(itertools.product(FROM, ONTO))


@pytest.mark.parametrize(("count", "onto"), full_but([(8, 4), (1, 8)], PAIRS))
def test_any_layout_is_restored_onto_any_other(tmp_path, count, onto):
    sf.save(tmp_path, placed(count, FROM[count]), step=1)
    wanted = placed(onto, ONTO[onto])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted
    )
    check_same(sf.restore(tmp_path, like, step=1).state, wanted)


def test_a_changed_bit_is_refused_or_does_no_harm(tmp_path, count):
    rng = random.Random(0)
    state = {"w": np.random.default_rng(0).normal(size=200), "k": jax.random.key(3), "i": 4}
    state["p"] = jax.device_put(state["w"].astype("f4"), NamedSharding(sf.make_mesh(), P("fsdp")))
    sf.save(tmp_path, state, step=1)
    files = sorted(path for path in (tmp_path / "1").rglob("*") if path.is_file())
    refused, times = 0, count(1, 6)
    for path in times * files:
        good = path.read_bytes()
        at = rng.randrange(8 * len(good))
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        problems = sf.checkpoint.verify(tmp_path)[1]
        try:
            check_same(sf.restore(tmp_path, state, step=1).state, state)
            assert problems == []
        except sf.errors.CheckpointError:
            refused += 1
            assert problems != []
        path.write_bytes(good)
    assert refused > times * len(files) / 6


@pytest.mark.parametrize("cut", full_but([0.5, None], [0.0, 0.5, None]))
def test_a_file_that_is_cut_off_or_gone_is_refused_or_does_no_harm(tmp_path, cut):
    state = {"w": np.random.default_rng(0).normal(size=200), "i": 4}
    sf.save(tmp_path, state, step=1)
    for path in sorted(path for path in (tmp_path / "1" / "state").rglob("*") if path.is_file()):
        good = path.read_bytes()
        path.unlink() if cut is None else path.write_bytes(good[: int(cut * len(good))])
        if path.name != "commit_success.txt":
            assert sf.checkpoint.latest_step(tmp_path) is None
            with pytest.raises(sf.errors.CheckpointError, match="no checkpoint can be restored"):
                sf.restore(tmp_path, state, step=1)
        path.write_bytes(good)
    assert sf.checkpoint.verify(tmp_path) == {1: []}
