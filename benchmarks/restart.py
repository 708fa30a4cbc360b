"""From the death of a process to the next step, against a first start with a warm cache.

The launcher starts two processes on this machine, each with its own directory for temporary steps,
as two hosts have. Process 1 and process 0 are killed in turn, and the launcher starts both again. A
first start has the compilation cache of an earlier run, and no checkpoint.

    python -m benchmarks restart [--quick]
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Claim, show

EVERY = 20  # steps between temporary saves
PARTS = ("imports", "connects", "starts")  # until the first step is seen
SCRIPT = """
import sys, time
begin = time.time()
import jax, jax.numpy as jnp, numpy as np, optax
import stepfold as sf
sf.fit
imported = time.time()
sf.start_distributed()
connected = time.time()
folder = sys.argv[1]
WIDTH = 128
tx = optax.adamw(1e-3)

def init(key):
    layers = jax.random.normal(key, (8, 2, WIDTH, WIDTH)) / 12
    return {"layers": layers}

def loss_fn(params, batch, key):
    def layer(x, weights):
        x = x + jax.nn.gelu(x @ weights[0]) @ weights[1]
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), None
    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return sf.mean((x - 1) ** 2)

def start():
    return sf.init_state(init, tx, jax.random.key(0), sharding=plan)

shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
plan = sf.make_sharding(shape, sf.make_mesh())
data = {"x": np.random.default_rng(0).normal(size=(640, WIDTH)).astype(np.float32)}
first = True

def hook(event):
    global first
    if first:
        first = False
        now = time.time()
        parts = (imported - begin, connected - imported, now - connected)
        print("FIRST", event.step, now, *parts, flush=True)

index = jax.process_index()
temporary = sf.Temporary(f"{folder}/host-{index}", every=EVERY, replicas=1)
sf.fit(
    sf.make_train_step(loss_fn, tx), start, sf.batches(data, 32, seed=0), steps=1_000_000,
    log_every=1, run_dir=folder, hooks=[hook, sf.progress("none")],
    checkpoints=sf.Checkpoints(every=100_000, temporary=temporary),
)
"""


class Job:
    """A run by the launcher, whose lines are read from a file."""

    def __init__(self, script, folder, cache):
        self.log, self.began = Path(folder, "log"), time.time()
        folder.mkdir(exist_ok=True)
        # JAX_PLATFORMS, since the processes cannot share an accelerator.
        command = [sys.executable, "-m", "stepfold", "launch", "--processes", "2"]
        command += ["--restarts", "99", "--pause", "0", str(script), str(folder / "run")]
        with self.log.open("ab") as out:
            environ = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(cache),
            }
            environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)

    def firsts(self):
        """Return what both processes have printed at their first steps."""
        lines = self.log.read_text().splitlines()
        return [line.split()[2:] for line in lines if "FIRST" in line]

    def wait(self, count):
        """Wait for this many first steps; return the time of the last, and its parts."""
        deadline = time.time() + 300
        while len(self.firsts()) < count:
            if self.process.poll() is not None or time.time() > deadline:
                raise RuntimeError(self.log.read_text()[-3000:])
            time.sleep(0.02)
        lines = [[*map(float, line)] for line in self.firsts()[count - 2 : count]]
        step, now, *parts = max(lines, key=lambda line: line[1])
        return step, now, parts

    def wait_for_step(self, step):
        """Wait until a step is logged."""
        rows = self.log.with_name("run") / "metrics.jsonl"
        while f'"step": {step},' not in rows.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text()[-3000:])
            time.sleep(0.05)

    def kill(self, index):
        """Kill one of the processes of the launcher."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        os.kill(int(children.read_text().split()[index]), signal.SIGKILL)
        return time.time()

    def end(self):
        """End the launcher and its processes."""
        self.process.kill()
        self.process.wait()


def main(argv):
    """Return the seconds of first starts and of restarts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 1 if parser.parse_args(argv).quick else 3
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(f"EVERY = {EVERY}\n{SCRIPT}")
        for number in range(rounds + 1):
            job = Job(script, Path(folder, f"{number}"), Path(folder, "compiled"))
            try:
                what = "first start" if number else "first start, cold"
                rows.append(row(what, *since(job.began, job.wait(2))))
                for death, victim in enumerate((1, 0)):
                    job.wait_for_step((death + 1) * 3 * EVERY)  # so that some are saved
                    killed = job.kill(victim)
                    what = f"death of process {victim}"
                    rows.append(row(what, *since(killed, job.wait(4 + 2 * death))))
            finally:
                job.end()
    show(rows, judge(rows))
    return rows


def since(began, first):
    """Return the step, the seconds since a moment, and the parts of a first step."""
    step, now, parts = first
    return step, now - began, parts


def row(what, step, seconds, parts):
    """Return a row of the table."""
    named = {name: round(part, 2) for name, part in zip(PARTS, parts, strict=True)}
    return {"what": what, "step": int(step), "seconds": round(seconds, 2), **named}


def judge(rows):
    """Return the claim on the ratio of restarts to first starts."""
    first = statistics.median(each["seconds"] for each in rows if each["what"] == "first start")
    deaths = statistics.median(each["seconds"] for each in rows if "death" in each["what"])
    steps = [each["step"] for each in rows if "death" in each["what"]]
    lost = max((i % 2 + 1) * 3 * EVERY + 1 - step for i, step in enumerate(steps))
    what = "from a death to the next step, of a first start with a warm cache"
    # The last save may still be in progress when the process dies.
    return [
        Claim(what, deaths / first, 1.0),
        Claim(
            "intervals of temporary saves between the death and the next step", lost / EVERY, 2.0
        ),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
