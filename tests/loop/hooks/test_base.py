"""Events, stop reasons, and the order in which hooks are called."""

import copy
import json
import pickle

import numpy as np
import pytest
from tests.small import EVAL_STEP, STEP, batches, start

import stepfold as sf
from stepfold.loop.hooks.base import (
    BaseHook,
    Event,
    GoBack,
    HookDispatcher,
    Stop,
    may_stop,
)

EVENT = Event(10, None, {"train/loss": 2.0}, None)


def dispatch(*hooks, event=EVENT):
    """Return the event with the numbers of all hooks, and the first reason."""
    event, reasons = HookDispatcher(hooks).dispatch(event)
    return event, reasons[0] if reasons else None


class Writer(BaseHook):
    """A hook that declares to return no numbers, as `log_to` does."""

    def __init__(self):
        self.rows = []

    def __call__(self, event):
        self.rows.append(dict(event.metrics))


class Counter:
    """A hook with state that counts events."""

    def __init__(self):
        self.count = 0
        self.epochs = []

    def __call__(self, event):
        self.count += 1

    def end_epoch(self, epoch):
        self.epochs.append(epoch)

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


# Events and reasons


def test_the_kind_decides_what_a_train_event_is():
    assert EVENT.is_train
    assert not Event(10, None, {"train/lr": 0.1, "eval/loss": 2.0}, None, kind="eval").is_train
    assert Event(10, None, {"eval/loss": 2.0}, None).is_train


# Numbers


def test_numbers_are_shown_to_later_hooks_and_not_to_earlier_ones():
    seen = []
    look = lambda event: seen.append(dict(event.metrics))
    event, stop = dispatch(look, lambda event: {"rate": np.float32(0.5)}, look)
    assert seen == [{"train/loss": 2.0}, {"train/loss": 2.0, "rate": 0.5}]
    assert event.metrics == seen[1]
    assert type(event.metrics["rate"]) is float
    assert stop is None
    assert EVENT.metrics == {"train/loss": 2.0}


def test_a_hook_that_provides_no_numbers_sees_all_of_them_wherever_it_stands():
    class Speed(BaseHook):
        provides = ("speed/",)

        def __call__(self, event):
            return {"speed/steps": 3.0}

    first, last = Writer(), Writer()
    numbers = [Speed(), lambda event: {"a": 1.0}, lambda event: {"b": event.metrics["a"]}]
    dispatch(first, *numbers, last)
    assert first.rows == last.rows == [{"train/loss": 2.0, "speed/steps": 3.0, "a": 1.0, "b": 1.0}]


@pytest.mark.parametrize("returned", [True, 3.0, ["stop"], b"stop"])
def test_any_other_return_value_names_the_hook(returned):
    def mistaken(event):
        return returned

    message = "mistaken: expected a hook to return None, a reason to stop, a request, or numbers"
    with pytest.raises(sf.ConfigError, match=message):
        dispatch(mistaken)
    with pytest.raises(sf.ConfigError, match="rate: expected a number, got 'fast'"):
        dispatch(lambda event: {"rate": "fast"})


# Reasons to stop


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("enough", Stop("hook", "enough")),
        (Stop("plateau", "flat"), Stop("plateau", "flat")),
        *((empty, None) for empty in (None, "", Stop("hook", ""))),
    ],
)
def test_a_string_is_short_for_a_stop_and_an_empty_reason_is_none(returned, reason):
    assert dispatch(lambda event: returned)[1] == reason


def test_every_hook_is_called_and_the_reasons_are_in_the_order_of_the_list():
    seen = []
    hooks = [lambda event: None, lambda event: "one", lambda event: GoBack(), seen.append]
    _, (first, second) = HookDispatcher(hooks).dispatch(EVENT)
    assert first == Stop("hook", "one")
    assert second == GoBack(9, (10, 11))
    assert seen == [EVENT]


@pytest.mark.parametrize("skip", ["two", (3,), (5, 3), (0, 2), 11])
def test_what_is_no_range_of_steps_to_skip_is_refused(skip):
    with pytest.raises(sf.ConfigError, match="expected a number of steps up to 10, or a"):
        dispatch(lambda event: GoBack(skip=skip))


def test_the_reason_of_the_first_hook_in_the_list_counts_although_it_is_called_last():
    calls = []

    class Silent(BaseHook):
        def __call__(self, event):
            calls.append("silent")
            return "from the list's first"

    def any_hook(event):
        calls.append("any")
        return "from the list's second"

    assert dispatch(Silent(), any_hook)[1].message == "from the list's first"
    assert calls == ["any", "silent"]


# State


def test_a_state_is_that_after_the_last_event():
    dispatcher = HookDispatcher([Counter()])
    assert dispatcher.get_state() == [["Counter", 0]]
    dispatcher.dispatch(EVENT)
    assert dispatcher.get_state() == [["Counter", 1]]


def counters(*metrics):
    hooks = [Counter() for _ in metrics]
    for hook, metric in zip(hooks, metrics, strict=True):
        hook.metric = metric
    return hooks


def test_a_hook_gets_the_state_of_the_one_that_watched_the_same():
    first, second = counters("eval/loss", "eval/accuracy")
    first.count, second.count = 3, 7
    state = HookDispatcher([first, lambda event: None, second]).get_state()
    assert state == [["Counter eval/loss", 3], ["Counter eval/accuracy", 7]]
    resumed = counters("eval/accuracy", "test/loss", "eval/loss")
    HookDispatcher([Writer(), *resumed]).set_state(state)
    assert [hook.count for hook in resumed] == [7, 0, 3]
    # By their order if several watch the same.
    twins = counters("eval/loss", "eval/loss")
    HookDispatcher(twins).set_state([["Counter eval/loss", 0], ["Counter eval/loss", 7]])
    assert [hook.count for hook in twins] == [0, 7]


