"""Worker processes change where a batch is made, and nothing else, and leave nothing behind."""

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.data import shared_memory
from stepfold.data.worker_pool import WorkerPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DATA = {"x": np.arange(400, dtype=np.float32).reshape(100, 4), "y": np.arange(100)}


def noisy(width=10, pause=0.0):
    """Make a transform that other processes cannot import."""

    def transform(example, rng):
        time.sleep(pause)
        return {**example, "noise": rng.normal(size=width), "pid": np.int64(os.getpid())}

    return transform


def make(width=10, pause=0.0, **options):
    return sf.batches(DATA, 8, seed=0, transform=noisy(width, pause), **options)


def mixed():
    parts = {"a": ({"x": np.arange(50)}, 1), "b": ({"x": -np.arange(50)}, 1)}
    return sf.batches(sf.mix(parts, seed=1), 8, transform=lambda e: {"x": e["x"] * 2})


def bits(batches):
    """Return all that batches hold but the processes that made them."""
    return [
        [(name, leaf.dtype, leaf.tobytes()) for name, leaf in batch.items() if name != "pid"]
        for batch in batches
    ]


def take(batches, count):
    return list(itertools.islice(batches, count))


def processes():
    """Map all processes to their parents and their command lines; zombies are not among them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (path / "cmdline").read_text()
        except OSError:
            continue
        if state != "Z":
            found[int(path.name)] = int(parent), words
    return found


def family(root=None):
    """List the nursery of a process and its workers."""
    root, all_of_them = root or os.getpid(), processes()
    nurseries = [
        pid
        for pid, (parent, words) in all_of_them.items()
        if parent == root and "run_nursery" in words
    ]
    return nurseries, [pid for pid, (parent, _) in all_of_them.items() if parent in nurseries]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that a test leaves no processes and no open files."""
    jax.devices()  # opens files
    if sys.platform != "linux":
        yield
        return
    before = descriptors()
    gc.freeze()  # so that a collection after each test only searches what the test made
    yield
    gc.collect()
    assert family() == ([], [])
    assert descriptors() <= before


# Without processes


@pytest.mark.parametrize("count", [-1, 1.5, True, "two"])
def test_a_count_that_is_no_count_is_refused(count):
    with pytest.raises(
        sf.errors.ConfigError, match="count: expected an integer of at least 0, got"
    ):
        sf.workers(make(), count)


def test_ahead_is_at_least_one_and_not_too_large():
    with pytest.raises(
        sf.errors.ConfigError, match="ahead: expected an integer of at least 1, got 0"
    ):
        sf.workers(make(), 2, ahead=0)
    with pytest.raises(
        sf.errors.ConfigError, match="ahead: expected at most 60 .* got 61; give a larger"
    ):
        sf.workers(make(), 2, ahead=61)


@pytest.mark.parametrize("batches", [[1, 2], iter([1]), range(3), DATA])
def test_batches_without_random_access_are_refused(batches):
    with pytest.raises(
        sf.errors.DataError, match="workers: expected sf.batches, or an iterator with"
    ):
        sf.workers(batches, 2)


def test_prefetched_batches_and_workers_of_workers_are_refused():
    for wrapped in (sf.prefetch(make()), sf.workers(make(), 0)):
        with pytest.raises(sf.errors.DataError, match=r"sf.prefetch\(sf.workers\(batches, 2\)\)"):
            sf.workers(wrapped, 2)


def test_batches_that_depend_on_the_run_are_refused():
    class Actor:
        def read_state(self, state):
            self.state = state

    with pytest.raises(sf.errors.DataError, match="do not depend on the state of the run"):
        sf.workers(Actor(), 2)


def test_systems_without_shared_descriptors_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert len(sf.workers(make(epochs=1, remainder="pad"), 0)) == 13
    with pytest.raises(
        sf.errors.ConfigError, match="expected Linux or macOS, got win32; give count=0"
    ):
        sf.workers(make(), 2)


def test_what_only_cloudpickle_can_send_is_refused_without_it(monkeypatch):
    monkeypatch.setattr(shared_memory, "find_spec", lambda name: None)
    with pytest.raises(sf.errors.ConfigError, match=r"pip install 'stepfold\[workers\]'"):
        next(sf.workers(make(), 2))


