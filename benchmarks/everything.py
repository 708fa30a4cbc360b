"""A decoder that is trained with everything on, against a plain one, for `results`.

The plain run is `make_train_step` and `fit` in one process. The other one has ordered gradients of
a state that is sharded over two processes, meets damaged batches, goes back to a checkpoint and
skips them, and then loses a process and continues on the other. Its loss is a cross-entropy without
logits, and its optimizer state is in bfloat16. Both see the same batches, except those that are
damaged.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import elastic
import jax
import nanogpt
import numpy as np

import stepfold as sf

LAYERS, WIDTH, BATCH, STEPS, HEARTBEAT = 2, 32, 16, 300, 30
PARTS = (
    "ordered gradients",
    "going back",
    "a lost process",
    "linear cross-entropy",
    "bfloat16 state",
)


def pieces(seed, steps, damaged=()):
    """Draw the pieces of text of all steps; those of damaged batches are random characters."""
    rng = np.random.default_rng(seed)
    codes, length = nanogpt.text()[0], nanogpt.LENGTH
    starts = rng.integers(len(codes) - length, size=(steps * BATCH, 1))
    rows = codes[starts + np.arange(length + 1)]
    for step in damaged:
        part = rows[step * BATCH : (step + 1) * BATCH]
        part[...] = rng.integers(nanogpt.vocabulary(), size=part.shape)
    return sf.batches({"x": rows[:, :-1], "y": rows[:, 1:]}, BATCH)


def evaluation():
    """Measure the loss of the validation text, at the end."""
    batches = nanogpt.validation_batches
    return sf.Evaluation(sf.make_eval_step(nanogpt.loss_fn), batches, name="validation")


def plain(seed, steps=STEPS):
    """Train in one process, with nothing on."""
    tx = nanogpt.optimizer(steps)
    weights = nanogpt.draw(seed, LAYERS, WIDTH)
    result = sf.fit(
        sf.make_train_step(nanogpt.loss_fn, tx),
        sf.init_state(weights, tx, jax.random.key(seed)),
        pieces(seed, steps),
        steps=steps,
        evaluation=evaluation(),
    )
    return {"loss": result.history["validation/loss"][-1]}


def linear_loss(params, batch, _key):
    """Return the loss of `nanogpt.loss_fn` without its logits."""
    features = nanogpt.features(params, batch["x"])
    return sf.linear_cross_entropy(features, params["embed"].T, batch["y"])


def optimizer(steps, mesh=None):
    """Make the optimizer of the plain run, with a norm in one order, and its state in bfloat16."""
    clip = None if mesh is None else sf.clip_by_ordered_norm(1.0, mesh)
    return sf.low_precision(nanogpt.optimizer(steps, clip))


def eventful(seed, steps, folder):
    """Train in this process of two; process 1 is killed after three quarters of the steps."""
    weights, key = nanogpt.draw(seed, LAYERS, WIDTH), jax.random.key(seed)
    shape = jax.eval_shape(lambda: sf.init_state(weights, optimizer(steps), key))

    def build(devices):
        mesh = sf.make_mesh((1, len(devices), 1, 1), devices=devices)
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        tx = optimizer(steps, mesh)
        return sf.make_train_step(linear_loss, tx, grad=sf.ordered(plan)), plan

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_a_process(event):
        if event.step >= steps * 3 // 4 and jax.process_index() == 1:
            threading.Timer(0.05, die).start()  # in a later step

    run = sf.Elastic(build, replicas=1)
    half = steps // 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = sf.fit(
            run,
            sf.init_state(weights, optimizer(steps), key, sharding=run.plan),
            pieces(seed, steps, damaged=(half, half + 1)),
            steps=steps,
            evaluation=evaluation(),
            run_dir=folder,
            checkpoints=sf.Checkpoints(every=steps // 6),
            hooks=[sf.roll_back_on_spike(window=steps // 12, skip=2), lose_a_process],
        )
    record = json.loads(Path(folder, "run.json").read_text())
    died = [str(warning.message) for warning in caught if "died" in str(warning.message)]
    return {
        "loss": result.history["validation/loss"][-1],
        "died": died,
        "skipped": [entry["skipped"] for entry in record["rollbacks"]],
    }


def everything(seed, steps=STEPS):
    """Train in two processes with everything on."""
    with tempfile.TemporaryDirectory() as folder:
        found = elastic.start("eventful", 2, seed, steps, folder, file=__file__)
    return found | {"parts": [*PARTS]}


if __name__ == "__main__":
    coordinator, count, rank, arguments = sys.argv[3:]  # after "--process eventful"
    elastic.join(coordinator, int(count), int(rank), HEARTBEAT)
    print(json.dumps(eventful(*json.loads(arguments))))
