"""Events, stop reasons, and the order in which hooks are called."""

import copy
import json
import pickle

import numpy as np
import pytest
from tests.small import EVAL_STEP, STEP, Shown, batches, start

import stepfold as sf
from stepfold.hooks.objects import BaseHook, as_hook, from_object
from stepfold.loop.events import Event, GoBack, Stop
from stepfold.loop.hook import Hook, Hooks, Sink

EVENT = Event(10, None, {"train/loss": 2.0}, None)


def dispatch(*hooks, event=EVENT):
    """Return the event with the numbers of all hooks, and the first reason."""
    _, event, reasons = update(hooks, event)
    return event, reasons[0] if reasons else None


def update(hooks, event=EVENT):
    """Return the states after an event, the event with all numbers, and the requests."""
    hooks = Hooks([*map(as_hook, hooks)])
    return hooks.update(hooks.init, event)


class Writer(BaseHook):
    """A hook that declares to return no numbers, as `log_to` does."""

    def __init__(self):
        self.rows = []

    def __call__(self, event):
        self.rows.append(dict(event.metrics))


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
    with pytest.raises(sf.errors.ConfigError, match=message):
        dispatch(mistaken)
    with pytest.raises(sf.errors.ConfigError, match="rate: expected a number, got 'fast'"):
        dispatch(lambda event: {"rate": "fast"})


@pytest.mark.parametrize("pair", [None, 3, "no", (1, None, 2), {"a": 1.0}])
def test_an_update_that_returns_no_pair_names_the_hook(pair):
    with pytest.raises(
        sf.errors.ConfigError, match="mine: update: expected a pair of the next state and"
    ):
        dispatch(Hook(0, lambda state, event: pair, "mine"))


@pytest.mark.parametrize("events", ["start", ("epochs",), ["train"]])
def test_events_that_do_not_exist_are_refused(events):
    says = r"Hook: also: expected some of \('start', 'epoch'\), got "
    with pytest.raises(sf.errors.ConfigError, match=says):
        run([Hook(0, count, "mine", events)])


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
    _, _, (first, second) = update(hooks)
    assert first == Stop("hook", "one")
    assert second == GoBack(9, (10, 11))
    assert seen == [EVENT]


@pytest.mark.parametrize("skip", ["two", (3,), (5, 3), (0, 2), 11])
def test_what_is_no_range_of_steps_to_skip_is_refused(skip):
    with pytest.raises(sf.errors.ConfigError, match="expected a number of steps up to 10, or a"):
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


# States


def count(state, event):
    return state + 1, None


def counting(name="count"):
    return Hook(0, count, name)


def hooks_of(*names):
    return Hooks([counting(name) for name in names])


def test_a_state_is_that_after_the_last_event():
    hooks = hooks_of("count")
    assert hooks.to_saved(hooks.init) == [["count", 0]]
    states, _, _ = hooks.update(hooks.init, EVENT)
    assert hooks.to_saved(states) == [["count", 1]]
    assert hooks.to_saved(hooks.init) == [["count", 0]]


def test_a_name_is_the_key_of_a_state():
    plain = as_hook(lambda event: None)
    saved = Hooks([counting("a"), plain, counting("b")]).to_saved((3, None, 7))
    assert saved == [["a", 3], ["b", 7]]
    hooks = hooks_of("b", "new", "a")
    assert hooks.from_saved(saved, hooks.init) == (7, 0, 3)
    assert Hooks([as_hook(Hook(0, count))]).names == ["count"]  # that of its function
    with pytest.warns(UserWarning, match="hooks: the checkpoint has the state of a, but fit has"):
        assert hooks_of("b").from_saved(saved, (0,)) == (7,)


def test_states_of_one_name_match_in_order_if_they_are_as_many():
    saved = hooks_of("a", "a").to_saved((3, 7))
    assert hooks_of("b", "a", "a").from_saved(saved, (0, 0, 0)) == (0, 3, 7)
    with pytest.warns(UserWarning, match="hooks: expected 2 a, as in .*, got 1; .* a name=…"):
        assert hooks_of("a").from_saved(saved, (0,)) == (0,)


