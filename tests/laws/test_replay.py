"""A fault planted in known rows of a known step is found there, by every way of running it."""

import functools
import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf

pytestmark = pytest.mark.not_optimized

ROWS, LENGTH = 8, 80
TX = optax.sgd(0.01, momentum=0.9)


def clean():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(LENGTH, 3)).astype(np.float32),
        "y": rng.uniform(1, 2, size=LENGTH).astype(np.float32),
    }


def logarithm(params, batch, key):
    kept = jax.random.bernoulli(key, 0.8, batch["x"].shape).astype(batch["x"].dtype)
    target = jnp.log(batch["y"])  # the line of a zero
    predicted = (batch["x"] * kept) @ params["w"]
    return sf.mean((predicted.astype(target.dtype) - target) ** 2)


def difference(params, batch, key):
    drift = 2 * batch["y"] - batch["y"]  # the line of an infinity
    return sf.mean((batch["x"] @ params["w"] - drift) ** 2)


def half(params, batch, key):
    small = (batch["y"] * params["w"][0]).astype(jnp.float16)
    return sf.mean((small * small).astype(jnp.float32))  # the line of an overflow


def line_of(function, comment):
    code = function.__code__
    source = Path(code.co_filename).read_text().splitlines()
    number = next(n for n, text in enumerate(source, 1) if text.endswith(comment))
    return f"test_replay.py:{number} ({function.__name__})"


FAULTS = {
    "a zero": (logarithm, 0.0, "# the line of a zero"),
    "an infinity": (difference, np.inf, "# the line of an infinity"),
    "an overflow": (half, 1e4, "# the line of an overflow"),
}


def start():
    return sf.init_state({"w": jnp.ones(3)}, TX, jax.random.key(3))


def planted(value, step, rows, **options):
    """Return a function that makes batches in which rows of one step are bad."""
    data = clean()
    order = sf.batches(np.arange(LENGTH), ROWS, **{"seed": 1, **options}).at(step - 1)
    data["y"][order[list(rows)]] = value
    return lambda: sf.batches(data, ROWS, **{"seed": 1, **options})


@functools.cache
def make_step(loss, **options):
    """Make a step once, so that runs of it share its programs."""
    return sf.make_train_step(loss, TX, **options)


def run(loss, batches, folder=None, *, every=7, steps=30, options=None, **more):
    plan = sf.Checkpoints(every=every, keep=None) if folder else None
    step = make_step(loss, **(options or {}))
    result = sf.fit(
        step, start(), batches, steps=steps, run_dir=folder, checkpoints=plan, log_every=5, **more
    )
    return step, result


def check(replayed, result, step, rows, leaves=("params/w", "opt_state/0/trace/w")):
    assert (result.capsule.step, replayed.step, replayed.origin) == (step, step, step)
    assert replayed.reproduced, str(replayed)
    assert replayed.examples == tuple((row,) for row in rows)
    assert set(leaves) <= set(replayed.leaves)
    assert "train/loss" in replayed.newly_nonfinite


@pytest.mark.parametrize("fault", full_but(["a zero"], FAULTS))
def test_the_rows_and_the_line_are_found(tmp_path, fault):
    loss, value, comment = FAULTS[fault]
    batches = planted(value, 9, (2, 5))
    step, result = run(loss, batches(), tmp_path)
    replayed = sf.debug.replay(result.capsule.path, step, state=start(), batches=batches())
    leaves = () if fault == "an overflow" else ("params/w",)  # its gradient does not overflow
    check(replayed, result, 9, (2, 5), leaves)
    assert line_of(loss, comment) in replayed.where


@pytest.mark.full
@pytest.mark.parametrize("at", [1, 7, 8, 10])
def test_at_any_distance_from_the_checkpoint_and_without_one(tmp_path, at):
    batches = planted(0.0, at, (3,))
    step, result = run(logarithm, batches(), tmp_path)
    before = (at - 1) // 7 * 7
    assert result.capsule.distance == at - 1 - before
    assert (result.capsule.checkpoint is None) == (before == 0)
    check(sf.debug.replay(result.capsule, step, state=start()), result, at, (3,))


