"""Hooks and sinks in runs: whose state is kept, what continues, and what is refused."""

import json
import math

import numpy as np
import pytest
from tests.runs.runs import Cut, cut_at
from tests.small import STEP, Shown, batches, start

import stepfold as sf
from stepfold.hooks.objects import from_object
from stepfold.loop.events import Event
from stepfold.loop.hook import Hook, Sink

EPOCH = 4  # steps


def fit(hooks, folder=None, steps=12, **options):
    options = {"log_every": 2, **options}
    if folder is not None:
        options["checkpoints"] = sf.Checkpoints(folder, every=4)
    return sf.fit(STEP, start(), batches(), steps=steps, hooks=hooks, **options)


def note(name="note", also=(), **options):
    """Make a hook whose state has the steps that it has seen, and those seen in this process."""

    def update(state, event):
        seen = [*state["seen"], event.step] if event.is_train else state["seen"]
        return {"seen": seen, "_all": [*state["_all"], event.step]}, None

    return Hook({"seen": [], "_all": []}, update, name, also, **options)


def back_from(step, to):
    """Make a hook that lets a run go back once."""

    def hook(event):
        return None if is_done or event.step < step else is_done.append(1) or sf.hooks.GoBack(to=to)

    is_done = []
    return hook


# The states of a run


def test_the_state_of_a_hook_continues_after_a_resume(tmp_path):
    whole = fit(note()).hooks["note"]
    assert whole["seen"] == [2, 4, 6, 8, 10, 12]
    with pytest.raises(Cut):
        fit([note(), cut_at(10)], tmp_path)
    resumed = fit(note(), tmp_path)
    assert resumed.resumed
    assert resumed.hooks["note"]["seen"] == whole["seen"]
    assert resumed.hooks["note"]["_all"] == [10, 12]  # the checkpoint has none of those before


def test_the_state_of_a_hook_continues_where_a_run_goes_back_but_memory_stays(tmp_path):
    result = fit([note(), back_from(8, to=4)], tmp_path)
    assert result.resumed == 4
    assert result.hooks["note"]["seen"] == [2, 4, 6, 8, 10, 12]
    assert result.hooks["note"]["_all"][:6] == [2, 4, 6, 8, 6, 8]


def test_a_checkpoint_has_the_states_by_name_without_memory(tmp_path):
    fit([note("a"), note("b", ("start",)), lambda event: None], tmp_path)
    seen = []
    look = Hook({"seen": None}, lambda s, event: (s, seen.append(s["seen"])), "b", ("start",))
    with pytest.warns(UserWarning, match="has the state of a, but fit has no such hook"):
        fit([look, sf.progress("none")], tmp_path, steps=13)
    assert seen[0] == [2, 4, 6, 8, 10, 12]
    restored = sf.restore(tmp_path, start())
    saved = dict(restored.extra["fit"]["hooks"])
    assert saved["b"] == {"seen": seen[0]}


def test_two_runs_with_one_hook_do_not_share_its_state():
    hook = note()
    first, second = fit(hook).hooks["note"], fit(hook).hooks["note"]
    assert first == second
    assert hook.init == {"seen": [], "_all": []}


def test_the_state_of_another_hook_of_the_name_is_dropped_with_a_warning(tmp_path):
    fit(Hook({"other": 1}, lambda state, event: (state, None), "note"), tmp_path)
    with pytest.warns(UserWarning, match="the state of note in the checkpoint is that of another"):
        result = fit(note(), tmp_path, steps=16)
    assert result.hooks["note"]["seen"] == [14, 16]


