"""A run keeps `run.json` and its page up to date, however it ends, at a hundredth of its time."""

import itertools
import json
import signal
import threading
import time
import warnings

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.runs.info import read_run_info
from stepfold.runs.report import report_writer
from stepfold.runs.report.report_writer import ReportWriter

from .run_files import Page

COMPLETED = sf.Stop("completed", "all 20 steps were done")


def fit(folder, steps=20, data=0.0, **options):
    batches = sf.batches({"x": np.full(24, data, np.float32)}, 4, seed=0)
    return sf.fit(STEP, start(), batches, **{"steps": steps, "run_dir": folder, **options})


def attempts(folder):
    return read_run_info(folder)["attempts"]


def read_page(folder):
    return Page((folder / "report.html").read_text())


def run(folder, events=(), stop=COMPLETED, first=0):
    """Use a writer as `fit` does."""
    writer = ReportWriter(folder, {})
    writer.open(first, 20, first)
    for step in events:
        writer.write(None, sf.Event(step, 20, {}, None, data_wait_seconds=step / 1000))
    writer.finish(20, stop)


def refreshes(page):
    return [a["content"] for a in page.attributes("meta") if a.get("http-equiv") == "refresh"]


def test_a_run_is_described(tmp_path):
    fit(tmp_path)
    (attempt,) = attempts(tmp_path)
    assert (attempt["from"], attempt["to"], attempt["total"]) == (0, 20, 20)
    assert attempt["stop"] == {"kind": "completed", "message": "all 20 steps were done"}
    assert attempt["began"] <= attempt["ended"] == attempt["updated"]
    assert [row[0] for row in attempt["clock"]] == [0, 10, 20]
    page = read_page(tmp_path)
    assert (page.data["kind"], page.data["reason"]) == ("finished", "All 20 steps were done.")
    assert refreshes(page) == []


@pytest.mark.parametrize("closing", [False, True], ids=["in a hook", "after the last step"])
def test_an_exception_is_described(tmp_path, closing):
    def breaks(event):
        if not closing:
            time.sleep(0.02)
            fail()

    def fail():
        raise KeyError("a <b> c")

    breaks.close = fail if closing else lambda: None
    with pytest.raises(KeyError):
        fit(tmp_path, hooks=[breaks])
    (attempt,) = attempts(tmp_path)
    assert attempt["stop"] == {"kind": "error", "message": "KeyError: 'a <b> c'"}
    assert attempt["ended"] is not None
    assert closing or parts_of(attempt)["hook breaks"] >= 0.02  # which is timed too
    data = read_page(tmp_path).data
    assert (data["kind"], data["reason"][:19]) == ("failed", "KeyError: 'a <b> c'")


def test_a_signal_is_described_and_all_attempts_are_kept(tmp_path):
    plan = sf.Checkpoints(every=5)
    with pytest.raises(SystemExit):
        fit(tmp_path, checkpoints=plan, hooks=lambda event: signal.raise_signal(signal.SIGTERM))
    fit(tmp_path, checkpoints=plan)
    first, second = attempts(tmp_path)
    assert first["stop"]["kind"] == "signal"
    assert first["stop"]["message"].startswith("SIGTERM at step")
    assert (second["from"], second["to"]) == (first["to"], 20)
    assert second["stop"]["kind"] == "completed"


def test_attempts_of_format_1_are_kept(tmp_path):
    old = {"began": "2026-03-01T10:00:00+00:00", "from": 0, "to": 5, "stopped": "enough at step 5"}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "attempts": [old]}))
    run(tmp_path, first=5)
    first, second = attempts(tmp_path)
    assert first["stop"] == {"kind": "unknown", "message": "enough at step 5"}
    assert second["stop"] == COMPLETED._asdict()


