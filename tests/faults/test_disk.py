"""A save for which there is no room is told of in time, leaves nothing, and the next goes on."""

import os
import resource
import shutil
import subprocess
from contextlib import contextmanager, suppress

import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import ones

import stepfold as sf

# Where one write of orbax's fails, others of the same save end after the loop that asked for them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LIKE = {"w": ones((256, 1024)), "b": ones(300), "count": ones((), np.int32)}
NO_ROOM = "not saved: no space left on the device; make room"
NOT_SAVED = "not saved: "


def make_state(step):
    rng = np.random.default_rng(step)
    values = {
        name: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for name, leaf in LIKE.items()
    }
    return values | {"count": jnp.asarray(step, jnp.int32)}


def is_of(restored, step):
    assert restored.step == step
    wanted = make_state(step)
    assert all(np.array_equal(restored.state[name], wanted[name]) for name in wanted)


@contextmanager
def file_size(limit):
    """Let no file of this process grow over a limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(disk, left):
    """Leave so many bytes free."""
    free = shutil.disk_usage(disk).free
    with (disk / "ballast").open("wb") as file:
        file.write(bytes(free - left))


def fails(series, how, words):
    """Save step 2, for which there is no room, and see the error come in time."""

    def save():
        series.save(make_state(2), step=2)
        if how == "next save":
            series.save(make_state(3), step=3)
        else:
            series.wait()

    with pytest.raises(sf.errors.CheckpointError, match=words):
        save()


def is_as_before(folder):
    """The step before is good, and nothing is left of the one that failed."""
    assert sf.checkpoint.verify(folder) == {1: []}
    assert sf.checkpoint.latest_step(folder) == 1
    assert [path.name for path in folder.iterdir()] == ["1"]
    is_of(sf.restore(folder, LIKE), 1)


def goes_on(folder, series):
    series.save(make_state(4), step=4)
    series.wait()
    is_of(series.restore(LIKE), 4)
    assert sf.checkpoint.verify(folder) == {4: []}


def full(*values):
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


@pytest.mark.parametrize("how", ["wait", "next save"])
@pytest.mark.parametrize("async_", [True, *full(False)])
def test_a_full_disk(small_disk, async_, how):
    disk = small_disk("size=4m")
    folder = disk / "run"
    with sf.Checkpoints(folder, keep=1, async_=async_) as series:
        series.save(make_state(1), step=1)
        series.wait()
        fill(disk, left=300_000)
        fails(series, how, NO_ROOM)
        is_as_before(folder)
        fails(series, how, NO_ROOM)
        is_as_before(folder)
        (disk / "ballast").unlink()
        goes_on(folder, series)


def test_a_disk_that_is_full_at_any_byte(small_disk, count):
    """The arrays fit, but not the manifest; the manifest, but not what orbax writes after it."""
    disk = small_disk("size=4m")
    folder = disk / "run"
    sf.save(folder, make_state(1), step=1)
    needed = sum(
        -(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file()
    )
    failed = []
    points = [*np.linspace(0, needed - 4096, count(3, 24), dtype=int)]
    points += [needed + 4096 * i for i in range(-count(2, 10), 1)]
    with sf.Checkpoints(folder, keep=None) as series:
        for left in points:
            fill(disk, left)
            if left < 0.98 * needed:
                fails(series, "wait", NO_ROOM)
                failed.append(left)
            else:  # some are a little smaller than others
                with suppress(sf.errors.CheckpointError):
                    series.save(make_state(2), step=2)
                    series.wait()
                    is_of(sf.restore(folder, LIKE), 2)
                    shutil.rmtree(folder / "2")
            is_as_before(folder)
            (disk / "ballast").unlink()
        series.save(make_state(5), step=5)
        is_of(series.restore(LIKE), 5)
    print(f"{len(failed)} saves on a disk that was full at another byte each")


def allow(disk, files):
    """Let a disk take so many more files and folders."""
    used = os.statvfs(disk).f_files - os.statvfs(disk).f_ffree
    subprocess.run(["mount", "-o", f"remount,nr_inodes={used + files}", str(disk)], check=True)


def test_a_disk_without_room_for_any_of_the_files(small_disk, count):
    """Each file and folder of a step is once the first that cannot be made."""
    disk = small_disk("size=64m,nr_inodes=1000")
    folder = disk / "run"
    with sf.Checkpoints(folder, keep=None) as series:
        series.save(make_state(1), step=1)
        series.wait()
        needed = sum(1 for _ in (folder / "1").rglob("*")) + 1
        failed = []
        for files in range(0, needed - 2, count(5, 1)):
            allow(disk, files)
            fails(series, "wait", NO_ROOM)
            is_as_before(folder)
            allow(disk, 1000)
            try:
                series.save(make_state(2), step=2)
                is_of(series.restore(LIKE), 2)
                shutil.rmtree(folder / "2")
            except sf.errors.CheckpointError as error:
                failed.append(f"there was room for {files}, then for 1000: {error}")
    assert not failed, "\n".join(failed)
    print(f"{needed} files and folders, each once the one for which there was no room")


@pytest.mark.parametrize("limit", [100, 100_000, *full(16, 400, 1000, 1_000_000)])
@pytest.mark.parametrize("how", ["wait", "next save"])
def test_a_limit_of_the_size_of_files(tmp_path, limit, how):
    folder = tmp_path / "run"
    with sf.Checkpoints(folder, keep=1) as series:
        series.save(make_state(1), step=1)
        series.wait()
        for _ in range(2):
            with file_size(limit):
                fails(series, how, NOT_SAVED)
            is_as_before(folder)
        goes_on(folder, series)


def test_a_directory_that_is_removed_meanwhile(tmp_path):
    folder = tmp_path / "run"
    with sf.Checkpoints(folder, keep=1) as series:
        series.save(make_state(1), step=1)
        series.wait()
        shutil.rmtree(folder)
        try:
            series.save(make_state(2), step=2)
            series.wait()
        except sf.errors.CheckpointError:
            assert sf.checkpoint.latest_step(folder) is None
        else:
            is_of(sf.restore(folder, LIKE), 2)
        folder.mkdir(exist_ok=True)
        goes_on(folder, series)


@pytest.mark.parametrize("left", ["no file", "no byte", "no step"])
def test_a_full_second_disk_ends_no_run(small_disk, tmp_path, left):
    disk = small_disk("size=4m" if left != "no file" else "size=4m,nr_inodes=8")
    if left == "no file":
        for number in range(7):
            (disk / f"{number}").touch()
    else:
        fill(disk, left=0 if left == "no byte" else 300_000)
    policy = sf.Checkpoints(tmp_path / "run", every=6, temporary=sf.Temporary(disk, every=2))
    with pytest.warns(RuntimeWarning, match="disk0.*temporary saves.*(No|no) space left"):
        saves_until(policy, 9)
    is_of(policy.restore(LIKE), 6)
    assert sf.checkpoint.verify(tmp_path / "run") == {6: []}


def saves_until(policy, stop):
    with policy as series:
        for step in range(1, stop):
            if series.due(step):
                series.save(make_state(step), step=step)
