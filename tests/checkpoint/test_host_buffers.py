"""A save in the background copies the state, so that the next step can use its memory."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.host_buffers import HostBuffers, as_arrays
from stepfold.internals.orbax import StepWriter

from .sameness import check_same


def make_state(seed, place="sharded"):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    shardings = {
        "one device": SingleDeviceSharding(jax.devices()[0]),
        "sharded": NamedSharding(mesh, P("x")),
        "replicated": NamedSharding(mesh, P()),
    }
    rng = np.random.default_rng(seed)
    put = lambda array: jax.device_put(array, shardings[place])
    return {
        "w": put(rng.normal(size=(64, 33)).astype(np.float32)),
        "b": put(jnp.asarray(rng.normal(size=(128,)), jnp.bfloat16)),
        "bits": put(rng.integers(0, 2, 64).astype(bool)),
        "empty": put(np.zeros((0, 4), np.float32)),
        "key": put(jax.random.split(jax.random.key(seed), 4)),
    }


@jax.jit
def fold(state):
    return {
        name: jnp.logical_not(leaf)
        if leaf.dtype == bool
        else leaf
        if name in ("empty", "key")
        else leaf * 2
        for name, leaf in state.items()
    }


def pointers(state):
    """Return where the numbers of a state are in memory."""
    return {
        name: [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for name, leaf in state.items()
        if name in ("w", "b", "bits")
    }


@pytest.mark.parametrize("place", ["one device", "sharded", "replicated"])
@pytest.mark.parametrize("kind", ["permanent", "temporary", "bucket"])
def test_a_step_after_a_save_in_the_background_uses_the_same_memory(tmp_path, kind, place):
    step = jax.jit(fold, donate_argnums=0)
    directory = f"file://{tmp_path}/bucket" if kind == "bucket" else tmp_path / "durable"
    temporary = sf.Temporary(tmp_path / "local", every=1) if kind == "temporary" else None
    state = step(make_state(0, place))
    with sf.Checkpoints(directory, temporary=temporary) as series:
        for number in (1, 2, 3):
            before, wanted = pointers(state), jax.tree.map(np.asarray, raw(fold(state)))
            expected = jax.tree.map(jnp.copy, state)
            assert series.due(number) == (kind == "temporary")
            series.save(state, step=number)
            state = step(state)
            jax.block_until_ready(state)
            assert pointers(state) == before
            check_same(series.restore(expected).state, expected)
            jax.tree.map(np.testing.assert_array_equal, raw(state), wanted)


@pytest.mark.parametrize("kind", ["permanent", "temporary"])
def test_a_save_in_the_background_makes_no_arrays_at_the_call(tmp_path, monkeypatch, kind):
    """Each of them takes 0.1 ms, of which the loop would lose a second for 10,000 leaves."""
    put, start, blocked = jax.device_put, StepWriter.save, threading.current_thread()

    def elsewhere(run):
        def call(*args, **options):
            assert threading.current_thread() is not blocked
            return run(*args, **options)

        return call

    temporary = sf.Temporary(tmp_path / "local", every=1) if kind == "temporary" else None
    state = make_state(0)
    expected = jax.tree.map(jnp.copy, state)
    with sf.Checkpoints(tmp_path / "durable", temporary=temporary) as series:
        assert series.due(1) == (kind == "temporary")
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", elsewhere(put))
            patch.setattr(StepWriter, "save", elsewhere(start))  # orbax takes 20 ms to begin
            series.save(state, step=1)
            series.wait()
        check_same(series.restore(expected).state, expected)


def has_bits_of(state, wanted):
    assert state.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.asarray(state[name]).tobytes() == np.asarray(leaf).tobytes(), name


def raw(state):
    return state | {"key": jax.random.key_data(state["key"])}


def test_copies_stay_as_they_are(tmp_path):
    buffers, state = HostBuffers(), raw(make_state(0))
    wanted = jax.tree.map(np.array, state)
    copies = buffers.copy(state)
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)({"w": state["w"]})
    )
    assert state["w"].is_deleted()
    kept = as_arrays(copies)
    has_bits_of(kept, wanted)
    assert all(kept[name].sharding == leaf.sharding for name, leaf in state.items())


def test_memory_is_used_again_and_follows_the_state():
    buffers = HostBuffers()
    first = pointers(as_arrays(buffers.copy(raw(make_state(0)))))
    again = as_arrays(buffers.copy(raw(make_state(1))))
    assert pointers(again) == first
    has_bits_of(again, raw(make_state(1)))
    other = {"w": jnp.arange(5.0), "n": np.arange(3), "x": 2}
    has_bits_of(as_arrays(buffers.copy(other)), {"w": other["w"]})  # the rest is left out
    assert as_arrays(buffers.copy({"w": jnp.ones(3, jnp.int32)}))["w"].dtype == jnp.int32


def test_a_save_that_is_not_in_the_background_needs_no_copy(tmp_path):
    with sf.Checkpoints(tmp_path, async_=False) as series:
        series.save(make_state(0), step=1)
        assert series._buffers is None
