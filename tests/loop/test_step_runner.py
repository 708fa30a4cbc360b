import functools
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu.metrics import Average

import stepfold as sf
from stepfold.core.metrics import TermSum
from stepfold.loop.step_runner import StepRunner

TX = optax.adam(0.1)
STEP = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2, b["mask"]), TX)


@functools.cache
def initial():
    return sf.init_state({"w": jnp.ones(3)}, TX, jax.random.key(0))


def start():
    return jax.tree.map(jnp.copy, initial())


def batch(seed, rows=3):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=rows).astype(np.float32), "mask": rng.uniform(size=rows) < 0.7}


FORMS = {
    "step": lambda: STEP,
    "jitted": lambda: jax.jit(STEP),
    "compiled": lambda: sf.compile_step(STEP, start(), batch(0)),
}


def values(metrics):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), metrics)


def test_each_count_is_compiled_once(compiles):
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2, b["mask"]), TX)
    runner, state = StepRunner(step), start()
    compiles.clear()  # of what `start` runs
    for _ in range(2):
        for count in (1, 3):
            state, _ = runner(state, [batch(seed) for seed in range(count)])
            compiles.append(str(count))
    made = [name for name in compiles if name not in "13"]
    assert len(made) == 2
    assert compiles[-2:] == ["1", "3"]


def test_it_knows_whether_a_step_is_compiled_already():
    assert {form: StepRunner(make()).is_compiled for form, make in FORMS.items()} == {
        "step": False,
        "jitted": True,
        "compiled": True,
    }


def test_another_form_of_batch_is_refused():
    runner, state = StepRunner(STEP), start()
    state, _ = runner(state, [batch(0)])
    with pytest.raises(sf.RetraceError, match=r"batch/x: expected float32\[3\], got float32\[1\]"):
        runner(state, [batch(0, rows=1)])


def test_batches_of_several_forms_in_one_call_are_refused():
    words = r"batch.*/x: expected float32\[3\], got float32\[1\]"
    with pytest.raises((sf.RetraceError, sf.DataError), match=words):
        StepRunner(STEP)(start(), [batch(0), batch(1, rows=1)])


@pytest.mark.parametrize("step", [None, "step", 3])
def test_what_is_no_step_is_refused(step):
    with pytest.raises(sf.ConfigError, match=r"step: expected a step \(state, batch\) -> …, got "):
        StepRunner(step)


@pytest.mark.parametrize(
    "step",
    [
        lambda state, batch: state,
        lambda state, batch: (state, {}, None),
        lambda state, batch: {"loss": sf.mean(batch["x"])},
        lambda state, batch: None,
    ],
)
def test_a_step_that_gives_no_pair_is_refused(step):
    with pytest.raises(sf.ConfigError, match=r"step: expected \(state, metrics\) from it, got "):
        StepRunner(step)(start(), [batch(0)])


@pytest.mark.parametrize("metrics", [{"loss": jnp.float32(1)}, None, jnp.float32(1)])
def test_a_step_that_says_no_metrics_is_refused(metrics):
    with pytest.raises(sf.ConfigError, match=r"step: expected metrics by name from it, got "):
        StepRunner(lambda state, batch: (state, metrics))(start(), [batch(0)])


def test_a_loss_function_is_no_step():
    said = r"step: expected .* got loss_fn\(params, batch, key\); sf.make_train_step makes"

    def loss_fn(params, batch, key): ...

    with pytest.raises(sf.ConfigError, match=said):
        StepRunner(loss_fn)


# What an earlier runner has compiled


def test_a_program_is_not_reused_for_another_form_or_setting():
    traces = []

    def step(state, batch):
        traces.append(batch["x"].shape)
        return state, {"loss": sf.mean(batch["x"] @ batch["x"])}

    state = lambda: {"n": jnp.zeros(())}
    for rows in (3, 3, 4):
        StepRunner(step)(state(), [batch(0, rows)])
    with jax.default_matmul_precision("float32"):
        StepRunner(step)(state(), [batch(0, 4)])
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
        (chunk,) = runner.unpack([packed])
        totals.append(chunk["loss"].total.tolist())
    assert totals == [[1.0], [2.0]]


def test_under_disable_jit_the_step_runs_eagerly():
    seen = []

    def step(state, batch):
        seen.append(float(batch.sum()))  # fails on a tracer
        return state + 1, {"loss": sf.mean(batch)}

    with jax.disable_jit():
        runner, state = StepRunner(step), jnp.zeros(())
        for value in (1.0, 2.0):
            state, packed = runner(state, [jnp.full(2, value)])
    assert (seen, float(state)) == ([2.0, 4.0], 2.0)
    (chunk,) = runner.unpack([packed])
    assert chunk["loss"].total.tolist() == [4.0]


@pytest.mark.parametrize("form", ["step", "jitted"])
def test_scalar_metrics_are_refused_in_words(form):
    step = lambda state, batch: (state, {"loss": batch.sum()})
    runner = StepRunner(jax.jit(step) if form == "jitted" else step)
    with pytest.raises(sf.ConfigError, match=r"step: expected metrics by name .* sf.mean\("):
        runner(jnp.zeros(()), [jnp.ones(2)])


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


@pytest.fixture(params=["one at a time", "several"])
def packed(request):
    runner, state, calls = StepRunner(many), jnp.float32(1), []
    for group in [[0], [1], [2]] if request.param == "one at a time" else [[0, 1], [2]]:
        state, call = runner(state, [vector(i) for i in group])
        calls.append(call)
    return runner, calls


def test_packed_metrics_are_unpacked_bit_for_bit(packed):
    runner, calls = packed
    state, wanted, run = jnp.float32(1), [], jax.jit(many)
    for i in range(3):
        state, metrics = run(state, vector(i))
        wanted.append(metrics)
    (chunk,) = runner.unpack(calls)
    same(chunk, jax.tree.map(lambda *leaves: np.stack(leaves), *wanted))


def test_there_is_one_array_for_each_dtype():
    _, row = StepRunner(many)(jnp.float32(1), [vector(1)])
    assert sorted(str(array.dtype) for array in row.arrays) == [
        *("bfloat16", "bool", "float32", "uint32")
    ]


def test_a_step_may_say_nothing():
    runner = StepRunner(lambda state, batch: (state, {}))
    _, row = runner(jnp.ones(()), [jnp.ones(2)])
    assert runner.unpack([row, row]) == [{}]


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
    here = runner.unpack(rows)
    calls, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or get(x))
    elsewhere = [replace(row, arrays=[Elsewhere(array) for array in row.arrays]) for row in rows]
    there = runner.unpack(elsewhere)
    assert len(calls) == 1
    chex.assert_trees_all_equal(here, there)