def test_a_run_that_goes_back_does_not_write_while_its_thread_writes(tmp_path, monkeypatch):
    writing, overlaps = [], []
    write = report_writer.write_run_info

    def slowly(folder, info):
        overlaps.append(len(writing))
        writing.append(1)
        time.sleep(0.02)
        write(folder, info)
        writing.pop()

    monkeypatch.setattr(report_writer, "write_run_info", slowly)
    writer = ReportWriter(tmp_path, {})
    writer.open(0, 20, 0)
    for step in range(1, 5):  # the thread writes its first page meanwhile
        writer.end_attempt(step, None)
        writer.open(step, 20, step)
    writer.finish(20, COMPLETED)
    assert overlaps
    assert not any(overlaps)
    assert [attempt["from"] for attempt in attempts(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_completed_run_stays_as_it_is(tmp_path):
    plan = sf.Checkpoints(every=5)
    fit(tmp_path, checkpoints=plan)
    before = [(tmp_path / name).read_bytes() for name in ("run.json", "report.html")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing was trained
        fit(tmp_path, checkpoints=plan)
    assert [(tmp_path / name).read_bytes() for name in ("run.json", "report.html")] == before


def test_pages_follow_a_running_run(tmp_path, monkeypatch):
    monkeypatch.setattr(report_writer, "_MIN_PAUSE", 0.02)
    monkeypatch.setattr(report_writer, "_MAX_PAUSE", 0.02)
    monkeypatch.setattr(report_writer, "_SHARE", 1.0)

    def wait(event):
        (attempt,) = attempts(tmp_path)
        assert attempt["ended"] is None
        until = time.monotonic() + 30
        page = tmp_path / "report.html"
        while event.step > 10 and not (page.exists() and "Step 10 of 20" in page.read_text()):
            assert time.monotonic() < until, "no page shows step 10"
            time.sleep(0.01)

    fit(tmp_path, hooks=[wait])


def test_the_page_of_a_running_run_reloads_itself(tmp_path):
    writer, until = ReportWriter(tmp_path, {}), time.monotonic() + 30
    writer.open(0, 100, 0)
    while not (tmp_path / "report.html").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert refreshes(read_page(tmp_path)) == ["2"]
    writer.finish(100, COMPLETED)
    assert refreshes(read_page(tmp_path)) == []


def pauses_of(writer, monkeypatch, *, age, cost):
    """Return the pauses between pages of a run of some age, which take some CPU time each."""
    pauses, clock = [], itertools.count(0, cost)  # read before and after each page

    class Waits(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return len(pauses) > 2

    monkeypatch.setattr(writer, "_closing", Waits())
    monkeypatch.setattr(writer, "_opened_at", time.perf_counter() - age)
    monkeypatch.setattr(writer, "_write_page", lambda: None)
    monkeypatch.setattr(report_writer.time, "thread_time", lambda: next(clock))
    writer._work()
    assert pauses[0] == 0
    return pauses[1:]


def test_pages_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    writer = ReportWriter(tmp_path, {})
    costly = pauses_of(writer, monkeypatch, age=3600, cost=0.35)
    assert costly == pytest.approx([35, 35])
    assert pauses_of(writer, monkeypatch, age=3600, cost=0) == [30, 30]
    assert pauses_of(writer, monkeypatch, age=8, cost=0) == pytest.approx([8, 8], abs=1)
    assert pauses_of(writer, monkeypatch, age=0, cost=0) == [2, 2]


def test_a_file_that_cannot_be_written_is_warned_of_once_and_the_run_continues(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.warns(UserWarning, match="not up to date: IsADirectoryError: .*run continues") as w:
        assert fit(tmp_path).steps == 20
    assert len(w) == 1


def test_nothing_is_written_without_a_run_dir_by_other_processes_or_before_a_run(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    fit(None)
    ReportWriter(tmp_path, {}).finish(20, sf.Stop("already_completed", "step 20 of 20 was done"))
    monkeypatch.setattr(report_writer.jax, "process_index", lambda: 1)
    run(tmp_path, events=[10])
    assert list(tmp_path.iterdir()) == []


def test_the_clock_covers_the_run_evenly_however_long_it_is(tmp_path):
    run(tmp_path, events=range(1, 12_345))
    rows = attempts(tmp_path)[0]["clock"]
    steps = [step for step, _, _ in rows]
    assert 200 <= len(rows) <= 402
    assert (steps[0], steps[-1]) == (0, 12_344)
    assert len(set(np.diff(steps[:-1]))) == 1
    assert all(waited == pytest.approx(step / 1000) for step, _, waited in rows)
    assert np.all(np.diff([seconds for _, seconds, _ in rows]) >= 0)


def parts_of(attempt):
    return dict(attempt["parts"])


def test_the_parts_of_the_time_add_up_and_have_names(tmp_path):
    def slowly(state):
        time.sleep(0.03)
        return {"x": 1.0}

    def named(event):
        time.sleep(0.01)

    def batches():
        for _ in range(20):
            time.sleep(0.005)
            yield {"x": np.zeros(4, np.float32)}

    options = {"log_every": 5, "checkpoints": sf.Checkpoints(every=10), "hooks": [named]}
    evaluation = sf.Evaluation(slowly, every=10)
    start_time = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a generator cannot be resumed
        sf.fit(
            STEP, start(), batches(), steps=20, run_dir=tmp_path, evaluation=evaluation, **options
        )
    elapsed = time.perf_counter() - start_time
    (attempt,) = attempts(tmp_path)
    parts = parts_of(attempt)
    assert parts["evaluation eval"] >= 2 * 0.03
    assert parts["hook named"] >= 6 * 0.01
    assert parts["batches"] >= 20 * 0.005
    assert {"start", "steps", "saving", "end", "hook metrics.jsonl"} < parts.keys()
    assert min(parts.values()) >= 0
    assert attempt["clock"][-1][1] <= sum(parts.values()) <= elapsed
    rows = read_page(tmp_path).table("Where the time went")
    assert {"waiting for batches", "evaluation eval", "hook named"} <= {row[0] for row in rows}
