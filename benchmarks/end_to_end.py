"""`fit` reaches a target loss as fast as a hand-written loop, and as other libraries.

A byte-level GPT (`gpt`) learns Python's manual until the mean loss of ten steps is below a target:
in a hand-written jitted loop, with `fit`, in flax with clu, in Keras on jax, and in torch, eager
and compiled. Libraries that are not installed are skipped. Model, initial weights, batches and
AdamW are the same, and the losses of the first three steps have to agree. Each run has a process of
its own. Time starts when data, weights and libraries are loaded. It ends when the loss is reached,
with compilation; and without it, it is the time of a step after the first ten times the number of
steps. Ratios are medians over rounds.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import gpt
import jax
import jax.numpy as jnp
import optax
from gpt_peers import flax_and_clu, keras_on_jax, torch_loop
from measure import Claim, show

import stepfold as sf


def by_hand(weights, batches, every, log):
    """Train with only jax and optax: a jitted step that donates its state."""
    tx = optax.adamw(gpt.RATE, **gpt.ADAMW)
    params = jax.tree.map(jnp.asarray, weights)
    opt_state, total = tx.init(params), jnp.zeros(())

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, total, batch):
        loss, grads = jax.value_and_grad(lambda params: gpt.nll(params, batch).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total + loss

    for number, batch in enumerate(batches, 1):
        params, opt_state, total = step(params, opt_state, total, batch)
        if number % every == 0:
            if log(float(total) / every):
                return
            total = jnp.zeros(())


def with_fit(weights, batches, every, log):
    """Train with `fit`."""
    tx = optax.adamw(gpt.RATE, **gpt.ADAMW)
    step = sf.make_train_step(lambda params, batch, key: sf.mean(gpt.nll(params, batch)), tx)

    def enough(event):
        if event.step % every:  # the steps that were under way when it was reached
            return None
        return "the loss is reached" if log(event.metrics["train/loss"]) else None

    state = sf.init_state(weights, tx, jax.random.key(0))
    sf.fit(step, state, batches, hooks=[enough], log_every=every)


WAYS = {  # what needs to be installed, and the loop
    "by hand": ("jax", by_hand),
    "fit": ("stepfold", with_fit),
    "flax + clu": ("flax", flax_and_clu),
    "Keras on jax": ("keras", keras_on_jax),
    "torch": ("torch", torch_loop),
    "torch.compile": ("torch", partial(torch_loop, compiled=True)),
}


def installed(names):
    """Return the ways whose packages are installed, and print why others are skipped."""
    found = []
    for name in names:
        package = WAYS[name][0]
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed")
        elif name == "torch.compile" and shutil.which("g++") is None:
            print(f"{name} is left out: it needs g++")
        else:
            found.append(name)
    return found


def run(name, steps, every, target):
    """Train in this process, and return `(mean loss, seconds)` of each log point."""
    package, way = WAYS[name]
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # jax has no cache on the disk either
    import_module(package)
    if name == "fit":  # stepfold imports it on first use
        import_module("clu.metrics")
    weights, batches, points = gpt.draw(), list(gpt.batches(steps)), []
    start = time.perf_counter()

    def log(loss):
        points.append((loss, time.perf_counter() - start))
        return loss <= target

    way(weights, iter(batches), every, log)
    return points


def in_child(name, steps, every, target):
    """Train in a process of its own."""
    options = {"way": name, "steps": steps, "every": every, "target": target}
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def check_alike(found):
    """Exit if the first losses differ: by 1e-5 before an update, and by 1e-4 after it."""
    wanted = [loss for loss, _ in found["by hand"][:3]]
    for name, points in found.items():
        for number, (loss, _) in enumerate(points[:3]):
            if not abs(loss / wanted[number] - 1) <= (1e-4 if number else 1e-5):
                raise SystemExit(
                    f"{name} is another model: expected the losses of a loop by hand, {wanted}, "
                    f"got {[loss for loss, _ in points[:3]]}"
                )


def measure(names, rounds, steps, every, target):
    """Train in each way in turns."""
    if every > 1:
        check_alike({name: in_child(name, 3, 1, 0.0) for name in names})
    times, order, last_round = {name: [] for name in names}, random.Random(0), {}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            points = last_round[name] = in_child(name, steps, every, target)
            if not points[-1][0] <= target:
                raise SystemExit(f"{name}: the loss is {points[-1][0]} after {steps} steps")
            first, last = points[0][1], points[-1][1]
            done = len(points) * every
            each = (last - first) / (done - every)
            times[name].append((done, last, done * each, 1e3 * each))
            print(f"{name}: {done} steps in {last:.1f} s", flush=True)
    if every == 1:  # the runs themselves have all losses
        check_alike(last_round)
    return [row(name, times) for name in names]


def row(name, times):
    """Make the row of one way, relative to the hand-written loop and to `fit`."""
    found, package = times[name], WAYS[name][0]
    steps, whole, warm, each = (statistics.median(column) for column in zip(*found, strict=True))

    def over(these, those, column):
        pairs = zip(times[these], times[those], strict=True)
        return statistics.median(one[column] / other[column] for one, other in pairs)

    return {
        "loop": f"{name} ({package} {version(package)})",
        "steps": int(steps),
        "s": whole,
        "without compiling": warm,
        "ms a step": each,
        "s/by hand": over(name, "by hand", 1),
        "without/by hand": over(name, "by hand", 2),
        "fit's s/its": over("fit", name, 1),
    }


def judge(rows):
    """Return the claims about the rows."""
    hand, fit = rows[:2]
    steps = max(row["steps"] for row in rows) - min(row["steps"] for row in rows)
    return [
        Claim("steps to the loss, most less fewest of all loops", steps, 10, clock=False),
        Claim("time to the loss in fit, over a loop by hand", fit["s/by hand"], 1.03),
        Claim("the same, without compiling", fit["without/by hand"], 1.01),
        *(
            Claim(f"time to the loss in fit, over {other['loop']}", other["fit's s/its"], 1.0)
            for other in rows
            if other not in (hand, fit)
        ),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three ways and one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", type=float, default=2.7, help="the loss to come to")
    parser.add_argument("--way", choices=list(WAYS), help="train in this process, for JSON")
    parser.add_argument("--steps", type=int, default=600, help="the most steps of a run")
    parser.add_argument("--every", type=int, default=10, help="the steps from one log to the next")
    options = parser.parse_args(argv)
    if options.way:
        print(json.dumps(run(options.way, options.steps, options.every, options.target)))
        return None
    if options.quick:
        names, rounds, steps, every, target = installed(list(WAYS)[:3]), 1, 60, 1, 4.0
    else:
        names, rounds, steps = installed(WAYS), options.rounds, options.steps
        every, target = options.every, options.target
    rows = measure(names, rounds, steps, every, target)
    print(f"\nuntil the loss is {target}\n")
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
