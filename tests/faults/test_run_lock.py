"""One run at a time writes to a run_dir, and a killed one can be resumed at once."""

import json
import os
import signal
import socket
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tests import small

import stepfold as sf
from stepfold.checkpoint import claims as run_lock
from stepfold.runs.files import RunLock


def trains(folder, seconds, steps):
    """Train in a directory, and write a line once the run has it."""
    run_lock._STALE = 1000.0  # none is watched for so long

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
    except sf.errors.ConfigError as error:
        print(error)
        sys.exit(3)


def wait_for(found, seconds=60):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def claims(folder):
    return sorted(folder.glob(".lock-*"))


def test_a_second_run_is_refused_with_the_holder(forks, tmp_path):
    first = forks.start(trains, str(tmp_path), 0.05, 1000)
    wait_for(lambda: (tmp_path / "run.json").exists())
    end = forks.run(trains, str(tmp_path), 0.0, 2)
    assert end.code == 3, end
    assert end.output.startswith(
        f"run_dir: expected a directory that no other run uses, got {tmp_path}"
    )
    assert f"process {first.pid} on {socket.gethostname()} since 20" in end.output
    first.kill(signal.SIGTERM)
    assert first.wait().code == 143
    assert len(json.loads((tmp_path / "run.json").read_bytes())["attempts"]) == 1
    assert not claims(tmp_path)


def test_a_killed_run_is_resumed_at_once(forks, tmp_path):
    """It is not watched for the time in which another host would show life."""
    first = forks.start(trains, str(tmp_path), 0.05, 1000)
    wait_for(lambda: (tmp_path / "run.json").exists())
    first.kill()
    end = forks.run(trains, str(tmp_path), 0.0, 2)  # the first is still a zombie
    assert (end.code, end.output) == (0, "opened\nall 2 steps were done\n"), end
    assert first.wait().code == -signal.SIGKILL
    assert not claims(tmp_path)


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


class Clock:
    """A clock that runs only while something sleeps."""

    def __init__(self):
        self.now, self.on_sleep = 0.0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_lock, "time", clock)
    return clock


def acquire(folder):
    lock = RunLock(folder, print)
    lock.acquire()
    lock.release()


@pytest.mark.parametrize(
    "changes",
    [{"started": "1"}, {"pid": 2**22 + 1}, {"machine": "other", "age": 100}],
    ids=["reused", "gone", "without a sign of life for long"],
)
def test_a_dead_process_is_ignored_at_once(tmp_path, clock, changes):
    """On this host it is known to be dead although it was just there."""
    path = claim(tmp_path, **changes)
    acquire(tmp_path)
    assert clock.now == 0
    assert not path.exists()


def test_a_live_process_of_this_host_is_not_ignored_although_it_was_stopped_for_long(
    tmp_path, clock
):
    claim(tmp_path, age=1e6)
    with pytest.raises(
        sf.errors.ConfigError, match=r"process \d+ on there since 2026-01-02T03:04:05"
    ):
        acquire(tmp_path)
    assert len(claims(tmp_path)) == 1


DAMAGED = {
    "empty": "", "a list": "[]", "a pid of text": '{"pid": "x"}', "no text": '{"machine": 3}',
    "deep": "[" * 100_000, "too many digits": '{"pid": ' + "9" * 5000 + "}",
    "no pid": '{"pid": ' + "9" * 200 + "}", "not UTF-8": b"\xed\xa0\x80",
}  # fmt: skip


@pytest.mark.parametrize("text", [None, *DAMAGED])
def test_a_process_that_may_live_is_watched(tmp_path, clock, text):
    path = claim(tmp_path, machine="other")
    if text is not None:
        content = DAMAGED[text]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    acquire(tmp_path)
    assert clock.now == pytest.approx(60, abs=0.2)
    assert not path.exists()


@pytest.mark.parametrize("age", [-1e6, -1.0])
def test_a_dead_process_whose_time_is_in_the_future_is_watched_no_longer(tmp_path, clock, age):
    path = claim(tmp_path, age=age, machine="other")
    acquire(tmp_path)
    assert clock.now == pytest.approx(60, abs=0.2)
    assert not path.exists()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_does_not_prolong_the_watch(tmp_path, monkeypatch, clock, jump):
    claim(tmp_path, machine="other")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    acquire(tmp_path)
    assert clock.now < 61


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
    thread.join(60)
    assert not thread.is_alive()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def bind(folder, monkeypatch, name):
    monkeypatch.chdir(folder)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)


def test_a_directory_has_one_lock_by_all_of_its_names(tmp_path, clock):
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.symlink_to(folder)
    for first, second in ((folder, other), (other, folder)):
        lock = RunLock(first, print)
        lock.acquire()
        with pytest.raises(
            sf.errors.ConfigError, match="expected a directory that no other run uses"
        ):
            acquire(second)
        lock.release()
    assert not claims(folder)


@pytest.mark.parametrize("name", [".lock-0", ".lock-z"])
def test_a_process_of_another_host_that_gives_a_sign_of_life_has_the_directory(
    tmp_path, clock, name
):
    path = claim(tmp_path, machine="other", name=name)
    clock.on_sleep = lambda: os.utime(path) if clock.now > 30 else None
    with pytest.raises(sf.errors.ConfigError, match=f"on there since .*{name}"):
        acquire(tmp_path)
    assert claims(tmp_path) == [path]
    assert clock.now < 40


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
        except sf.errors.ConfigError as error:
            errors.append(error)
            return
        held.append(lock)
        wins.append(len(held))
        time.sleep(0.3)
        held.remove(lock)
        lock.release()

    for number in range(count(2, 12)):
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
    with pytest.raises(sf.errors.ConfigError, match=r"run_dir: expected a directory to write in"):
        acquire(tmp_path / "missing")
