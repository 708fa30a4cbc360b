from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average

import stepfold as sf
from stepfold.core.report import TermSum
from stepfold.loop.rows import Rower


def step(state, batch):
    terms = {"fit": sf.mean(batch), "size": sf.mean(state)}
    metrics = {
        "loss": TermSum(terms),
        "hits": sf.mean(batch > 1),
        "half": Average(total=batch.astype(jnp.bfloat16).sum(), count=jnp.bfloat16(3)),
        "vector": Average(total=batch * state, count=jnp.ones(3)),
        "bits": Average(total=batch > 2, count=jnp.array(3, jnp.uint32)),
    }
    return state + 1, metrics


def batch(i):
    return jnp.array([np.nan, -0.0, 1e-45], jnp.float32) * i + jnp.float32(i)


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.fixture(params=["one at a time", "scanned"])
def rows(request):
    rower, state = Rower(step), jnp.float32(1)
    if request.param == "scanned":
        scan = jax.jit(lambda state, batches: jax.lax.scan(rower, state, batches))
        state, first = scan(state, jnp.stack([batch(0), batch(1)]))
        _, last = scan(state, jnp.stack([batch(2)]))
        return rower, [first, last]
    found, run = [], jax.jit(rower)
    for i in range(3):
        state, row = run(state, batch(i))
        found.append(row)
    return rower, found


def test_rows_hold_the_metrics_bit_for_bit(rows):
    rower, found = rows
    state, wanted, run = jnp.float32(1), [], jax.jit(step)
    for i in range(3):
        state, metrics = run(state, batch(i))
        wanted.append(metrics)
    same(rower.stacked(found), jax.tree.map(lambda *leaves: np.stack(leaves), *wanted))


def test_there_is_one_array_for_each_dtype():
    _, row = jax.jit(Rower(step))(jnp.float32(1), batch(1))
    assert sorted(str(array.dtype) for array in row) == [
        *("bfloat16", "bool", "float32", "int32", "uint32")
    ]


def test_a_step_may_say_nothing():
    rower = Rower(lambda state, batch: (state, {}))
    _, row = jax.jit(rower)(jnp.ones(()), jnp.ones(2))
    assert rower.stacked([row, row]) == {}


class Elsewhere:
    """An array on a device whose memory is not the host's."""

    def __init__(self, array):
        self._array = array

    def devices(self):
        return [SimpleNamespace(platform="gpu")]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


def test_from_another_device_all_is_fetched_at_once(monkeypatch):
    rower = Rower(step)
    rows = [jax.jit(rower)(jnp.float32(1), batch(i))[1] for i in range(4)]
    here = rower.stacked(rows)
    calls, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or get(x))
    there = rower.stacked([[Elsewhere(array) for array in row] for row in rows])
    assert len(calls) == 1
    chex.assert_trees_all_equal(here, there)
