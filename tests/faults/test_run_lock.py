"""One run at a time writes to a run_dir, and a killed one can be resumed at once."""

import json
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from tests import small

import stepfold as sf
from stepfold.loop import run_lock
from stepfold.loop.run_lock import RunLock

from .forks import Forks


def trains(folder, seconds, steps):
    """Train in a directory, and write a line once the run has it."""
    import sys
    import time

    import jax.numpy as jnp
    import numpy as np

    import stepfold as sf

    def count(state, batch):
        return {"step": state["step"] + 1}, {"loss": sf.mean(batch)}

    def batches():
        print("opened", flush=True)
        while True:
            time.sleep(seconds)
            yield np.zeros(2)

    try:
        result = sf.fit(count, {"step": jnp.int32(0)}, batches(), steps=steps, run_dir=folder)
        print(result.stop_reason)
    except sf.ConfigError as error:
        print(error)
        sys.exit(3)


@pytest.fixture
def others():
    """Run a process besides that of `forks`."""
    with Forks() as forks:
        yield forks


def wait_for(found, seconds=20):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def claims(folder):
    return sorted(folder.glob(".lock-*"))


def test_a_second_run_is_refused_with_the_holder(forks, others, tmp_path):
    pid = forks.start(trains, str(tmp_path), 0.05, 1000)
    wait_for(lambda: (tmp_path / "run.json").exists())
    end = others.run(trains, str(tmp_path), 0.0, 2, timeout=20)
    assert end.code == 3, end
    assert end.output.startswith(
        f"run_dir: expected a directory that no other run uses, got {tmp_path}"
    )
    assert f"process {pid} on {socket.gethostname()} since 20" in end.output
    os.kill(pid, signal.SIGTERM)
    assert forks.wait().code == 143
    assert len(json.loads((tmp_path / "run.json").read_bytes())["attempts"]) == 1
    assert not claims(tmp_path)


def test_a_killed_run_is_resumed_at_once(forks, others, tmp_path):
    pid = forks.start(trains, str(tmp_path), 0.05, 1000)
    wait_for(lambda: (tmp_path / "run.json").exists())
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    end = others.run(trains, str(tmp_path), 0.0, 2)  # the first is still a zombie
    assert time.monotonic() - began < 10
    assert (end.code, end.output) == (0, "opened\nall 2 steps were done\n"), end
    assert forks.wait().code == -signal.SIGKILL
    assert not claims(tmp_path)


def test_one_of_three_that_begin_together_runs(tmp_path, count):
    for number in range(count(1, 3)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        claim(folder, started="1")  # of a dead run, which all of them may delete
        with Forks() as first, Forks() as second, Forks() as third:
            running = {
                one: one.start(trains, str(folder), 0.1, 1000) for one in (first, second, third)
            }
            wait_for(
                lambda: sum(not run_lock._start_time(pid) for pid in running.values()) == 2, 30
            )
            (winner,) = (one for one, pid in running.items() if run_lock._start_time(pid))
            wait_for((folder / "run.json").exists)
            os.kill(running.pop(winner), signal.SIGTERM)
            end = winner.wait()
            assert end.code == 143, end
            for loser in running:
                end = loser.wait()
                assert end.code == 3, end
                assert "expected a directory that no other run uses" in end.output
        assert len(json.loads((folder / "run.json").read_bytes())["attempts"]) == 1


def test_a_killed_claim_does_not_pass_for_a_run_or_a_checkpoint(tmp_path, recwarn):
    claim(tmp_path, started="1")
    batches = [np.zeros(2, np.float32)] * 3
    for _ in range(2):
        sf.fit(small.STEP, small.start(), [{"x": batch} for batch in batches], run_dir=tmp_path)
    moved = tmp_path / "previous-1"
    assert {path.name for path in moved.iterdir()} == {
        "run.json", "metrics.jsonl", "metrics.csv", "report.html",
    }  # fmt: skip
    assert not claims(tmp_path)
    assert [str(warning.message).partition(":")[0] for warning in recwarn] == ["run_dir"]


def test_a_run_that_ended_leaves_no_thread_that_could_free_its_state_at_exit(tmp_path, monkeypatch):
    beat = RunLock._beat
    monkeypatch.setattr(RunLock, "_beat", lambda lock: (beat(lock), time.sleep(0.3)))
    before = set(threading.enumerate())
    sf.fit(small.STEP, small.start(), [{"x": np.zeros(2, np.float32)}], run_dir=tmp_path)
    assert set(threading.enumerate()) <= before


# Claims of processes that this one only reads about


def claim(folder, age=0.0, name=".lock-0", **changes):
    """Write the claim of another process, which is of this host unless `machine` is changed."""
    content = {
        "host": "there", "pid": os.getpid(), "since": "2026-01-02T03:04:05+00:00",
        "machine": run_lock._machine(), "started": run_lock._start_time(os.getpid()), **changes,
    }  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(content))
    os.utime(path, (time.time() - age,) * 2)
    return path


