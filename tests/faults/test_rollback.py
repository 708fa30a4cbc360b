"""A run that is killed at any moment, also while it goes back, ends as one that was not."""

import inspect
import json
import os
import random
import signal
import textwrap
import time

import pytest


def trains(folder, poison, skips, out):
    """Train over poisoned batches, go back where they show, and print what the run ends with."""
    import json
    import zlib
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    size, tx = 64, optax.adam(0.02)
    x = np.random.default_rng(0).normal(size=(8 * size, 8)).astype(np.float32)
    bad = np.zeros(8 * size, np.float32)
    order = sf.batches(np.arange(8 * size), 8, seed=0)
    for index in poison:
        bad[order.at(index)] = 1e4

    def loss_fn(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["x"].sum(-1) - batch["bad"]) ** 2)

    result = sf.fit(
        sf.make_train_step(loss_fn, tx),
        sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0)),
        sf.batches({"x": x, "bad": bad}, 8, seed=0).without(skips) if skips
        else sf.batches({"x": x, "bad": bad}, 8, seed=0),
        steps=44, log_every=8, run_dir=folder, checkpoints=sf.Checkpoints(every=4, keep=6),
        hooks=[] if skips else sf.roll_back_on_spike(window=8, sigma=100.0, limit=4),
    )  # fmt: skip
    rows = Path(folder, "metrics.jsonl").read_text()
    state = np.asarray(result.state.params["w"]).tobytes()
    end = [result.steps, zlib.crc32(state), rows, dict(result.history)]
    Path(out).write_text(json.dumps(end))


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    args = (str(folder / "run"), (), [(13, 14), (31, 32)], str(folder / "out"))
    began = time.monotonic()
    assert forks.run(trains, *args).code == 0
    return json.loads((folder / "out").read_text()), time.monotonic() - began


def test_a_run_killed_at_random_moments_ends_as_one_that_skipped_from_the_start(
    forks, whole, tmp_path, count
):
    want, seconds = whole
    chance = random.Random(0)
    for number in range(count(1, 40)):
        folder = tmp_path / f"{number}"
        args = (str(folder / "run"), (13, 31), (), str(folder / "out"))
        folder.mkdir()
        for _ in range(count(3, 5)):
            pid = forks.start(trains, *args)
            time.sleep(seconds * chance.uniform(0.5, 1.0))
            os.kill(pid, signal.SIGKILL)
            forks.wait()
        end = forks.run(trains, *args)
        assert end.code == 0, end
        assert json.loads((folder / "out").read_text()) == want
        skipped = json.loads((folder / "run" / "run.json").read_text())["rollbacks"]
        assert [entry["skipped"] for entry in skipped] == [[13, 14], [31, 32]]


def dies(place, folder, poison, out, method, when):
    """Train as `trains` does, and die before or after the first call of a method."""
    import os
    import signal
    import sys

    from stepfold import Checkpoints
    from stepfold.checkpoint.store import DirectoryStore

    owner = DirectoryStore if method == "delete" else Checkpoints
    whole, is_going_back = getattr(owner, method), []
    delete_after = Checkpoints.delete_after

    def begin(self, *args):
        is_going_back.append(True)
        delete_after(self, *args)

    def dying(self, *args):
        if when == "after":
            whole(self, *args)
        if method != "delete" or is_going_back:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *args)

    Checkpoints.delete_after = begin
    setattr(owner, method, dying)
    sys.path.insert(0, place)
    import program

    program.trains(folder, poison, (), out)


@pytest.mark.parametrize(
    ("method", "when"),
    [("write_note", "before"), ("write_note", "after"), ("delete", "before"), ("delete", "after"),
     ("delete_after", "after")],
)  # fmt: skip
def test_a_run_that_dies_while_it_goes_back_continues(forks, whole, tmp_path, method, when):
    (tmp_path / "program.py").write_text(textwrap.dedent(inspect.getsource(trains)))
    args = (str(tmp_path / "run"), (13, 31), str(tmp_path / "out"))
    end = forks.run(dies, str(tmp_path), *args, method, when)
    assert end.code == -signal.SIGKILL, end
    assert forks.run(trains, *args[:2], (), args[2]).code == 0
    assert json.loads((tmp_path / "out").read_text()) == whole[0]
