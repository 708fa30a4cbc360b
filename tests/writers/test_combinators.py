"""Several writers are one, a thread writes in the order of the calls, and `log_to` feeds them."""

import json
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import Shown

import stepfold as sf
from stepfold.loop.events import Event
from stepfold.writers.base import Writer, console
from stepfold.writers.combinators import async_writer, log_to, multi_writer
from stepfold.writers.jsonl import jsonl


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


def test_multi_writer_forwards_all_calls_in_order_also_to_writers_like_clus():
    first, second, foreign = Recorder(), Recorder(), Foreign()
    write_all(async_writer(multi_writer(first, second, foreign, console())))
    assert [name for name, *_ in first.calls] == ALL_CALLS
    assert str(first.calls) == str(second.calls)
    assert [name.removeprefix("write_") for name, *_ in foreign.calls] == [
        name for name in ALL_CALLS if name != "resume"
    ]


@pytest.mark.parametrize("method", ["write_scalars", "flush", "close", "resume"])
def test_multi_writer_calls_the_others_when_one_raises(method):
    name = method.removeprefix("write_")
    writers = [Recorder(), Recorder(fails=[name]), Recorder()]
    arguments = {"write_scalars": (1, {"a": 1}), "resume": (3,)}.get(method, ())
    with pytest.raises(OSError, match=f"{name} fails"):
        getattr(multi_writer(*writers), method)(*arguments)
    assert [each.calls for each in writers] == [[(name, *arguments)], [], [(name, *arguments)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: multi_writer(Recorder(), "a"),
            r"writers\[1\]: expected a writer, such as sf.writers.jsonl\(path\), got str 'a', w",
        ),
        (lambda: async_writer(Recorder), "writer: expected a writer, .* a class; call it"),
        (lambda: async_writer(console(), depth=0), "depth: expected an integer of at least"),
        (lambda: log_to("metrics.csv"), r"log_to: expected a writer with write_scalars\(step,"),
        (lambda: log_to(Memory), "log_to: expected a writer with write_scalars"),
        (lambda: log_to(Memory(), every=0), "every: expected an integer of at least 1, got 0"),
    ],
)
def test_objects_that_are_not_writers_are_refused(make, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        make()


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
    value, array, device = np.array(1.0), np.arange(3), jnp.ones(())
    scalars = {"a": value, "d": device}
    writer.write_scalars(1, scalars)
    writer.write_histograms(1, {"h": array}, {"h": 2})
    value[...], array[:] = 7, 7
    scalars["b"] = 3
    recorder.gate.set()
    writer.close()
    (_, _, written), (_, _, histogram, buckets), _ = recorder.calls
    assert (written["a"], written["d"] is device, "b" in written) == (1, True, False)
    assert (histogram["h"].tolist(), buckets) == ([0, 1, 2], {"h": 2})


@pytest.mark.parametrize("call", ["flush", "close", "write_scalars"])
def test_background_errors_are_raised_once_by_a_later_call(call):
    recorder = Recorder(fails=[2, 3])
    recorder.gate.clear()
    writer = async_writer(recorder)
    for step in (1, 2, 3, 4):
        writer.write_scalars(step, {})
    recorder.gate.set()
    if call == "write_scalars":  # which waits for nothing
        time.sleep(0.2)
    arguments = (5, {}) if call == "write_scalars" else ()
    with pytest.raises(OSError, match="scalars fails at 2") as caught:
        getattr(writer, call)(*arguments)
    assert [note[:47] for note in caught.value.__notes__] == [
        "in the background, in write_scalars of step 2: ",
        "and after it OSError: scalars fails at 3",
    ]
    writer.close()
    written = [each[1] for each in recorder.calls if each[0] == "scalars"]
    assert written == [1, 4, *arguments[:1]]
    assert recorder.calls[-1] == ("close",)
    writer.write_scalars(6, {})  # a closed writer can be written to, and closed again
    writer.close()
    assert [call[0] for call in recorder.calls[-2:]] == ["scalars", "close"]


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


def test_rows_queued_before_a_flush_are_durable_when_it_returns(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "a.jsonl", [], os.fsync

    def sync(file):
        fsync(file)
        synced.append(path.read_bytes().count(b"\n"))

    class Slow(Recorder):
        def write_scalars(self, step, scalars):
            time.sleep(0.001)

    monkeypatch.setattr(os, "fsync", sync)
    writer = async_writer(multi_writer(Slow(), jsonl(path)))
    for rows in range(20, 120, 20):
        for step in range(rows - 20, rows):
            writer.write_scalars(step, {"a": step})
        writer.flush()
        assert synced[-1] == rows
    writer.resume(10)  # keeps its place in the queue
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 10, "a": 10}
    writer.close()


def write_slowly(fails, bug):
    """Write from a thread that takes longer than the script."""
    import time

    from stepfold.writers.base import Writer
    from stepfold.writers.combinators import async_writer

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


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_ends_without_close_writes_all_that_is_queued(forks, fails):
    end = forks.run(write_slowly, [19] if fails else [], "a bug" if fails else None)
    assert end.output.split() == [*map(str, range(20 - fails)), "closed"]
    assert (end.code, bool(end.errors)) == (int(fails), fails)
    for error in ("KeyError: 'a bug'", "OSError: the disk is full", "in write_scalars of step 19"):
        assert (error in end.errors) is fails


@pytest.mark.parametrize("writes", [False, True])
def test_a_writer_may_be_closed_while_the_interpreter_exits(forks, tmp_path, writes):
    def close_at_exit(path, writes):
        import atexit

        import stepfold as sf

        writer = sf.writers.async_writer(sf.writers.jsonl(path))
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
    shown = Shown(log_to(writer))
    shown.start()
    for event in (train(10), train(20), evaluation(20)):
        shown(event)
    assert shown.save() == []
    shown.hook.close()
    assert writer.rows == {10: {"train/loss": 10.0}, 20: {"train/loss": 20.0, "eval/loss": 20.0}}
    assert writer.calls == [("resume", 0), "flush", "close"]


def test_every_thins_out_train_metrics_but_not_evaluations_or_the_last_step():
    writer = Memory()
    hook = Shown(log_to(writer, every=25))
    for step in range(10, 80, 10):
        hook(train(step, total=70))
        hook(evaluation(step))
    assert [step for step, row in writer.rows.items() if "train/loss" in row] == [30, 50, 70]
    assert [step for step, row in writer.rows.items() if "eval/loss" in row] == [*range(10, 80, 10)]


def test_every_continues_after_a_resume_unless_it_is_another_number():
    for every, rows in ((25, [50]), (20, [40, 60])):
        shown = Shown(log_to(Memory(), every=25))
        shown.start()
        shown(train(30))
        resumed = Shown(log_to(writer := Memory(), every=every))
        resumed.resume(shown.save(), 30)
        for step in (35, 40, 50, 60):
            resumed(train(step))
        assert [*writer.rows] == rows


def test_the_last_interval_is_written_at_the_end_unless_the_run_went_back_since():
    shown = Shown(log_to(writer := Memory(), every=25))
    shown.start()
    for step in (10, 30):
        shown(train(step))
    saved = shown.save()
    shown(train(40))
    assert shown.hook.end(shown.state)["_skipped"] is None
    assert [*writer.rows] == [30, 40]
    shown.resume(saved, 30)
    shown.hook.end(shown.state)
    assert [*writer.rows] == [30]


@pytest.mark.parametrize(
    "call", [lambda hook: Shown(hook)(train(20)), lambda hook: hook.close()], ids=["write", "close"]
)
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
    writer.full, writer.calls = True, []
    with pytest.raises(OSError, match="no space left"):
        hook.close()
    assert writer.calls == ["close"]  # even so


def test_other_writers_are_not_called_by_two_threads_at_once():
    class Busy(Memory):
        busy, clashes = False, 0

        def write_scalars(self, *_):
            self.clashes += self.busy
            self.busy = True
            time.sleep(0.001)
            self.busy = False

        flush = write_scalars

    writer = Busy()
    hook = log_to(writer)
    flushing = threading.Thread(target=lambda: [hook.flush() for _ in range(50)])
    flushing.start()
    for step in range(50):
        hook.write(None, train(step))
    flushing.join()
    assert writer.clashes == 0


@pytest.mark.parametrize(("everywhere", "rows"), [(False, []), (True, [10])])
def test_the_first_process_writes_or_all_do(monkeypatch, everywhere, rows):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Memory()
    shown = Shown(log_to(writer, everywhere=everywhere))
    shown.start()
    shown(train(10))
    shown.hook.flush()
    shown.hook.close()
    assert list(writer.rows) == rows
    assert bool(writer.calls) is everywhere
