"""Events, stop reasons, and the order in which hooks are called."""

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.loop.hooks.base import (
    BaseHook,
    Event,
    GoBack,
    HookDispatcher,
    Stop,
    hook_name,
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


def test_the_repr_of_an_event_is_one_short_line():
    event = Event(10, 20, {"eval/loss": 2.0}, {"w": np.ones(100_000)}, kind="eval")
    assert repr(event) == "Event('eval', step=10, total=20, metrics={eval/loss: 2})"


def test_a_stop_is_a_kind_and_a_message():
    stop = Stop("plateau", "the loss is flat")
    assert tuple(stop) == ("plateau", "the loss is flat")
    assert str(stop) == stop.message


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
    first, last = Writer(), Writer()
    dispatch(first, lambda event: {"a": 1.0}, lambda event: {"b": event.metrics["a"]}, last)
    assert first.rows == last.rows == [{"train/loss": 2.0, "a": 1.0, "b": 1.0}]


def test_a_hook_that_declares_prefixes_is_called_before_those_that_provide_none():
    class Speed(BaseHook):
        provides = ("speed/",)

        def __call__(self, event):
            return {"speed/steps": 3.0}

    writer = Writer()
    dispatch(writer, Speed())
    assert writer.rows == [{"train/loss": 2.0, "speed/steps": 3.0}]


@pytest.mark.parametrize("returned", [True, 3.0, ["stop"], b"stop"])
def test_any_other_return_value_names_the_hook(returned):
    def mistaken(event):
        return returned

    message = "mistaken: expected a hook to return None, a reason to stop, a request, or numbers"
    with pytest.raises(sf.ConfigError, match=message):
        dispatch(mistaken)


def test_a_value_that_is_not_a_number_is_named():
    with pytest.raises(sf.ConfigError, match="rate: expected a number, got 'fast'"):
        dispatch(lambda event: {"rate": "fast"})


# Reasons to stop


def test_a_string_is_short_for_a_stop():
    assert dispatch(lambda event: "enough")[1] == Stop("hook", "enough")
    assert dispatch(lambda event: Stop("plateau", "flat"))[1] == Stop("plateau", "flat")


@pytest.mark.parametrize("returned", [None, "", Stop("hook", "")])
def test_an_empty_reason_is_none(returned):
    assert dispatch(lambda event: returned)[1] is None


def test_every_hook_is_called_and_the_reasons_are_in_the_order_of_the_list():
    seen = []
    hooks = [lambda event: None, lambda event: "one", lambda event: GoBack(), seen.append]
    _, (first, second) = HookDispatcher(hooks).dispatch(EVENT)
    assert first == Stop("hook", "one")
    assert second == GoBack(9, (10, 11))
    assert seen == [EVENT]


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


def test_a_hook_may_stop_unless_it_declares_otherwise():
    assert may_stop(lambda event: None)
    assert not may_stop(BaseHook())


# State


def test_the_snapshot_of_a_transaction_is_kept_until_every_hook_has_seen_the_event():
    hook = Counter()

    def failing(event):
        raise ZeroDivisionError

    dispatcher = HookDispatcher([hook, failing])
    with pytest.raises(ZeroDivisionError), dispatcher.transaction():
        dispatcher.dispatch(EVENT)
    assert (hook.count, dispatcher.get_state()) == (1, [["Counter", 0]])


def test_after_a_transaction_the_state_is_the_new_one():
    dispatcher = HookDispatcher([Counter()])
    with dispatcher.transaction():
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


def test_a_name_is_the_key_of_a_state():
    first, second = counters("eval/loss", "eval/loss")
    first.name, second.name, second.count = "patient", "eager", 7
    state = HookDispatcher([first, second]).get_state()
    resumed = counters("eval/loss")
    resumed[0].name = "eager"
    HookDispatcher(resumed).set_state(state)
    assert resumed[0].count == 7


def test_hooks_that_watch_the_same_get_their_state_back_by_their_order():
    first, second = counters("eval/loss", "eval/loss")
    second.count = 7
    state = HookDispatcher([first, second]).get_state()
    resumed = counters("eval/loss", "eval/loss")
    HookDispatcher(resumed).set_state(state)
    assert [hook.count for hook in resumed] == [0, 7]


def test_a_state_that_may_be_that_of_several_hooks_is_dropped_with_a_warning():
    first, second = counters("eval/loss", "eval/loss")
    first.count = second.count = 7
    state = HookDispatcher([first, second]).get_state()
    resumed = counters("eval/loss")
    with pytest.warns(UserWarning, match="hooks: expected 2 Counter eval/loss, as in .*, got 1"):
        HookDispatcher(resumed).set_state(state)
    assert resumed[0].count == 0


def test_a_hook_whose_state_is_none_is_not_restored():
    class Stateless(BaseHook):
        def set_state(self, state):
            raise AssertionError

    dispatcher = HookDispatcher([Stateless()])
    dispatcher.set_state(dispatcher.get_state())


def test_a_hook_is_named_by_the_function_or_class_that_made_it():
    assert hook_name(Counter()) == "Counter"
    assert hook_name(dispatch) == "dispatch"


# What hooks declare


def test_end_epoch_is_called_where_it_exists():
    hook = Counter()
    dispatcher = HookDispatcher([hook, lambda event: None])
    dispatcher.end_epoch(3)
    assert (dispatcher.wants_epochs, hook.epochs) == (True, [3])
    assert not HookDispatcher([lambda event: None, BaseHook()]).wants_epochs


def test_one_hook_that_needs_the_exact_state_is_enough():
    class Exact(BaseHook):
        needs_exact_state = True

    assert HookDispatcher([lambda event: None, Exact()]).needs_exact_state
    assert not HookDispatcher([lambda event: None, BaseHook()]).needs_exact_state


def test_open_and_flush_are_called_where_they_exist():
    class Recorder:
        def __init__(self):
            self.calls = []

        def __call__(self, event): ...

        def open(self, step, total):
            self.calls.append((step, total))

        def flush(self):
            self.calls.append("flush")

    hook = Recorder()
    dispatcher = HookDispatcher([lambda event: None, hook, BaseHook()])
    dispatcher.open(5, 9)
    dispatcher.flush()
    assert hook.calls == [(5, 9), "flush"]


# In a run


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, event):
        self.calls.append(event.step)
        half = event.metrics["train/loss"] / 2
        return {"recorder/half": half, "recorder/data_wait": event.data_wait_seconds}

    def open(self, step, total):
        self.calls.append(("open", step, total))

    def close(self):
        self.calls.append("close")

    def get_state(self):
        return {"calls": len(self.calls)}

    def set_state(self, state):
        self.calls.append(("set_state", state))


def run(directory, steps, *hooks):
    batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    checkpoints = None if directory is None else sf.Checkpoints(directory, every=10)
    return sf.fit(STEP, start(), batches, steps=steps, checkpoints=checkpoints, hooks=hooks)


def test_hooks_are_opened_called_and_closed_and_a_resume_restores_their_state(tmp_path):
    first, second, third = Recorder(), Recorder(), Recorder()
    result = run(tmp_path, 10, first)
    assert first.calls == [("open", 0, 10), 10, "close"]
    loss = result.history["train/loss"]
    assert result.history["recorder/half"] == [value / 2 for value in loss]
    assert result.history["recorder/data_wait"][0] > 0
    result = run(tmp_path, 20, second)
    assert second.calls == [("set_state", {"calls": 2}), ("open", 10, 20), 20, "close"]
    assert result.history["recorder/half"].steps == [10, 20]
    with pytest.warns(UserWarning, match="nothing was trained"):
        run(tmp_path, 20, third)  # already completed: nothing to open
    assert third.calls == [("set_state", {"calls": 3}), "close"]
