"""Several processes open a run together, or all raise together within seconds."""

import json
import os
import re
import time

import pytest

from stepfold.checkpoint import claims as run_lock


def opens(start, run_dirs, folders, late, blind):
    """Fit for 4 steps; `late` is by how many seconds the last process is later."""
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    me = start().process
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"].mean() * b["x"]), tx)
    make = lambda key: sf.init_state(lambda key: {"w": jnp.ones(8)}, tx, key)
    plan = sf.make_sharding(jax.eval_shape(make, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
    state = sf.init_state(lambda key: {"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=plan)
    batches = sf.batches({"x": np.ones(16, np.float32)}, 8, seed=0)
    time.sleep(late if me == 1 else 0)
    began = time.monotonic()
    checkpoints = folders and sf.Checkpoints(folders[me], every=2)
    has_checkpoint = sf.Series.has_checkpoint
    if me == 1 and blind:  # as a file system that shows new files late, or never
        sf.Series.has_checkpoint = lambda self: False
    try:
        result = sf.fit(
            step, state, batches, steps=4, log_every=2, checkpoints=checkpoints,
            run_dir=run_dirs and run_dirs[me],
        )  # fmt: skip
        print("done", result.steps, result.resumed)
    except sf.StepfoldError as error:
        print(f"{time.monotonic() - began < 20} {type(error).__name__}: {error}")
    finally:
        sf.Series.has_checkpoint = has_checkpoint


@pytest.fixture
def outputs(processes):
    """Run `opens` with a run directory, a folder of checkpoints, or both, for each process."""

    def run(run_dirs=None, folders=None, late=0, blind=False):
        run_dirs, folders = (paths and [*map(str, paths)] for paths in (run_dirs, folders))
        return processes.run(opens, run_dirs, folders, late, blind, timeout=40 + late)

    return run


@pytest.mark.parametrize("kind", ["run_dir", "checkpoints"])
def test_directories_that_are_not_shared_raise_within_seconds(outputs, tmp_path, kind):
    here, there = tmp_path / "here", tmp_path / "there"
    same = (tmp_path / "same",) * 2
    args = ((here, there), None) if kind == "run_dir" else (same, (here, there))
    for directory, output in zip((here, there), outputs(*args), strict=True):
        assert output == (
            f"True CheckpointError: {directory}: expected a directory that all 2 processes share, "
            "got one in which process 1 cannot see the files of process 0; give one on a shared "
            "file system\n"
        )
    assert not list(tmp_path.glob("*/.*")), "something was left behind"


def test_a_directory_that_one_cannot_make_is_an_error_of_both(outputs, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    first, second = outputs(None, (tmp_path / "folder", file))
    assert (
        second
        == f"True CheckpointError: {file}: expected a directory, got a file; give another path\n"
    )
    assert first.startswith(
        f"True CheckpointError: {tmp_path / 'folder'}: not opened: process 1 raised "
    )
    assert f"{file}: expected a directory, got a file" in first


def test_process_0_decides_whether_to_resume(outputs, tmp_path):
    assert outputs((tmp_path,) * 2, (tmp_path / "c",) * 2) == ["done 4 None\n"] * 2
    assert outputs((tmp_path,) * 2, (tmp_path / "c",) * 2, blind=True) == ["done 4 4\n"] * 2


def test_a_directory_in_use_is_an_error_of_all(outputs, tmp_path):
    claim = {"host": "there", "pid": os.getpid(), "machine": run_lock._machine()}
    claim |= {"started": run_lock._start_time(os.getpid()), "since": "2026-01-02"}
    path = tmp_path / ".lock-0"
    path.write_text(json.dumps(claim))
    first, second = outputs((tmp_path,) * 2)
    problem = f"expected a directory that no other run uses, got {tmp_path}, in use by process"
    assert first.startswith(
        f"True ConfigError: run_dir: {problem} {os.getpid()} on there since 2026"
    )
    assert re.match(
        r"True CheckpointError: run_dir: .* process 0 raised ConfigError: run_dir: ", second
    )
    assert problem in second
    assert [path.name for path in tmp_path.iterdir()] == [".lock-0"]


@pytest.mark.full
def test_a_process_may_be_later_than_the_patience_of_gloo(outputs, tmp_path):
    began = time.monotonic()
    assert outputs((tmp_path,) * 2, late=40) == ["done 4 None\n"] * 2
    assert time.monotonic() - began > 40