def acquire(folder):
    lock = RunLock(folder, print)
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("changes", [{"started": "1"}, {"pid": 2**22 + 1}], ids=["reused", "gone"])
def test_a_dead_process_of_this_host_is_ignored_although_it_was_just_there(tmp_path, changes):
    path = claim(tmp_path, **changes)
    acquire(tmp_path)
    assert not path.exists()


@pytest.fixture
def short_tie(monkeypatch):
    monkeypatch.setattr(run_lock, "_TIE", 0.2)


@pytest.mark.usefixtures("short_tie")
def test_a_live_process_of_this_host_is_not_ignored_although_it_was_stopped_for_long(tmp_path):
    claim(tmp_path, age=1e6)
    with pytest.raises(sf.ConfigError, match=r"process \d+ on there since 2026-01-02T03:04:05"):
        acquire(tmp_path)
    assert len(claims(tmp_path)) == 1


def test_a_process_of_another_host_without_a_sign_of_life_for_long_is_ignored(tmp_path):
    path = claim(tmp_path, age=100, machine="other")
    began = time.monotonic()
    acquire(tmp_path)
    assert time.monotonic() - began < 5
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x"}', '{"machine": 3}', None])
def test_a_process_that_may_live_is_watched(tmp_path, monkeypatch, text):
    monkeypatch.setattr(run_lock, "_STALE", 0.5)
    path = claim(tmp_path, machine="other")
    if text is not None:
        path.write_text(text)
    began = time.monotonic()
    acquire(tmp_path)
    assert 0.3 < time.monotonic() - began < 5


@pytest.mark.parametrize("age", [-1e6, -1.0])
def test_a_dead_process_whose_time_is_in_the_future_is_watched_no_longer(
    tmp_path, monkeypatch, age
):
    monkeypatch.setattr(run_lock, "_STALE", 0.5)
    path = claim(tmp_path, age=age, machine="other")
    began = time.monotonic()
    acquire(tmp_path)
    assert 0.3 < time.monotonic() - began < 5
    assert not path.exists()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_does_not_prolong_the_watch(tmp_path, monkeypatch, jump):
    monkeypatch.setattr(run_lock, "_STALE", 0.5)
    claim(tmp_path, machine="other")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    began = time.monotonic()
    acquire(tmp_path)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"pid": ' + "9" * 5000 + "}", '{"pid": ' + "9" * 200 + "}", b"\xed\xa0\x80"],
    ids=["deep", "too many digits", "no pid", "not UTF-8"],
)
def test_a_damaged_claim_is_watched(tmp_path, monkeypatch, text):
    monkeypatch.setattr(run_lock, "_STALE", 0.5)
    path = claim(tmp_path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.monotonic()
    acquire(tmp_path)
    assert 0.3 < time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "link to nothing"])
