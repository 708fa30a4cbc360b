"""Whenever processes or their launcher are killed, a run ends with the rows and bits of another."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forks import clean_environ

pytestmark = pytest.mark.full
SCHEDULES, STEPS = 24, 160
SCRIPT = f"""
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

folder, hosts = sys.argv[1:]
sf.start_distributed()
tx = sf.ema_params(optax.adam(1e-2), 0.9)
rng = np.random.default_rng(0)


def examples(count):
    x = rng.normal(size=(count, 8)).astype("float32")
    return {{"x": x, "y": np.tanh(x.sum(1))}}


def loss_fn(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["hidden"])
    return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)


def init(key):
    keys = jax.random.split(key)
    hidden = jax.random.normal(keys[0], (8, 16))
    return {{"hidden": hidden, "out": jax.random.normal(keys[1], (16,))}}


def start():
    return sf.init_state(init, tx, jax.random.key(0), sharding=plan)


mixture = sf.mix({{"a": (examples(300), 2.0), "b": (examples(200), 1.0)}}, seed=0)
held_out = examples(64)
shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
plan = sf.make_sharding(shape, sf.make_mesh(), sf.sharding.fsdp(min_size=1))
index = jax.process_index()
with sf.workers(sf.batches(mixture, 16), 1) as batches:
    result = sf.fit(
        sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=4)),
        start,
        batches,
        steps={STEPS},
        log_every=5,
        run_dir=folder,
        evaluation=sf.Evaluation(
            sf.make_eval_step(loss_fn), lambda: sf.batches(held_out, 16, epochs=1), every=20
        ),
        checkpoints=sf.Checkpoints(
            every=60,
            best="eval/loss",
            temporary=sf.Temporary(f"{{hosts}}/{{index}}", every=8, replicas=1),
        ),
        hooks=[sf.hooks.stop_early("eval/loss", patience=50), sf.progress("none")],
    )
restored = sf.restore(f"{{folder}}/checkpoints", shape)  # all processes call this
bits = hashlib.sha256()
for leaf in jax.tree.leaves(restored.state.params):
    bits.update(np.asarray(leaf).tobytes())
if index == 0:
    print("bits", bits.hexdigest(), result.best, flush=True)
"""


class Job:
    """The script under a launcher, with as many processes as given."""

    def __init__(self, script: Path, folder: Path, count: int) -> None:
        command = [sys.executable, "-m", "stepfold", "launch", "--processes", f"{count}"]
        options = ["--restarts", "9", "--pause", "0"]
        self.log = folder.with_suffix(f".{time.monotonic_ns()}")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *options, script, folder, folder.with_suffix(".hosts")],
                stdout=out, stderr=out, env=clean_environ(),
            )  # fmt: skip

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [*map(int, path.read_text().split())] if path.exists() else []

    def wait(self) -> str:
        code = self.process.wait(timeout=240)
        text = self.log.read_text()
        assert code == 0, text[-4000:]
        return next(line for line in text.splitlines() if "bits" in line).partition("bits")[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows, without evaluations: their sums depend on the devices, to rounding."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in line.items() if "eval" not in name} for line in lines]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("deaths") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def undisturbed(script, tmp_path_factory):
    """Return the last line and the rows of a run that nobody has killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return Job(script, folder, 1).wait(), rows(folder)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_a_run_that_is_killed_at_any_moment_has_the_same_rows_and_bits(
    seed, script, undisturbed, tmp_path
):
    chance, folder, story = random.Random(seed), tmp_path / "run", []
    job = Job(script, folder, chance.choice([1, 2, 2, 4]))
    try:
        for _ in range(chance.randint(1, 3)):
            time.sleep(chance.uniform(0, 9))
            victims = job.children()
            what = chance.choice(["one", "one", "all", "launcher"])
            if what == "launcher":  # and with it all processes; others take their place
                job.kill()
                if chance.random() < 0.5:
                    lost = chance.randrange(4)
                    shutil.rmtree(folder.with_suffix(".hosts") / f"{lost}", ignore_errors=True)
                job = Job(script, folder, chance.choice([1, 2, 2, 4]))
            for victim in [chance.choice(victims)] if what == "one" and victims else victims:
                if what != "launcher":
                    try:
                        os.kill(victim, signal.SIGKILL)
                    except ProcessLookupError:
                        what = f"{what}, too late"
            story.append(what)
        assert (job.wait(), rows(folder)) == undisturbed, story
    finally:
        job.kill()
