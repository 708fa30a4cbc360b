"""How the parameters are distributed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf


def event(params, step=10):
    state = sf.TrainState(jnp.array(step), params, (), (), jax.random.key(0))
    return sf.Event(step, None, {"train/loss": 1.0}, state)


def params():
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


def test_the_numbers_are_those_of_numpy_by_path():
    given = params()
    found = sf.weight_statistics()(event(given))
    paths = {"layers/0/kernel", "layers/1/kernel", "bias"}  # integers are no weights
    assert {name.removeprefix("weights/").rsplit("/", 1)[0] for name in found} == paths
    for path, leaf in {
        "layers/1/kernel": given["layers"][1]["kernel"],
        "bias": given["bias"],
    }.items():
        wanted = np.asarray(leaf, np.float64)
        for what in ("mean", "std", "min", "max"):
            assert found[f"weights/{path}/{what}"] == pytest.approx(
                getattr(wanted, what)(), rel=1e-4, abs=1e-6
            )


def test_the_pattern_chooses_and_the_name_is_ones_own():
    found = sf.weight_statistics(r"layers/\d+/kernel", name="norms")(event(params()))
    assert len(found) == 8
    assert all(name.startswith("norms/layers/") for name in found)


def test_of_two_states_the_parameters_of_both_are_measured():
    one = event({"w": jnp.ones(3)}).state
    found = sf.weight_statistics()(sf.Event(1, None, {}, {"actor": one, "critic": one}))
    assert {name.removesuffix("/mean") for name in found if name.endswith("mean")} == {
        "weights/actor/w",
        "weights/critic/w",
    }


def test_sharded_parameters_give_the_same_numbers():
    given = params()
    mesh = sf.make_mesh()
    placed = jax.device_put(given, sf.make_sharding(given, mesh, sf.fsdp(min_size=0)))
    writer = Memory()
    found = sf.weight_statistics(writer=writer, samples=50)(event(placed))
    for name, value in sf.weight_statistics()(event(given)).items():
        assert found[name] == pytest.approx(value, rel=1e-5)
    assert len(writer.rows[10]["weights/layers/0/kernel"]) == 50


def test_a_writer_is_given_the_values_or_evenly_spaced_ones():
    given, writer = params(), Memory()
    sf.weight_statistics(writer=writer)(event(given))
    kernel = np.asarray(given["layers"][0]["kernel"])
    np.testing.assert_array_equal(writer.rows[10]["weights/layers/0/kernel"], kernel.ravel())
    sf.weight_statistics(writer=writer, samples=3)(event(given, 20))
    some = writer.rows[20]["weights/layers/0/kernel"]
    np.testing.assert_array_equal(some, kernel.ravel()[[0, 1024, 2047]])


def test_it_compiles_once_whatever_the_step(compiles):
    hook, given = sf.weight_statistics(), params()
    hook(event(given))
    later = event(given, 20)
    before = len(compiles)
    hook(later)
    assert len(compiles) == before


def test_fit_shows_the_numbers_to_the_hooks_after_it():
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(4)}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b) ** 2), tx)
    batches = sf.batches(np.zeros((8, 4), np.float32), 4, seed=0)
    hook = sf.every(10, sf.weight_statistics())
    result = sf.fit(step, state, batches, steps=20, log_every=5, hooks=[hook])
    assert result.history["weights/w/mean"].steps == [10, 20]
    assert 0 < result.history["weights/w/mean"][0] < 1


def test_a_pattern_that_finds_nothing_lists_what_is_there():
    said = "expected 'heads' to be found in the path .* there are bias, layers/0/kernel, layers/1"
    with pytest.raises(sf.ConfigError, match=said):
        sf.weight_statistics("heads")(event(params()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "("}, r"pattern: expected a regular expression, got '\('"),
        ({"pattern": None}, "pattern: expected a regular expression, got None"),
        ({"writer": print}, "writer: expected one with write_histograms, got "),
        ({"samples": 0}, "samples: expected an integer of at least 1, got 0"),
    ],
)
def test_arguments_are_checked(options, said):
    with pytest.raises(sf.ConfigError, match=said):
        sf.weight_statistics(**options)
