"""Hooks around another hook, and callbacks at the ends of epochs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import STEP, Shown, start

import stepfold as sf
from stepfold.hooks.stop import on_nonfinite, stop_early, time_limit
from stepfold.hooks.wrappers import callback, every, only_warn
from stepfold.loop.events import Event, GoBack, Nonfinite, Replace, Stop
from stepfold.loop.hook import Hook


def event(step=7):
    return Event(step, None, {"train/loss": 1.0}, None)


class Recorder:
    """An object with effects and a state: the steps that it has seen."""

    def __init__(self):
        self.steps, self.effects = [], []

    def __call__(self, event):
        self.steps.append(event.step)

    def open(self, step, total):
        self.effects.append(("open", step, total))

    def flush(self):
        self.effects.append("flush")

    def close(self):
        self.effects.append("close")

    def get_state(self):
        return [*self.steps]

    def set_state(self, state):
        self.steps = [*state]


WRAPPERS = [only_warn, lambda hook: every(1, hook)]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_effects_of_a_wrapped_object_are_those_of_the_object(wrap, tmp_path):
    inner = Recorder()
    sf.fit(
        STEP, start(), sf.batches({"x": np.ones(24, np.float32)}, 4), steps=6, log_every=3,
        hooks=wrap(inner), checkpoints=sf.Checkpoints(tmp_path, every=6),
    )  # fmt: skip
    assert inner.effects == [("open", 0, 6), "flush", "close"]
    assert inner.steps == [3, 6]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_state_of_a_wrapped_hook_is_saved_and_continues(wrap):
    hook = Shown(wrap(Recorder()))
    hook.start()
    hook(event(7))
    inner = Recorder()
    resumed = Shown(wrap(inner))
    resumed.resume(hook.save(), 7)
    resumed(event(8))
    assert inner.steps == [7, 8]
    early = Shown(wrap(stop_early("eval/loss", patience=2)))
    for step in (1, 2):
        early(Event(step, None, {"eval/loss": 1.0}, None, kind="eval"))
    resumed = Shown(wrap(stop_early("eval/loss", patience=2)))
    resumed.resume(early.save(), 2)
    state = resumed.state.get("hook", resumed.state)
    assert (state["best"], state["best_step"], state["num_worse"]) == (1.0, 1, 1)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_declarations_are_those_of_the_wrapped_hook(wrap):
    update = lambda state, event: (state, None)
    exact = Hook(0, update, "mine", (), True, "eval/loss", ("norm/",), (Stop, GoBack), ("eval",))
    for inner in (exact, on_nonfinite()):
        hook = wrap(wrap(inner))
        names = "exact", "metric", "provides", "only"
        assert [getattr(hook, name) for name in names] == [getattr(inner, name) for name in names]
        assert hook.declares(Nonfinite) == inner.declares(Nonfinite)
        assert "start" in hook.also or inner is exact


def test_only_a_wrapper_that_warns_cannot_stop():
    hook = on_nonfinite()
    assert every(1, hook).may_return(Stop)
    assert every(1, lambda event: None).may_return(Stop)
    for wrapped in (only_warn(hook), every(1, only_warn(hook)), only_warn(every(1, hook))):
        assert not wrapped.may_return(Stop, GoBack, Replace)
        assert wrapped.declares(Nonfinite)  # it stays the one of `fit`
    assert not only_warn(lambda event: None).may_return(Stop)


def test_a_wrapper_is_named_by_itself_and_its_hook():
    early = stop_early("eval/loss", patience=1)
    assert every(2, early).name == "every stop_early eval/loss"
    assert only_warn(every(2, early)).name == "only_warn every stop_early eval/loss"
    (hook := Shown(every(2, Recorder()))).start()
    with pytest.warns(UserWarning, match="has the state of every Recorder, but fit has no such"):
        Shown(every(2, early)).resume(hook.save())


@pytest.mark.parametrize("wrong", [None, 10, "stop", Recorder])
def test_what_is_not_a_hook_is_refused(wrong):
    for name, wrap in (("every", lambda hook: every(10, hook)), ("only_warn", only_warn)):
        with pytest.raises(
            sf.errors.ConfigError, match=rf"{name}.*: expected a hook, \(event\) -> …"
        ):
            wrap(wrong)
    for wrap in WRAPPERS:
        with pytest.raises(
            sf.errors.ConfigError, match="expected a hook that is called with events, got"
        ):
            wrap(callback(print))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_sink_is_refused_with_what_to_do(wrap):
    for sink in (sf.progress("none"), sf.hooks.watchdog(60)):
        with pytest.raises(
            sf.errors.ConfigError, match=r"expected a hook, .* sf.log_to has every=…"
        ):
            wrap(sink)


# every


def make_every(n):
    seen = []
    return Shown(every(n, lambda event: seen.append(event.step))), seen


def steps_seen(hook, seen, *steps):
    for step in steps:
        hook(event(step))
    return seen


def test_the_first_event_at_or_after_each_multiple():
    steps = [10, 20, 30, 40, 50, 60, 100, 110]
    assert steps_seen(*make_every(25), *steps) == [30, 50, 100]
    kinds = []  # each kind of event counts alone
    hook = Shown(every(10, lambda event: kinds.append((event.step, event.kind))))
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
        other.start()
        steps_seen(other, [], *saved[1:])
        hook.resume(other.save(), step)
    else:
        hook.start(step)
    assert steps_seen(hook, seen, *then) == wanted


@pytest.mark.parametrize("wrong", [0, 2.0, True, lambda event: None])
def test_every_needs_a_count(wrong):
    with pytest.raises(
        sf.errors.ConfigError, match="every: expected an integer of at least 1, got "
    ):
        every(wrong, lambda event: None)


# only_warn


def test_a_hook_may_see_one_kind_of_event_alone():
    seen = []
    hook = Shown(every(20, lambda event: seen.append((event.kind, event.step)), kind="eval"))
    for step in range(10, 101, 10):
        hook(Event(step, None, {}, None))
        if step % 30 == 0:
            hook(Event(step, None, {}, None, kind="eval"))
    assert seen == [("eval", 30), ("eval", 60), ("eval", 90)]
    with pytest.raises(
        sf.errors.ConfigError, match="kind: expected 'train', or the name of an eval"
    ):
        every(20, print, kind=3)


@pytest.mark.parametrize(
    "hook", [time_limit(0), lambda event: Stop("plateau", "flat"), lambda event: "flat"]
)
def test_a_reason_becomes_a_warning(hook):
    with pytest.warns(UserWarning, match="^step 7: (the time limit of 0 s was reached|flat)$"):
        assert Shown(only_warn(hook))(event()) is None


@pytest.mark.parametrize("returned", ["", Stop("hook", ""), None, {"a": 1}])
def test_what_is_no_reason_passes(returned):
    hook = lambda event: returned
    passed = {"a": 1} if isinstance(returned, dict) else None
    assert Shown(only_warn(hook))(event()) == passed
    assert Shown(every(7, hook))(event()) == returned
    assert Shown(every(8, hook))(event()) is None


def test_a_reason_that_a_resumed_run_has_is_no_new_warning(recwarn):
    hook = Shown(only_warn(stop_early("eval/loss", patience=1)))
    for step in (1, 2):
        hook(Event(step, None, {"eval/loss": 1.0}, None, kind="eval"))
    assert len(recwarn) == 1
    resumed = Shown(only_warn(stop_early("eval/loss", patience=1)))
    assert resumed.resume(hook.save(), 2) is None
    assert len(recwarn) == 1


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
    assert sf.checkpoint.latest_step(tmp_path) == 2 * STEPS_PER_EPOCH
    run(recorder(seen), checkpoints=checkpoints)
    assert [epoch for _, epoch, _ in seen] == [1, 2]


def test_a_callback_needs_a_function_and_epochs():
    endless = iter([{"x": np.zeros(4, np.float32)}])
    with pytest.raises(
        sf.errors.ConfigError, match="hooks: expected batches that know how many steps an"
    ):
        sf.fit(STEP, start(), endless, steps=1, hooks=[callback(print)])
    message = r"callback: expected a function \(trainer, epoch, metrics\), got None"
    with pytest.raises(sf.errors.ConfigError, match=message):
        callback(None)
