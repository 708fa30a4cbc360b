"""A call of `fit`: how it ends and goes on, what it refuses, prints, keeps and writes."""

import contextlib
import copy
import importlib
import io
import itertools
import json
import os
import pickle
import re
import signal
import threading
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import STEP, TX, start

import stepfold as sf
from stepfold.loop import run as run_module
from stepfold.loop.hook import Stop
from stepfold.loop.metrics import History
from stepfold.runs import capsule as capsule_module
from stepfold.runs.fit import FitResult

from .runs import rows

progress_hooks = importlib.import_module("stepfold.hooks.progress")

DATA = {"x": np.arange(24, dtype=np.float32)}


def step(state, batch):
    return {"n": state["n"] + 1}, {"at": sf.mean(batch["x"])}


JITTED = jax.jit(step)


def number():
    return {"n": jnp.int32(0)}


def batches(**options):
    return sf.batches(DATA, 4, **{"seed": 0, **options})


def fit(given=None, **options):
    options = {"steps": None if "epochs" in options else 20, **options}
    return sf.fit(JITTED, number(), batches() if given is None else given, **options)


def saves(folder, every=7, **options):
    return {"run_dir": folder, "checkpoints": sf.Checkpoints(every=every, keep=None), **options}


def saves_at_end(folder):
    return saves(folder, every=1000)


# When it ends


@pytest.mark.parametrize(
    ("given", "options", "steps", "message"),
    [
        (batches, {"steps": 13}, 13, "all 13 steps were done"),
        (batches, {"epochs": 3}, 18, "all 18 steps were done"),
        (lambda: [next(batches())] * 4, {"epochs": 3}, 12, "all 12 steps were done"),
        (lambda: batches(epochs=2), {"steps": None}, 12, "the batches ended at step 12"),
        (lambda: batches(epochs=2), {"steps": 50}, 12, "the batches ended at step 12"),
        (lambda: [next(batches())] * 5, {"steps": None}, 5, "the batches ended at step 5"),
    ],
)
def test_it_ends_after_so_many_steps_epochs_or_batches(given, options, steps, message):
    result = fit(given(), **options)
    assert (result.steps, result.stop_reason.message) == (steps, message)
    assert (int(result.state["n"]), result.best, result.resumed) == (steps, None, None)
    assert result.history["train/at"].steps == sorted({*range(10, steps + 1, 10), steps})


def test_it_takes_no_batch_that_it_does_not_use():
    pulled = []
    given = (pulled.append(i) or {"x": np.ones(4, np.float32)} for i in itertools.count())
    fit(given, steps=7)
    assert len(pulled) == 7


def test_a_time_limit_ends_it():
    result = fit(steps=1000, log_every=1, time_limit=0)
    message = "the time limit of 0 s was reached; stopped at step"
    assert result.stop_reason.message.startswith(message)
    assert 1 <= result.steps <= 10


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
@pytest.mark.parametrize("given", [[], iter([]), (x for x in ())])
@pytest.mark.parametrize("state", [number, lambda: start()._replace(step=jnp.int32(3))])
def test_no_batch_at_all_is_refused_and_leaves_nothing_behind(state, given, tmp_path):
    with pytest.raises(sf.errors.DataError, match="batches: expected at least one, got none"):
        sf.fit(JITTED, state(), given, **saves(tmp_path))
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") is None


# Going on


@pytest.mark.parametrize(
    ("given", "first", "again", "kind", "message"),
    [
        (batches, {}, {}, "already_completed", "step 20 of 20 was done before"),
        (batches, {}, {"steps": 10}, "already_completed", "step 20 of 10 was done before"),
        (batches, *[{"epochs": 2}] * 2, "already_completed", "step 12 of 12 was done before"),
        (
            lambda: batches(epochs=2),
            *[{"steps": None}] * 2,
            "exhausted",
            "the batches ended at step 12",
        ),
    ],
)
def test_a_run_that_is_over_warns_that_nothing_was_trained(
    given, first, again, kind, message, tmp_path
):
    done = fit(given(), **first, **saves_at_end(tmp_path))
    with pytest.warns(UserWarning, match=f"nothing was trained: {message}; give more_steps"):
        result = fit(given(), **again, **saves_at_end(tmp_path))
    assert (result.stop_reason.kind, result.stop_reason.message) == (kind, message)
    assert (result.steps, result.resumed, result.history) == (done.steps, done.steps, done.history)
    assert int(result.state["n"]) == done.steps


@pytest.mark.parametrize("wrap", [lambda hook: hook, partial(sf.hooks.every, 1)])
def test_a_run_that_a_hook_has_stopped_trains_no_further(wrap, tmp_path):
    def call(patience, **options):
        hook = wrap(sf.hooks.stop_early("eval/loss_a", patience=patience, mode="min"))
        options = {"evaluation": MEASURES_LOSS, "hooks": hook, **options}
        return fit(**options, **saves_at_end(tmp_path))

    done = call(2)
    assert (done.steps, done.stop_reason.kind) == (15, "early_stop")
    for options in ({}, {"steps": None, "more_steps": 5}):
        with pytest.warns(UserWarning, match="trained: eval/loss_a .*change the arguments of the"):
            again = call(2, **options)
        assert again.stop_reason == done.stop_reason
        assert (again.steps, again.history, int(again.state["n"])) == (15, done.history, 15)
    assert call(3).steps == 20


def test_early_stopping_by_an_evaluation_at_the_end_is_warned_of():
    hook = sf.hooks.stop_early("eval/loss_a", patience=1, mode="min")
    at_end = sf.Evaluation(lambda state: {"loss_a": state["n"]})
    words = "stop_early stops nothing, since eval/loss_a is only measured at the end"
    with pytest.warns(UserWarning, match=words):
        fit(evaluation=at_end, hooks=hook)


