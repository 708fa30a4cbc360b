import json
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.hooks.base import Event
from stepfold.loop.writers.base import Writer, console_writer
from stepfold.loop.writers.combinators import async_writer, log_to, multi_writer
from stepfold.loop.writers.jsonl import jsonl_writer


class Recorder(Writer):
    """Record calls while `gate` is open, and raise in given methods or at given steps."""

    def __init__(self, fails=()):
        self.calls, self.fails, self.threads = [], fails, set()
        self.gate = threading.Event()
        self.gate.set()

    def _call(self, name, *arguments):
        assert self.gate.wait(30)
        self.threads.add(threading.current_thread())
        if name in self.fails or (arguments and arguments[0] in self.fails):
            raise OSError(f"{name} fails at {arguments[0] if arguments else 'the end'}")
        self.calls.append((name, *arguments))

    def write_scalars(self, step, scalars):
        self._call("scalars", step, scalars)

    def write_texts(self, step, texts):
        self._call("texts", step, texts)

    def write_histograms(self, step, arrays, num_buckets=None):
        self._call("histograms", step, arrays, num_buckets)

    def write_images(self, step, images):
        self._call("images", step, images)

    def write_hparams(self, hparams):
        self._call("hparams", "", hparams)

    def resume(self, step):
        self._call("resume", step)

    def flush(self):
        self._call("flush")

    def close(self):
        self._call("close")


