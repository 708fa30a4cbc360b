"""Statistics of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.hooks.objects import as_hook
from stepfold.hooks.weights import weight_statistics
from stepfold.loop.events import Event


def event(params, step=10):
    state = sf.TrainState(jnp.array(step), params, (), (), jax.random.key(0))
    return Event(step, None, {"train/loss": 1.0}, state)


def make_params():
    draw = np.random.default_rng(0).normal
    return {
        "layers": [{"kernel": jnp.asarray(draw(size=(64, 32)), jnp.float32)} for _ in range(2)],
        "bias": jnp.asarray(draw(3, 0.1, size=32), jnp.bfloat16),
        "count": jnp.arange(3),
    }


class Memory:
    def __init__(self):
        self.rows = {}

    def write_histograms(self, step, arrays, num_buckets=None):
        self.rows[step] = arrays


def test_what_is_declared_and_chosen():
    measure = weight_statistics(r"layers/\d+/kernel", name="norms")
    hook = as_hook(measure)
    assert (as_hook(weight_statistics()).provides, hook.provides) == (("weights/",), ("norms/",))
    assert (hook.name, hook.returns, hook.exact) == ("weight_statistics", [], False)
    measure.needs_exact_state = True
    assert as_hook(measure).exact
    statistics = measure(event(make_params()))
    assert len(statistics) == 8
    assert all(name.startswith("norms/layers/") for name in statistics)


def test_the_numbers_are_those_of_numpy_by_path():
    params = make_params()
    statistics = weight_statistics()(event(params))
    paths = {"layers/0/kernel", "layers/1/kernel", "bias"}  # integers are not weights
    assert {name.removeprefix("weights/").rsplit("/", 1)[0] for name in statistics} == paths
    leaves = {"layers/1/kernel": params["layers"][1]["kernel"], "bias": params["bias"]}
    for path, leaf in leaves.items():
        wanted = np.asarray(leaf, np.float64)
        for what in ("mean", "std", "min", "max"):
            assert statistics[f"weights/{path}/{what}"] == pytest.approx(
                getattr(wanted, what)(), rel=1e-4, abs=1e-6
            )


def test_the_parameters_of_two_states_are_measured():
    state = event({"w": jnp.ones(3)}).state
    statistics = weight_statistics()(Event(1, None, {}, {"actor": state, "critic": state}))
    assert {name.removesuffix("/mean") for name in statistics if name.endswith("mean")} == {
        "weights/actor/w",
        "weights/critic/w",
    }


def test_sharded_parameters_give_the_same_numbers():
    params = make_params()
    mesh = sf.make_mesh()
    placed = jax.device_put(params, sf.make_sharding(params, mesh, sf.sharding.fsdp(min_size=0)))
    writer = Memory()
    statistics = weight_statistics(writer=writer, samples=50)(event(placed))
    for name, value in weight_statistics()(event(params)).items():
        assert statistics[name] == pytest.approx(value, rel=1e-5)
    assert len(writer.rows[10]["weights/layers/0/kernel"]) == 50


def test_a_writer_gets_the_values_or_evenly_spaced_ones(monkeypatch):
    params, writer = make_params(), Memory()
    weight_statistics("layers/0", writer=writer)(event(params))
    kernel = np.asarray(params["layers"][0]["kernel"])
    np.testing.assert_array_equal(writer.rows[10]["weights/layers/0/kernel"], kernel.ravel())
    weight_statistics("layers/0", writer=writer, samples=3)(event(params, 20))
    values = writer.rows[20]["weights/layers/0/kernel"]
    np.testing.assert_array_equal(values, kernel.ravel()[[0, 1024, 2047]])
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # only the first process writes
    assert weight_statistics("layers/0", writer=writer)(event(params, 30))
    assert 30 not in writer.rows


def test_it_compiles_once(compiles):
    hook, params = weight_statistics(), make_params()
    hook(event(params))
    later = event(params, 20)
    before = len(compiles)
    hook(later)
    assert len(compiles) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, r"pattern: expected a regular expression, got '\('"),
        ({"pattern": "heads"}, "in the path of .* got 'heads'; the paths are bias, layers/0"),
        ({"writer": print}, "writer: expected one with write_histograms, got "),
        ({"samples": 0}, "samples: expected an integer of at least 1, got 0"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        weight_statistics(**options)(event(make_params()))
