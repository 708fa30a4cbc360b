"""Runs of trackio, read from its database; it decides where that is when it is imported."""

import json
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

import stepfold as sf

RUN = """
import os, socket
import jax, jax.numpy as jnp, numpy as np, optax
import stepfold as sf

def refuse(*arguments, **options):
    raise AssertionError(f"a call of the network: {arguments}")

socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse

def writer(**options):
    hardware = {"auto_log_cpu": False, "auto_log_gpu": False}
    return sf.writers.wandb(library="trackio", project="tests", name="one", **hardware, **options)
"""


def run(folder, code):
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", RUN + code]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(folder):
    with sqlite3.connect(folder / "tests.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        configs = database.execute("select config from configs").fetchall()
    return [(step, json.loads(row)) for step, row in rows], [json.loads(c) for (c,) in configs]


@pytest.mark.full
def test_a_run_holds_what_was_written(tmp_path):
    run(
        tmp_path,
        """
idle = writer()
idle.flush()
idle.close()
assert not os.listdir(os.environ["TRACKIO_DIR"])  # no run is started before the first write
writer = sf.writers.async_writer(writer(config={"seed": 1}))
writer.write_hparams({"lr": np.float32(0.5)})
writer.write_scalars(10, {"train/loss": 0.1, "count": np.int64(3), "bad": float("nan")})
writer.write_scalars(10, {"eval/loss": 0.25})
writer.write_texts(20, {"note": "Wörter"})
writer.write_histograms(30, {"w": np.array([0.0, 1.0, 1.0, np.nan])}, {"w": 2})
writer.write_images(30, {"digits": np.zeros((2, 5, 4, 1)), "colour": np.zeros((5, 4, 3))})
writer.flush()
writer.close()
""",
    )
    rows, (config,) = rows_of(tmp_path)
    assert rows[:3] == [
        (10, {"train/loss": 0.1, "count": 3, "bad": "NaN"}),
        (10, {"eval/loss": 0.25}),
        (20, {"note": "Wörter"}),
    ]
    (_, histogram), (last, images) = rows[3:]
    assert (histogram["w"]["values"], histogram["w"]["bins"]) == ([1, 2], [0, 0.5, 1])
    assert histogram["w/nonfinite"] == 1
    assert last == 30
    assert sorted(images) == ["colour", "digits/0", "digits/1"]
    for image in images.values():
        assert (tmp_path / "media" / image["file_path"]).read_bytes()[:4] == b"\x89PNG"
    assert (config["lr"], config["seed"]) == (0.5, 1)


@pytest.mark.full
def test_a_run_of_fit_continues_its_run(tmp_path):
    code = """
tx = optax.sgd(0.1)
state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b) ** 2), tx)
batches = sf.batches(np.zeros(8, np.float32), 4)
hooks = sf.log_to(writer(resume="allow"))
sf.fit(
    step, state, batches, steps=STEPS, log_every=2,
    run_dir=sf.RunDirectory(FOLDER, config={"rate": 0.1}),
    checkpoints=sf.Checkpoints(every=4), hooks=hooks,
)
"""
    for steps in (4, 8):
        run(tmp_path, f"STEPS, FOLDER = {steps}, {str(tmp_path / 'run')!r}\n" + code)
    rows, configs = rows_of(tmp_path)
    assert [step for step, _ in rows] == [2, 4, 6, 8]
    written = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    for (_, row), line in zip(rows, written, strict=True):
        assert row["train/loss"] == pytest.approx(line["train/loss"], rel=1e-12)
    assert configs[0]["rate"] == 0.1


def test_a_write_after_close_is_refused():
    writer = sf.writers.wandb(project="tests", library="trackio")
    writer.close()
    says = "trackio: write after close.*with name=… and resume='must'"
    with pytest.raises(sf.errors.ConfigError, match=says):
        writer.write_scalars(1, {"a": 1})
    with pytest.raises(sf.errors.ConfigError, match=says):
        writer.write_images(1, {"a": np.zeros((2, 2, 1))})