def test_it_has_what_its_batches_have():
    ours, plain = sf.workers(make(epochs=2, remainder="pad"), 0), make(epochs=2, remainder="pad")
    for name in ("endless", "steps_per_epoch", "batch_sizes", "skipped"):
        assert getattr(ours, name) == getattr(plain, name)
    assert ours.epoch_ends.end(2) == 26
    assert len(ours) == len(plain)
    assert ours.batch_index(3) == 3
    assert ours
    assert ours.state_at(5) == plain.state_at(5)
    assert bits([ours.at(5)]) == bits([plain.at(5)])
    stream = sf.workers(sf.batches(lambda: iter(range(9)), 2), 0)
    assert stream.endless
    assert [hasattr(stream, name) for name in ("without", "at", "state_at", "reweight")] == [
        *(True, False, False, False)
    ]
    assert not hasattr(stream, "read_state")


def test_an_error_of_the_transform_leaves_the_position_and_so_does_the_end():
    def fails(example):
        if example == 2 and fail:
            raise ValueError("here")
        return example

    for source in (range(4), lambda: iter(range(4))):
        fail = [True]
        stream = sf.workers(sf.batches(source, 2, epochs=1, transform=fails), 0)
        assert next(stream).tolist() == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="here") as caught:
                next(stream)
            assert any("batch of step 1" in note for note in caught.value.__notes__)
            assert stream.get_state()["step"] == 1
        fail.clear()
        assert [batch.tolist() for batch in stream] == [[2, 3]]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)
            assert stream.get_state()["step"] == 2


def test_integers_that_jax_would_wrap_around_are_warned_of_once():
    for source in ([2**40, 2**41], lambda: iter([2**40, 2**41])):
        stream = sf.workers(sf.batches(source, 1), 0)
        with pytest.warns(UserWarning, match="batch: expected integers that fit int32"):
            next(stream)
        next(stream)


# With processes


@pytest.mark.full
def test_other_processes_make_the_same_batches_and_go_on_from_any_position():
    want = bits(take(make(3000), 12))
    with sf.workers(make(3000), 2) as stream:
        batches = take(stream, 6)
        assert bits(batches) == want[:6]
        pids = {int(pid) for batch in batches for pid in batch["pid"]}
        assert len(pids) == 2
        assert os.getpid() not in pids
        state = stream.get_state()
        assert state == make(start=6).get_state()
        stream.set_state(stream.state_at(2))
        assert bits(take(stream, 3)) == want[2:5]
        stream.set_state(state)
        assert bits(take(stream, 2)) == want[6:8]
        with sf.prefetch(stream) as ahead:
            assert bits(take(ahead, 2)) == want[8:10]
            assert ahead.get_state()["step"] == 10
            skipping = ahead.without([(10, 11)])
            assert bits(take(skipping, 1)) == want[11:12]
            skipping.close()
            skipping._iterator.close()


@pytest.mark.full
def test_changed_batches_take_over_the_processes():
    plain = make(epochs=3, remainder="drop").without([(2, 4)]).without([(6, 7)])
    with sf.workers(make(epochs=3, remainder="drop"), 2) as stream:
        assert bits(take(stream, 1)) == bits(take(plain, 1))
        before = family()
        skipping = stream.without([(2, 4)]).without([(6, 7)])
        assert skipping.skipped == plain.skipped
        assert len(skipping) == len(plain)
        assert bits(take(skipping, 3)) == bits(take(plain, 3))
        assert family() == before
        state = skipping.get_state()
        skipping.close()  # others start, which get the changed batches
        assert skipping.get_state() == state
        assert bits(skipping) == bits(plain)


@pytest.mark.full
def test_weights_of_a_mixture_change_in_the_workers():
    plain = mixed()
    with sf.workers(mixed(), 2) as stream:
        for _ in range(2):
            assert bits(take(stream, 5)) == bits(take(plain, 5))
            for batches in (plain, stream):
                batches.reweight({"a": 3, "b": 1})
        assert bits(take(stream, 6)) == bits(take(plain, 6))
        assert stream.get_state() == plain.get_state()


