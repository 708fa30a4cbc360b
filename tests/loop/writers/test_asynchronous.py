import json
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf


class Recorder:
    """Writes down what it is given, each when `let_go` is set, and fails at some steps."""

    def __init__(self, fails=()):
        self.calls, self.fails, self.threads = [], fails, set()
        self.let_go = threading.Event()
        self.let_go.set()

    def _call(self, name, *arguments):
        assert self.let_go.wait(30)
        self.threads.add(threading.current_thread())
        if arguments and arguments[0] in self.fails:
            raise OSError(f"{name} fails at {arguments[0]}")
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

    def flush(self):
        self._call("flush")

    def close(self):
        self._call("close")


def test_calls_arrive_in_order_and_in_another_thread():
    recorder = Recorder()
    writer = sf.async_writer(recorder)
    expected = []
    for step in range(1000):
        writer.write_scalars(step, {"a": step})
        writer.write_texts(step, {"b": str(step)})
        expected += [("scalars", step, {"a": step}), ("texts", step, {"b": str(step)})]
    writer.write_hparams({"lr": 1})
    writer.flush()
    assert recorder.calls == [*expected, ("hparams", "", {"lr": 1}), ("flush",)]
    assert threading.main_thread() not in recorder.threads
    writer.close()
    assert recorder.calls[-1] == ("close",)
    assert not [one for one in threading.enumerate() if one.name == "stepfold-write"]


def test_values_are_those_of_the_call():
    recorder = Recorder()
    recorder.let_go.clear()
    writer = sf.async_writer(recorder)
    value, array, image = np.array(1.0), np.arange(3), np.zeros((2, 2, 1))
    scalars, device = {"a": value}, jnp.ones(())
    writer.write_scalars(1, scalars | {"d": device})
    writer.write_histograms(1, {"h": array}, {"h": 2})
    writer.write_images(1, {"i": image})
    value[...], array[:], image[:] = 7, 7, 7
    scalars["b"] = 3
    recorder.let_go.set()
    writer.close()
    (_, _, got), (_, _, histogram, buckets), (_, _, images), _ = recorder.calls
    assert got["a"] == 1
    assert got["d"] is device
    assert "b" not in got
    assert histogram["h"].tolist() == [0, 1, 2]
    assert buckets == {"h": 2}
    assert images["i"].sum() == 0


@pytest.mark.parametrize("call", ["flush", "close"])
def test_what_goes_wrong_is_raised_by_a_later_call_and_once(call):
    recorder = Recorder(fails=[2, 3])
    recorder.let_go.clear()
    writer = sf.async_writer(recorder)
    for step in (1, 2, 3, 4):
        writer.write_scalars(step, {})
    recorder.let_go.set()
    with pytest.raises(OSError, match="scalars fails at 2") as caught:
        getattr(writer, call)()
    assert [note[:47] for note in caught.value.__notes__] == [
        "in the background, in write_scalars of step 2: ",
        "and after it OSError: scalars fails at 3",
    ]
    writer.close()
    assert [one[1] for one in recorder.calls if one[0] == "scalars"] == [1, 4]
    assert recorder.calls[-1] == ("close",)


def test_the_next_write_raises_what_went_wrong_and_is_written():
    recorder = Recorder(fails=[2])
    writer = sf.async_writer(recorder)
    writer.write_scalars(2, {})
    while not writer._failures:
        time.sleep(0.001)
    with pytest.raises(OSError, match="scalars fails at 2"):
        writer.write_scalars(3, {})
    writer.close()
    assert recorder.calls == [("scalars", 3, {}), ("close",)]


def test_a_slow_writer_is_waited_for_only_when_the_queue_is_full():
    recorder = Recorder()
    recorder.let_go.clear()
    writer = sf.async_writer(recorder, depth=8)
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
    recorder.let_go.set()
    thread.join(10)
    writer.close()
    assert [call[1] for call in recorder.calls[:-1]] == list(range(9))


def test_it_can_be_closed_twice_and_written_to_again():
    recorder = Recorder()
    writer = sf.async_writer(recorder)
    writer.close()
    writer.write_scalars(1, {})
    writer.close()
    writer.close()
    assert [call[0] for call in recorder.calls] == ["close", "scalars", "close", "close"]


def test_resume_is_heard_in_its_turn(tmp_path):
    path = tmp_path / "a.jsonl"
    writer = sf.async_writer(sf.jsonl_writer(path))
    for step in range(50):
        writer.write_scalars(step, {"a": step})
    writer.resume(10)
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 10, "a": 10}
    writer.close()
    other = sf.async_writer(Recorder())  # as clu's, which know no resume
    other.resume(3)
    other.close()


def test_arguments_are_checked():
    with pytest.raises(sf.ConfigError, match="writer: expected a writer"):
        sf.async_writer("a.csv")
    with pytest.raises(sf.ConfigError, match="depth: expected an integer of at least 1, got int 0"):
        sf.async_writer(sf.console_writer(), depth=0)


SLOW = """
import sys, time
import stepfold as sf
class Slow(type(sf.console_writer())):
    def write_scalars(self, step, scalars):
        time.sleep(0.01)
        if step in FAILS:
            raise OSError("the disk is full")
        super().write_scalars(step, scalars)
    def close(self):
        print("closed")
writer = sf.async_writer(Slow(None))
for step in range(20):
    writer.write_scalars(step, {"a": step})
"""


def test_nothing_is_lost_at_the_end_of_a_script_that_does_not_close():
    code = "FAILS = []" + SLOW
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        *map(str, range(20)),
        "closed",
    ]
    assert done.stderr == ""


def test_nothing_is_lost_at_the_end_of_a_script_that_fails_and_what_goes_wrong_then_is_shown():
    code = "FAILS = [19]" + SLOW + "raise KeyError('a bug')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
    assert "OSError: the disk is full" in done.stderr
    assert "in write_scalars of step 19" in done.stderr
    assert done.stdout.splitlines()[-2:] == ["      18  a 18", "closed"]


KILLED = """
import pathlib, sys, stepfold as sf
folder = pathlib.Path(sys.argv[1])
files = sf.multi_writer(sf.csv_writer(folder / "m.csv"), sf.jsonl_writer(folder / "m.jsonl"))
writer = sf.async_writer(files)
step = 0
while True:
    writer.write_scalars(step, {"loss": step / 3, f"m{step // 500}": step})
    if step % 50 == 0:
        writer.flush()
        print(step, flush=True)
    step += 1
"""


def test_a_kill_loses_nothing_that_was_flushed(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) >= 1500:
                break
        process.kill()
        last = [int(line), *map(int, process.stdout.read().split())][-1]
    csv_file, jsonl_file = tmp_path / "m.csv", tmp_path / "m.jsonl"
    for make, path in ((sf.csv_writer, csv_file), (sf.jsonl_writer, jsonl_file)):
        writer = make(path)
        writer.resume(last)
        writer.write_scalars(last + 1, {"loss": 0.5})
        writer.close()
    rows = [json.loads(line) for line in jsonl_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(last + 2))
    assert all(row["loss"] == row["step"] / 3 for row in rows[:-1])
    table = [line.split(",") for line in csv_file.read_text().splitlines()]
    assert len({len(row) for row in table}) == 1
    assert [int(row[0]) for row in table[1:]] == list(range(last + 2))
    assert all(float(row[1]) == int(row[0]) / 3 for row in table[1:-1])