class Foreign:
    """A writer like clu's: the same methods, but no `resume` and no base class of stepfold."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("write_") or name in ("flush", "close"):
            return lambda *arguments: self.calls.append((name, *arguments))
        raise AttributeError(name)


def write_all(writer):
    array = np.ones(3)
    writer.write_scalars(1, {"a": 1})
    writer.write_texts(2, {"a": "b"})
    writer.write_histograms(3, {"a": array})
    writer.write_histograms(3, {"a": array}, {"a": 5})
    writer.write_images(4, {"a": np.ones((2, 2, 1))})
    writer.write_hparams({"lr": 1})
    writer.resume(5)
    writer.flush()
    writer.close()


ALL_CALLS = [
    *("scalars", "texts", "histograms", "histograms", "images", "hparams"),
    *("resume", "flush", "close"),
]


def test_multi_writer_forwards_all_calls_in_order():
    first, second = Recorder(), Recorder()
    write_all(multi_writer(first, second))
    assert [name for name, *_ in first.calls] == ALL_CALLS
    assert str(first.calls) == str(second.calls)


@pytest.mark.parametrize("method", ["write_scalars", "flush", "close", "resume"])
def test_multi_writer_calls_the_others_when_one_raises(method):
    name = method.removeprefix("write_")
    writers = [Recorder(), Recorder(fails=[name]), Recorder()]
    arguments = {"write_scalars": (1, {"a": 1}), "resume": (3,)}.get(method, ())
    with pytest.raises(OSError, match=f"{name} fails"):
        getattr(multi_writer(*writers), method)(*arguments)
    assert [each.calls for each in writers] == [[(name, *arguments)], [], [(name, *arguments)]]


def test_objects_that_are_not_writers_are_refused():
    with pytest.raises(
        sf.ConfigError,
        match=r"writers\[1\]: expected a writer, such as jsonl_writer\(path\), got str 'a', "
        "which has no write_scalars, write_texts",
    ):
        multi_writer(Recorder(), "a")
    with pytest.raises(sf.ConfigError, match="writer: expected a writer, .* a class; call it"):
        async_writer(Recorder)
    with pytest.raises(sf.ConfigError, match="writer: expected a writer, .* got str 'a.csv'"):
        async_writer("a.csv")


def test_a_writer_like_clus_can_be_combined():
    foreign = Foreign()
    write_all(async_writer(multi_writer(foreign, console_writer())))
    assert [name.removeprefix("write_") for name, *_ in foreign.calls] == [
        name for name in ALL_CALLS if name != "resume"
    ]


def test_calls_arrive_in_order_in_another_thread():
    recorder = Recorder()
    writer = async_writer(recorder)
    expected = []
    for step in range(300):
        writer.write_scalars(step, {"a": step})
        writer.write_texts(step, {"b": str(step)})
        expected += [("scalars", step, {"a": step}), ("texts", step, {"b": str(step)})]
    writer.write_hparams({"lr": 1})
    writer.flush()
    assert recorder.calls == [*expected, ("hparams", "", {"lr": 1}), ("flush",)]
    assert threading.main_thread() not in recorder.threads
    writer.close()
    assert recorder.calls[-1] == ("close",)
    assert not [each for each in threading.enumerate() if each.name == "stepfold-write"]


def test_values_are_those_of_the_time_of_the_call():
    recorder = Recorder()
    recorder.gate.clear()
    writer = async_writer(recorder)
    value, array, image = np.array(1.0), np.arange(3), np.zeros((2, 2, 1))
    scalars, device = {"a": value}, jnp.ones(())
    writer.write_scalars(1, scalars | {"d": device})
    writer.write_histograms(1, {"h": array}, {"h": 2})
    writer.write_images(1, {"i": image})
    value[...], array[:], image[:] = 7, 7, 7
    scalars["b"] = 3
    recorder.gate.set()
    writer.close()
    (_, _, written), (_, _, histogram, buckets), (_, _, images), _ = recorder.calls
    assert written["a"] == 1
    assert written["d"] is device
    assert "b" not in written
    assert histogram["h"].tolist() == [0, 1, 2]
    assert buckets == {"h": 2}
    assert images["i"].sum() == 0


@pytest.mark.parametrize("call", ["flush", "close"])
def test_background_errors_are_raised_once_by_a_later_call(call):
    recorder = Recorder(fails=[2, 3])
    recorder.gate.clear()
    writer = async_writer(recorder)
    for step in (1, 2, 3, 4):
        writer.write_scalars(step, {})
    recorder.gate.set()
    with pytest.raises(OSError, match="scalars fails at 2") as caught:
        getattr(writer, call)()
    assert [note[:47] for note in caught.value.__notes__] == [
        "in the background, in write_scalars of step 2: ",
        "and after it OSError: scalars fails at 3",
    ]
    writer.close()
    assert [each[1] for each in recorder.calls if each[0] == "scalars"] == [1, 4]
    assert recorder.calls[-1] == ("close",)


def test_only_a_full_queue_blocks():
    recorder = Recorder()
    recorder.gate.clear()
    writer = async_writer(recorder, depth=8)
    done = threading.Event()

    def loop():
        for step in range(8):
            writer.write_scalars(step, {})
        done.set()
        writer.write_scalars(8, {})

    thread = threading.Thread(target=loop)
    thread.start()
    assert done.wait(10)
    thread.join(0.2)
    assert thread.is_alive()
    recorder.gate.set()
    thread.join(10)
    writer.close()
    assert [call[1] for call in recorder.calls[:-1]] == list(range(9))


def test_flush_and_close_may_be_called_at_once_by_several_threads():
    for _ in range(20):
        recorder = Recorder()
        writer = async_writer(recorder)
        writer.write_scalars(1, {})
        threads = [threading.Thread(target=each) for each in (writer.flush, writer.close) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        writer.close()
        assert [call for call in recorder.calls if call[0] == "scalars"] == [("scalars", 1, {})]


def test_rows_queued_before_a_flush_are_durable_when_it_returns(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "a.jsonl", [], os.fsync

    def sync(file):
        fsync(file)
        synced.append(path.read_bytes().count(b"\n"))

    class Slow(Recorder):
        def write_scalars(self, step, scalars):
            time.sleep(0.001)

    monkeypatch.setattr(os, "fsync", sync)
    writer = async_writer(multi_writer(Slow(), jsonl_writer(path)))
    stop, last = threading.Event(), [-1]

    def train():
        step = 0
        while not stop.is_set():
            writer.write_scalars(step, {"a": step})
            last[0], step = step, step + 1
            time.sleep(0.001)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(5):
        time.sleep(0.02)
        queued = last[0]
        writer.flush()
        assert synced[-1] > queued
    stop.set()
    thread.join()
    writer.close()


def write_slowly(fails, bug):
    """Write from a thread that takes longer than the script."""
    import time

    from stepfold.loop.writers.base import Writer
    from stepfold.loop.writers.combinators import async_writer

    class Slow(Writer):
        def write_scalars(self, step, scalars):
            time.sleep(0.01)
            if step in fails:
                raise OSError("the disk is full")
            print(step)

        def close(self):
            print("closed")

    writer = async_writer(Slow())
    for step in range(20):
        writer.write_scalars(step, {"a": step})
    if bug:
        raise KeyError(bug)


def test_a_process_that_ends_without_close_writes_all_that_is_queued(forks):
    end = forks.run(write_slowly, [], None)
    assert end.output.split() == [*map(str, range(20)), "closed"]
    assert (end.code, end.errors) == (0, "")


@pytest.mark.parametrize("writes", [False, True])
def test_a_writer_may_be_closed_while_the_interpreter_exits(forks, tmp_path, writes):
    def close_at_exit(path, writes):
        import atexit

        import stepfold as sf

        writer = sf.async_writer(sf.jsonl_writer(path))
        atexit.register(writer.close)
        if writes:
            writer.write_scalars(1, {"loss": 0.5})

    path = tmp_path / "metrics.jsonl"
    end = forks.run(close_at_exit, str(path), writes)
    assert (end.code, end.errors) == (0, "")
    assert path.exists() == writes


class Memory:
    """A writer that keeps rows by step, like a file, and refuses steps that decrease."""

    def __init__(self):
        self.rows, self.calls = {}, []

    def write_scalars(self, step, scalars):
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(scalars)

    def resume(self, step):
        self.calls.append(("resume", step))
        self.rows = {at: row for at, row in self.rows.items() if at <= step}

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def train(step, total=None):
    return Event(step, total, {"train/loss": float(step)}, None)


def evaluation(step):
    return Event(step, None, {"eval/loss": float(step)}, None, kind="eval")


def test_log_to_writes_every_event_and_closes_the_writer():
    writer = Memory()
    hook = log_to(writer)
    hook.open(0, None)
    for event in (train(10), train(20), evaluation(20)):
        assert hook(event) is None
    hook.close()
    assert writer.rows == {
        10: {"train/loss": 10.0},
        20: {"train/loss": 20.0, "eval/loss": 20.0},
    }
    assert writer.calls == [("resume", 0), "flush", "close"]


def test_every_thins_out_train_metrics_but_not_evaluations_or_the_last_step():
    writer = Memory()
    hook = log_to(writer, every=25)
    for step in range(10, 80, 10):
        hook(train(step, total=70))
        hook(evaluation(step))
    assert [step for step, row in writer.rows.items() if "train/loss" in row] == [30, 50, 70]
    assert [step for step, row in writer.rows.items() if "eval/loss" in row] == [*range(10, 80, 10)]


def test_log_to_needs_only_write_scalars():
    class Least:
        def write_scalars(self, step, scalars):
            steps.append(step)

    steps = []
    hook = log_to(Least())
    hook.open(0, None)
    hook(train(10))
    hook.flush()
    hook.close()
    assert steps == [10]


@pytest.mark.parametrize("call", [lambda hook: hook(train(20)), lambda hook: hook.close()])
def test_an_error_of_a_flush_is_raised_later(call):
    class Full(Memory):
        full = True

        def flush(self):
            if self.full:
                raise OSError("no space left")

    writer = Full()
    hook = log_to(writer)
    hook.flush()  # as in the background, before a checkpoint commits
    hook.flush()
    writer.full = False
    with pytest.raises(OSError, match="no space left") as caught:
        call(hook)
    assert caught.value.__notes__ == ["and after it OSError: no space left"]
    assert writer.rows == ({20: {"train/loss": 20.0}} if writer.rows else {})
    hook.close()


def test_a_flush_does_not_stall_the_loop_of_an_async_writer():
    recorder = Recorder()
    hook = log_to(async_writer(recorder))
    recorder.gate.clear()
    hook(train(10))
    flushing = threading.Thread(target=hook.flush)
    flushing.start()
    hook(train(20))  # returns although the writer is stuck
    flushing.join(0.1)
    assert flushing.is_alive()
    recorder.gate.set()
    flushing.join(10)
    hook.close()
    assert [call[:2] for call in recorder.calls if call[0] == "scalars"] == [
        ("scalars", 10),
        ("scalars", 20),
    ]


def test_other_writers_are_not_called_by_two_threads_at_once():
    class Busy(Memory):
        busy, clashes = False, 0

        def _call(self):
            self.clashes += self.busy
            self.busy = True
            time.sleep(0.001)
            self.busy = False

        def write_scalars(self, step, scalars):
            self._call()

        def flush(self):
            self._call()

    writer = Busy()
    hook = log_to(writer)
    flushing = threading.Thread(target=lambda: [hook.flush() for _ in range(50)])
    flushing.start()
    for step in range(50):
        hook(train(step))
    flushing.join()
    assert writer.clashes == 0


@pytest.mark.parametrize(("everywhere", "rows"), [(False, []), (True, [10])])
def test_the_first_process_writes_or_all_do(monkeypatch, everywhere, rows):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Memory()
    hook = log_to(writer, everywhere=everywhere)
    hook.open(0, None)
    hook(train(10))
    hook.flush()
    hook.close()
    assert list(writer.rows) == rows
    assert bool(writer.calls) is everywhere


@pytest.mark.parametrize("wrong", [print, "metrics.csv", Memory])
def test_log_to_refuses_objects_that_are_not_writers(wrong):
    message = r"log_to: expected a writer with write_scalars\(step, .* sf.jsonl_writer\(path\)"
    with pytest.raises(sf.ConfigError, match=message):
        log_to(wrong)


