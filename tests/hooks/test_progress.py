"""Progress bars and lines of JSON."""

import importlib
import io
import json
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tests.small import STEP, Shown, start

import stepfold as sf
from stepfold.hooks.progress import progress
from stepfold.loop.events import Event

module = importlib.import_module("stepfold.hooks.progress")

BARS = ["tqdm", "rich"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def train(step, loss, total=40, time=None, **more):
    return Event(step, total, {"train/loss": loss, **more}, None, time=time)


def evaluation(step, total=40, **metrics):
    return Event(step, total, metrics, None, kind="eval")


def printed(file):
    return [json.loads(line, parse_constant=pytest.fail) for line in file.getvalue().splitlines()]


def lines(*events, step=0, total=40, **options):
    file = io.StringIO()
    with_events(progress("json", file=file, **options), *events, step=step, total=total)
    return printed(file)


def with_events(sink, *events, step=0, total=40):
    """Show a sink the events of a run; return its last state."""
    shown = Shown(sink)
    shown.start(step, total)
    for event in events:
        shown(event)
    sink.close()
    return shown.state


# The running average


def test_the_loss_is_a_running_average_over_about_so_many_steps():
    losses = [line["loss"] for line in lines(train(1, 1.0), train(2, 4.0), over=2)]
    assert losses == [1.0, pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)]
    (*_, last) = lines(*[train(10 * n, 1.0 if n < 3 else 7.0) for n in range(1, 30)], over=10)
    assert last["loss"] == pytest.approx(7.0, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_do_not_enter_the_average(bad):
    assert [line["loss"] for line in lines(train(10, 2.0), train(20, bad))] == [2.0, 2.0]
    assert "loss" not in lines(train(10, bad))[0]


def test_the_average_continues_after_a_resume_unless_it_is_of_another_metric():
    file = io.StringIO()
    make = lambda **options: Shown(progress("json", file=file, over=2, **options))
    shown = make()
    shown.start()
    shown(train(1, 1.0))
    saved = shown.save()
    for average in ("train/loss", "train/accuracy"):
        resumed = make(average=average)
        resumed.resume(saved, 1)
        resumed(train(2, 4.0, **{"train/accuracy": 0.25}))
    _, loss, accuracy = printed(file)
    assert loss["loss"] == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)
    assert accuracy["accuracy"] == pytest.approx(0.25)


# Lines of JSON


def test_lines_are_json_and_hold_what_is_new():
    nan = {"train/loss": float("inf"), "eval/loss": float("nan")}
    first, second = lines(
        Event(5, 20, {"train/loss": 0.5} | nan, None, time=2.0),
        train(15, 0.5, total=20, time=6.0),
        total=20,
    )
    times = {"steps_per_second": None, "seconds_left": None}
    assert first == {"step": 5, "total": 20, **times, "train/loss": None, "eval/loss": None}
    times = {"steps_per_second": 2.5, "seconds_left": 2.0}
    assert second == {"step": 15, "total": 20, **times, "loss": 0.5, "train/loss": 0.5}
    (*_, last) = lines(train(5, 1.0, None, time=1.0), train(10, 1.0, None, time=2.0), total=None)
    assert (last["steps_per_second"], last["seconds_left"], last["total"]) == (5.0, None, None)


def test_metrics_are_chosen_by_name_or_pattern():
    event = train(10, 2.0, **{"train/accuracy": 0.5, "eval/loss": 3.0})
    assert set(lines(event, metrics=())[0]) >= {"step", "loss"}
    assert "train/accuracy" not in lines(event, metrics=("eval/*",))[0]
    assert lines(event, metrics=("eval/*",))[0]["eval/loss"] == 3.0
    assert lines(event)[0]["train/accuracy"] == 0.5


# Bars


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns, so that a bar is drawn when the test wants."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("kind", BARS)
def test_a_bar_shows_step_total_rate_and_values_and_keeps_older_values(kind, clock):
    shown = Shown(progress(kind, file=(terminal := Terminal()), over=1))
    shown.start(5, 20)
    shown(train(10, 0.123456, 20, time=1.0, **{"eval/loss": 2.0}))
    clock[0] += 1
    shown(train(15, 0.5, 20, time=3.0))
    shown.hook.close()
    seen = terminal.getvalue()
    for text in ("10/20", "15/20", "0.1235", "0.5", "step/s"):
        assert text in seen
    assert "eval/loss" in seen[seen.rindex("15/20") :]


@pytest.mark.parametrize("kind", BARS)
@pytest.mark.parametrize("total", [40, None])
def test_a_bar_shows_evaluations_and_ends_at_the_last_step(kind, total):
    first = train(10, 2.0, total, **{"train/accuracy": 0.5})
    events = [first, evaluation(10, total, **{"eval/loss": 0.75})]
    events += [train(step, 2.0, total) for step in range(11, 41)]  # faster than it is drawn
    with_events(progress(kind, file=(terminal := Terminal())), *events, total=total)
    seen = terminal.getvalue()
    assert ("40/40" if total else "40") in seen
    assert "eval/loss" in seen
    assert "accuracy" not in seen
    assert seen.count("/40") < 20


