"""A run of forty steps to look at: dropout, accumulation, an average, masks, and much to be done.

Nothing divides evenly: a log point every 5 steps, an evaluation every 6, a checkpoint every 7.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

from . import network

STEPS, LOG, EVALUATE, SAVE = 40, 5, 6, 7
TX = sf.ema_params(optax.sgd(0.05, momentum=0.9), 0.9)


def data(examples=70):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(examples, 3)).astype(np.float32),
        "y": rng.normal(size=examples).astype(np.float32),
        "mask": rng.uniform(size=examples) < 0.7,
    }


def loss(params, batch, key):
    kept = jax.random.bernoulli(key, 0.8, batch["x"].shape).astype(jnp.float32)
    error = ((batch["x"] * kept) @ params["w"] - batch["y"]) ** 2
    terms = {"fit": sf.mean(error, batch["mask"]), "size": 1e-2 * (params["w"] ** 2).sum()}
    return terms, {"close": sf.mean(error < 1, batch["mask"])}


def init(key):
    return {"w": jax.random.normal(key, (3,))}


@functools.cache
def _make():
    return jax.jit(lambda: sf.init_state(init, TX, jax.random.key(0)))


def start():
    """Make the state that the run begins with; a new one each time, since it is donated."""
    return _make()()


STEP = sf.make_train_step(loss, TX, accumulate=2)
MEASURE = sf.make_eval_step(loss)


def batches(**options):
    return sf.batches(data(), 8, **{"seed": 0, **options})


def evaluation(**options):
    test = lambda: sf.batches(data(), 32, epochs=1, remainder="pad")
    return sf.Evaluation(MEASURE, test, **{"every": EVALUATE, **options})


def run(folder=None, *, step=STEP, state=None, data=None, steps=STEPS, every=SAVE, **options):
    """Run it, with checkpoints if there is a folder for them."""
    return sf.fit(
        step,
        start() if state is None else state,
        batches() if data is None else data,
        **{
            "steps": steps if "epochs" not in options else None,
            "run_dir": folder,
            "evaluation": evaluation(),
            "checkpoints": folder and sf.Checkpoints(every=every, keep=None),
            "log_every": LOG,
            **options,
        },
    )


def whole():
    """Give what the run comes to where nothing happens: the bits of its state, and its history."""
    return _whole(jax.config.read("jax_disable_most_optimizations"))


@functools.cache
def _whole(_):
    return told(run())


def told(result):
    """Give what has to be the same however a run was cut: every bit, and every point of a curve."""
    return network.bits(result.state), curves(result.history)


def curves(history):
    """Give the curves with their steps, and with NaNs that equal themselves."""
    return {
        name: list(zip(curve.steps, map(repr, curve), strict=True))
        for name, curve in history.items()
    }
