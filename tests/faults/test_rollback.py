"""A run that is killed while it goes back ends as one that skipped the batches from the start.

Most kills are stops of a process whose files are copied before it continues, as in test_kills.py.
"""

import json
import os
import shutil
import signal
import threading
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint import Series
from stepfold.checkpoint.store import DirectoryStore
from stepfold.runs.rollback import Rollbacks


def trains(runs):
    """Train over poisoned batches, run after run, and go back where they show.

    A run is a folder, the poisoned batches, and those to skip from the start. It writes what it
    ends with into the folder.
    """
    size, tx = 64, optax.adam(0.02)
    x = np.random.default_rng(0).normal(size=(8 * size, 8)).astype(np.float32)
    order = sf.batches(np.arange(8 * size), 8, seed=0)
    init = jax.jit(lambda: sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0)))

    def loss_fn(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["x"].sum(-1) - batch["bad"]) ** 2)

    step = sf.make_train_step(loss_fn, tx)
    for folder, poison, skips in runs:
        bad = np.zeros(8 * size, np.float32)
        for index in poison:
            bad[order.at(index)] = 1e4
        batches = sf.batches({"x": x, "bad": bad}, 8, seed=0)
        result = sf.fit(
            step, init(), batches.without(skips) if skips else batches,
            steps=44, log_every=8, run_dir=f"{folder}/run",
            checkpoints=sf.Checkpoints(every=4, keep=6),
            hooks=[] if skips else sf.hooks.on_spike(
                action="go_back", window=8, deviations=100.0, limit=4
            ),
        )  # fmt: skip
        rows = Path(folder, "run", "metrics.jsonl").read_text()
        state = np.asarray(result.state.params["w"]).tobytes()
        end = [result.steps, zlib.crc32(state), rows, dict(result.history)]
        Path(folder, "end.json").write_text(json.dumps(end))


def stops_while_it_goes_back(runs, kills):
    """Train as `trains` does, and stop or die around everything that changes checkpoints."""
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

    wrap(Rollbacks, "_write")
    wrap(Series, "delete_after")
    wrap(DirectoryStore, "delete")
    trains(runs)


@pytest.mark.parametrize("kills", [None, pytest.param("before delete", marks=pytest.mark.full)])
def test_a_run_that_dies_while_it_goes_back_continues(forks, tmp_path, kills, count):
    """One process stops at each moment of going back; another is really killed."""
    copies = []

    def copy(output):
        copies.append(tmp_path / f"{len(copies)}")
        shutil.copytree(output.splitlines()[-1], copies[-1])

    poison, skips = [13, 31], [(13, 14), (31, 32)]
    runs = [(str(tmp_path / "run"), poison, ())]
    end = forks.run_and_copy(stops_while_it_goes_back, runs, kills, copy=copy)
    assert end.code == (-signal.SIGKILL if kills else 0), end
    if kills:
        copies = [tmp_path / "run"]
    else:
        assert len(copies) >= 10
        copies = copies[:: len(copies) // count(2, len(copies))]
    whole = tmp_path / "whole"
    whole.mkdir()
    runs = [(str(folder), poison, ()) for folder in copies]
    end = forks.run(trains, [*runs, (str(whole), (), skips)], timeout=300)
    assert end.code == 0, end
    for folder in copies:
        assert (folder / "end.json").read_text() == (whole / "end.json").read_text()
        rollbacks = json.loads((folder / "run" / "run.json").read_text())["rollbacks"]
        assert [entry["skipped"] for entry in rollbacks] == [list(skip) for skip in skips]
