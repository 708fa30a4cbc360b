"""A run that is killed at any moment, also while it goes back, ends as one that was not.

Most kills are stops of a process whose files are copied before it continues, as in test_kills.py.
"""

import json
import os
import random
import shutil
import signal
import threading
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold import Series
from stepfold.checkpoint.store import DirectoryStore


def trains(runs):
    """Train over poisoned batches, run after run, and go back where they show.

    A run is a folder, the poisoned batches, those to skip from the start, and after how many
    seconds to stop, if at all. It writes what it ends with into the folder.
    """
    size, tx = 64, optax.adam(0.02)
    x = np.random.default_rng(0).normal(size=(8 * size, 8)).astype(np.float32)
    order = sf.batches(np.arange(8 * size), 8, seed=0)
    init = jax.jit(lambda: sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0)))

    def loss_fn(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["x"].sum(-1) - batch["bad"]) ** 2)

    step = sf.make_train_step(loss_fn, tx)

    def stop(folder):
        os.write(1, f"{folder}\n".encode())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    for folder, poison, skips, seconds in runs:
        bad = np.zeros(8 * size, np.float32)
        for index in poison:
            bad[order.at(index)] = 1e4
        batches = sf.batches({"x": x, "bad": bad}, 8, seed=0)
        began = time.monotonic()
        timer = threading.Timer(seconds or 0, stop, (folder,))
        if seconds is not None:
            timer.start()
        result = sf.fit(
            step, init(), batches.without(skips) if skips else batches,
            steps=44, log_every=8, run_dir=f"{folder}/run",
            checkpoints=sf.Checkpoints(every=4, keep=6),
            hooks=[] if skips else sf.roll_back_on_spike(window=8, deviations=100.0, limit=4),
        )  # fmt: skip
        timer.cancel()
        rows = Path(folder, "run", "metrics.jsonl").read_text()
        state = np.asarray(result.state.params["w"]).tobytes()
        end = [result.steps, zlib.crc32(state), rows, dict(result.history)]
        Path(folder, "end.json").write_text(json.dumps(end))
        os.write(1, f"{time.monotonic() - began}\n".encode())


def ends_as(folder, whole):
    assert json.loads((folder / "end.json").read_text()) == whole
    rollbacks = json.loads((folder / "run" / "run.json").read_text())["rollbacks"]
    assert [entry["skipped"] for entry in rollbacks] == [[13, 14], [31, 32]]


def run_all(forks, folders, seconds, copy=None):
    """Train in folders, all in one process."""
    poison = [13, 31]
    runs = [(str(folder), poison, (), each) for folder, each in zip(folders, seconds, strict=True)]
    end = forks.run_and_copy(trains, runs, copy=copy)
    assert end.code == 0, end


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """Skip the batches from the start; return what that ends with, and the seconds of a run."""
    folders = [tmp_path_factory.mktemp("whole") for _ in range(2)]
    end = forks.run(trains, [(str(folder), (), [(13, 14), (31, 32)], None) for folder in folders])
    assert end.code == 0, end
    return json.loads((folders[0] / "end.json").read_text()), float(end.output.splitlines()[-1])


def test_a_run_stopped_at_random_moments_ends_as_one_that_skipped_from_the_start(
    forks, whole, tmp_path, count
):
    """Each of several runs is stopped and continued from a copy, again and again."""
    want, seconds = whole
    chance, stops = random.Random(0), 0
    folders = [tmp_path / f"run-{i}" for i in range(count(2, 16))]
    for attempt in range(count(2, 4)):
        copies = []

        def copy(output, copies=copies, attempt=attempt):
            stopped = Path(output.splitlines()[-1])
            copies.append(tmp_path / f"{attempt}-{len(copies)}")
            shutil.copytree(stopped, copies[-1])

        run_all(forks, folders, [seconds * chance.uniform(0, 1) for _ in folders], copy)
        for folder in folders:
            ends_as(folder, want)
        folders, stops = copies, stops + len(copies)
    run_all(forks, folders, [None] * len(folders))
    for folder in folders:
        ends_as(folder, want)
    assert stops >= count(1, 16)
    print(f"{stops} stops at random moments")


def stops_while_it_goes_back(runs, kills):
    """Train as `trains` does, and stop or die around everything that changes checkpoints."""
    from test_rollback import trains

    is_going_back = []

    def end(when):
        if kills == when:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(1, f"{runs[0][0]}\n".encode())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def wrap(owner, method):
        whole = getattr(owner, method)

        def stopping(self, *args):
            if method != "delete":
                is_going_back.append(True)
            if is_going_back:
                end(f"before {method}")
            whole(self, *args)
            if is_going_back:
                end(f"after {method}")

        setattr(owner, method, stopping)

    wrap(Series, "write_note")
    wrap(Series, "delete_after")
    wrap(DirectoryStore, "delete")
    trains(runs)


@pytest.mark.parametrize("kills", [None, "before delete"])
def test_a_run_that_dies_while_it_goes_back_continues(forks, whole, tmp_path, kills, count):
    """One process stops at each moment of going back; another is really killed."""
    copies = []

    def copy(output):
        copies.append(tmp_path / f"{len(copies)}")
        shutil.copytree(output.splitlines()[-1], copies[-1])

    runs = [(str(tmp_path / "run"), [13, 31], (), None)]
    end = forks.run_and_copy(stops_while_it_goes_back, runs, kills, copy=copy)
    assert end.code == (-signal.SIGKILL if kills else 0), end
    if kills:
        copies = [tmp_path / "run"]
    else:
        assert len(copies) >= 10
        copies = copies[:: len(copies) // count(4, len(copies))]
    run_all(forks, copies, [None] * len(copies))
    for folder in copies:
        ends_as(folder, whole[0])
