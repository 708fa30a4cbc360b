"""A run under `python -m stepfold launch` loses processes, and ends as one that lost none."""

import subprocess
import sys

import pytest
from tests.forks import clean_environ

SCRIPT = """
import os
import signal
import sys
import time

import jax
import numpy as np
import optax

import stepfold as sf

folder, *deaths = sys.argv[1:]
tx = optax.adam(1e-2)


def loss_fn(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["hidden"])
    return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)


def init(key):
    keys = jax.random.split(key)
    return {"hidden": jax.random.normal(keys[0], (8, 16)), "out": jax.random.normal(keys[1], (16,))}


def dies(event):
    for number, death in enumerate(deaths):
        process, step = map(int, death.split(":"))
        marker = f"{folder}/death-{number}"
        if (process, step) == (jax.process_index(), event.step) and not os.path.exists(marker):
            open(marker, "w").close()
            if "STOP" in os.environ:
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(2)  # so that it arrives before the end
            else:
                os.kill(os.getpid(), signal.SIGKILL)


is_gone = os.environ.get("GONE") == os.environ.get("STEPFOLD_LOCAL_PROCESS", "alone")
if is_gone and os.path.exists(f"{folder}/death-0"):
    sys.exit("this device is gone")
sf.start_distributed()
x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
data = sf.batches({"x": x, "y": np.tanh(x.sum(1))}, 16, seed=0)
shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
plan = sf.make_sharding(shape, sf.make_mesh(), sf.sharding.fsdp(min_size=1))
step = sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=4))
state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
result = sf.fit(
    step, state, data, steps=60, log_every=5, run_dir=folder,
    checkpoints=sf.Checkpoints(every=10), hooks=dies,
)
print("resumed", result.resumed, "of", jax.process_count())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("launched") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script, tmp_path_factory):
    """Return the rows of a run of the script without a launcher."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, script, folder], check=True, env=clean_environ())
    return (folder / "metrics.jsonl").read_bytes()


def launch(script, folder, *arguments, options=(), **environ):
    command = [sys.executable, "-m", "stepfold", "launch", "--processes", "2", *options]
    return subprocess.run(
        [*command, script, folder, *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=clean_environ() | environ,
    )  # fmt: skip


@pytest.mark.parametrize(
    "deaths", [["0:25"], pytest.param(["1:15", "0:25", "0:45"], marks=pytest.mark.full)]
)
def test_a_run_that_loses_processes_has_the_same_rows(deaths, script, alone, tmp_path):
    done = launch(script, tmp_path, *deaths)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("launch: ") == len(deaths)
    for death in deaths:
        assert f"process {death[0]}: SIGKILL" in done.stderr
    assert done.stdout.count("resumed") == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == alone


@pytest.mark.full
def test_the_rest_continue_with_the_same_rows_without_one_that_does_not_come_back(
    script, alone, tmp_path
):
    options = ["--min", "1", "--pause", "0"]
    done = launch(script, tmp_path, "1:35", options=options, GONE="1")
    assert done.returncode == 0, done.stderr
    assert "starting 1 process" in done.stderr
    assert "this device is gone" in done.stderr
    assert done.stdout.count("resumed") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == alone


@pytest.mark.full
def test_a_signal_to_the_launcher_stops_and_saves_the_run(script, alone, tmp_path):
    done = launch(script, tmp_path, "0:25", STOP="1")
    assert done.returncode == 143, done.stderr
    assert "launch: " not in done.stderr
    stopped = max(int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert 25 <= stopped < 60
    done = launch(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"resumed {stopped} of 2") == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == alone
