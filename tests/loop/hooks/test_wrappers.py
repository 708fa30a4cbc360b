"""Hooks around another hook, and callbacks at the ends of epochs."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.loop.hooks.base import BaseHook, Event, HookDispatcher, Stop
from stepfold.loop.hooks.stop import TimeLimit, stop_early, stop_on_nonfinite
from stepfold.loop.hooks.wrappers import HookWrapper, callback, every, only_warn


def event(step=7):
    return Event(step, None, {"train/loss": 1.0}, None)


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, event):
        self.calls.append(event.step)

    def open(self, step, total):
        self.calls.append(("open", step, total))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")

    def get_state(self):
        return {"calls": list(self.calls)}

    def set_state(self, state):
        self.calls = state["calls"]


WRAPPERS = [HookWrapper, only_warn, lambda hook: every(1, hook)]


# HookWrapper


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_everything_that_fit_calls_reaches_the_inner_hook(wrap):
    inner = Recorder()
    hook = wrap(inner)
    hook.open(3, 10)
    hook(event())
    hook.flush()
    hook.close()
    assert inner.calls == [("open", 3, 10), 7, "flush", "close"]
    other = Recorder()
    wrap(other).set_state(json.loads(json.dumps(hook.get_state())))
    assert other.calls == [["open", 3, 10], 7, "flush", "close"]
    plain = HookDispatcher([wrap(lambda event: None)])  # has none of these methods
    plain.set_state(plain.get_state())
    plain.open(0, None)
    plain.flush()


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_declarations_are_those_of_the_inner_hook(wrap):
    class Exact(BaseHook):
        metric, provides = "eval/loss", ("norm/",)
        needs_exact_state = replaces_nonfinite_stop = writes_metrics = True

    for inner in (Exact(), stop_on_nonfinite(), lambda event: None):
        hook = wrap(wrap(inner))
        for name in (*vars(BaseHook), "end_epoch", "found"):
            if name.startswith("_") or name in ("can_stop", "still_stops", "open", "close"):
                continue
            if name in ("get_state", "set_state"):
                assert hasattr(hook, name)
            else:
                assert hasattr(hook, name) == hasattr(inner, name), name
                assert getattr(hook, name, None) == getattr(inner, name, None), name


def test_only_a_wrapper_that_warns_cannot_stop():
    hook = stop_on_nonfinite()
    assert every(1, hook).can_stop
    assert not hasattr(every(1, lambda event: None), "can_stop")
    for wrapped in (only_warn(hook), every(1, only_warn(hook)), only_warn(every(1, hook))):
        assert not wrapped.can_stop
        assert wrapped.replaces_nonfinite_stop
    # A wrapper is named by itself and not by its hook.
    state = HookDispatcher([every(1, event), only_warn(TimeLimit(9))]).get_state()
    assert [name for name, _ in state] == ["every", "only_warn"]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_state_of_a_hook_of_another_kind_is_not_given(wrap):
    inner = stop_early("eval/loss", patience=1)
    before = inner.get_state()
    with pytest.warns(UserWarning, match="hooks: expected Recorder in .*, got stop_early, which"):
        wrap(inner).set_state(wrap(Recorder()).get_state())
    assert inner.get_state() == before
    for other in (copy.deepcopy(wrap(inner)), pickle.loads(pickle.dumps(wrap(inner)))):
        assert other.metric == "eval/loss"


@pytest.mark.parametrize("wrong", [None, 10, "stop", Recorder])
def test_what_is_not_a_hook_is_refused(wrong):
    for name, wrap in (("every", lambda hook: every(10, hook)), ("only_warn", only_warn)):
        with pytest.raises(sf.ConfigError, match=rf"{name}.*: expected a hook, \(event\) -> …"):
            wrap(wrong)
    for wrap in WRAPPERS:
        with pytest.raises(sf.ConfigError, match="expected a hook that is called with events, got"):
            wrap(callback(print))


# every


def make_every(n):
    seen = []
    return every(n, lambda event: seen.append(event.step)), seen


def steps_seen(hook, seen, *steps):
    for step in steps:
        hook(event(step))
    return seen


def test_the_first_event_at_or_after_each_multiple():
    steps = [10, 20, 30, 40, 50, 60, 100, 110]
    assert steps_seen(*make_every(25), *steps) == [30, 50, 100]
    kinds = []  # each kind of event counts alone
    hook = every(10, lambda event: kinds.append((event.step, event.kind)))
    for step in (5, 10, 15, 20):
        for kind in ("train", "eval", "train", "eval"):
            if kind == "train" or step != 10:
                hook(sf.Event(step, None, {}, None, kind=kind))
    assert kinds == [(10, "train"), (15, "eval"), (20, "train"), (20, "eval")]


@pytest.mark.parametrize(
    ("saved", "step", "then", "wanted"),
    [
        ((100, 90), 105, (100, 110, 200), [100, 200]),  # saved before the event of step 100
        ((10, 500, 1000), 1000, (1050, 1100, 1200), [1100, 1200]),  # with another number of steps
        (None, 250, (260, 300), [300]),
    ],
)
def test_a_resumed_run_counts_from_its_step(saved, step, then, wanted):
    hook, seen = make_every(100)
    if saved:
        other, _ = make_every(saved[0])
        steps_seen(other, [], *saved[1:])
        hook.set_state(other.get_state())
    hook.open(step, None)
    assert steps_seen(hook, seen, *then) == wanted


@pytest.mark.parametrize("wrong", [0, 2.0, True, lambda event: None])
def test_every_needs_a_count(wrong):
    with pytest.raises(sf.ConfigError, match="every: expected an integer of at least 1, got "):
        every(wrong, lambda event: None)


# only_warn


def test_a_hook_may_see_one_kind_of_event_alone():
    seen = []
    hook = every(20, lambda event: seen.append((event.kind, event.step)), kind="eval")
    for step in range(10, 101, 10):
        hook(Event(step, None, {}, None))
        if step % 30 == 0:
            hook(Event(step, None, {}, None, kind="eval"))
    assert seen == [("eval", 30), ("eval", 60), ("eval", 90)]
    with pytest.raises(sf.ConfigError, match="kind: expected 'train', or the name of an eval"):
        every(20, hook, kind=3)


@pytest.mark.parametrize(
    "hook", [TimeLimit(0), lambda event: Stop("plateau", "flat"), lambda event: "flat"]
)
def test_a_reason_becomes_a_warning(hook):
    with pytest.warns(UserWarning, match="^step 7: (the time limit of 0 s was reached|flat)$"):
        assert only_warn(hook)(event()) is None


@pytest.mark.parametrize("returned", ["", Stop("hook", ""), None, {"a": 1}])
def test_what_is_no_reason_passes(returned):
    assert only_warn(lambda event: returned)(event()) == (
        {"a": 1} if isinstance(returned, dict) else None
    )
    assert every(7, lambda event: returned)(event()) == returned
    assert every(8, lambda event: returned)(event()) is None


# callback

STEPS_PER_EPOCH = 6


def run(*hooks, epochs=3, log_every=4, **options):
    data = {"x": np.arange(4.0 * STEPS_PER_EPOCH, dtype=np.float32)}
    evaluation = sf.Evaluation(lambda state: {"w": state.params["w"]}, every_epochs=1)
    options |= {"epochs": epochs, "log_every": log_every, "evaluation": evaluation}
    return sf.fit(STEP, start(), sf.batches(data, 4, seed=0), hooks=hooks, **options)


def recorder(seen):
    return callback(lambda trainer, epoch, metrics: seen.append((trainer, epoch, metrics)), "me")


def test_a_callback_is_called_after_every_epoch_and_its_evaluation_including_the_last():
    seen = []
    result = run(recorder(seen))
    assert [(trainer, epoch) for trainer, epoch, _ in seen] == [("me", 0), ("me", 1), ("me", 2)]
    assert [metrics["eval_w"] for *_, metrics in seen] == list(result.history["eval/w"])
    assert set(seen[0][2]) == {"train_loss", "train_grad_norm", "eval_w"}


def test_train_metrics_are_means_over_the_steps_of_the_epoch_for_any_log_every():
    losses = []
    run(lambda event: losses.extend(event.per_step.get("train/loss", ())))
    wanted = np.reshape(losses, (3, STEPS_PER_EPOCH)).mean(axis=1)
    for log_every in (1, 4, STEPS_PER_EPOCH, 100):
        seen = []
        run(recorder(seen), log_every=log_every)
        means = [metrics["train_loss"] for *_, metrics in seen]
        np.testing.assert_allclose(means, wanted, rtol=1e-12)


def test_the_means_of_an_epoch_are_weighted_and_leave_out_a_skipped_step():
    def loss_fn(params, batch, key):
        return sf.mean(params * batch["x"], batch["mask"])

    step = sf.make_train_step(loss_fn, optax.sgd(0.0), skip_nonfinite=True)
    state = sf.init_state(jnp.ones(()), optax.sgd(0.0), jax.random.key(0))
    data = {"x": np.float32([1, 1, 9, 0, np.inf, 1, 3, 3]), "mask": [1, 1, 1, 0, 1, 1, 1, 1]}
    data["mask"] = np.array(data["mask"], bool)
    seen = []
    batches = sf.batches(data, 2, epochs=1)
    result = sf.fit(step, state, batches, hooks=recorder(seen), log_every=4)
    assert seen[0][2]["train_loss"] == result.history["train/loss"][-1] == (1 + 1 + 9 + 3 + 3) / 5
    assert seen[0][2]["train_skipped"] == 0.25


def test_the_epoch_at_whose_end_the_run_stops_counts_and_an_incomplete_one_does_not():
    for last in (STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1):
        seen = []
        stop = lambda event, last=last: "enough" if event.step == last else None
        stop.needs_exact_state = True  # so that the run stops there
        run(stop, recorder(seen), log_every=last)
        assert [epoch for _, epoch, _ in seen] == [0]


def test_an_exception_reaches_the_user_after_a_save_and_the_epoch_is_repeated(tmp_path):
    def fail(trainer, epoch, metrics):
        if epoch == 1:
            raise RuntimeError("mine")

    seen = []
    checkpoints = sf.Checkpoints(tmp_path, every=100)
    with pytest.raises(RuntimeError, match="mine"):
        run(callback(fail), checkpoints=checkpoints)
    assert sf.latest_step(tmp_path) == 2 * STEPS_PER_EPOCH
    run(recorder(seen), checkpoints=checkpoints)
    assert [epoch for _, epoch, _ in seen] == [1, 2]


def test_a_callback_needs_a_function_and_epochs():
    endless = iter([{"x": np.zeros(4, np.float32)}])
    with pytest.raises(sf.ConfigError, match="hooks: expected batches that know how many steps an"):
        sf.fit(STEP, start(), endless, steps=1, hooks=[callback(print)])
    message = r"callback: expected a function \(trainer, epoch, metrics\), got None"
    with pytest.raises(sf.ConfigError, match=message):
        callback(None)
