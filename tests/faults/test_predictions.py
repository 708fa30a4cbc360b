"""Predictions that were killed, or that found no room, continue to the same files."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import stepfold as sf

from .test_disk import file_size, fill

COUNT, ROWS = 400, 8


def step(params, batch):
    return {"y": params["w"] * batch["x"], "id": batch["id"]}


def predicts(folder, pause=0.0, ready=None):
    """Predict with a source that takes its time; make a file once there are some rows."""

    class Slow:
        def __len__(self):
            return COUNT

        def __getitem__(self, index):
            time.sleep(pause)
            if ready is not None and index == 3 * ROWS:
                Path(ready).touch()
            return {"x": np.float32(index) / 7 * np.ones(5, np.float32), "id": np.int32(index)}

    batches = sf.batches(Slow(), 16, epochs=1, remainder="pad")
    return sf.predict(step, {"w": np.float32(3)}, batches, to=folder, shard_rows=ROWS)


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert len(predicts(folder)) == COUNT // ROWS
    return content(folder)


def stops(folder, stop_at):
    """Predict, and stop before the given changes of files."""
    from tests.faults.training import Changes, stop

    Changes([folder], dict.fromkeys(stop_at, stop))
    predicts(folder)


def test_kills_at_random_times(forks, whole, tmp_path, count):
    chance, lost = random.Random(0), []
    for i in range(count(2, 12)):
        folder, ready = tmp_path / f"{i}", tmp_path / f"{i} ready"
        process = forks.start(predicts, str(folder), 0.0005, str(ready))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, process.errors()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        assert process.wait().code == -signal.SIGKILL
        found = content(folder)
        complete = {name: found[name] for name in found if name.startswith("rows")}
        assert complete.items() <= whole.items()
        lost.append(COUNT // ROWS - len(complete))
        predicts(folder)
        assert content(folder) == whole
    assert any(lost)
    print(f"{len(lost)} kills, files that were left to write: {sorted(lost)}")


def test_stops_before_each_change_of_a_file(forks, whole, tmp_path, count):
    """Of the index and of the first files: open, sync and rename."""
    (tmp_path / "run").mkdir()
    copies = []

    def copy(_):
        shutil.copytree(tmp_path / "run", tmp_path / f"{len(copies)}")
        copies.append(tmp_path / f"{len(copies)}")

    points = list(range(1, count(9, 40)))
    end = forks.run_and_copy(stops, str(tmp_path / "run"), points, copy=copy)
    assert (end.code, len(copies)) == (0, len(points)), end.errors
    for folder in copies:
        predicts(folder)
        assert content(folder) == whole


def test_a_full_disk(small_disk, whole, count):
    disk = small_disk("size=1m")
    words = "(npz|json): cannot be written: No space left on .*room"
    for left in np.linspace(0, 60_000, count(3, 15), dtype=int):
        folder = disk / f"{left}"
        folder.mkdir()
        fill(disk, left=left)
        with pytest.raises(sf.errors.CheckpointError, match=words):
            predicts(folder)
        found = content(folder)
        assert not any(name.endswith(".part") for name in found)
        assert {name: found[name] for name in found if "rows" in name}.items() <= whole.items()
        (disk / "ballast").unlink()
        predicts(folder)
        assert content(folder) == whole
        shutil.rmtree(folder)


def test_a_limit_of_the_size_of_files(tmp_path, whole):
    with (
        file_size(100),
        pytest.raises(sf.errors.CheckpointError, match=r"json: cannot be written: File too large"),
    ):
        predicts(tmp_path)
    assert content(tmp_path) == {}
    predicts(tmp_path)
    assert content(tmp_path) == whole


def denied(folder):
    os.setuid(65534)  # nobody
    try:
        predicts(folder)
    except sf.errors.CheckpointError as error:
        print(error)


def test_no_permission(forks, public_path):
    folder = public_path / "run"
    end = forks.run(denied, str(folder))
    assert "expected a directory to save in, got one that cannot be made: Permission" in end.output
    folder.mkdir()
    end = forks.run(denied, str(folder))
    assert "got one without permission to write; change the permission" in end.output
    assert content(folder) == {}


def test_a_file_that_cannot_be_read(forks, public_path, whole):
    folder = public_path / "run"
    predicts(folder)
    folder.chmod(0o777)
    (folder / "predictions.json").chmod(0)
    end = forks.run(denied, str(folder))
    words = "predictions.json: cannot be read: Permission denied"
    assert words in end.output
    assert content(folder) == whole