def test_a_name_is_the_key_of_a_state():
    first, second = counters("eval/loss", "eval/loss")
    first.name, second.name, second.count = "patient", "eager", 7
    state = HookDispatcher([first, second]).get_state()
    resumed = counters("eval/loss")
    resumed[0].name = "eager"
    with pytest.warns(UserWarning, match="hooks: expected patient, whose state is in the"):
        HookDispatcher(resumed).set_state(state)
    assert resumed[0].count == 7


def test_a_state_that_may_be_that_of_several_hooks_is_dropped_with_a_warning():
    first, second = counters("eval/loss", "eval/loss")
    first.count = second.count = 7
    state = HookDispatcher([first, second]).get_state()
    resumed = counters("eval/loss")
    with pytest.warns(UserWarning, match="hooks: expected 2 Counter eval/loss, as in .*, got 1"):
        HookDispatcher(resumed).set_state(state)
    assert resumed[0].count == 0


# What hooks declare


def test_methods_and_declarations_count_where_they_exist():
    class Exact(BaseHook):
        needs_exact_state = True

        def flush(self):
            flushed.append(True)

    flushed, counter, plain = [], Counter(), [lambda event: None, BaseHook()]
    dispatcher = HookDispatcher([*plain, counter, Exact()])
    dispatcher.end_epoch(3)
    dispatcher.flush()
    assert (counter.epochs, flushed) == ([3], [True])
    for hooks, wanted in ((dispatcher, True), (HookDispatcher(plain), False)):
        assert (hooks.wants_epochs, hooks.needs_exact_state) == (wanted, wanted)
    assert may_stop(plain[0])
    assert not may_stop(plain[1])


# In a run


# What a hook may not change


def run(hooks, path=None, **options):
    """Run 8 steps with a log point and an evaluation at every fourth; return the result."""
    options["evaluation"] = sf.Evaluation(EVAL_STEP, lambda: batches(epochs=1), every=4)
    writers = [] if path is None else [sf.log_to(sf.jsonl_writer(path))]
    hooks = [*hooks, *writers]
    return sf.fit(STEP, start(), batches(), steps=8, log_every=4, hooks=hooks, **options)


CHANGES = {
    "an item": lambda metrics: metrics.__setitem__("train/loss", 0.0),
    "a new item": lambda metrics: metrics.__setitem__("new", 0.0),
    "del": lambda metrics: metrics.__delitem__("train/loss"),
    "update": lambda metrics: metrics.update(new=0.0),
    "|=": lambda metrics: metrics.__ior__({"new": 0.0}),
    "pop": lambda metrics: metrics.pop("train/loss"),
    "clear": lambda metrics: metrics.clear(),
    "setdefault": lambda metrics: metrics.setdefault("new", 0.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hook_cannot_change_the_metrics_of_an_event(change):
    says = "event.metrics: expected the numbers that were measured, got a change of them; return"
    with pytest.raises(sf.ConfigError, match=says):
        run([lambda event: CHANGES[change](event.metrics)])


def test_metrics_of_an_event_can_be_copied_and_written_by_anyone(tmp_path):
    class Own:
        def write_scalars(self, step, scalars):
            scalars["step"] = step

    seen = []

    def look(event):
        seen.append(json.loads(json.dumps(event.metrics)) == event.metrics)
        copies = [event.metrics.copy(), {**event.metrics}, event.metrics | {}, dict(event.metrics)]
        copies += [copy.copy(event.metrics), copy.deepcopy(event.metrics)]
        copies.append(pickle.loads(pickle.dumps(event.metrics)))
        for each in copies:
            each["mine"] = 1.0
            seen.append({**event.metrics, "mine": 1.0} == each)

    result = run([look, sf.log_to(Own())], tmp_path / "metrics.jsonl")
    assert len(seen) > 8
    assert all(seen)
    assert "step" not in result.history
    assert "step" in json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])


def test_values_of_steps_are_read_only():
    def spoil(event):
        event.per_step["train/loss"][0] = np.nan

    with pytest.raises(ValueError, match="read-only"):
        run([spoil])


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("name", ["train/loss", "eval/loss"])
def test_a_number_of_a_hook_cannot_replace_a_metric(name, kind):
    hook = lambda event: {name: -1.0} if event.kind == kind else None
    says = (
        f"lambda>: expected names of numbers that no step and no evaluation measures, got '{name}'"
    )
    with pytest.raises(sf.ConfigError, match=says):
        run([hook])


def test_a_number_of_a_hook_is_not_called_step():
    with pytest.raises(sf.ConfigError, match="expected names other than 'step', the name of"):
        run([lambda event: {"step": 1}])


def test_two_hooks_return_different_names_or_the_same_number():
    def one(event):
        return {"norm": float(event.step), "nan": np.nan}

    def other(event):
        return {"norm": float(event.step + (event.kind == "eval"))}

    assert run([one, sf.every(8, one)]).history["norm"] == [4.0, 8.0]
    says = "hooks: .*one and .*other: norm: expected one number, got 4 and 5 at step 4; rename"
    with pytest.raises(sf.ConfigError, match=says):
        run([one, other])


def test_a_number_has_one_name():
    twice = {"a": {"b": 1}, "a/b": 2}
    with pytest.raises(sf.ConfigError, match="metrics: expected a name for each number, got 'a/b'"):
        run([lambda event: twice])
    with pytest.raises(sf.ConfigError, match="metrics: expected a name for each number, got 'eval"):
        sf.fit(STEP, start(), batches(), steps=4, evaluation=sf.Evaluation(lambda state: twice))