@pytest.mark.parametrize("other", [5, [1], {"best": 1.0}, {}])
def test_the_state_of_another_hook_of_this_name_is_dropped_with_a_warning(other):
    hooks = Hooks([Hook({"best": 0.0, "count": 0, "_seen": 3}, count, "mine")])
    with pytest.warns(UserWarning, match="the state of mine in the checkpoint is that of another"):
        assert hooks.from_saved([["mine", other]], hooks.init) == hooks.init
    same = {"best": 1.0, "count": 2, "more": 3}
    assert hooks.from_saved([["mine", same]], hooks.init) == ({**same, "_seen": 3},)


def test_keys_with_an_underscore_stay_in_memory():
    hooks = Hooks([Hook({"n": 0, "_seen": []}, count, "a"), Hook({"_last": None}, count, "b")])
    later = {"n": 2, "_seen": [1, 2]}, {"_last": 2}
    saved = hooks.to_saved(({"n": 1, "_seen": [1]}, {"_last": 1}))
    assert saved == [["a", {"n": 1}]]
    # A run that goes back keeps those that it has; one that resumes has none.
    assert hooks.from_saved(saved, later) == ({"n": 1, "_seen": [1, 2]}, {"_last": 2})
    assert hooks.from_saved(saved, hooks.init) == ({"n": 1, "_seen": []}, {"_last": None})


def test_a_state_may_become_none():
    for init in (5, "waiting", {"n": 0}):
        hooks = Hooks([Hook(init, count, "mine"), Hook(None, count, "other")])
        saved = hooks.to_saved((None, None))
        assert hooks.from_saved(saved, hooks.init) == (None, None)


@pytest.mark.parametrize("inner", ["_found", "n"])
def test_a_wrapped_hook_has_its_keys_in_memory_too(inner):
    note = lambda state, event: ({**state, inner: event.step, "_last": event}, None)
    hook = Shown(sf.hooks.every(1, Hook({inner: None, "_last": None}, note, "note")))
    hook.start()
    hook(EVENT)
    saved = hook.save()
    hook(later := EVENT._replace(step=11))
    hook.resume(saved)
    assert hook.state["hook"] == {inner: 11 if inner == "_found" else 10, "_last": later}


# Objects


class Counter:
    """An object that counts events."""

    def __init__(self, metric=None):
        self.count, self.metric, self.calls = 0, metric, []

    def __call__(self, event):
        self.count += 1
        return {"count": self.count}

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.calls.append(state)
        self.count = state


def test_an_object_is_named_by_its_name_or_its_class_and_metric():
    names = [as_hook(Counter()).name, as_hook(Counter("eval/loss")).name]
    assert names == ["Counter", "Counter eval/loss"]
    assert from_object(Counter("eval/loss"), "mine").name == "mine"
    named = Counter("eval/loss")
    named.name = "patient"
    assert as_hook(named).name == "patient"


def test_an_object_gets_a_state_only_where_the_run_continues_from_another_one():
    hook = Shown(counter := Counter())
    hook.start()
    assert [hook(EVENT) for _ in range(2)] == [{"count": 1}, {"count": 2}]
    assert (hook.state, counter.calls) == (2, [])
    saved = hook.save()
    assert saved == [["Counter", 2]]
    resumed = Shown(other := Counter())
    resumed.resume(saved)
    assert resumed(EVENT) == {"count": 3}
    assert other.calls == [2]


def test_an_object_that_was_opened_again_gets_its_state_even_if_it_is_that_before():
    hook = Shown(counter := Counter())
    hook.start()
    hook(EVENT)
    saved = hook.save()
    counter.count = 0  # as `open` or `reset` does where a run goes back
    hook.resume(saved)
    assert hook(EVENT) == {"count": 2}


def test_the_state_of_an_object_is_whole_whatever_its_keys_are():
    class Private(Counter):
        def get_state(self):
            return {"_count": self.count}

        def set_state(self, state):
            self.count = state["_count"]

    for wrap in (lambda hook: hook, lambda hook: sf.hooks.every(1, hook)):
        hook = Shown(wrap(Private()))
        hook.start()
        hook(EVENT)
        saved = hook.save()
        hook(EVENT._replace(step=11))
        resumed = Shown(wrap(Private()))
        for each in (hook, resumed):  # it goes back, or resumes
            each.resume(saved)
            assert each(EVENT._replace(step=11)) == {"count": 2}