def test_what_is_not_a_file_is_no_claim(tmp_path, monkeypatch, kind):
    path = tmp_path / ".lock-0"
    make = {
        "pipe": lambda: os.mkfifo(path),
        "socket": lambda: bind(tmp_path, monkeypatch, path.name),
        "directory": path.mkdir,
        "link to nothing": lambda: path.symlink_to("nothing"),
    }
    make[kind]()
    thread = threading.Thread(target=acquire, args=(tmp_path,), daemon=True)
    thread.start()
    thread.join(3)
    assert not thread.is_alive()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def bind(folder, monkeypatch, name):
    monkeypatch.chdir(folder)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)


def test_a_directory_has_one_lock_by_all_of_its_names(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_TIE", 0.2)
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.symlink_to(folder)
    for first, second in ((folder, other), (other, folder)):
        lock = RunLock(first, print)
        lock.acquire()
        with pytest.raises(sf.ConfigError, match="expected a directory that no other run uses"):
            acquire(second)
        lock.release()
    assert not claims(folder)


@pytest.mark.usefixtures("short_tie")
@pytest.mark.parametrize("name", [".lock-0", ".lock-z"])
def test_a_process_of_another_host_that_gives_a_sign_of_life_has_the_directory(tmp_path, name):
    path = claim(tmp_path, machine="other", name=name)
    threading.Timer(0.3, os.utime, (path,)).start()
    with pytest.raises(sf.ConfigError, match=f"on there since .*{name}"):
        acquire(tmp_path)
    assert claims(tmp_path) == [path]


def test_the_lock_shows_life_and_stops_the_run_if_its_claim_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT", 0.05)
    stops = []
    lock = RunLock(tmp_path, stops.append)
    lock.acquire()
    (path,) = claims(tmp_path)
    first = path.stat().st_mtime_ns
    wait_for(lambda: path.stat().st_mtime_ns > first)
    assert not stops
    path.unlink()
    wait_for(lambda: stops)
    assert [stop.kind for stop in stops] == ["error"]
    lock.release()


def test_a_run_whose_claim_is_deleted_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT", 0.05)
    batch = {"x": np.ones(4, np.float32)}

    def batches():
        yield batch
        for path in claims(tmp_path):
            path.unlink()
        while True:
            time.sleep(0.01)
            yield batch

    result = sf.fit(small.STEP, small.start(), batches(), steps=100_000, run_dir=tmp_path)
    assert result.stop_reason.kind == "error"
    assert "another run may use " in result.stop_reason.message
    assert result.steps < 1000


def test_a_forked_child_does_not_release_it(tmp_path, monkeypatch):
    lock = RunLock(tmp_path, print)
    lock.acquire()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        lock.release()
    assert claims(tmp_path)
    lock.release()
    lock.release()
    assert not claims(tmp_path)


def test_one_of_many_that_begin_at_once_has_it(tmp_path, monkeypatch, count):
    monkeypatch.setattr(run_lock, "_TIE", 0.5)
    together, held, wins, errors = threading.Barrier(6), [], [], []

    def compete():
        lock = RunLock(tmp_path, print)
        together.wait()
        try:
            lock.acquire()
        except sf.ConfigError as error:
            errors.append(error)
            return
        held.append(lock)
        wins.append(len(held))
        time.sleep(0.3)
        held.remove(lock)
        lock.release()

    for number in range(count(3, 12)):
        claim(tmp_path, started="1")  # of a dead run, which all of them may delete
        threads = [threading.Thread(target=compete) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(wins) == 1, "two had it at once"
        assert len(wins) > number, "none had it"
        assert not claims(tmp_path)
    assert errors


def test_a_full_or_forbidden_directory_is_an_error_of_run_dir(tmp_path):
    with pytest.raises(sf.ConfigError, match=r"run_dir: expected a directory to write in"):
        acquire(tmp_path / "missing")