def test_a_hook_that_may_only_warn_does_not_stop_a_resumed_run(tmp_path):
    def call(steps):
        hook = sf.hooks.only_warn(sf.hooks.stop_early("eval/loss_a", patience=1, mode="min"))
        return fit(evaluation=MEASURES_LOSS, hooks=hook, steps=steps, **saves_at_end(tmp_path))

    with pytest.warns(UserWarning, match="step 10: eval/loss_a has not become better"):
        call(10)
    with pytest.warns(UserWarning, match="step 15: eval/loss_a has not become better"):
        assert call(15).steps == 15


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"batches": [next(batches())] * 20},
            sf.errors.DataError,
            "(?s)batches: expected get_state and set_state, to be resumed at step 10, got list"
            ".*start in another directory",
        ),
        ({"batches": batches(seed=1)}, sf.errors.DataError, "got others: seed was 0 and is 1"),
        (
            {"state": {"m": np.int32(0)}},
            sf.errors.TreeMismatchError,
            "differs at 2 paths; to train another model, give another directory",
        ),
        (
            {"batches": (pytest.fail("pulled") for _ in "x"), "resume": False},
            sf.errors.ConfigError,
            "resume=False: .* steps? 7",
        ),
    ],
)
def test_another_run_is_refused_where_there_are_checkpoints(options, error, words, tmp_path):
    fit(steps=10, **saves(tmp_path))
    call = {"state": number(), "batches": batches(), "steps": 20, **saves(tmp_path), **options}
    with pytest.raises(error, match=words) as caught:
        sf.fit(JITTED, **call)
    assert not any(f"{name}=" in str(caught.value) for name in ("rename", "parts", "partial"))
    assert sorted(sf.checkpoint.verify(tmp_path / "checkpoints")) == [7, 10]


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
@pytest.mark.filterwarnings("ignore:nothing was trained")
def test_a_run_that_is_over_pulls_no_batch(tmp_path):
    fit(**saves_at_end(tmp_path))
    again = fit((pytest.fail("pulled") for _ in "x"), **saves_at_end(tmp_path))
    assert again.stop_reason.message == "step 20 of 20 was done before"


def test_checkpoints_of_a_loop_of_ones_own_can_be_gone_on_with(tmp_path):
    given, state = batches(), number()
    for batch in itertools.islice(given, 5):
        state, _ = JITTED(state, batch)
    sf.save(tmp_path / "checkpoints", state, step=5, data=given, extra=["my own"])
    result = fit(**saves_at_end(tmp_path))
    assert (result.resumed, int(result.state["n"])) == (5, 20)


# What an exception has with it


def leaves_by(error):
    def leave(_):
        raise error

    return leave


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_whatever_a_hook_ends_a_run_with_has_the_result(error, tmp_path):
    with pytest.raises(type(error)) as caught:
        fit(hooks=leaves_by(error), **saves(tmp_path))
    found = caught.value.result
    assert (found.steps, int(found.state["n"])) == (14, 14)
    assert found.stop_reason.message == f"{type(error).__name__}: {error}"
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") == 14


def test_a_stop_and_a_signal_say_why_the_run_ended():
    stop = lambda event: sf.Stop("plateau", "flat") if event.step == 5 else None
    result = fit(hooks=stop, log_every=5)
    assert result.stop_reason.kind == "plateau"
    assert str(result.stop_reason).startswith("flat; stopped at step")
    # Once, since a second one leaves at once.
    interrupt = lambda event: signal.raise_signal(signal.SIGINT) if event.step == 5 else None
    with pytest.raises(KeyboardInterrupt, match=r"result = sys.last_value.result") as caught:
        fit(hooks=interrupt, log_every=5)
    assert caught.value.result.stop_reason.kind == "signal"


def test_only_a_nan_that_jax_finds_is_blamed_on_its_setting():
    divide = lambda event: np.ones(1) / np.zeros(1)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError) as of_numpy:
        fit(hooks=divide)
    assert not hasattr(of_numpy.value, "__notes__")
    nan = [{"x": np.full(4, np.nan, np.float32)}]
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as of_jax:
        fit(nan, steps=None)
    assert any(note.startswith("jax_debug_nans ended the run") for note in of_jax.value.__notes__)


def test_what_goes_wrong_after_the_last_step_has_the_result():
    class Hook:
        def __call__(self, event):
            pass

        def close(self):
            raise OSError("full")

    with pytest.raises(OSError, match="full") as caught:
        fit(hooks=Hook())
    assert int(caught.value.result.state["n"]) == 20


def test_what_a_second_signal_waits_for_is_said(tmp_path, capfd, monkeypatch):
    written, finish = threading.Event(), sf.checkpoint.Series._finish

    def interrupt_twice(event):
        threading.Timer(0.3, written.set).start()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    slow = lambda self, store, step: (written.wait(60), finish(self, store, step))
    monkeypatch.setattr(sf.checkpoint.Series, "_finish", slow)
    with pytest.raises(KeyboardInterrupt):
        fit(hooks=sf.hooks.every(10, interrupt_twice), **saves(tmp_path))
    said = "waiting for the checkpoint of step 7, which is being written\n"
    assert said in capfd.readouterr().err
    assert sf.checkpoint.verify(tmp_path / "checkpoints") == {7: []}


# What it prints