def test_the_result_has_the_states_by_name_even_of_a_run_that_fails_or_is_done(tmp_path):
    result = fit([note(), sf.log_to(Rows(), every=4), sf.progress("none")], tmp_path)
    assert result.hooks["log_to"]["multiple"] == 3
    assert result.hooks["progress"]["weight"] > 0
    with pytest.warns(UserWarning, match="nothing was trained"):
        done = fit([note(), sf.log_to(Rows(), every=4), sf.progress("none")], tmp_path)
    assert done.hooks["note"]["seen"] == result.hooks["note"]["seen"]
    with pytest.raises(Cut) as caught:
        fit([note(), cut_at(6)])
    assert caught.value.result.hooks["note"]["seen"] == [2, 4]  # those that all hooks have seen


class Rows:
    """A writer in memory."""

    def __init__(self):
        self.steps = []

    def write_scalars(self, step, scalars):
        self.steps.append(step)


# Events without metrics


def test_a_run_begins_and_ends_epochs_for_hooks_that_ask():
    seen = []

    def update(state, event):
        seen.append((event.kind, event.step, event.epoch, dict(event.metrics) == {}))
        return state, None

    plain = lambda event: seen.append(("plain", event.step))
    fit([Hook(None, update, "mine", ("start", "epoch")), plain], steps=5, log_every=4)
    assert seen == [
        ("start", 0, None, True),
        *[("train", 4, None, False), ("plain", 4), ("epoch", 4, 0, True)],
        *[("train", 5, None, False), ("plain", 5)],
    ]


def test_a_hook_may_stop_a_run_that_begins(tmp_path):
    stop = Hook(None, lambda state, event: (state, "enough"), "stop", ("start",))
    with pytest.warns(UserWarning, match="nothing was trained: enough"):
        result = fit(stop, tmp_path)
    assert (result.steps, result.stop_reason.message) == (0, "enough; stopped at step 0")


# Objects


class Object:
    """An object with a state and effects, as users write them."""

    def __init__(self):
        self.calls, self.count = [], 0

    def __call__(self, event):
        self.calls.append(event.step)
        self.count += 1

    def open(self, step, total):
        self.calls.append(f"open {step} of {total}")
        self.count = 0

    def rewind(self, step):
        self.calls.append(f"rewind {step}")

    def end_run(self):
        self.calls.append("end")

    def write_config(self, config):
        self.calls.append(dict(config))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.calls.append(f"state {state}")
        self.count = state


class ObjectWithEpochs(Object):
    def end_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")


def test_an_object_is_called_as_a_hook_and_for_its_effects():
    hook = ObjectWithEpochs()
    fit(hook, steps=6, log_every=4, run_dir=sf.RunDirectory(config={"rate": 0.1}))
    wanted = ["open 0 of 6", {"rate": 0.1}, 4, "epoch 0", 6, "end", "close"]
    assert [call for call in hook.calls if call != "flush"] == wanted


@pytest.mark.parametrize(
    "make", [lambda hook: hook, from_object, lambda hook: sf.hooks.every(1, hook)]
)
def test_the_state_of_an_object_continues_after_a_resume_and_where_a_run_goes_back(make, tmp_path):
    with pytest.raises(Cut):
        fit([make(Object()), cut_at(6)], tmp_path)
    hook = Object()
    result = fit([make(hook), back_from(10, to=8)], tmp_path)
    assert result.resumed == 8
    assert hook.count == 6
    opened = [call for call in hook.calls if str(call).startswith(("open", "state"))]
    assert [call.split()[0] for call in opened] == ["open", "state", "open", "state"]


class Files:
    """An object with effects alone."""

    closed = 0

    def __call__(self, event):
        assert not self.closed

    def close(self):
        self.closed += 1


def test_an_object_with_effects_alone_has_no_state(tmp_path):
    assert fit(hook := Files()).hooks.get("Files") is None
    assert hook.closed == 1
    with pytest.raises(Cut):
        fit([hook := Files(), cut_at(8)], tmp_path)
    assert hook.closed == 1


# Sinks of the user


