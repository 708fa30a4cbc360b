"""Steps are compiled once for each form, and their metrics come back bit for bit."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average
from tests.small import STEP, TX, loss_fn, start

import stepfold as sf
from stepfold.core.metrics import TermSum
from stepfold.loop.step_runner import StepRunner, unpack


def batch(rows=3):
    return {"x": np.linspace(0.0, 1.0, rows, dtype=np.float32)}


def test_each_count_is_compiled_once(compiles):
    runner, state = StepRunner(sf.make_train_step(lambda *args: loss_fn(*args), TX)), start()
    compiles.clear()  # of what `start` runs
    for _ in range(2):
        for count in (1, 3):
            state, _ = runner(state, [batch() for _ in range(count)])
            compiles.append(str(count))
    made = [name for name in compiles if name not in "13"]
    assert len(made) == 2
    assert compiles[-2:] == ["1", "3"]


def test_it_knows_whether_a_step_is_compiled_already():
    compiled = sf.compile_step(STEP, start(), batch())
    is_compiled = [StepRunner(step).is_compiled for step in (STEP, jax.jit(STEP), compiled)]
    assert is_compiled == [False, True, True]


def test_another_form_of_batch_is_refused():
    words = r"/x: expected float32\[3\], got float32\[1\]"
    with pytest.raises((sf.errors.RetraceError, sf.errors.DataError), match=f"batch.*{words}"):
        StepRunner(STEP)(start(), [batch(), batch(rows=1)])
    runner, state = StepRunner(STEP), start()
    state, _ = runner(state, [batch()])
    with pytest.raises(sf.errors.RetraceError, match=f"batch{words}"):
        runner(state, [batch(rows=1)])


def no_metrics(metrics):
    return lambda state, batch: (state, metrics)


PAIR = r"step: expected \(state, metrics\) from it, got "
BY_NAME = r"step: expected metrics by name from it, got "
VECTOR = lambda state, batch: (state, {"loss": batch["x"]})
USE_MEAN = r"step: expected metrics by name .* sf.mean\("


@pytest.mark.parametrize(
    ("step", "message"),
    [
        *((x, r"step: expected a step \(state, batch\) -> …, got ") for x in (None, "step", 3)),
        (loss_fn, r"step: expected .* got loss_fn\(params, batch, key\); sf.make_train_step makes"),
        (lambda state, batch: state, PAIR),
        (lambda state, batch: (state, {}, None), PAIR),
        (lambda state, batch: {"loss": sf.mean(batch["x"])}, PAIR),
        (lambda state, batch: None, PAIR),
        *((no_metrics(x), BY_NAME) for x in ({"loss": "low"}, {"loss": 1j}, None, np.float32(1))),
        (VECTOR, USE_MEAN),
        (jax.jit(VECTOR), USE_MEAN),
    ],
)
def test_what_is_no_step_is_refused(step, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        StepRunner(step)(start(), [batch()])


# What an earlier runner has compiled


def test_a_program_is_not_reused_for_another_form_or_setting():
    traces = []

    def step(state, batch):
        traces.append(batch["x"].shape)
        return state, {"loss": sf.mean(batch["x"] @ batch["x"])}

    state = lambda: {"n": jnp.zeros(())}
    for rows in (3, 3, 4):
        StepRunner(step)(state(), [batch(rows)])
    with jax.default_matmul_precision("float32"):
        StepRunner(step)(state(), [batch(4)])
    assert traces == [(3,), (4,), (4,)]


def test_methods_of_two_objects_share_no_program():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def step(self, state, batch):
            return state, {"loss": sf.mean(self.scale * batch)}

    totals = []
    for model in (Model(1.0), Model(2.0)):
        runner = StepRunner(model.step)
        _, packed = runner(jnp.zeros(()), [jnp.ones(())])
        (chunk,) = unpack([packed])
        totals.append(chunk["loss"].total.tolist())
    assert totals == [[1.0], [2.0]]


# How metrics are packed


def many(state, batch):
    terms = {"fit": sf.mean(batch), "size": sf.mean(state)}
    metrics = {
        "loss": TermSum(terms),
        "hits": sf.mean(batch > 1),
        "half": Average(total=batch.astype(jnp.bfloat16).sum(), count=jnp.bfloat16(3)),
        "vector": Average(total=batch * state, count=jnp.ones(3)),
        "bits": Average(total=batch > 2, count=jnp.array(3, jnp.uint32)),
    }
    return state + 1, metrics


def vector(i):
    return jnp.array([np.nan, -0.0, 1e-45], jnp.float32) * i + jnp.float32(i)


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]]])
def test_packed_metrics_are_unpacked_bit_for_bit(groups):
    runner, state, calls = StepRunner(many), jnp.float32(1), []
    for group in groups:
        state, call = runner(state, [vector(i) for i in group])
        calls.append(call)
    state, wanted, run = jnp.float32(1), [], jax.jit(many)
    for i in range(3):
        state, metrics = run(state, vector(i))
        wanted.append(metrics)
    dtypes = sorted(str(array.dtype) for array in calls[0].arrays)
    assert dtypes == ["bfloat16", "bool", "float32", "uint32"]  # an array for each
    (chunk,) = unpack(calls)
    same(chunk, jax.tree.map(lambda *leaves: np.stack(leaves), *wanted))


def test_a_step_may_return_no_metrics():
    _, row = StepRunner(lambda state, batch: (state, {}))(jnp.ones(()), [jnp.ones(2)])
    assert unpack([row, row]) == [{}]


class Elsewhere:
    """An array on a device whose memory is not the host's."""

    def __init__(self, array):
        self._array = array

    def devices(self):
        return [SimpleNamespace(platform="gpu")]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


def test_from_another_device_all_is_fetched_at_once(monkeypatch):
    runner, state = StepRunner(many), jnp.float32(1)
    rows = []
    for i in range(4):
        state, row = runner(state, [vector(i)])
        rows.append(row)
    here = unpack(rows)
    calls, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or get(x))
    elsewhere = [replace(row, arrays=[Elsewhere(array) for array in row.arrays]) for row in rows]
    there = unpack(elsewhere)
    assert len(calls) == 1
    chex.assert_trees_all_equal(here, there)


def test_a_step_that_was_compiled_before_starts_without_a_look_at_each_array():
    """Counted, since a time depends on the machine; the loop itself costs the same for all."""
    calls = [0]

    def count(frame, event, _):
        calls[0] += event in ("call", "c_call")

    def cost(arrays):
        params = {f"w{i}": jnp.ones(()) for i in range(arrays)}
        train = sf.make_train_step(lambda p, x, key: sf.mean(p["w0"] * x), TX)
        new = lambda: sf.init_state(jax.tree.map(jnp.copy, params), TX, jax.random.key(0))
        fit = lambda state: sf.fit(train, state, [np.ones(4, np.float32)], steps=1)
        fit(new())
        state, calls[0] = new(), 0
        sys.setprofile(count)
        try:
            fit(state)
        finally:
            sys.setprofile(None)
        return calls[0]

    assert cost(60) - cost(10) <= 30 * 50