@pytest.mark.parametrize(
    ("hooks", "is_shown"),
    [([], True), ([sf.progress("none")], False), ([sf.log_to(sf.writers.console())], False)],
)
def test_a_long_run_without_a_hook_that_shows_progress_prints_lines(
    hooks, is_shown, capfd, monkeypatch
):
    fit(hooks=hooks)  # a short one prints none
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress_hooks.DefaultProgress, "_quiet_seconds", -9.0)
    fit(hooks=[*hooks, lambda event: {"own": 0.25}])
    lines = [line[:23] for line in capfd.readouterr().err.splitlines()]
    assert lines == (["step 10 of 20  own 0.25", "step 20 of 20  own 0.25"] if is_shown else [])


def test_the_average_in_lines_continues_at_a_resume(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress_hooks.DefaultProgress, "_quiet_seconds", -9.0)

    def last_line(*steps):
        for n in steps:
            sf.fit(STEP, start(), batches(), steps=n, **saves_at_end(tmp_path / str(len(steps))))
        return re.sub("  [^ ]* steps/s.*", "", capfd.readouterr().err.splitlines()[-1])

    line = last_line(20)
    assert line.startswith("step 20 of 20  loss ")
    assert last_line(10, 20) == line


@pytest.mark.parametrize("hooks", [[], [sf.progress("json", file=io.StringIO())]])
def test_a_run_that_resumes_says_so(hooks, tmp_path, capfd):
    fit(steps=10, hooks=hooks, **saves_at_end(tmp_path))
    assert capfd.readouterr().err == ""
    fit(hooks=hooks, **saves_at_end(tmp_path))
    assert capfd.readouterr().err == f"resuming from step 10 of {tmp_path}\n"
    fit(steps=30, hooks=sf.progress("none"), **saves_at_end(tmp_path))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            sf.hooks.stop_early("train/at", mode="min", patience=9, name="mine"),
            sf.hooks.on_spike("train/at", name="mine"),
        ),
        (sf.progress("none", name="every"), sf.hooks.every(2, lambda event: None)),
        (sf.hooks.every(2, lambda event: None), sf.hooks.callback(print, name="every")),
    ],
)
def test_a_name_that_another_hook_had_starts_it_afresh(first, second, tmp_path):
    fit(epochs=2, hooks=first, **saves(tmp_path))
    words = (
        "hooks: the state of (mine|every) in the checkpoint is that of another hook .* starts over"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        result = sf.fit(JITTED, number(), batches(), steps=24, hooks=second, **saves(tmp_path))
    assert (result.resumed, caught[0].filename) == (12, __file__)


# Where things go


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
def test_a_run_dir_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("")
    given = (pytest.fail("pulled") for _ in "x")
    with pytest.raises(
        sf.errors.CheckpointError, match="expected a directory to save in, got one that"
    ):
        fit(given, **saves(tmp_path / "file" / "run"))


def test_metrics_that_a_hook_writes_are_not_written_twice(tmp_path):
    class Writes:
        writes_metrics = True

        def __call__(self, event):
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {event.step}, "own": 1.0}}\n')

    fit(run_dir=tmp_path, steps=1, hooks=[Writes()])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "report.html", "run.json"]
    assert '"own"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: sf.log_to(sf.writers.jsonl(path / "metrics.jsonl")),
        lambda path: sf.log_to(
            sf.writers.async_writer(sf.writers.jsonl(path / "metrics.csv", csv=True)), every=5
        ),
        lambda path: sf.log_to(
            sf.writers.multi_writer(sf.writers.jsonl(path / "x/../metrics.jsonl"))
        ),
        lambda path: sf.log_to(sf.writers.jsonl(path / "x", csv=path / "metrics.csv")),
    ],
)
def test_a_writer_to_a_file_that_fit_writes_is_refused(make, tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="hooks: expected writers to other files .*metrics"
    ):
        fit(run_dir=tmp_path, hooks=make(tmp_path))
    assert fit(run_dir=tmp_path, hooks=sf.log_to(sf.writers.jsonl(tmp_path / "own"))).steps == 20
    assert rows(tmp_path / "metrics.jsonl") == rows(tmp_path / "own") == [10, 20]


def test_a_refused_argument_leaves_no_series_open(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=7)
    own = sf.log_to(sf.writers.jsonl(tmp_path / "run" / "metrics.jsonl"))
    with pytest.raises(sf.errors.ConfigError, match="hooks: expected writers to other files"):
        fit(run_dir=tmp_path / "run", checkpoints=plan, hooks=own)
    with pytest.raises(sf.errors.CheckpointError, match="Checkpoints.request: no series is open"):
        plan.request()


def test_a_run_that_has_lost_its_directory_saves_no_more(tmp_path, monkeypatch):
    """It says so even if a hook stops it."""

    def lose(event):
        for path in tmp_path.glob(".lock-*"):
            path.unlink()
            time.sleep(0.2)
        return "enough"

    monkeypatch.setattr("stepfold.checkpoint.claims._BEAT", 0.05)
    result = fit(steps=10_000, hooks=lose, **saves(tmp_path, every=5))
    assert result.stop_reason.kind == "error"
    assert "another run may use" in result.stop_reason.message
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") == 5 < result.steps < 1000


def test_checkpoints_say_where_they_go_or_the_run_does(tmp_path):
    with pytest.raises(sf.errors.ConfigError, match="expected a directory, got none; give run_dir"):
        fit(checkpoints=sf.Checkpoints(every=7))
    plan = sf.Checkpoints(tmp_path / "other", every=7)
    fit(run_dir=tmp_path / "run", checkpoints=plan)
    assert sorted(sf.checkpoint.verify(tmp_path / "other")) == [7, 14, 20]
    assert not (tmp_path / "run" / "checkpoints").exists()


# What goes in


def test_the_state_is_donated_and_the_parameters_that_it_was_made_of_are_not():
    params = {"w": jnp.ones(())}
    state = sf.init_state(params, TX, jax.random.key(0))
    sf.fit(STEP, state, batches(), steps=3)
    assert params["w"] == 1
    words = "state/step.*: the arrays were donated to an earlier call .*; continue with the state"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.fit(STEP, state, batches(), steps=3)