def test_what_an_object_returns_at_the_end_of_an_epoch_has_no_meaning():
    class Files(BaseHook):
        def end_epoch(self, epoch):
            return epoch + 1

    assert Shown(Files())(EVENT._replace(kind="epoch", epoch=0)) is None


def test_a_function_has_the_declarations_of_its_attributes():
    def measure(event):
        return {"norm/w": 1.0}

    hook = as_hook(measure)
    assert (hook.provides, hook.returns, hook.metric, hook.exact) == (None, None, None, False)
    measure.provides, measure.metric, measure.needs_exact_state = ("norm/",), "eval/loss", True
    measure.replaces_state = True
    hook = as_hook(measure)
    assert (hook.provides, hook.metric, hook.exact) == (("norm/",), "eval/loss", True)
    assert hook.returns == [Stop, sf.hooks.Replace, sf.hooks.Reweight]
    assert hook.update(None, EVENT) == (None, {"norm/w": 1.0})
    assert hook.name.endswith("measure eval/loss")


# What hooks declare


def test_what_hooks_declare_counts():
    class Exact(BaseHook):
        needs_exact_state = replaces_state = True

        def end_epoch(self, epoch):
            pass

    for declares in (True, False):
        hooks = Hooks([*map(as_hook, [lambda event: None, *([Exact()] if declares else [])])])
        assert (hooks.wants_epochs, hooks.exact, hooks.replaces) == (declares,) * 3
    stops = [as_hook(hook).may_return(Stop) for hook in (lambda event: None, BaseHook(), Exact())]
    assert stops == [True, False, False]


def test_events_without_metrics_reach_only_hooks_that_ask_and_no_sink():
    seen = []

    def note(name):
        return lambda state, event: (state, seen.append((name, event.kind)))

    class Files(Sink):
        def write(self, state, event):
            seen.append(("sink", event.kind))
            return state

    every = ("start", "epoch")
    events = {"none": (), "start": ("start",), "epoch": ("epoch",), "both": every}
    hooks = Hooks([Hook(None, note(name), name, events[name]) for name in events], [Files()])
    for kind in ("start", "train", "epoch"):
        hooks.update(hooks.init, EVENT._replace(kind=kind))
    assert seen == [
        *[(name, "start") for name in ("start", "both")],
        *[(name, "train") for name in (*events, "sink")],
        *[(name, "epoch") for name in ("epoch", "both")],
    ]


# What a hook may not change


def run(hooks, path=None, **options):
    """Run 8 steps with a log point and an evaluation at every fourth; return the result."""
    options["evaluation"] = sf.Evaluation(EVAL_STEP, lambda: batches(epochs=1), every=4)
    writers = [] if path is None else [sf.log_to(sf.writers.jsonl(path))]
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
    says = "event.metrics is read-only; return"
    with pytest.raises(sf.errors.ConfigError, match=says):
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
    with pytest.raises(sf.errors.ConfigError, match=says):
        run([hook])


def test_a_number_of_a_hook_is_not_called_step():
    with pytest.raises(
        sf.errors.ConfigError, match="expected names other than 'step', the name of"
    ):
        run([lambda event: {"step": 1}])


def test_two_hooks_return_different_names_or_the_same_number():
    def one(event):
        return {"norm": float(event.step), "nan": np.nan}

    def other(event):
        return {"norm": float(event.step + (event.kind == "eval"))}

    assert run([one, sf.hooks.every(8, one)]).history["norm"] == [4.0, 8.0]
    says = "hooks: .*one and .*other: norm: expected one number, got 4 and 5 at step 4; rename"
    with pytest.raises(sf.errors.ConfigError, match=says):
        run([one, other])


def test_a_number_has_one_name():
    twice = {"a": {"b": 1}, "a/b": 2}
    with pytest.raises(
        sf.errors.ConfigError, match="metrics: expected a name for each number, got 'a/b'"
    ):
        run([lambda event: twice])
    with pytest.raises(
        sf.errors.ConfigError, match="metrics: expected a name for each number, got 'eval"
    ):
        sf.fit(STEP, start(), batches(), steps=4, evaluation=sf.Evaluation(lambda state: twice))
