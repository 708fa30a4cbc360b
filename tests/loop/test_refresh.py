import itertools
import json
import signal
import threading
import time

import jax
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop import refresh
from stepfold.loop.record import read_record
from stepfold.loop.refresh import Refresh, Samples

TX = optax.sgd(0.1)
TRAIN = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), TX)


def start():
    return sf.init_state({"w": np.float32(1)}, TX, jax.random.key(0))


def batches():
    return sf.batches({"x": np.zeros(24, np.float32)}, 4, seed=0)


def fit(folder, steps=20, given=None, **options):
    given = batches() if given is None else given
    return sf.fit(TRAIN, start(), given, **{"steps": steps, "run_dir": folder, **options})


def attempts(folder):
    return read_record(folder)["attempts"]


def test_a_run_tells_how_it_went(tmp_path):
    fit(tmp_path)
    (one,) = attempts(tmp_path)
    assert (one["from"], one["to"], one["total"]) == (0, 20, 20)
    assert (one["stopped"], one["error"]) == ("all 20 steps were done", None)
    assert one["began"] <= one["ended"] == one["updated"]
    assert [row[0] for row in one["clock"]] == [0, 10, 20]
    page = (tmp_path / "report.html").read_text()
    assert "All 20 steps were done." in page
    assert 'http-equiv="refresh"' not in page


def test_a_reason_to_stop_is_told(tmp_path):
    fit(tmp_path, hooks=[lambda event: "enough"])
    assert attempts(tmp_path)[0]["stopped"] == "enough at step 11"
    assert "Stopped early" in (tmp_path / "report.html").read_text()


def test_an_exception_is_told(tmp_path):
    def breaks(event):
        raise KeyError("a <b> c")

    with pytest.raises(KeyError):
        fit(tmp_path, hooks=[breaks])
    (one,) = attempts(tmp_path)
    assert one["error"] == {"type": "KeyError", "message": "'a <b> c'"}
    assert one["ended"] is not None
    assert "KeyError: &#x27;a &lt;b&gt; c&#x27;" in (tmp_path / "report.html").read_text()


def test_a_signal_is_told(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, hooks=[lambda event: signal.raise_signal(signal.SIGTERM)])
    assert attempts(tmp_path)[0]["stopped"].startswith("SIGTERM at step")


def test_attempts_at_one_run_are_all_told(tmp_path):
    plan = sf.Checkpoints(every=5)

    def breaks(event):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fit(tmp_path, checkpoints=plan, hooks=[breaks])
    fit(tmp_path, checkpoints=plan)
    first, second = attempts(tmp_path)
    assert first["error"]["message"] == "gone"
    assert (second["from"], second["to"], second["error"]) == (first["to"], 20, None)


def test_a_run_that_was_over_stays_as_it_was(tmp_path):
    plan = sf.Checkpoints(every=5)
    fit(tmp_path, checkpoints=plan)
    before = [(tmp_path / name).read_bytes() for name in ("run.json", "report.html")]
    fit(tmp_path, checkpoints=plan)
    assert [(tmp_path / name).read_bytes() for name in ("run.json", "report.html")] == before


def test_without_checkpoints_it_begins_anew(tmp_path):
    fit(tmp_path)
    fit(tmp_path, steps=10)
    assert [one["to"] for one in attempts(tmp_path)] == [10]


def test_it_is_told_from_the_beginning_and_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "pause_after", lambda cost, age: 0.02)

    def waits(event):
        (one,) = attempts(tmp_path)
        assert one["ended"] is None
        until = time.monotonic() + 30
        while time.monotonic() < until:
            page = tmp_path / "report.html"
            if event.step == 10 or (page.exists() and "Step 10 of 20" in page.read_text()):
                return
            time.sleep(0.01)
        raise AssertionError("no page tells of step 10")

    fit(tmp_path, hooks=[waits])


def test_a_page_of_a_run_under_way_loads_itself_anew(tmp_path):
    told = Refresh(tmp_path, {}, goes_on=False)
    with told:
        told.open(0, 100)
        until = time.monotonic() + 30
        while not (tmp_path / "report.html").exists() and time.monotonic() < until:
            time.sleep(0.01)
        page = (tmp_path / "report.html").read_text()
    assert '<meta http-equiv="refresh" content="2">' in page
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_writing_pages_takes_a_hundredth_of_the_time(tmp_path, monkeypatch):
    pauses = []

    class Waits(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return len(pauses) > 2

    told = Refresh(tmp_path, {}, goes_on=False)
    told._end, told._began = Waits(), -1e9
    monkeypatch.setattr(told, "_refresh", lambda: work(0.5))
    told._work()
    assert pauses[0] == 0
    assert all(50 <= pause < 100 for pause in pauses[1:])
    monkeypatch.setattr(told, "_refresh", lambda: None)
    pauses.clear()
    told._work()
    assert pauses[1:] == [30, 30]


def test_what_cannot_be_written_is_warned_of_once_and_the_run_goes_on(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.warns(
        UserWarning, match="are not up to date: IsADirectoryError: .*run goes on"
    ) as w:
        assert fit(tmp_path).steps == 20
    assert len(w) == 1


@pytest.mark.parametrize("text", ["{", '{"format": 99}'])
def test_a_record_that_cannot_be_read_is_put_aside(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.warns(UserWarning, match="run.json: expected .*; it is now .*run.json.aside"):
        fit(tmp_path, checkpoints=sf.Checkpoints(every=5))
    assert (tmp_path / "run.json.aside").read_text() == text
    assert [one["to"] for one in attempts(tmp_path)] == [20]


def test_without_a_run_dir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(None)
    assert list(tmp_path.iterdir()) == []


def test_another_process_than_the_first_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh.jax, "process_index", lambda: 1)
    with Refresh(tmp_path, {}, goes_on=False) as told:
        told.open(0, 10)
        told(sf.Event(10, 10, {}, None))
        told.tell(10, "all")
    assert list(tmp_path.iterdir()) == []


def test_samples_cover_the_run_evenly_however_long_it_is():
    samples = Samples(limit=100)
    for step in range(12_345):
        samples.add(step, step / 1000)
    rows = samples.rows()
    steps = [row[0] for row in rows]
    assert 50 <= len(rows) <= 101
    assert (steps[0], steps[-1]) == (0, 12_344)
    assert len({b - a for a, b in itertools.pairwise(steps[:-1])}) == 1
    assert all(waited == pytest.approx(step / 1000) for step, _, waited in rows)
    assert json.loads(json.dumps(rows)) == [list(row) for row in rows]