class Lines(Sink):
    """A sink that notes its calls; its state counts the events."""

    init = 0

    def __init__(self, calls):
        self.calls = calls

    def open(self, step, total, seen):
        self.calls.append(("open", step, total, seen))

    def write(self, state, event):
        self.calls.append((event.kind, event.step, event.metrics.get("own")))
        return state + 1

    def write_config(self, config):
        self.calls.append(("config", dict(config)))

    def end(self, state):
        self.calls.append("end")
        return state

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


MEASURE = sf.Evaluation(lambda state: {"one": 1.0}, every=4)


def test_a_sink_gets_every_event_after_all_hooks_wherever_it_stands():
    calls = []
    own = lambda event: {"own": float(event.step)}
    result = fit(
        [Lines(calls), own], steps=6, evaluation=MEASURE, run_dir=sf.RunDirectory(config={"a": 1})
    )
    assert calls == [
        *[("open", 0, 6, 0), ("config", {"a": 1})],
        *[("train", 2, 2.0), ("train", 4, 4.0), ("eval", 4, 4.0), ("train", 6, 6.0), "end"],
        *[("eval", 6, 6.0), "close"],
    ]
    assert result.hooks["Lines"] == 5


def test_a_sink_knows_at_a_resume_what_it_has_seen(tmp_path):
    calls = []
    with pytest.raises(Cut):
        fit([Lines(calls), cut_at(10)], tmp_path)
    assert calls[-1] == "close"
    del calls[:]
    result = fit([Lines(calls)], tmp_path)
    assert result.resumed > 8
    assert calls[0] == ("open", result.resumed, 12, 8)
    assert calls[1:3] == [("train", 10, None), ("train", 12, None)]
    assert result.hooks["Lines"] == 6


def test_a_sink_is_opened_again_where_a_run_goes_back(tmp_path):
    calls = []
    result = fit([Lines(calls), back_from(8, to=4)], tmp_path)
    at, again = (index for index, call in enumerate(calls) if call[0] == "open")
    assert (calls[at], calls[again]) == (("open", 0, 12, 0), ("open", 4, 12, 4))
    assert calls[again + 1] == ("train", 6, None)
    assert result.hooks["Lines"] == 6
    assert calls.count("close") == 1


def test_a_sink_is_flushed_before_a_checkpoint_commits(tmp_path):
    class Flushed(Lines):
        def flush(self):
            steps.append(
                (sf.checkpoint.latest_step(tmp_path), sum(call[0] == "train" for call in calls))
            )

    calls, steps = [], []
    fit(Flushed(calls), tmp_path, steps=8)
    before, rows = steps[0]
    assert before is None  # the checkpoint of step 4 is not there yet
    assert rows >= 2  # the rows of steps 2 and 4 are written
    assert steps[-1][0] == 4


class Fails(Lines):
    def __init__(self, calls, where):
        super().__init__(calls)
        self.where = where

    def open(self, *given):
        super().open(*given)
        self._fail("open")

    def write(self, state, event):
        self._fail(f"write {event.step}")
        return super().write(state, event)

    def end(self, state):
        self._fail("end")
        return state

    def close(self):
        super().close()
        self._fail("close")

    def _fail(self, where):
        if where == self.where:
            raise Cut


@pytest.mark.parametrize("where", ["open", "write 2", "write 6", "end", "close"])
def test_sinks_are_closed_once_however_the_run_ends(where, tmp_path):
    one, two, other = [], [], []
    with pytest.raises(Cut):
        fit([Lines(one), Fails(two, where), Lines(other)], tmp_path, steps=6)
    assert [calls.count("close") for calls in (one, two, other)] == [1, 1, 1]


def test_an_interrupted_run_does_not_end_its_sinks(tmp_path):
    calls = []
    with pytest.raises(Cut):
        fit([Lines(calls), cut_at(6)], tmp_path)
    assert "end" not in calls
    fit([Lines(calls)], tmp_path)
    assert calls.count("end") == 1


# What is refused


class Mine:
    def __call__(self, event):
        pass


