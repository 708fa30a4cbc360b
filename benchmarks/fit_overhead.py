"""`fit` with every feature enabled costs as much as the bare jitted loop over the same batches.

The features are progress, JSON lines, CSV and TensorBoard every ten steps, throughput, the stop at
a NaN or inf, a watchdog, the report, and checkpoints that are not due. Both loops run the same step
on the same numpy batches in turns. They are timed from one batch to a later one, which excludes
compilation and the end of the run. On a busy machine the wall time of so short a step varies, so
the tables also show the CPU time of the main thread, and the number of Python and C functions that
it calls in a step, which is exact. They show loops of other libraries, if installed, and the growth
of memory in a long run.
"""

import argparse
import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import init, loss_fn, make_batch
from measure import Claim, resident, show
from peers import installed

import stepfold as sf

WARM = 50


def mlp():
    """Make a step that takes tens of microseconds, over shuffled batches."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(6400, 64)).astype(np.float32),
        "y": rng.integers(0, 10, 6400).astype(np.int32),
    }

    def start(key):
        one, two = jax.random.split(key)
        return {"a": jax.random.normal(one, (64, 64)) / 8, "b": jax.random.normal(two, (64, 10))}

    def loss(params, batch, key):
        del key
        logits = jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return sf.mean(nll), {"accuracy": sf.mean(logits.argmax(-1) == batch["y"])}

    return start, loss, sf.batches(data, 64, seed=0)


def transformer():
    """Make a step of a decoder of about a million parameters."""
    return partial(init, layers=4, width=128), loss_fn, make_batch(8)


def leaves(count=500):
    """Make a step over many small arrays. Adam adds two for each."""

    def start(key):
        del key
        return {f"w{i}": jnp.ones((8,)) for i in range(count)}

    def loss(params, batch, key):
        del key
        # The leaves are stacked because XLA copies a Python sum over them into the kernel of every
        # gradient: for 500 leaves a million instructions, and minutes to compile.
        return sf.mean((jnp.stack(list(params.values())) @ batch["x"]).sum() ** 2)

    return start, loss, {"x": np.ones(8, np.float32)}


class Terminal(io.StringIO):
    """A terminal that discards a progress bar."""

    def isatty(self):
        """Return True."""
        return True

    def write(self, text):
        """Discard the text."""
        return len(text)


class Clock:
    """Yield batches, or one repeatedly, and record the time of two of them.

    With `counts`, the calls between the two are counted too, which takes time.
    """

    def __init__(self, batch, steps, *, counts=False):
        self.batch, self.steps, self.pulled, self.marks = batch, steps, 0, []
        self.counts, self.calls = counts, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.pulled in (WARM, self.steps - 1):
            self.marks.append((time.thread_time(), time.perf_counter()))
            if self.counts:
                sys.setprofile(self._count if self.pulled == WARM else None)
        if self.pulled == self.steps:
            raise StopIteration
        self.pulled += 1
        return next(self.batch) if isinstance(self.batch, Iterator) else self.batch

    def get_state(self):
        """Return the position."""
        return {"step": self.pulled}

    def set_state(self, state):
        """Set the position."""
        self.pulled = state["step"]

    def _count(self, frame, event, argument):
        del frame, argument
        self.calls += event in ("call", "c_call")

    def calls_in_a_step(self):
        """Give the number of functions that are called in a step."""
        return self.calls / (self.steps - 1 - WARM)

    def microseconds(self):
        """Give wall time of a step, and CPU time of the thread that pulls batches."""
        (cpu, wall), (cpu_end, wall_end) = self.marks
        count = (self.steps - 1 - WARM) / 1e6
        return (cpu_end - cpu) / count, (wall_end - wall) / count


def bare(step, state, batches):
    """Fold as one writes it by hand, with nothing else."""
    step = jax.jit(step, donate_argnums=0)
    for batch in batches:
        state, _ = step(state, batch)
    jax.block_until_ready(state)


def plain(step, state, batches, **options):
    """Run `fit` without options."""
    sf.fit(step, state, batches, **options)


def all_on(step, state, batches, **options):
    """Run `fit` with every feature."""
    with tempfile.TemporaryDirectory() as folder:
        tensorboard = sf.writers.async_writer(sf.writers.tensorboard(Path(folder) / "events"))
        hooks = [
            sf.progress(file=Terminal()),
            sf.hooks.throughput(),
            sf.log_to(tensorboard),
            sf.hooks.watchdog(600),
        ]
        sf.fit(
            step,
            state,
            batches,
            run_dir=folder,
            checkpoints=sf.Checkpoints(every=10**9),
            hooks=hooks,
            **options,
        )


WAYS = {
    "bare": bare,
    "fit": plain,
    "everything": all_on,
    "logs every 100": partial(all_on, log_every=100),
    "16 a call": partial(all_on, steps_per_call=16, log_every=16),
}


def measure(model, steps, rounds, loops):
    """Measure each loop in turns."""
    start, loss, batch = model()
    tx = optax.adam(1e-3)
    train = sf.make_train_step(loss, tx)
    ways = dict(WAYS)
    if model is leaves:  # on CPU, XLA makes one function of a short loop: minutes for 500 leaves
        del ways["16 a call"]
    for name, loop in loops.items():
        ways[name] = lambda _, __, clock, loop=loop: loop(start, clock)
    times = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            clock = Clock(batch, steps)
            ways[name](train, sf.init_state(start, tx, jax.random.key(0)), clock)
            times[name].append(clock.microseconds())
    rows, calls = [], {}
    for name in WAYS.keys() & ways.keys():
        clock = Clock(batch, min(steps, 500), counts=True)
        ways[name](train, sf.init_state(start, tx, jax.random.key(0)), clock)
        calls[name] = clock.calls_in_a_step()
    for name, found in times.items():
        pairs = list(zip(found, times["bare"], strict=True))
        rows.append(
            {
                "model": model.__name__,
                "loop": name,
                "us": statistics.median(wall for _, wall in found),
                "cpu us": statistics.median(cpu for cpu, _ in found),
                "wall/bare": statistics.median(a[1] / b[1] for a, b in pairs),
                "cpu/bare": statistics.median(a[0] / b[0] for a, b in pairs),
                "cpu - bare": statistics.median(a[0] - b[0] for a, b in pairs),
                "calls": calls.get(name, ""),
            }
        )
    return rows


def grown(steps, since):
    """Return the growth of the process in bytes over a long run, after a first part."""
    start, loss, batch = mlp()
    tx = optax.sgd(1e-3)
    seen = {}

    def batches():
        for number in range(steps):
            if number in (since, steps - 1):
                seen[number] = resident()
            yield next(batch)

    all_on(sf.make_train_step(loss, tx), sf.init_state(start, tx, jax.random.key(0)), batches())
    return seen[steps - 1] - seen[since]


LIMITS = {"mlp": 1.0, "transformer": 1.01, "leaves": 1.01}


def judge(rows):
    """Return the claims about the rows."""
    found = {(row["model"], row["loop"]): row for row in rows if "loop" in row}
    claims = [
        Claim(f"wall time of fit with everything on, over the bare loop, {model}", over, limit)
        for model, limit in LIMITS.items()
        if (model, "everything") in found
        for over in [found[model, "everything"]["wall/bare"]]
    ]
    scanned, more = found["mlp", "16 a call"]["wall/bare"], found["mlp", "everything"]["cpu - bare"]
    calls = found["mlp", "everything"]["calls"] - found["mlp", "bare"]["calls"]
    often, seldom = (found["mlp", name]["cpu/bare"] for name in ("everything", "logs every 100"))
    growth = rows[-1]["grown MiB"]
    return [
        *claims,
        Claim("wall time with 16 steps in a call, over the bare loop", scanned, 0.5),
        Claim("calls of a step more than the bare loop's, mlp", calls, 60, clock=False),
        Claim("main-thread CPU microseconds more than the bare loop's, mlp", more, 20),
        Claim("main-thread CPU of everything on, over the bare loop's, mlp", often, 1.5),
        Claim("the same with log points every 100 steps", seldom, 1.08),
        Claim("MiB that a long run grows by", growth, 4, clock=False),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model and one round")
    quick = parser.parse_args(argv).quick
    if quick:  # only the first of the other libraries
        runs = [(mlp, 100, 1, dict(list(installed().items())[:1]))]
    else:
        runs = [(mlp, 4000, 9, installed()), (transformer, 120, 5, {}), (leaves, 250, 5, {})]
    rows = [row for run in runs for row in measure(*run)]
    steps, since = (600, 300) if quick else (100_000, 20_000)
    grew = grown(steps, since) / 2**20
    rows.append({"steps of a long run": steps, "from step": since, "grown MiB": grew})
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
