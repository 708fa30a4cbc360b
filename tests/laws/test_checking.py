"""A checked step has the bits of the step, and finds one-bit errors; what is nearly right fails."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import stepfold as sf
from stepfold.core.metrics import DifferentLeaves
from stepfold.debug import check

from . import network

from_mask = DifferentLeaves.from_mask
EVERY = 3
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def by_value(step, every):
    """Compare values, of which a NaN is not even equal to itself."""
    return _compared(step, every, lambda a, b: (a != b).any(), lax.optimization_barrier)


def by_sum(step, every):
    """Compare sums of bits, in which errors cancel."""
    total = lambda leaf: check._words(leaf).sum(dtype=jnp.uint32)
    return _compared(step, every, lambda a, b: total(a) != total(b), lax.optimization_barrier)


def without_barrier(step, every):
    """Run the step twice without a barrier; XLA merges both runs."""
    total = lambda leaf: check._words(leaf).sum(dtype=jnp.uint32)
    return _compared(step, every, lambda a, b: total(a) != total(b), lambda x: x)


def _compared(step, every, differ, barrier):
    def checked(state, batch):
        new, metrics = step(state, batch)
        again, _ = step(*barrier((state, batch)))
        is_due = state["step"] % every == 0
        flags = [differ(a, b) & is_due for a, b in zip(_data(new), _data(again), strict=True)]
        return new, {**metrics, "corrupt": from_mask(jnp.stack(flags))}

    return checked


def _data(state):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]


# Errors are planted by a callback, which counts its calls.


class Faults:
    """Flip bits of leaves in given calls."""

    def __init__(self):
        self.calls, self.flips = 0, {}

    def __call__(self, *leaves):
        leaves = [np.array(leaf) for leaf in leaves]
        for leaf, byte, mask in self.flips.get(self.calls, ()):
            raw = leaves[leaf].reshape(-1).view(np.uint8)
            raw[byte % raw.size] ^= mask
        self.calls += 1
        return leaves


FAULTS = Faults()


def faulty(state, batch):
    """Change every leaf, by way of the callback."""
    state = {
        **state,
        "step": state["step"] + 1,
        "w": state["w"] * 0.5 + batch["x"],
        "half": state["half"] + 1,
        "key": jax.random.fold_in(state["key"], 1),
    }
    leaves, structure = jax.tree.flatten(state)
    data = _data(state)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data]
    data = jax.pure_callback(FAULTS, shapes, *data)
    keyed = [
        jax.random.wrap_key_data(x) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else x
        for leaf, x in zip(leaves, data, strict=True)
    ]
    state = structure.unflatten(keyed)
    return state, {"w": sf.mean(jnp.nan_to_num(state["w"]).sum())}


def initial():
    return {
        "step": jnp.int32(0),
        "w": jnp.array([[1.0, -0.0], [jnp.nan, 3.0]]),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "count": jnp.arange(3, dtype=jnp.int8),
        "flags": jnp.array([True, False]),
        "phase": jnp.array([1 + 2j, 0], jnp.complex64),
        "key": jax.random.key(0),
    }


BATCH = {"x": np.float32(1)}
PATHS = ["count", "flags", "half", "key", "phase", "step", "w"]
FLIPPED = [path for path in PATHS if path not in ("flags", "step")]  # a flag is no byte


@cache
def jitted(make):
    return jax.jit(make(faulty, every=EVERY))


def run(make, flips, steps=5):
    """Run some steps with planted errors; return the paths that are found, by step."""
    step, state = jitted(make), initial()
    FAULTS.calls, FAULTS.flips = 0, {}
    jax.block_until_ready(step(state, BATCH))  # compiled; a callback may run ahead of it
    FAULTS.calls, FAULTS.flips = 0, flips
    found = {}
    for number in range(1, steps + 1):
        state, metrics = step(state, BATCH)
        paths = metrics["corrupt"].paths(state)
        assert int(metrics["corrupt"].compute()) == len(paths)
        if paths:
            found[number] = paths
    jax.block_until_ready(state)
    FAULTS.flips = {}
    return found


# Calls 0 and 1 are of step 1, 2 of step 2, 3 of step 3, 4 and 5 of step 4, 6 of step 5.
CHECKED = {0: 1, 1: 1, 4: 4, 5: 4}


def check_flips(make, call, flips):
    found = run(make, {call: [(PATHS.index(path), byte, 1 << bit) for path, byte, bit in flips]})
    paths = sorted({path for path, _, _ in flips})
    assert found == ({CHECKED[call]: paths} if call in CHECKED else {})
    assert FAULTS.calls == 7


@given(
    call=st.integers(0, 6),
    path=st.sampled_from(FLIPPED),
    byte=st.integers(0, 15),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_found_in_its_step_and_leaf(call, path, byte, bit):
    check_flips(sf.debug.check_step, call, [(path, byte, bit)])


TWO_SIGNS = [("w", 3, 7), ("w", 15, 7)]


def test_two_signs_that_flip_are_found():
    check_flips(sf.debug.check_step, 1, TWO_SIGNS)


def test_a_step_without_errors_is_not_corrupt_although_it_has_a_nan():
    check_flips(sf.debug.check_step, 2, [])


@pytest.mark.parametrize(
    ("make", "call", "flips"),
    [(by_value, 2, []), (by_sum, 1, TWO_SIGNS), (without_barrier, 1, [("w", 0, 0)])],
)
def test_what_is_nearly_right_fails_the_same_law(make, call, flips):
    with pytest.raises(AssertionError):
        check_flips(make, call, flips)


def test_what_depends_on_the_batch_alone_runs_twice_as_well():
    calls = []

    def step(state, batch):
        scale = jax.pure_callback(
            lambda x: calls.append(0) or np.float32(1), jax.ShapeDtypeStruct((), jnp.float32),
            batch["x"],
        )  # fmt: skip
        product = jnp.ones((8, 8)) * batch["x"] @ jnp.ones((8, 8))
        return {"step": state["step"] + 1, "w": state["w"] * scale + product}, {}

    state = {"step": jnp.int32(0), "w": jnp.zeros((8, 8))}
    checked = jax.jit(sf.debug.check_step(step, every=2))
    for number, wanted in enumerate((2, 3, 5, 6)):
        jax.block_until_ready(checked({**state, "step": jnp.int32(number)}, BATCH))
        assert len(calls) == wanted


# The state and the metrics are the step's own


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (1, {"accumulate": 4, "stateful": True}),
        pytest.param(8, {}, marks=pytest.mark.full),
    ],
)
def test_state_and_metrics_are_those_of_the_step(devices, options):
    stateful = "stateful" in options
    loss = network.stateful_loss if stateful else network.loss
    init = network.init if stateful else lambda key: network.init(key)[0]
    step = sf.make_train_step(loss, TX, skip_nonfinite=True, **options)
    mesh = sf.make_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    plan = NamedSharding(mesh, PartitionSpec())
    start = lambda: sf.init_state(init, TX, jax.random.key(0), stateful=stateful, sharding=plan)
    batches = [sf.shard_batch(network.batch(i), mesh) for i in range(4)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
    checked = sf.debug.check_step(step, every=2)
    plain, checked = (
        jax.jit(lambda state, rows, step=step: lax.scan(step, state, rows))(start(), stacked)
        for step in (step, checked)
    )
    assert checked[1].pop("corrupt").words.tolist() == [[0]] * 4
    assert network.bits(checked) == network.bits(plain)


def test_an_ensemble_is_checked_member_by_member():
    states = {"step": jnp.zeros(3, jnp.int32), "w": jnp.arange(3.0)}
    step = lambda state, batch: ({"step": state["step"] + 1, "w": jnp.sin(state["w"] + batch)}, {})
    plain = jax.jit(jax.vmap(step, (0, None)))(states, jnp.float32(1))
    checked = jax.jit(jax.vmap(sf.debug.check_step(step, every=1), (0, None)))(
        states, jnp.float32(1)
    )
    assert network.bits(plain[0]) == network.bits(checked[0])
    assert checked[1]["corrupt"].words.tolist() == [[0]] * 3


def test_an_error_on_one_of_eight_devices_is_found():
    mesh = sf.make_mesh((8,), ("dp",))
    flips = []

    def local(w):
        def flip(device, w):
            if device == 5:
                flips.append(0)
            return np.array(w) + np.float32(device == 5 and len(flips) == 2)

        return jax.pure_callback(
            flip, jax.ShapeDtypeStruct(w.shape, w.dtype), lax.axis_index("dp"), w
        )

    spec = PartitionSpec("dp")
    over_devices = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def step(state, batch):
        return {"step": state["step"] + 1, "w": over_devices(state["w"]) + batch}, {}

    state = {
        "step": jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec())),
        "w": jax.device_put(jnp.zeros(32), NamedSharding(mesh, spec)),
    }
    state, metrics = jax.jit(sf.debug.check_step(step, every=1), donate_argnums=0)(
        state, jnp.float32(1)
    )
    assert metrics["corrupt"].paths(state) == ["w"]


# Memory


@pytest.mark.full
def test_no_copy_of_the_state_is_kept():
    def loss(params, batch, key):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return sf.mean(batch**2)

    step = sf.make_train_step(loss, optax.adam(0.1))
    state = sf.init_state([jnp.ones((128, 128))] * 6, optax.adam(0.1), jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) * 3

    def temporaries(make):
        compiled = sf.compile_step(make(step), state, jnp.ones((8, 128))).compiled
        return compiled.memory_analysis().temp_size_in_bytes

    def with_both_states(step):
        def checked(state, batch):
            batches = jnp.stack([batch, batch])
            _, (both, _) = lax.scan(lambda _, batch: (None, step(state, batch)), None, batches)
            same = [(leaf[0] == leaf[1]).all() for leaf in _data(both)]
            new = jax.tree.map(lambda leaf: leaf[1], both)
            return new, {"corrupt": sf.mean(jnp.stack(same))}

        return checked

    plain = temporaries(lambda step: step)
    assert temporaries(sf.debug.check_step) - plain < 0.5 * size
    assert temporaries(with_both_states) - plain > 0.5 * size