def test_a_step_that_is_ready_cannot_be_scanned_and_says_so():
    words = "steps_per_call=4: expected a step that is neither jitted nor compiled"
    with pytest.raises(sf.errors.ConfigError, match=words):
        fit(steps_per_call=4)
    assert fit(steps_per_call=1).steps == 20


class Rows:
    """A writer that keeps what it gets, by step."""

    def __init__(self):
        self.rows = {}

    def write_scalars(self, step, scalars):
        self.rows.setdefault(step, {}).update(scalars)


INTEGERS = [("steps", 0), ("steps", 2.5), ("steps", True), ("epochs", 0), ("more_steps", 0)]
INTEGERS += [("log_every", 0), ("log_every", None), ("steps_per_call", 0), ("steps_per_call", True)]
KNOWN_EPOCHS = "expected batches that know how many steps an epoch has, .*got generator"


def evaluations(*names, **options):
    return [sf.Evaluation(lambda state: {}, name=name, **options) for name in names]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({x: n}, f"{x}: expected an integer of at least 1, got {n}") for x, n in INTEGERS),
        ({"steps": 3, "epochs": 2}, "steps, epochs: expected one of them, got 3 and 2"),
        ({"steps": 9, "more_steps": 3}, "steps, more_steps: expected one of them, got 9 and 3"),
        ({"hooks": [3]}, "hooks: expected functions of an event, got int 3"),
        ({"hooks": None}, "hooks: expected functions of an event, got NoneType None"),
        (
            {"hooks": [sf.hooks.on_spike]},
            r"got function .*; call it with its arguments, as in on_spi",
        ),
        (
            {"hooks": [lambda step, metrics: None]},
            r", which takes <lambda>\(step, metrics\); sf.Hook",
        ),
        (
            {"hooks": sf.progress},
            r"got function .*; call it with its arguments, as in progress\(kind",
        ),
        ({"hooks": Rows()}, r"got Rows .*; sf.log_to\(writer\) makes a hook of a writer"),
        ({"evaluation": [3]}, r"evaluation: expected sf.Evaluation\(…\), got int 3"),
        *(
            (
                {"evaluation": evaluations(*names)},
                r"evaluation: expected different names, none of them train, start, epoch, "
                rf"got \['{names[0]}'",
            )
            for names in (["eval", "eval"], ["train"], ["train/held_out"], ["start"], ["epoch"])
        ),
        ({"checkpoints": "here"}, r"checkpoints: expected sf.Checkpoints\(.*\), got str 'here'"),
        ({"time_limit": -1}, "time_limit: expected seconds, a number of at least 0, got -1"),
        ({"hooks": sf.hooks.callback(lambda *_: None)}, f"hooks: {KNOWN_EPOCHS}"),
        ({"evaluation": evaluations("eval", every_epochs=1)}, f"every_epochs: {KNOWN_EPOCHS}"),
        ({"checkpoints": sf.Checkpoints("x", every_epochs=1)}, f"every_epochs: {KNOWN_EPOCHS}"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_done(options, words):
    has_length = options.keys() & {"steps", "epochs", "more_steps"}
    options = options if has_length else {"steps": 9, **options}
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.fit(JITTED, number(), (pytest.fail("pulled") for _ in "x"), **options)


# What it keeps of a step that went wrong


def spoilt():
    data = np.arange(24, dtype=np.float32)
    data[9] = np.nan
    return sf.batches({"x": data}, 4)


CLEAN = lambda: sf.batches({"x": np.ones(24, np.float32)}, 4)


def learn(data=spoilt, **options):
    return sf.fit(STEP, start(), data(), **{"steps": 20, **options})


def test_a_loss_that_is_no_number_leaves_a_capsule(tmp_path):
    result = learn(run_dir=tmp_path, steps=30)
    assert result.stop_reason.message.startswith("train/loss is nan in step 3; stopped at step ")
    assert result.stop_reason.message.endswith(f"; see {tmp_path / 'capsules' / '3'}")
    assert (
        sf.debug.read_capsule(result.capsule.path).metrics.keys() == result.capsule.metrics.keys()
    )


def test_without_a_place_for_it_the_capsule_is_on_the_result(tmp_path):
    (tmp_path / "capsules").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="the capsule of step 3 cannot be written") as caught:
        in_the_way = learn(run_dir=tmp_path, steps=30)
    assert [warning.filename for warning in caught] == [__file__]
    for result in (in_the_way, learn(steps=30)):
        assert (result.capsule.step, result.capsule.path) == (3, None)
        assert "see" not in result.stop_reason.message


def test_a_capsule_is_taken_while_the_directory_is_locked_and_named_in_its_files(
    tmp_path, monkeypatch
):
    take, locks = capsule_module.take_capsule, []
    see = lambda *args, **options: locks.extend(tmp_path.glob(".lock-*")) or take(*args, **options)
    monkeypatch.setattr(capsule_module, "take_capsule", see)
    result = learn(run_dir=tmp_path)
    (attempt,) = json.loads((tmp_path / "run.json").read_text())["attempts"]
    assert len(locks) == 1
    assert attempt["stop"] == result.stop_reason._asdict()


