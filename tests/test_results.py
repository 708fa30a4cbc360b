"""The recorded results hold their claims, and are those that the guide shows."""

import copy
import json
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.not_optimized

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "examples" / "guide" / "ideas" / "results.md"


@pytest.fixture(scope="module")
def results():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("results")
    sys.path.remove(str(ROOT / "benchmarks"))


def rows_of(results, record):
    """Return all rows of a record that is complete, without training."""
    record.keep = lambda name, *_, **__: record.runs[name]
    names = [name for name in results.EXPERIMENTS if name != "gpu"]
    return [row for name in names for row in results.EXPERIMENTS[name](record, quick=False)]


@pytest.fixture(scope="module")
def rows(results):
    return rows_of(results, results.Record(RECORD))


def test_the_guide_shows_the_tables_of_the_record(results, rows):
    lines = results.markdown(rows).splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line not in PAGE.read_text().splitlines()] == []


def test_recorded_claims_without_a_clock_hold(results, rows):
    claims = list(results.judge(rows))
    assert [claim.what for claim in claims if claim.verdict == "does not hold"] == []
    assert sum(not claim.clock for claim in claims) >= 10


def worse_accuracy(runs):
    for run in [run for name, run in runs.items() if name.startswith("mnist1d/GRU")]:
        run["accuracy"] -= 0.1


def other_loss(runs):
    runs["nanogpt"]["torch"]["loss"][3] += 0.02


def shorter_episodes(runs):
    for run in [run for name, run in runs.items() if name.startswith("cartpole/fit")]:
        run["likelier actions"] -= 50


def nothing_happened(runs):
    runs["everything/0"]["died"] = []


@pytest.mark.parametrize("spoil", [worse_accuracy, other_loss, shorter_episodes, nothing_happened])
def test_a_record_of_wrong_results_does_not_hold(spoil, results):
    record = results.Record(RECORD)
    record.runs = copy.deepcopy(record.runs)
    spoil(record.runs)
    claims = results.judge(rows_of(results, record))
    assert [claim.what for claim in claims if claim.verdict == "does not hold"] != []


def test_a_record_trains_only_what_it_lacks(results, tmp_path):
    path, trained = tmp_path / "record.json", []

    def train(name):
        trained.append(name)
        return {"name": name}

    results.Record(path).keep("first", train, "first")
    again = results.Record(path)
    again.keep("first", train, "first")
    again.keep("second", train, "second")
    assert trained == ["first", "second"]
    assert [run["name"] for run in json.loads(path.read_text()).values()] == trained


def test_examples_of_mnist1d_are_disturbed_templates(results):
    train, test = results.mnist1d.draw()
    assert train["x"].shape == (4000, 40)
    assert test["x"].shape == (1000, 40)
    every = np.concatenate([train["label"], test["label"]])
    assert np.bincount(every).tolist() == [500] * 10
    whole = np.concatenate([train["x"], test["x"]])
    assert abs(whole.mean()) < 1e-5
    assert whole.std() == pytest.approx(1, abs=1e-5)
    again = results.mnist1d.draw.__wrapped__(examples=50)[0]["x"]
    assert np.array_equal(again, results.mnist1d.draw.__wrapped__(examples=50)[0]["x"])
    assert np.unique(whole, axis=0).shape == whole.shape


def test_models_of_mnist1d_have_the_parameters_of_the_paper(results):
    models, key = results.mnist1d.MODELS, jax.random.key(0)
    count = lambda init: sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init, key)))
    sizes = {name: count(init) for name, (init, _) in models.items()}
    assert sizes == {"logistic": 410, "MLP": 15_210, "CNN": 5_210, "GRU": 5_134}


@pytest.mark.full
def test_the_cnn_is_one_of_convolutions(results):
    mnist1d = results.mnist1d
    params = jax.jit(mnist1d.init_cnn)(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)

    @jax.jit
    def by_convolutions(params, x):
        hidden = x[..., None]
        for layer in params[:-1]:
            kernel = layer["w"].reshape(-1, hidden.shape[-1], 25)
            forms = ("NWC", "WIO", "NWC")
            hidden = jax.lax.conv_general_dilated(hidden, kernel, (2,), [(1, 1)], None, None, forms)
            hidden = jax.nn.relu(hidden + layer["b"])
        return mnist1d.affine(params[-1], hidden.reshape(3, -1))

    expected = by_convolutions(params, x)
    assert np.allclose(jax.jit(mnist1d.cnn)(params, x), expected, atol=1e-5)


@pytest.mark.full
def test_cartpole_falls_without_control_and_ends_after_500_steps(results):
    cartpole, key = results.cartpole, jax.random.key(0)
    game, lengths, play = cartpole.reset(key), [], jax.jit(cartpole.play)
    for _ in range(60):
        game, ended, time = play(game, jnp.ones(4, jnp.int32), key)
        lengths += time[ended].tolist()
    assert lengths
    assert max(lengths) < 15  # always to the right
    almost = cartpole.Game(jnp.zeros((1, 4)), jnp.array([cartpole.LONGEST - 1]))
    game, ended, time = play(almost, jnp.ones(1, jnp.int32), key)
    assert (ended.tolist(), time.tolist(), game.time.tolist()) == ([True], [500], [0])


def test_the_rate_of_nanogpt_warms_up_and_falls(results):
    rate = results.nanogpt.rate
    assert float(rate(0)) == pytest.approx(1e-3 / 101)
    assert float(rate(100)) == pytest.approx(1e-3)
    assert float(rate(1050)) == pytest.approx(5.5e-4)
    assert float(rate(2000)) == pytest.approx(1e-4)
