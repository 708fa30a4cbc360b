"""A pipeline, DiLoCo and stacked Muon, composed from a step as the examples do.

Each example is loaded as a module. The tests of costs and of equality fail without what cures the
traps that the examples document. What the examples print is tested in tests/test_examples.py.
"""

import importlib.util
import math
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import stepfold as sf

from .network import compile_fast  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("standard_promotion")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load(name, **constants):
    """Load an example with other constants."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert vars(module).keys() >= constants.keys()
    vars(module).update(constants)
    return module


def initialized(example):
    return jax.device_get(jax.jit(example.init)(jax.random.key(0)))


def mesh_of(dims, names):
    return sf.make_mesh(dims, names, devices=jax.devices()[: math.prod(dims)])


def difference(a, b):
    errors = jax.tree.map(lambda x, y: float(abs(np.asarray(x) - np.asarray(y)).max()), a, b)
    return max(jax.tree.leaves(errors))


# A pipeline


SMALL = {"LAYERS": 4, "WIDTH": 16, "HIDDEN": 32, "BATCH": 64}


def pipelined(example, params, dims, microbatches, **options):
    mesh = mesh_of(dims, example.AXES)
    apply = partial(example.pipeline, mesh=mesh, microbatches=microbatches)
    return example.train(params, mesh, apply, **options)


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
def test_a_pipeline_equals_the_layers_in_sequence():
    example = load("pipeline", **SMALL)
    with jax.enable_x64(True):
        params = initialized(example)
        expected, _ = example.train(params, mesh_of((1, 1, 1, 1), example.AXES))
        assert difference(params, expected) > 1e-3  # it trains
        for dims, microbatches, options in (
            ((1, 2, 2, 2), 4, {"accumulate": 2, "remat": True}),
            ((1, 1, 4, 1), 4, {}),
            ((2, 1, 4, 1), 2, {"accumulate": 2}),
        ):
            got, _ = pipelined(example, params, dims, microbatches, **options)
            assert difference(got, expected) < 1e-12, (dims, options)


@pytest.mark.full
def test_fsdp_in_a_pipeline_sends_weights_and_no_activations():
    example = load("pipeline", **SMALL, STEPS=0)
    params, sent = initialized(example), []
    for batch in (128, 1024):
        _, report = pipelined(example, params, (1, 4, 2, 1), 2, batch=batch)
        along = [entry for entry in report.collectives if "fsdp" in (entry.axes or ())]
        sent.append(sum(entry.moved for entry in along))
    assert 0 < sent[1] < 1.1 * sent[0]


# DiLoCo


def workers_mesh():
    return mesh_of((8,), ("dp",))


def images(rows):
    rng = np.random.default_rng(0)
    label = rng.integers(10, size=rows, dtype=np.int32)
    return {"image": rng.normal(size=(rows, 64)).astype(np.float32), "label": label}


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
def test_one_inner_step_of_sgd_equals_data_parallelism():
    example, batch = load("diloco"), images(128)
    with jax.enable_x64(True):
        options = {"inner": optax.sgd(0.1), "outer": optax.sgd(1.0), "steps": 1}
        (step, state), (one_round, outer) = example.prepare(workers_mesh(), **options)
        first = jax.device_get(state.params)
        for _ in range(2):
            state, metrics = jax.jit(step)(state, batch)
            outer, outer_metrics = jax.jit(one_round)(outer, batch)
    assert difference(outer.params, state.params) < 1e-12 < difference(first, state.params)
    losses = [float(m["loss"].compute()) for m in (metrics, outer_metrics)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
def test_workers_share_parameters_and_nothing_else(tmp_path):
    example, batch = load("diloco"), images(1280)
    _, (one_round, outer) = example.prepare(workers_mesh())
    one_round = sf.compile_step(one_round, outer, batch, donate=False)
    outer, _ = one_round(outer, batch)
    workers = jax.device_get(outer.workers._replace(key=jax.random.key_data(outer.workers.key)))
    w, moment = workers.params["hidden"], workers.opt_state[0].mu["hidden"]
    assert (w == w[0]).all()
    assert len({x.tobytes() for x in moment}) == len({x.tobytes() for x in workers.key}) == 8

    sf.save(tmp_path / "run", outer, step=1)
    restored = sf.restore(tmp_path / "run", outer).state
    results = [one_round(state, batch)[0] for state in (outer, restored)]
    assert difference(*(jax.device_get((x.params, x.opt_state)) for x in results)) == 0
    assert difference(*(jax.device_get(x.workers.opt_state) for x in results)) == 0


# Muon


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("dims", [(4, 1), (1, 4)])
def test_muon_at_home_makes_the_same_updates(dims):
    # Three matrices of a shape on four devices need padding.
    example = load("sharded_muon", LAYERS=3, WIDTH=64, HIDDEN=128)
    with jax.enable_x64(True):
        params, mesh = initialized(example), mesh_of(dims, ("dp", "fsdp"))
        (plain, *_), (home, *_) = (example.train(params, mesh, x) for x in (False, True))
    assert difference(plain, home) < 1e-11 < 1e-3 < difference(params, plain)


@pytest.mark.full
def test_muon_at_home_multiplies_a_share_and_sends_each_update_once():
    example = load("sharded_muon", STEPS=0)
    params, mesh = initialized(example), mesh_of((4, 1), ("dp", "fsdp"))
    (_, plain, flops), (_, home, flops_at_home) = (
        example.train(params, mesh, x) for x in (False, True)
    )
    assert flops_at_home < 0.5 * flops
    updates = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) * 3 // 4
    assert home.moved - plain.moved == pytest.approx(updates, rel=0.02)