def test_an_interruption_while_a_capsule_is_taken_has_the_result(monkeypatch):
    def interrupt(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return take(*args, **options)

    take = capsule_module.take_capsule
    monkeypatch.setattr(capsule_module, "take_capsule", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        learn()
    assert caught.value.result.capsule.step == 3


def test_a_capsule_is_on_the_result_of_an_error_after_it_was_taken():
    def hook(event):
        pass

    def close():
        raise ValueError("of the hook")

    hook.close = close
    with pytest.raises(ValueError, match="of the hook") as caught:
        learn(hooks=hook)
    assert caught.value.result.capsule.step == 3
    assert caught.value.result.stop_reason == ("error", "ValueError: of the hook")


# How long a run is


def test_more_steps_are_counted_from_the_state_and_append_to_the_files(tmp_path):
    first = fit(steps=7)
    rest = sf.fit(JITTED, first.state, batches(start=7), more_steps=20)
    assert (rest.steps, int(rest.state["n"])) == (20, 27)  # this state does not count its steps
    learned = learn(data=CLEAN, run_dir=tmp_path)
    rest = sf.fit(STEP, learned.state, CLEAN(), more_steps=20, run_dir=tmp_path)
    assert (rest.steps, rest.stop_reason.message) == (40, "all 40 steps were done")
    assert rows(tmp_path / "metrics.jsonl") == [10, 20, 30, 40]


def test_more_steps_continue_a_complete_run_and_not_an_interrupted_one(tmp_path):
    fit(steps=20, **saves_at_end(tmp_path))
    stop = lambda event: "enough" if event.step == 30 else None
    stop.needs_exact_state = True  # so that the run stops there
    cut = fit(steps=None, more_steps=20, hooks=stop, **saves_at_end(tmp_path))
    assert (cut.resumed, cut.stop_reason.kind) == (20, "hook")
    rest = fit(steps=None, more_steps=20, **saves_at_end(tmp_path))
    assert (rest.resumed, rest.steps) == (cut.steps, 40)
    assert rest.history["train/at"].steps == [10, 20, 30, 40]
    assert fit(steps=None, more_steps=5, **saves_at_end(tmp_path)).steps == 45


def test_an_epoch_may_be_a_single_batch():
    told = []
    show = sf.hooks.callback(lambda trainer, epoch, metrics: told.append(epoch))
    sf.fit(STEP, start(), [next(CLEAN())], epochs=3, hooks=show)
    assert told == [0, 1, 2]


def test_epochs_are_those_of_the_data_and_not_of_the_step():
    """A state of step 10 starts the first epoch of its data."""
    told, measured = [], []
    own = sf.Evaluation(lambda state: measured.append(int(state.step)) or {}, every_epochs=1)
    state = learn(data=CLEAN, steps=10).state
    batches = [next(CLEAN())] * 4
    show = sf.hooks.callback(lambda trainer, epoch, metrics: told.append(epoch))
    result = sf.fit(STEP, state, batches, epochs=2, evaluation=own, hooks=show)
    assert (result.steps, measured, told) == (18, [14, 18], [0, 1])


def test_an_epoch_that_an_exception_interrupted_at_the_end_of_the_run_is_finished(tmp_path):
    epochs, errors = [], [OSError("no")]

    def measure(state):
        if errors:
            raise errors.pop()
        return {}

    def run():
        show = sf.hooks.callback(lambda trainer, epoch, metrics: epochs.append(epoch))
        own = sf.Evaluation(measure)
        return fit(epochs=2, evaluation=own, hooks=show, **saves_at_end(tmp_path))

    with pytest.raises(OSError, match="no"):
        run()
    assert run().stop_reason.kind == "completed"
    assert epochs == [0, 1]


def test_a_nan_of_an_earlier_run_does_not_end_one_in_which_nothing_is_trained():
    hook = sf.hooks.on_nonfinite()
    first = learn(steps=3, hooks=hook)
    assert first.stop_reason.kind == "nonfinite"
    with pytest.warns(UserWarning, match="nothing was trained: step 3 of 3 was done before"):
        again = sf.fit(STEP, first.state, spoilt(), steps=3, hooks=hook)
    assert again.stop_reason.kind == "already_completed"
    assert again.capsule is None


def test_a_directory_that_cannot_be_read_does_not_replace_an_error(tmp_path, monkeypatch):
    def fails(event):
        monkeypatch.setattr(sf.checkpoint.Series, "best_step", unreadable)
        raise ValueError("of the hook")

    def unreadable(self):
        raise OSError("the server is gone")

    with pytest.raises(ValueError, match="of the hook") as caught:
        fit(steps=20, hooks=fails, **saves(tmp_path))
    assert caught.value.result.best is None
    assert any("the server is gone" in note for note in caught.value.__notes__)


def earlier_format(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "FORMAT", 99)
    fit(steps=7, **saves(tmp_path))
    monkeypatch.undo()
    return saves(tmp_path)


def earlier_run(tmp_path, _):
    fit(steps=20, run_dir=tmp_path)
    return {"run_dir": tmp_path}


def no_position(tmp_path, _):
    return {"batches": (next(batches()) for _ in range(10)), **saves(tmp_path)}


def few_batches(*_):
    return {"batches": [next(batches())] * 5}


def lost_position(tmp_path, _):
    rows = sf.batches(({"x": np.float32(i)} for i in range(99)), 4)
    return {"batches": rows, **saves(tmp_path)}


def long_history(tmp_path, monkeypatch):
    monkeypatch.setattr("stepfold.loop.metrics._SAVED_POINTS", 3)
    plan = {"checkpoints": sf.Checkpoints(tmp_path, every=7), "log_every": 1}
    fit(steps=7, **plan)
    return plan


def signal_to_save(*_):
    return {"hooks": lambda _: os.kill(os.getpid(), signal.SIGUSR1), "log_every": 4}


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (earlier_format, "was saved by another version"),
        (earlier_run, "previous-1"),
        (no_position, "batches: expected get_state and set_state, to resume"),
        (few_batches, "batches: expected enough for 10 steps, got 5; .*epochs"),
        (lost_position, "expected a position"),
        (signal_to_save, "SIGUSR1 ignored: fit has no checkpoints"),
        (long_history, "history: only the last 3 points of train/at are left, as a checkpoint"),
    ],
)
def test_a_warning_is_at_the_line_that_calls_fit(prepare, words, tmp_path, monkeypatch):
    options = {"batches": batches(), "steps": 10, **prepare(tmp_path, monkeypatch)}
    with pytest.warns(UserWarning, match=words) as caught:
        sf.fit(JITTED, number(), **options)
    assert [warning.filename for warning in caught] == [__file__]


