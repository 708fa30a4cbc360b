"""A decoder that is trained with everything on, against a plain one, for `results`.

The plain run is `make_train_step` and `fit` in one process. The other one has ordered gradients of
a state that is sharded over two processes, meets damaged batches, goes back to a checkpoint and
skips them, and then loses a process; the same command starts both again, which resume. Its loss is
a cross-entropy without logits, and its optimizer state is in bfloat16. Both see the same batches,
except those that are damaged.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import nanogpt
import numpy as np

import stepfold as sf

LAYERS, WIDTH, BATCH, STEPS, PROCESSES = 2, 32, 16, 300, 2
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
    clip = None if mesh is None else sf.optim.clip_by_ordered_norm(1.0, mesh)
    return sf.optim.low_precision(nanogpt.optimizer(steps, clip))


def eventful(seed, steps, folder, attempt):
    """Train in this process of two; process 1 is killed after three quarters of the steps, once."""
    weights, key = nanogpt.draw(seed, LAYERS, WIDTH), jax.random.key(seed)
    shape = jax.eval_shape(lambda: sf.init_state(weights, optimizer(steps), key))

    mesh = sf.make_mesh((1, jax.device_count(), 1, 1))
    plan, tx = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1)), optimizer(steps, mesh)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_a_process(event):
        if event.step >= steps * 3 // 4 and jax.process_index() == 1 and attempt == 0:
            threading.Timer(0.05, die).start()  # in a later step

    half = steps // 2
    result = sf.fit(
        sf.make_train_step(linear_loss, tx, grad=sf.sharding.ordered(plan)),
        sf.init_state(weights, optimizer(steps), key, sharding=plan),
        pieces(seed, steps, damaged=(half, half + 1)),
        steps=steps,
        evaluation=evaluation(),
        run_dir=folder,
        checkpoints=sf.Checkpoints(every=steps // 6),
        hooks=[sf.hooks.on_spike(action="go_back", window=steps // 12, skip=2), lose_a_process],
    )
    record = json.loads(Path(folder, "run.json").read_text())
    return {
        "loss": result.history["validation/loss"][-1],
        "resumed": result.resumed,
        "skipped": [entry["skipped"] for entry in record["rollbacks"]],
    }


def everything(seed, steps=STEPS):
    """Train in two processes with everything on; start them again when one has died."""
    died, result = [], None
    with tempfile.TemporaryDirectory() as folder:
        while result is None and len(died) < 2:
            lost, result = start_all(seed, steps, folder, len(died))
            died += [] if lost is None else [f"process {lost} died; all were started again"]
    if result is None:
        sys.exit(f"everything: {died}")
    return result | {"died": died, "parts": [*PARTS]}


def start_all(*args):
    """Run `eventful` in all processes; return which died first, if any, and what 0 returned."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryFile("w+") as output:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, f"localhost:{port}", str(rank), json.dumps(args)],
                stdout=output if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(PROCESSES)
        ]
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            time.sleep(0.1)
        lost = next((i for i, process in enumerate(running) if process.poll()), None)
        for process in running:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    return lost, json.loads(lines[-1]) if lost is None else None


if __name__ == "__main__":
    coordinator, rank, arguments = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 1)
    sf.start_distributed(coordinator, PROCESSES, int(rank))
    print(json.dumps(eventful(*json.loads(arguments))))