WAYS = {
    "accumulated": {"options": {"accumulate": 2}},
    "several in a call": {"steps_per_call": 3},
    "rematerialized": {"options": {"remat": True}},
    "in bfloat16": {"options": {"precision": "bf16"}},
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_for_every_kind_of_step(way):
    batches = planted(0.0, 8, (0, 7))
    step, result = run(logarithm, batches(), **WAYS[way])
    check(sf.debug.replay(result.capsule, step, state=start()), result, 8, (0, 7))


def test_behind_a_prefetch():
    batches = planted(0.0, 6, (4,))
    step, result = run(logarithm, sf.prefetch(batches(), size=3))
    check(sf.debug.replay(result.capsule, step, state=start()), result, 6, (4,))


def test_after_a_resume(tmp_path):
    batches = planted(0.0, 10, (1,))
    run(logarithm, batches(), tmp_path, steps=7)
    step, result = run(logarithm, batches(), tmp_path)
    assert result.resumed == 7
    check(sf.debug.replay(result.capsule, step), result, 10, (1,))


@pytest.mark.full
def test_over_a_step_that_was_skipped():
    """The zero in step 3 is skipped; in step 8 the loss is finite, and another metric is not."""

    def loss(params, batch, key):
        return logarithm(params, batch, key), {"own": sf.mean(jnp.log(batch["z"]))}

    data = clean() | {"z": np.ones(LENGTH, np.float32)}
    order = sf.batches(np.arange(LENGTH), ROWS, seed=1)
    data["y"][order.at(2)[2]], data["z"][order.at(7)[6]] = 0.0, 0.0
    step, result = run(loss, sf.batches(data, ROWS, seed=1), options={"skip_nonfinite": True})
    assert (result.steps, result.capsule) == (30, None)
    hook = sf.hooks.on_nonfinite("train/own")
    batches = sf.batches(data, ROWS, seed=1)
    step, result = run(loss, batches, options={"skip_nonfinite": True}, hooks=[hook])
    assert result.capsule.step == 8
    replayed = sf.debug.replay(result.capsule, step, state=start())
    assert (replayed.reproduced, replayed.examples, replayed.leaves) == (True, ((6,),), ())


def test_a_nan_that_an_earlier_step_left_in_the_state_is_traced_to_that_step():
    def loss(params, batch, key):
        return sf.mean(jnp.sqrt(params["w"][0] * batch["y"]))  # its gradient at zero is infinite

    batches = planted(0.0, 4, (5,))
    step, result = run(loss, batches())
    assert result.capsule.step == 5
    replayed = sf.debug.replay(result.capsule, step, state=start())
    assert (replayed.reproduced, replayed.origin, replayed.examples) == (True, 4, ((5,),))
    assert "it began in step 4" in str(replayed)


def test_with_a_model_state():
    def loss(params, batch, key, seen):
        return logarithm(params, batch, key), {}, {"total": seen["total"] + batch["y"].sum()}

    batches = planted(0.0, 3, (6,))
    step = sf.make_train_step(loss, TX, stateful=True)
    init = lambda: sf.init_state(
        ({"w": jnp.ones(3)}, {"total": jnp.zeros(())}), TX, jax.random.key(3), stateful=True
    )
    result = sf.fit(step, init(), batches(), steps=10)
    check(sf.debug.replay(result.capsule, step, state=init()), result, 3, (6,))


@pytest.mark.full
def test_with_a_sharded_state(tmp_path):
    mesh = sf.make_mesh()
    batches = planted(0.0, 9, (5,))
    init = lambda key: {"w": jnp.ones(3), "big": jnp.ones((64, 8))}

    def loss(params, batch, key):
        return {"fit": logarithm(params, batch, key), "size": 1e-3 * (params["big"] ** 2).sum()}

    shape = jax.eval_shape(lambda k: sf.init_state(init, TX, k), jax.random.key(3))
    plan = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))
    make = lambda: sf.init_state(init, TX, jax.random.key(3), sharding=plan)
    step = sf.make_train_step(loss, TX)
    saves = sf.Checkpoints(every=4)
    result = sf.fit(step, make(), batches(), steps=20, run_dir=tmp_path, checkpoints=saves)
    path = result.capsule.path
    check(sf.debug.replay(path, step, state=make(), batches=batches()), result, 9, (5,))


class Watched:
    """Batches that count how many are alive, and the calls of `get_state`."""

    def __init__(self):
        self.step, self.positions, self.most_alive, self.pulled = 0, 0, 0, []

    def __iter__(self):
        return self

    def __next__(self):
        gc.collect()
        alive = sum(batch() is not None for batch in self.pulled)
        self.most_alive = max(self.most_alive, alive)
        batch = jnp.ones((ROWS, 3))
        self.pulled.append(weakref.ref(batch))
        self.step += 1
        return batch

    def get_state(self):
        self.positions += 1
        return self.step

    def set_state(self, state):
        self.step = state


def test_a_run_pays_nothing_for_it():
    """No batch is kept, and the position is only read at the start and at log points."""
    batches = Watched()
    step = jax.jit(sf.make_train_step(lambda p, batch, key: sf.mean(batch @ p["w"]), TX))
    gc.freeze()  # so that objects of other tests are not searched forty times
    sf.fit(step, start(), batches, steps=40, log_every=20)
    assert batches.most_alive == 1  # the last, for hooks to see
    assert batches.positions == 3