# Files of an earlier run


def test_a_second_run_in_the_same_directory_overwrites_nothing(tmp_path):
    fit(run_dir=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.warns(
        UserWarning, match="run_dir: this run starts at step 0, but an earlier .*previous-1"
    ):
        fit(run_dir=tmp_path, steps=10)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "previous-1").iterdir()}
    assert kept == before
    assert rows(tmp_path / "metrics.jsonl") == [10]


def test_a_second_run_that_fails_at_once_loses_nothing(tmp_path):
    fit(run_dir=tmp_path)
    broken = (1 / 0 for _ in range(3))
    with pytest.warns(UserWarning, match="previous-1"), pytest.raises(ZeroDivisionError):
        fit(broken, run_dir=tmp_path)
    assert rows(tmp_path / "previous-1" / "metrics.jsonl") == [10, 20]


def test_a_second_run_in_a_directory_that_is_in_use_is_refused(tmp_path):
    def run_another(event):
        with pytest.raises(sf.errors.ConfigError, match="run_dir: expected"):
            fit(run_dir=tmp_path)
        seen.append(event.step)

    seen = []
    fit(run_dir=tmp_path, hooks=run_another)
    assert seen == [10, 20]


# Metrics that something depends on


def watch(metric):
    return sf.hooks.stop_early(metric, mode="min", patience=100)


MEASURES_LOSS = sf.Evaluation(lambda state: {"loss_a": state["n"]}, every=5)


@pytest.mark.parametrize("hook", [sf.hooks.throughput(), sf.progress("json", file=io.StringIO())])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"checkpoints": sf.Checkpoints("x", best="val/loss")},
            r"Checkpoints\(best=…\): expected one of train/…, .*got val/loss; add evaluation=",
        ),
        (
            {"hooks": [watch("val_loss")]},
            r"hooks: expected one of train/…, .*got val_loss; add evaluation=.* for eval/…",
        ),
        (
            {"hooks": [watch("eval/accuracy")], "evaluation": MEASURES_LOSS},
            "hooks: expected one of eval/loss_a, got eval/accuracy",
        ),
        (
            {"hooks": [watch("eval/loss_b")], "evaluation": MEASURES_LOSS},
            "hooks: expected one of eval/loss_a, got eval/loss_b; did you mean 'eval/loss_a'",
        ),
    ],
)
def test_a_metric_that_nothing_measures_is_refused(options, words, hook):
    with pytest.raises(sf.errors.ConfigError, match=words):
        fit(**{**options, "hooks": [hook, *options.get("hooks", [])]})


def test_a_kind_of_event_that_there_is_not_is_refused():
    own = sf.Evaluation(lambda state: {}, name="test")
    hook = lambda kind: sf.hooks.every(2, lambda event: None, kind=kind)
    for kind, given in (("evl", hook("evl")), ("eval", sf.hooks.only_warn(hook("eval")))):
        words = f"every: kind: expected one of train, test, got '{kind}'"
        with pytest.raises(sf.errors.ConfigError, match=words):
            fit(evaluation=own, hooks=given)
    assert fit(evaluation=own, hooks=hook("test")).steps == 20


def test_a_metric_that_a_function_may_give_is_looked_for_until_the_end(tmp_path):
    own = lambda event: {"own": 1.0 / event.step}
    kept = {"run_dir": tmp_path, "checkpoints": sf.Checkpoints(every=10, best="own", mode="min")}
    assert fit(hooks=own, **kept).best == 20
    kept = {"checkpoints": sf.Checkpoints(tmp_path / "x", every=10, best="other/loss")}
    words = "best=….: other/loss was never measured, so it had no effect; the metrics are own, "
    with pytest.warns(UserWarning, match=words):
        assert fit(hooks=own, **kept).best is None


def test_a_metric_that_a_hook_provides_may_be_watched_though_an_evaluation_lacks_it():
    """A hook that does not say what it returns may give it later, whatever is similar to it."""
    early = watch("throughput/waiting")
    assert fit(hooks=[early, sf.hooks.throughput()]).hooks[early.name]["best_step"] > 0
    add = lambda event: {"eval/loss_b": event.step} if event.step == 20 else None
    early = watch("eval/loss_b")
    result = fit(evaluation=MEASURES_LOSS, hooks=[early, add])
    assert (result.steps, result.hooks[early.name]["best_step"]) == (20, 20)


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, [10, 16]),
        ({"batches": batches(epochs=3), "steps": None}, [10, 18]),
        ({"hooks": lambda event: "enough" if event.step == 6 else None}, [8]),
        ({"hooks": lambda event: 1 / (event.step - 8) and None}, []),
    ],
)
def test_a_writer_that_leaves_out_intervals_writes_the_last_one(options, written):
    writer = Rows()
    own = sf.Evaluation(lambda state: {})
    options = {"batches": batches(), "hooks": lambda event: None, "steps": 16, **options}
    hooks = [sf.log_to(writer, every=10), options.pop("hooks")]
    with contextlib.suppress(ZeroDivisionError):
        sf.fit(JITTED, number(), hooks=hooks, log_every=2, evaluation=own, **options)
    assert [step for step, row in writer.rows.items() if "train/at" in row] == written