@linux
def test_a_worker_and_a_nursery_that_are_killed_are_replaced():
    want = bits(take(make(3000), 24))
    with sf.workers(make(3000), 2) as stream:
        got = take(stream, 4)
        for step, which in ((4, "worker"), (10, "nursery"), (16, "all")):
            nurseries, made = family()
            victims = {"worker": made[:1], "nursery": nurseries, "all": [*made, *nurseries]}
            for pid in victims[which]:
                os.kill(pid, signal.SIGKILL)
            got += take(stream, 6)
            assert len(got) == step + 6
        assert bits(got) == want[:22]


def test_errors_and_deaths_are_raised_at_their_batch_and_warnings_are_shown():
    # In a function, since the processes cannot import this file.
    class OwnError(Exception):
        def __init__(self, first, second):  # cannot be unpickled
            super().__init__(first + second)

    def fails(example):
        if example == 10:
            raise KeyError("ten")
        if example == 14:
            raise OwnError("four", "teen")
        if example == 18:
            os.kill(os.getpid(), signal.SIGSEGV)
        if example == 22:
            import jax.numpy

            return jax.numpy.ones(())
        if example == 26:
            warnings.warn("twenty-six", UserWarning, stacklevel=1)
        if example == 28:
            raise SystemExit(3)
        return example

    with sf.workers(sf.batches(np.arange(40), 2, transform=fails, epochs=1), 2) as stream:
        assert take(stream, 5)[-1].tolist() == [8, 9]
        for _ in range(2):  # the same batch again
            with pytest.raises(KeyError, match="ten") as caught:
                next(stream)
            assert any("index 10" in note for note in caught.value.__notes__)
            text = str(caught.value.__cause__)
            assert "in fails" in text
            assert __file__ in text
            assert 'raise KeyError("ten")' in text
        expected = {
            7: (sf.errors.DataError, "batch of step 7 raised .*OwnError: fourteen"),
            9: (
                sf.errors.DataError,
                "3 processes died while they made the batch of step 9, .* by SIGSEGV",
            ),
            11: (sf.errors.DataError, "workers: the batch of step 11 uses jax, which"),
            13: (UserWarning, "twenty-six"),
            14: (SystemExit, "3"),
        }
        for step in range(6, 20):
            stream.set_state(stream.state_at(step))
            if step in expected:
                with pytest.raises(expected[step][0], match=expected[step][1]):
                    next(stream)
            else:
                assert next(stream).tolist() == [2 * step, 2 * step + 1]
        with pytest.raises(StopIteration):
            next(stream)
        assert stream.get_state()["step"] == 20