REFUSED = {
    "a class": (Mine, r"hooks: expected functions of an event, .*; call it with its arg.*Mine\("),
    "a class of sinks": (Lines, r"hooks: expected functions of an event, .*; call it .* Lines\("),
    "a writer": (Rows(), r"hooks: expected functions .* sf.log_to\(writer\) makes a hook of a wr"),
    "a function of two": (lambda state, event: None, r"hooks: expected functions of an event, got"),
    "an update of one": (
        Hook(0, lambda event: None),
        r"hooks: update: expected a function of a state and an event, got .*<lambda>\(event\)",
    ),
    "a number": (3, "hooks: expected functions of an event, got int 3"),
    "an init that JSON cannot hold": (
        Hook({"a": object()}, lambda state, event: (state, None), "mine"),
        "hooks: mine: init/a: expected JSON",
    ),
    "a get_state alone": (
        type("Half", (Mine,), {"get_state": lambda self: 1})(),
        "hooks: Half: expected set_state next to get_state",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_not_a_hook_is_refused_with_what_to_do(mistake, tmp_path):
    hook, says = REFUSED[mistake]
    for hooks in (hook, [hook]):
        with pytest.raises(sf.errors.ConfigError, match=says):
            fit(hooks, tmp_path)


@pytest.mark.parametrize("make", [lambda: sf.log_to(Rows()), lambda: Lines([])])
def test_every_around_a_sink_is_refused(make):
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"every: expected a hook, .*; give it to fit itself; sf.log_to has every=…",
    ):
        sf.hooks.every(2, make())


# States that stepfold 0.2 has saved


def evaluated(step, loss):
    return Event(step, None, {"eval/loss": loss}, None, kind="eval")


def train(step, *losses, time=None):
    values = {"train/loss": np.array(losses)}
    return Event(step, None, {"train/loss": float(np.mean(losses))}, None, values, time=time)


def test_a_state_of_stop_early_of_0_2_continues():
    state = {"metric": "eval/loss", "sign": 1, "best": 0.5, "best_step": 20, "num_worse": 1}
    hook = Shown(sf.hooks.stop_early("eval/loss", patience=2))
    assert hook.resume([["stop_early eval/loss", state]], 30) is None
    assert str(hook(evaluated(40, 0.7))).endswith("than 0.5 for 2 evaluations, since step 20")


@pytest.mark.parametrize("action", ["stop", "go_back"])
@pytest.mark.parametrize("before", ["stop", "roll_back"])
def test_a_state_of_a_hook_on_spikes_of_0_2_continues(before, action):
    state = {"metric": "train/loss", "latest": [2.0, 2.1, 1.9, 2.0]}
    hook = Shown(sf.hooks.on_spike(window=4, action=action))
    hook.resume([[f"{before}_on_spike train/loss", state]], 4)
    kind = sf.Stop if action == "stop" else sf.hooks.GoBack
    assert isinstance(hook(train(5, 9.0)), kind)
    wrapped = Shown(sf.hooks.every(2, sf.hooks.on_spike(window=4, action=action)))
    saved = {"n": 2, "first": 0, "reached": {"train": 2}, "hook": state, "is_new": False}
    wrapped.resume([[f"every {before}_on_spike train/loss", saved]], 4)
    assert isinstance(wrapped(train(6, 9.0)), kind)


def test_a_hook_with_a_name_of_0_2_keeps_it():
    state = {"metric": "train/loss", "latest": [2.0, 2.1, 1.9, 2.0]}
    hook = Shown(sf.hooks.on_spike(window=4, name="stop_on_spike train/loss"))
    hook.resume([["stop_on_spike train/loss", state]], 4)
    assert hook(train(5, 9.0)).kind == "spike"


def test_a_state_of_progress_of_0_2_continues(capsys):
    state = {"average": "train/loss", "sum": 0.5, "weight": 0.5, "last_train_step": 1}
    shown = Shown(sf.progress("json", over=2))
    shown.resume([["progress", state]], 1)
    shown(train(2, 4.0))
    shown.hook.close()
    assert '"loss": 3.0' in capsys.readouterr().out  # (0.25 · 1 + 0.5 · 4) / 0.75


def test_a_state_of_log_to_of_0_2_continues():
    shown = Shown(sf.log_to(writer := Rows(), every=25))
    shown.resume([["log_to", {"every": 25, "multiple": 2}]], 75)
    for step in (75, 80, 100):  # the checkpoint was saved before the event of step 75
        shown(train(step, 1.0))
    assert writer.steps == [75, 100]


def test_a_state_of_throughput_of_0_2_continues(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1100.0)
    hook = Shown(sf.hooks.throughput())
    hook.resume([["throughput", {"started": 1000.0, "useful_seconds": 40.0}]], 10)
    assert hook(train(10, 1.0, time=0.0)) is None
    assert hook(train(20, 1.0, time=10.0))["throughput/goodput"] == pytest.approx(0.5)
    assert math.isclose(hook.state["useful_seconds"], 50.0)


# What hooks return at events without metrics


def at(kind, returned, **options):
    """Make a hook that returns something at one kind of event."""
    update = lambda state, event: (state, returned if event.kind == kind else None)
    return sf.Hook(None, update, "mine", also=("start", "epoch"), **options)


def test_a_reason_at_the_end_of_an_epoch_stops_the_run():
    result = fit(at("epoch", "enough of epochs"), steps=40)
    assert result.stop_reason.kind == "hook"
    assert "enough of epochs" in str(result.stop_reason)
    assert 0 < result.steps < 40


@pytest.mark.parametrize(
    ("kind", "returned", "words"),
    [
        ("start", {"a": 1.0}, "mine: expected a reason to stop or None at 'start', got dict"),
        (
            "start",
            sf.hooks.GoBack(),
            "mine: expected a reason to stop or None at 'start', got GoBack",
        ),
        ("epoch", {"a": 1.0}, "mine: expected no numbers at 'epoch', got dict .*; return them at"),
    ],
)
def test_what_has_no_effect_at_an_event_without_metrics_is_refused(kind, returned, words):
    with pytest.raises(sf.errors.ConfigError, match=words):
        fit(at(kind, returned), steps=40)


def test_a_capsule_is_taken_for_a_wrapped_hook_too():
    poisoned = [{"x": np.full(4, x, np.float32)} for x in (1, np.nan, 1, 1)]
    hook = sf.hooks.every(1, sf.hooks.on_nonfinite())
    result = sf.fit(STEP, start(), poisoned, hooks=hook, log_every=1)
    assert (result.stop_reason.kind, result.capsule.step) == ("nonfinite", 2)


def test_a_state_that_is_changed_in_place_does_not_reach_the_next_run():
    def update(state, event):
        state["seen"].append(event.step)
        return state, None

    hook = sf.Hook({"seen": []}, update, "seen")
    first, second = (fit(hook, steps=10).hooks["seen"]["seen"] for _ in range(2))
    assert first == second
    assert hook.init == {"seen": []}


def test_files_name_hooks_and_sinks_as_the_user_knows_them(tmp_path):
    class Opens:
        def open(self, step, total):
            pass

        def __call__(self, event):
            return None

    writer = sf.log_to(sf.writers.jsonl(tmp_path / "own.jsonl"))
    fit([Opens(), writer], run_dir=tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    named = "test_files_name_hooks_and_sinks_as_the_user_knows_them"
    assert info["arguments"]["hooks"] == ["on_nonfinite", named, "log_to"]
    parts = {part for part, _ in info["attempts"][0]["parts"] if part.startswith("hook ")}
    assert {"hook Opens", "hook log_to", "hook metrics.jsonl"} <= parts
    assert not any("effects" in part for part in parts)