# The history of a long run


@pytest.fixture
def long_run(tmp_path):
    """Return how to run ten more steps of a run with 50,000 rows, and those as they are saved."""
    first, folder = 500_000, tmp_path / "run"
    state = start()._replace(step=jnp.int32(first))
    options = {"more_steps": 10, **saves_at_end(folder)}
    options["checkpoints"] = replace(options["checkpoints"], best="eval/loss")
    options["evaluation"] = sf.Evaluation(lambda state: {"loss": -float(state.step)}, every=5)
    run = lambda: sf.fit(STEP, jax.tree.map(jnp.copy, state), batches(), **options)
    run()
    path = folder / "metrics.jsonl"
    steps = np.arange(10, first + 1, 10)
    lines = [json.dumps({"step": n, "train/loss": n / 7}) for n in steps.tolist()]
    lines[100] = lines[100][:-1] + ', "eval/loss": -1e9}'
    path.write_text("\n".join(lines) + "\n" + path.read_text())
    return run, [*steps.tolist(), first + 10, first + 20]


def test_a_resume_does_not_read_the_rows_of_a_long_run(long_run, tmp_path):
    run, steps = long_run
    tracemalloc.start()
    try:
        result = run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20  # as Python objects, the rows take 42 MiB
    (tmp_path / "run").rename(tmp_path / "moved")  # it is read now, wherever it is
    curve = result.history["train/loss"]
    assert curve.steps == steps
    assert curve[:-2] == [n / 7 for n in steps[:-2]]
    assert len(result.history["eval/loss"]) == 5
    saved = sf.checkpoint.verify(tmp_path / "moved" / "checkpoints")
    assert [step - steps[-1] for step in saved] == [-15, -10, 0]  # at -5 it was not the best


@pytest.mark.parametrize(
    "look",
    [
        len, list, dict, repr, pickle.dumps, json.dumps, copy.deepcopy, lambda h: h == {},
        lambda h: {} | h, lambda h: h | {}, lambda h: {**h}, lambda h: h.copy(),
        lambda h: h.items(), lambda h: "eval/loss" in h, lambda h: h["eval/loss"],
        lambda h: [*reversed(h)], lambda h: h.get("a"), lambda h: h.pop("b"), bool,
    ],
)  # fmt: skip
def test_a_history_is_read_whoever_looks(look):
    points = SimpleNamespace(steps=np.array([1.0, 2.0]), values=np.array([0.5, 0.25]))
    history, whole = History(), History()
    history.read_later(lambda name: {"eval/loss": points, "a": points})
    for step in (1, 2):
        whole.add(step, {"eval/loss": 1 / 2**step, "a": 1 / 2**step})
    for each in (history, whole):
        each.add(3, {"b": 4.0, "a": 2.0})
    found, wanted = look(history), look(whole)
    assert found == wanted or [*found] == [*wanted]
    assert [(n, c, c.steps) for n, c in history.items()] == [
        (n, c, c.steps) for n, c in whole.items()
    ]


# States and steps of other libraries


def by_hand(state, batch):
    """Return numbers as metrics, of which `sf.fit` knows no weight."""
    x = batch["x"].sum()
    return state + x, {"x": x, "two": 2, "is_small": x < 40}


@pytest.mark.parametrize("kind", ["step", "jitted", "several in a call"])
def test_numbers_that_a_step_returns_are_averaged_over_steps(kind, tmp_path):
    """They have weight one, with each step the same, in the history, the files and a resume."""
    step = jax.jit(by_hand) if kind == "jitted" else by_hand
    options = {"log_every": 5, "steps_per_call": 3 if kind.startswith("several") else 1}
    seen = []
    note = lambda event: seen.append((event.per_step["train/x"], event.weights["train/x"]))
    for steps in (8, 12):
        result = sf.fit(
            step, jnp.zeros(()), sf.batches({"x": np.arange(24.0, dtype=np.float32)}, 4),
            steps=steps, hooks=note, **options, **saves_at_end(tmp_path),
        )  # fmt: skip
    sums = np.arange(24.0).reshape(6, 4).sum(1)
    intervals = np.split(np.tile(sums, 2), [5, 8, 10])
    assert result.history["train/x"].steps == [5, 8, 10, 12]
    assert result.history["train/x"] == [np.mean(each) for each in intervals]
    assert result.history["train/two"] == [2.0] * 4
    assert result.history["train/is_small"] == [np.mean(each < 40) for each in intervals]
    values, weights = zip(*seen, strict=True)
    assert np.concatenate(values).tolist() == np.tile(sums, 2).tolist()
    assert np.concatenate(weights).tolist() == [1.0] * 12


def test_weak_types_and_numbers_of_a_state_are_made_strong():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), tx)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    hyperparams = {**state.opt_state.hyperparams, "learning_rate": 1e-4}
    state = state._replace(step=0, opt_state=state.opt_state._replace(hyperparams=hyperparams))
    result = sf.fit(step, state, batches(), steps=5)
    assert (result.steps, int(result.state.step)) == (5, 5)
    assert float(result.state.opt_state.hyperparams["learning_rate"]) == np.float32(1e-4)


def test_a_flax_train_state_is_trained(tmp_path):
    from flax.training.train_state import TrainState

    def step(state, batch):
        loss = lambda params: (params["w"] * batch["x"]).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": sf.mean(value)}

    state = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.1, momentum=0.9)
    )
    result = sf.fit(step, state, batches(), steps=12, **saves_at_end(tmp_path))
    assert (result.steps, int(result.state.step)) == (12, 12)