class Counter:
    """A stream that knows its position, and reads in the process that iterates."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 30:
            raise StopIteration
        if self.next == 25 and BROKEN:
            BROKEN.clear()
            raise OSError("the disk")
        self.next += 1
        return {"x": np.full(2000, self.next - 1), "reader": np.int64(os.getpid())}

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


BROKEN = [1]


def test_a_stream_is_read_here_and_transformed_there():
    def transform(example, rng):
        return {**example, "noise": rng.normal(size=3), "pid": np.int64(os.getpid())}

    read = partial(sf.batches, Counter, 4, epochs=1, remainder="keep", seed=0, transform=transform)
    BROKEN[:] = []
    want = bits(read())
    with sf.workers(read(), 2) as stream:
        BROKEN[:] = [1]
        batches = take(stream, 3)
        assert bits(batches) == want[:3]
        assert set(batches[-1]["reader"].tolist()) == {os.getpid()}
        assert os.getpid() not in batches[-1]["pid"].tolist()
        state = stream.get_state()
        assert bits(take(stream, 3)) == want[3:6]
        with pytest.raises(OSError, match="the disk"):
            next(stream)
        assert bits(stream) == want[6:]
        stream.set_state(state)
        skipping = stream.without([(4, 5)])
        assert bits(skipping) == [want[3], *want[5:]]
        skipping.close()
        resumed = read()
        resumed.set_state(state)
        assert bits(resumed) == want[3:]


@pytest.mark.full
def test_a_run_resumes_with_another_number_of_workers_bit_for_bit(tmp_path):
    tx = optax.sgd(0.01)
    loss = lambda params, batch, key: sf.mean(
        (batch["x"] @ params["w"] - batch["noise"][:, 0]) ** 2
    )
    step = sf.make_train_step(loss, tx)

    def run(folder, count, steps):
        state = sf.init_state({"w": jnp.zeros(4)}, tx, jax.random.key(0))
        noise = lambda e, rng: {**e, "noise": rng.normal(size=2).astype(np.float32)}
        scaled = {"x": DATA["x"] / 400}
        with sf.workers(sf.batches(scaled, 8, seed=0, transform=noise), count) as stream:
            options = {"log_every": 2, "checkpoints": sf.Checkpoints(every=3)}
            return sf.fit(step, state, stream, steps=steps, run_dir=folder, **options)

    whole = run(tmp_path / "whole", 0, 12)
    run(tmp_path / "parts", 2, 6)
    parts = run(tmp_path / "parts", 0, 12)
    assert parts.state.params["w"].tobytes() == whole.state.params["w"].tobytes()
    assert np.array_equal(parts.history["train/loss"], whole.history["train/loss"])


# Proofs that start many processes


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("may_fork", [True, False])
def test_workers_may_be_forked_or_started(count, may_fork):
    start = partial(WorkerPool, may_fork=may_fork)
    stream = sf.workers(make(3000, epochs=1, remainder="pad"), count)
    stream._pool = start(stream._messages.maker(), count, 2)
    with stream:
        assert bits(stream) == bits(make(3000, epochs=1, remainder="pad"))


@pytest.mark.full
@linux
def test_workers_that_were_started_are_replaced_too():
    stream = sf.workers(make(3000), 2)
    stream._pool = WorkerPool(stream._messages.maker(), 2, 2, may_fork=False)
    with stream:
        got = take(stream, 3)
        for _ in range(3):
            os.kill(family()[1][0], signal.SIGKILL)
            got += take(stream, 4)
        assert bits(got) == bits(take(make(3000), 15))


@pytest.mark.full
@linux
def test_random_kills_change_nothing(count):
    rng, steps = np.random.default_rng(0), count(30, 300)
    want = bits(take(make(3000, 0.001), steps))
    with sf.workers(make(3000, 0.001), 3) as stream:
        got = take(stream, 1)
        for _ in range(1, steps):
            nurseries, made = family()
            victims = [*made, *(nurseries if rng.random() < 0.1 else [])]
            if rng.random() < 0.3 and victims:
                os.kill(victims[rng.integers(len(victims))], signal.SIGKILL)
            got += take(stream, 1)
        assert bits(got) == want


@pytest.mark.full
def test_batches_that_cannot_be_loaded_are_an_error_with_the_traceback():
    class Fails:
        def __reduce__(self):
            return eval, ("1 / 0",)

    fails = Fails()
    for _ in range(2):
        stream = sf.workers(sf.batches(range(9), 3, transform=lambda x: (fails, x)[1]), 2)
        with pytest.raises(
            sf.errors.DataError, match="load (.|\n)* got ZeroDivisionError(.|\n)*Traceback"
        ):
            next(stream)


@pytest.mark.full
def test_batches_that_hold_arrays_of_jax_are_refused():
    scale = jnp.ones(())
    stream = sf.workers(sf.batches(range(9), 3, transform=lambda x: x * np.asarray(scale)), 2)
    with pytest.raises(sf.errors.DataError, match="without running jax(.|\n)*give numpy arrays"):
        next(stream)


@pytest.mark.full
@linux
def test_batches_that_kill_every_nursery_are_an_error():
    class Kills:
        def __reduce__(self):
            return eval, ("__import__('os').kill(__import__('os').getpid(), 11)",)

    kills = Kills()
    stream = sf.workers(sf.batches(range(9), 3, transform=lambda x: (kills, x)[1]), 2)
    with pytest.raises(sf.errors.DataError, match="step 0, got 3 that died .* the last by SIGSEGV"):
        next(stream)


@pytest.mark.full
def test_batches_that_are_held_stay_as_they_are():
    want = bits(take(make(3000), 30))
    with sf.workers(make(3000), 2) as stream:
        held = take(stream, 30)
        assert bits(held) == want
        on_device = [jax.device_put(next(stream)["noise"]) for _ in range(20)]
    plain = take(make(3000), 50)[30:]
    for got, batch in zip(on_device, plain, strict=True):
        np.testing.assert_array_equal(got, jnp.asarray(batch["noise"]))
    assert bits(held) == want


@pytest.mark.full
def test_numerical_libraries_have_one_thread():
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    transform = lambda x: [int(os.environ[name]) for name in names]
    with sf.workers(sf.batches(range(9), 3, transform=transform), 1) as stream:
        assert next(stream).tolist() == [[1, 1, 1]] * 3


@pytest.mark.full
@linux
def test_processes_end_when_the_iterator_is_collected():
    stream = sf.workers(make(3000), 2)
    batch = next(stream)
    nurseries, made = family()
    assert len(nurseries) == 1
    assert len(made) == 2
    del stream
    gc.collect()
    assert family() == ([], [])
    assert bits([batch]) == bits(take(make(3000), 1))


SCRIPT = """
import os, sys, time, warnings
import numpy as np, stepfold as sf
from typing import NamedTuple