@pytest.mark.parametrize("kind", BARS)
def test_without_a_terminal_a_bar_is_lines(kind, capsys):
    file = io.StringIO()
    for each in (progress(kind, file=file), progress(kind), progress("none")):
        state = with_events(each, *(train(step, 2.0) for step in (10, 20, 30)))
        assert state["sum"] / state["weight"] == pytest.approx(2.0)
    lines = ["step 10 of 40  loss 2", "step 30 of 40  loss 2"]
    for text in (file.getvalue(), capsys.readouterr().err):
        assert [line[: len(lines[0])] for line in text.splitlines()] == lines


@pytest.mark.parametrize("kind", BARS)
def test_what_is_printed_meanwhile_goes_to_stdout(kind, capsys):
    sink = progress(kind, file=(terminal := Terminal()))
    sink.open(0, 10, 0)
    print("hello")
    sink.close()
    assert capsys.readouterr().out == "hello\n"
    assert "hello" not in terminal.getvalue()


def test_a_notebook_without_ipywidgets_has_a_bar_too(monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for is_notebook in (True, False):
        shell.kernel = object() if is_notebook else None  # IPython in a terminal
        event = Event(5, 10, {"train/loss": 2.0}, None)
        with_events(progress("tqdm", file=(file := io.StringIO())), event, total=10)
        assert ("5/10" in file.getvalue()) is is_notebook


def test_a_notebook_has_a_bar_although_it_is_not_a_terminal(monkeypatch):
    from tqdm import auto, notebook

    class Widget(notebook.tqdm_notebook):
        def __init__(self, **options):
            calls.append(options)

        def close(self):
            calls.append("closed")

    calls = []
    monkeypatch.setattr(auto, "tqdm", Widget)
    with_events(progress("tqdm", file=io.StringIO()), step=3, total=10)
    assert calls[0]["initial"] == 3
    assert calls[1] == "closed"


def test_lines_go_to_stdout_of_the_first_of_several_processes(capsys, monkeypatch):
    with_events(progress("json"), train(10, 2.0))
    assert json.loads(capsys.readouterr().out)["loss"] == 2.0
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert lines(train(10, 2.0)) == []


# Arguments


@pytest.mark.parametrize("kind", BARS)
def test_a_missing_package_is_named_with_the_command_that_installs_it(kind, monkeypatch):
    monkeypatch.setattr("stepfold.writers.base.find_spec", lambda name: None)
    message = rf"{kind} is not installed; run pip install 'stepfold\[{kind}\]'"
    with pytest.raises(sf.errors.ConfigError, match=message):
        progress(kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": "a"}, "metrics: expected names or patterns, .* str 'a'"),
        ({"over": 0}, "over: expected an integer of at least 1, got 0"),
        ({"kind": "bar"}, "expected one of 'tqdm', 'rich', .*, got 'bar'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        progress(**{"kind": "json", **options})


# Streams that cannot be written


class Broken(Terminal):
    """A terminal that was there, and is gone after so many writes."""

    def __init__(self, error, writes):
        super().__init__()
        self.error, self.writes = error, writes

    def write(self, text):
        self.writes -= 1
        if self.writes < 0:
            raise self.error
        return super().write(text)


def fit_with(hook, steps=4):
    batches = sf.batches({"x": np.arange(8, dtype=np.float32)}, 4)
    return sf.fit(STEP, start(), batches, steps=steps, log_every=1, hooks=hook).steps


@pytest.mark.parametrize("kind", [*BARS, "json"])
@pytest.mark.parametrize("stream", [None, Terminal(), io.StringIO()])
def test_without_a_stream_nothing_is_shown_and_the_run_goes_on(kind, stream, monkeypatch):
    hook = progress(kind)
    if stream is not None:
        stream.close()
    if isinstance(stream, Terminal):
        with pytest.warns(
            RuntimeWarning,
            match="progress: .*cannot write to the stream: .*closed file; the run continues",
        ):
            assert fit_with(progress(kind, file=stream)) == 4
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    assert fit_with(hook) == 4


@pytest.mark.parametrize("kind", [*BARS, "json"])
@pytest.mark.parametrize("writes", [0, 1, 3])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("closed file")])
def test_a_file_that_fails_is_warned_of_once(kind, writes, error, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0)
    with pytest.warns(RuntimeWarning, match=f"progress: .*{re.escape(str(error))}") as caught:
        assert fit_with(progress(kind, file=Broken(error, writes)), steps=8) == 8
    assert len(caught) == 1