def test_under_disable_jit_it_runs_eagerly():
    seen = []

    def step(state, batch):
        seen.append(float(batch["x"].sum()))  # fails on a tracer
        return {"n": state["n"] + 1}, {"at": sf.mean(batch["x"])}

    with jax.disable_jit():
        result = sf.fit(step, number(), batches(), steps=2)
    assert (result.steps, len(seen)) == (2, 2)
    assert len(result.history["train/at"]) == 1


# What is checked before the first step


class Position:
    def __init__(self, position):
        self.position = position

    def __iter__(self):
        return self

    def __next__(self):
        pytest.fail("pulled")

    def get_state(self):
        return self.position

    def set_state(self, state): ...


class Kept:
    def __init__(self, state):
        self.state = state

    def __call__(self, event): ...

    def get_state(self):
        return self.state


@pytest.mark.parametrize(
    ("position", "hooks", "words"),
    [
        ({"at": object()}, (), r"batches: get_state\(\)/at: expected JSON or numpy"),
        ({}, Kept({"at": [object()]}), r"hooks: Kept: get_state\(\)/at/0: expected JSON"),
        ({}, Kept({"at": 1}), "Kept: expected set_state next to get_state"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_before_the_first_step(
    position, hooks, words, tmp_path
):
    with pytest.raises(sf.errors.ConfigError, match=words):
        fit(Position(position), hooks=hooks, **saves(tmp_path))


class Later(Position):
    """Batches whose position can be saved only at the start."""

    def __next__(self):
        self.position = {"at": jnp.ones(2)}
        return {"x": np.ones(4, np.float32)}


def test_a_position_after_the_first_batch_is_checked_before_the_first_step(tmp_path):
    steps = []

    def step(state, batch):
        steps.append(batch)
        return STEP(state, batch)

    with pytest.raises(
        sf.errors.ConfigError, match=r"batches: get_state\(\)/at: expected JSON or numpy"
    ):
        sf.fit(step, start(), Later({}), steps=3, **saves(tmp_path))
    assert not steps
    sf.fit(step, start(), Later({}), steps=3)  # without checkpoints it is not needed


@pytest.mark.parametrize("kind", ["shuffled", "prefetched", "mixed", "generator"])
def test_a_stream_whose_position_is_lost_warns_before_the_first_step(tmp_path, kind):
    rows = datasets.Dataset.from_dict({"x": np.arange(32.0)}).to_iterable_dataset()
    shuffled = rows.shuffle(seed=0, buffer_size=8)
    sources = {"generator": lambda: ({"x": float(i)} for i in range(32))}
    sources["mixed"] = datasets.interleave_datasets([rows, shuffled])
    reason = "a stream of type function" if kind == "generator" else "the examples in its shuffle b"

    def run(steps):
        batches = sf.batches(sources.get(kind, shuffled), 4)
        batches = sf.prefetch(batches) if kind == "prefetched" else batches
        hooks = lambda event: seen.append(len(warned))
        return sf.fit(
            STEP, start(), batches, steps=steps, log_every=1, hooks=hooks,
            checkpoints=sf.Checkpoints(tmp_path, every=100),
        )  # fmt: skip

    seen = []
    with pytest.warns(
        UserWarning, match=f"batches: expected a position .* got none: {reason}"
    ) as warned:
        run(2)
    assert seen[0] == 1
    with pytest.raises(sf.errors.DataError, match="expected a position that can be restored"):
        run(4)


# Events and checkpoints


def test_a_checkpoint_does_not_grow_with_the_run(tmp_path):
    sizes = []
    for steps in (40, 160):
        plan = {"run_dir": tmp_path / str(steps), "checkpoints": sf.Checkpoints(every=40)}
        fit(steps=steps, log_every=1, **plan)
        manifest = plan["run_dir"] / "checkpoints" / str(steps) / "state" / "leaves-0.json"
        sizes.append(manifest.stat().st_size)
    assert sizes[1] < sizes[0] + 50
    result = fit(steps=200, log_every=1, **plan)
    assert result.history["train/at"].steps == list(range(1, 201))


def test_without_a_run_dir_a_checkpoint_holds_the_end_of_the_history(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=40)
    fit(steps=40, log_every=1, checkpoints=plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["40"]
    result = fit(steps=60, log_every=1, checkpoints=plan)
    assert result.history["train/at"].steps == list(range(1, 61))


def test_metrics_are_durable_before_the_checkpoint_is(tmp_path):
    """A slow sibling in the same thread may hold the rows back, and a kill would lose them."""
    slow, seen = threading.Event(), []

    class Slow(sf.writers.Writer):
        def write_scalars(self, step, scalars):
            slow.wait(0.3)

    path = tmp_path / "mine.jsonl"
    writer = sf.writers.async_writer(sf.writers.multi_writer(Slow(), sf.writers.jsonl(path)))
    finish = sf.checkpoint.Series._finish

    def look(self, store, step):
        finish(self, store, step)
        seen.append((step, rows(path) if path.exists() else []))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sf.checkpoint.Series, "_finish", look)
        plan = sf.Checkpoints(tmp_path / "checkpoints", every=20)
        fit(steps=20, log_every=5, hooks=sf.log_to(writer), checkpoints=plan)
    assert seen[0] == (20, [5, 10, 15, 20])


def test_a_result_and_what_is_in_it_have_a_short_repr():
    history = History()
    for step in range(100):
        history.add(step, {f"train/{name}": step for name in "abcdefgh"})
    state = {f"w{i}": jnp.ones((100, 100)) for i in range(50)}
    result = FitResult(state, 99, history, Stop("completed", "all 99 steps were done"), None, None)
    assert len(repr(result)) < 300
    assert "all 99 steps were done" in repr(result)
    event = sf.Event(10, 20, {"train/loss": 0.5}, state, batch=state)
    assert len(repr(event)) < 200