class Pair(NamedTuple):
    x: object
    worker: object

scale = 3

def helper(x):
    return x * scale

def transform(x):
    if {slow}:
        time.sleep(0.05)
    return Pair(np.full(3000, helper(x)), os.getpid())

stream = sf.workers(sf.batches(range(100), 4, transform=transform), 2)
batch = [next(stream) for _ in range(6)][-1]
assert type(batch) is Pair and batch.x[0, 0] == 60, batch
assert os.getpid() != batch.worker[0]
print("ready", flush=True)
take = lambda count: [next(stream) for _ in range(count)]
warnings.simplefilter("ignore")  # jax warns of forks
{end}
"""
ENDS = {
    "normal": "",
    "exception": "1 / 0",
    "held": "import builtins; builtins.kept = stream, [next(stream) for _ in range(9)]",
    "child": "if os.fork() == 0: stream.close(); os._exit(0)\nos.wait(); take(9)",
    "forked": "child = os.fork()\nwhile True: time.sleep(0.01)",
}


KILLED = ("interrupt", "kill", "terminate", "forked")


# A plain script, without `if __name__ == "__main__"`.
@pytest.mark.full
@linux
@pytest.mark.parametrize("end", [*ENDS, *KILLED[:3]])
def test_no_process_stays_however_a_script_ends(end, tmp_path):
    code = ENDS.get(end, "for _ in stream: time.sleep(0.01)")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=code, slow=end == "kill"))
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        nurseries, made = family(process.pid)
        if end in KILLED:
            assert len(nurseries) == 1
            assert len(made) == 2
            number = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
            send = os.killpg if end == "interrupt" else os.kill
            send(process.pid, number.get(end, signal.SIGKILL))
        process.wait(20)
        until = time.monotonic() + 5
        while (left := {*nurseries, *made} & processes().keys()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not left
    finally:
        with contextlib.suppress(ProcessLookupError):  # the forked child
            os.killpg(process.pid, signal.SIGKILL)
        errors = process.communicate()[1]
    if end in ("exception", "interrupt"):
        assert errors.count("Traceback") == 1
        assert ("KeyboardInterrupt" if end == "interrupt" else "ZeroDivisionError") in errors
    else:
        assert errors == ""


@pytest.mark.full
def test_an_interrupt_leaves_an_iterator_that_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, threading, time
            import numpy as np, stepfold as sf

            def slow(x):
                time.sleep(0.3)
                return x

            stream = sf.workers(sf.batches(range(100), 2, transform=slow), 2)
            got = [next(stream).tolist() for _ in range(3)]
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    got.append(next(stream).tolist())
            except KeyboardInterrupt:
                pass
            got += [next(stream).tolist() for _ in range(3)]
            assert got == [[2 * i, 2 * i + 1] for i in range(len(got))], got
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
