"""Hooks that stop a run."""

import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import STEP, TX, Shown, batches, masked_loss_fn, start

import stepfold as sf
from stepfold.hooks import stop
from stepfold.hooks.stop import (
    on_nonfinite,
    on_spike,
    stop_early,
    stop_on_corruption,
    time_limit,
    watchdog,
)
from stepfold.loop.events import Event, GoBack, Nonfinite, Stop


def train(step, values=None, **metrics):
    return Event(step, None, metrics, None, values or {})


def evaluation(step, value, name="eval/loss", state=None):
    return Event(step, None, {name: value}, state, kind=name.split("/")[0])


def test_every_hook_here_declares_what_it_may_do():
    stops = [
        (time_limit(1), None, [Stop]),
        (on_nonfinite(), None, [Stop, Nonfinite]),
        (stop_on_corruption(), "train/corrupt", [Stop]),
        (on_spike(), "train/loss", [Stop]),
        (on_nonfinite(action="go_back"), None, [Stop, Nonfinite, GoBack]),
        (on_spike(action="go_back"), "train/loss", [Stop, GoBack]),
        (stop_early("a", patience=1, mode="max"), "a", [Stop]),
    ]
    for hook, metric, returns in stops:
        assert (hook.metric, {*hook.returns}, hook.provides) == (metric, {*returns}, ())
    request = Shown(on_nonfinite(action="go_back"))(train(1, {"train/loss": np.array([np.nan])}))
    assert request.limit == 3
    for hook in (on_nonfinite(), on_spike(), stop_on_corruption()):
        assert Shown(hook)(evaluation(1, np.nan)) is None  # which they ignore


EARLY = {"metric": "eval/loss", "patience": 1}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *(
            (time_limit, {"seconds": seconds}, "time_limit: expected seconds, a number of at least")
            for seconds in (-1, math.nan, "60", True)
        ),
        # It would never be seen, and the hook replaces the one that `fit` adds for the loss.
        (on_nonfinite, {"metric": "eval/loss"}, "metric: expected a train metric such as"),
        (
            stop_early,
            {**EARLY, "patience": 0},
            "patience: expected an integer of at least 1, got 0",
        ),
        (stop_early, {**EARLY, "min_delta": -1}, "min_delta: expected a number of at least 0, got"),
        (stop_early, {**EARLY, "mode": "least"}, "mode: expected one of 'min', 'max', got 'least'"),
        (stop_early, {**EARLY, "metric": 3}, "metric: expected the name of a metric, got 3"),
        (stop_early, {**EARLY, "metric": ""}, "expected the name of a metric, got ''"),
        # The state would be that of a later step.
        (stop_early, {**EARLY, "metric": "train/loss", "keep_state": True}, "keep_state: expected"),
        (on_spike, {"metric": "eval/loss"}, "metric: expected a train metric such as .train"),
        *(
            (make, {"action": action}, f"action: expected 'stop' or 'go_back', got {got}")
            for make in (on_nonfinite, on_spike)
            for action, got in (("skip", "str 'skip'"), (None, "None"), (["stop"], "list"))
        ),
        *(
            (make, {name: value}, f"{name}: expected action='go_back' with it, got action='stop'")
            for make in (on_nonfinite, on_spike)
            for name, value in (("skip", 1), ("limit", 3))
        ),
        *(
            (make, {"action": "go_back", name: 0}, f"{name}: expected an integer of at least 1")
            for make in (on_nonfinite, on_spike)
            for name in ("skip", "limit")
        ),
        (on_spike, {"window": 1}, "window: expected an integer of at least 2, got 1"),
        (on_spike, {"deviations": 0}, "deviations: expected a number above 0, got 0"),
        (watchdog, {"seconds": 0}, "expected seconds, a number above 0, got "),
        (watchdog, {"seconds": 60, "abort": 1}, "abort: expected True or False, got int 1"),
    ],
)
def test_arguments_are_checked(make, options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (on_nonfinite("train/los"), "train/los.*train/loss"),
        (on_spike("train/los"), "train/los.*train/loss"),
        (stop_early("eval/los", patience=1, mode="min"), "eval/los.*eval/loss"),
        (stop_on_corruption(), "hooks: expected one of train/.*, got train/corrupt"),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(hook, message):
    measure = sf.Evaluation(lambda state: {"loss": 1.0}, every=5)
    batches = [{"x": np.full(4, np.nan, np.float32)}] * 20
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.fit(STEP, start(), batches, evaluation=measure, hooks=[hook])


# time_limit


def test_it_stops_when_the_time_is_over(monkeypatch):
    times = iter([100.0, 159.0, 160.0])
    monkeypatch.setattr(stop.time, "monotonic", lambda: next(times))
    hook = Shown(time_limit(60))
    assert hook(train(1)) is None
    assert hook(train(2)) == Stop("time_limit", "the time limit of 60 s was reached")


# on_nonfinite


def test_a_nan_in_another_loss_of_a_step_without_loss_stops_the_run():
    def step(state, batch):
        losses = {"gen_loss": sf.mean(batch), "dis_loss": sf.mean(jnp.ones(2))}
        return state._replace(step=state.step + 1), losses

    batches = [np.full(4, np.nan if n == 4 else 1.0, np.float32) for n in range(9)]
    state = sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))
    result = sf.fit(step, state, batches, log_every=3)
    assert result.stop_reason.message.startswith("train/gen_loss is nan in step 5")
    assert (result.capsule.step, result.capsule.metric) == (5, "train/gen_loss")


def test_the_first_step_of_any_metric_counts_and_those_without_weight_do_not():
    values = {"train/a": np.array([1, 1, np.nan]), "train/b": np.array([1, np.inf, 1])}
    values["train/c"] = np.array([np.nan, 1, 1])
    weights = {"train/c": np.array([0.0, 1, 1])}
    event = Event(9, None, dict.fromkeys(values, np.nan), None, values, weights=weights)
    hook = Shown(on_nonfinite())
    assert str(hook(event)) == "train/b is inf in step 8"
    assert found(hook).before["train/a"] == 1
    assert str(Shown(on_nonfinite("train/a"))(event)) == "train/a is nan in step 9"
    with_loss = event._replace(per_step={**values, "train/loss": np.ones(3)})
    assert Shown(on_nonfinite())(with_loss._replace(metrics={"train/loss": 1.0})) is None


def found(hook):
    return hook.state["_found"]


def test_it_keeps_the_first_such_step_of_a_run_and_its_metrics():
    hook = Shown(on_nonfinite())
    values = {"train/loss": np.array([1.0, -np.inf, np.nan]), "train/hit": np.array([0.5, 0.25, 0])}
    reason = hook(train(9, values | {"train/many": np.ones((3, 2))}))
    assert reason == Stop("nonfinite", "train/loss is -inf in step 8")
    before = {"train/loss": 1.0, "train/hit": 0.5}
    wanted = (8, "train/loss", {"train/loss": -np.inf, "train/hit": 0.25}, before)
    assert found(hook) == wanted
    hook(train(12, values))
    assert found(hook) == wanted
    assert hook.save() == []  # a resume sees these steps again
    hook.start()
    assert found(hook) is None


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        ([0.0] * 3 + [np.nan] + [0.0] * 4, {}, "train/loss is nan in step 4; stopped at step 6"),
        ([1.0, None, 1.0, 1.0], {}, "the batches ended at step 4"),
        ([1.0, np.nan, 1.0, 1.0], {"skip_nonfinite": True}, "the batches ended at step 4"),
    ],
    ids=["nan", "masked", "skipped"],
)
def test_a_run_stops_with_a_nan_but_not_with_a_masked_batch_or_a_skipped_step(
    losses, options, message
):
    batches = [{"x": np.float32([x or 0]), "mask": np.array([x is not None])} for x in losses]
    step = sf.make_train_step(masked_loss_fn, TX, **options)
    result = sf.fit(step, start(), batches, log_every=2, hooks=on_nonfinite())
    assert str(result.stop_reason).startswith(message)
    assert result.stop_reason.kind == ("exhausted" if "ended" in message else "nonfinite")


# stop_early


def follow(hook, values, name="eval/loss", state=lambda step: None, first=1):
    """Show values to a `Shown` hook until it stops; return the step and the message."""
    for step, value in enumerate(values, first):
        reason = hook(evaluation(step, value, name, state(step)))
        if reason:
            assert reason.kind == "early_stop"
            return step, str(reason)
    return None


@pytest.mark.parametrize(
    ("options", "values", "step"),
    [
        ({"patience": 1}, [3, 2, 1, 1.5], 4),
        ({"patience": 2}, [3, 4, 2, 3, 3], 5),
        ({"patience": 2}, [3, 3, 3], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.4, 2.3], None),
        ({"patience": 2, "mode": "max"}, [1, 2, 3, 2, 3], 5),
        ({"patience": 2}, [3, math.nan, math.nan], 3),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 3, 4, 2], None),
        ({"patience": 2}, [math.inf, math.inf, 1], None),
    ],
)
def test_it_stops_after_so_many_values_without_improvement(options, values, step):
    stopped = follow(Shown(stop_early("eval/loss", **options)), values)
    assert (stopped and stopped[0]) == step


def test_the_message_names_the_best_value_and_the_next_run_starts_afresh():
    pure = stop_early("eval/accuracy", patience=2)
    for _ in range(2):
        hook = Shown(pure)
        hook.start()
        assert math.isnan(hook.state["best"])
        assert hook.state["best_step"] == -1
        assert follow(hook, [0.5, 0.75, 0.75, 0.5], "eval/accuracy") == (
            4,
            "eval/accuracy has not become better than 0.75 for 2 evaluations, since step 2",
        )
        assert (hook.state["best"], hook.state["best_step"]) == (0.75, 2)
        assert "_best_state" not in hook.state
    other = Shown(stop_early("eval/loss", patience=1))
    assert follow(other, [1, 2, 3], "train/loss") is None


def test_a_resumed_run_counts_on_and_stops_at_once_for_a_reason_that_it_has():
    hook = Shown(stop_early("eval/loss", patience=2))
    follow(hook, [1.0, 2.0])
    for more, patience in (([3.0], 2), ([3.0, 3.0], 3)):
        resumed = Shown(stop_early("eval/loss", patience=patience))
        assert resumed.resume(hook.save(), 2) is None
        step, message = follow(resumed, more, first=3)
        assert (step, message[-12:]) == (2 + len(more), "since step 1")
        assert resumed.start(step).kind == "early_stop"
    patient = Shown(stop_early("eval/loss", patience=4))
    assert patient.resume(resumed.save(), 4) is None


def test_two_runs_with_the_same_hook_do_not_share_its_state():
    hook, values = stop_early("eval/loss", patience=2), iter([1, 2, 3, 1, 2, 3])
    measure = sf.Evaluation(lambda state: {"loss": float(next(values))}, every=1)
    for _ in range(2):
        result = sf.fit(STEP, start(), batches(), steps=9, hooks=hook, evaluation=measure)
        assert (result.steps, result.stop_reason.kind) == (3, "early_stop")
        state = result.hooks["stop_early eval/loss"]
        assert (state["best"], state["best_step"], state["num_worse"]) == (1.0, 1, 2)


def test_it_keeps_a_copy_of_the_best_state_on_the_host_if_asked_to():
    hook = Shown(stop_early("eval/loss", patience=3, keep_state=True))
    keys = [jax.random.key(step) for step in range(4)]
    shown = [{"w": jnp.full(3, step), "half": jnp.bfloat16(step)} for step in range(4)]
    follow(hook, [3, 1, 2], state=lambda step: {**shown[step], "key": keys[step]})
    step, best = hook.state["_best_state"]
    assert step == 2
    assert type(best["w"]) is type(best["half"]) is np.ndarray
    assert best["half"].dtype == jnp.bfloat16
    donate = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    donate(shown[2])
    assert shown[2]["w"].is_deleted()  # the copy does not keep its buffer
    assert best["w"].tolist() == [2] * 3
    assert (jax.random.key_data(best["key"]) == jax.random.key_data(keys[2])).all()


def test_the_best_state_stays_in_memory_where_a_run_goes_back_unless_it_is_obsolete():
    hook = Shown(stop_early("eval/loss", patience=9, keep_state=True))
    follow(hook, [3, 2], state=lambda step: {"w": np.array(step)})
    saved = hook.save()
    ((_, kept),) = saved
    assert "_best_state" not in kept
    follow(hook, [2.5], state=lambda step: {"w": np.array(step)}, first=3)
    hook.resume(saved, 2)
    assert hook.state["_best_state"] == (2, {"w": 2})
    follow(hook, [1], state=lambda step: {"w": np.array(step)}, first=3)
    hook.resume(saved, 2)  # before the best one
    assert hook.state["_best_state"] is None


# on_spike


def losses(step, values):
    return train(step, {"train/loss": np.array(values)})


def feed(hook, values, chunk):
    """Feed values in intervals of `chunk` steps; return the first message."""
    hook = Shown(hook)
    for end in range(chunk, len(values) + 1, chunk):
        reason = hook(losses(end, values[end - chunk : end]))
        if reason:
            assert reason.kind == "spike"
            return str(reason)
    return None


def noise(count):
    return 2 + 0.1 * np.random.default_rng(0).normal(size=count)


@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_a_spike_is_found_in_its_step_for_any_interval(chunk):
    values = noise(200)
    values[149] = 4.0
    message = feed(on_spike(window=50), values, chunk)
    assert message is not None
    assert message.startswith("train/loss is 4 in step 150, and the median of the 50 before it is ")


def test_a_flat_loss_may_move_by_a_tenth():
    flat = np.full(100, 0.5)
    flat[90] = 0.54
    assert feed(on_spike(window=50), flat, 10) is None
    flat[90] = 0.56
    assert "in step 91" in feed(on_spike(window=50), flat, 10)


def test_the_state_of_another_metric_is_not_restored():
    hook = Shown(on_spike(window=10, name="mine"))
    hook(losses(10, noise(10)))
    for metric, is_same in (("train/loss", True), ("train/norm", False)):
        resumed = Shown(on_spike(metric, window=10, name="mine"))
        resumed.resume(hook.save(), 10)
        assert bool(resumed(train(11, {metric: np.array([99.0])}))) is is_same
    early, other = (
        Shown(stop_early(f"eval/{name}", patience=2, name="mine")) for name in ("loss", "accuracy")
    )
    follow(early, [0.5, 0.75])
    other.resume(early.save(), 2)
    other(evaluation(3, 0.25, "eval/accuracy"))
    assert (other.state["best"], other.state["best_step"]) == (0.25, 3)


def test_the_window_is_small_in_a_checkpoint_and_continues():
    values = noise(60)
    values[40] = 4.0
    hook = Shown(on_spike(window=10))
    assert hook(losses(40, values[:40])) is None
    saved = hook.save()
    assert len(saved[0][1]["latest"]) == 10
    resumed = Shown(on_spike(window=10))
    resumed.resume(saved, 40)
    assert str(resumed(losses(60, values[40:]))).startswith("train/loss is 4 in step 41")


# watchdog

EVENT = Event(1, None, {}, None)


@pytest.fixture
def stacks(tmp_path):
    """A file for stacks."""
    with (tmp_path / "stacks").open("w+") as file:
        yield file


def text_of(file):
    file.seek(0)
    return file.read()


def deep_in_the_data():
    time.sleep(0.4)


def stuck_in_a_step():
    time.sleep(0.4)


def test_all_stacks_are_dumped_and_the_run_continues(stacks):
    thread = threading.Thread(target=deep_in_the_data)
    hook = Shown(watchdog(0.1, file=stacks))
    hook.start()
    for _ in range(6):  # silent while events come
        time.sleep(0.03)
        hook(EVENT)
    assert text_of(stacks) == ""
    thread.start()
    stuck_in_a_step()
    hook.hook.close()
    thread.join()
    text = text_of(stacks)
    assert "Timeout (0:00:00.1" in text
    assert "in stuck_in_a_step" in text
    assert "in deep_in_the_data" in text


def hang(aborts_after):
    import time

    from stepfold.hooks.stop import watchdog

    sink = watchdog(aborts_after, abort=True)
    sink.open(0, 9, 0)
    time.sleep(60)


def test_with_abort_the_process_exits(forks):
    end = forks.run(hang, 0.2)
    assert end.code == 1
    assert "in hang" in end.errors


def test_nothing_is_watched_before_the_run_nor_after_it(stacks):
    watchdog(0.05, file=stacks)
    ended = Shown(watchdog(0.05, file=stacks))
    ended(EVENT)
    ended.hook.close()
    time.sleep(0.2)
    assert text_of(stacks) == ""


# stop_on_corruption


def corrupt(words, step):
    words = np.array(words, np.uint32)
    state = {f"{i:02}": np.ones(1) for i in range(40)}
    return Event(step, None, {"train/corrupt": float(words.any())}, state, {"train/corrupt": words})


def test_it_names_the_first_corrupt_step_and_its_leaves():
    hook = Shown(stop_on_corruption())
    assert hook(corrupt([[0, 0]] * 4, 4)) is None
    reason = hook(corrupt([[0, 0], [1 << 3, 1 << 7], [0, 1], [0, 0]], 8))
    assert reason.kind == "corrupt"
    assert str(reason).startswith("step 6 was run twice, and 2 of 40 leaves differ: 03, 39; do not")
    reason = Shown(stop_on_corruption())(corrupt([[2**32 - 1, 0]], 1))
    assert "32 of 40 leaves differ: 00, 01, 02, 03, 04, 05, 06, 07, …; do not" in str(reason)


CALLS = []  # of the function inside the step below


def corruptible_step(state, batch):
    def add(x):
        CALLS.append(x)
        return np.asarray(x) + np.spacing(np.float32(1)) * (len(CALLS) == 10)

    loss = jax.pure_callback(add, jax.ShapeDtypeStruct((), jnp.float32), state["loss"])
    return {"step": state["step"] + 1, "loss": loss}, {"loss": sf.mean(loss)}


CHECKED_STEP = sf.debug.check_step(corruptible_step, every=2)


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 4}, {"steps": 7}])
def test_a_corrupt_run_stops_in_the_right_step_and_is_not_saved(options, tmp_path):
    CALLS.clear()
    # Steps 1, 3, 5 and 7 run twice, so calls 9 and 10 are those of step 7.
    result = sf.fit(
        CHECKED_STEP,
        {"step": jnp.int32(0), "loss": jnp.float32(1)},
        sf.batches(np.zeros(16, np.float32), 1, epochs=1),
        run_dir=tmp_path,
        checkpoints=sf.Checkpoints(every=4),
        log_every=4,
        hooks=[stop_on_corruption()],
        **options,
    )
    assert result.stop_reason.kind == "corrupt"
    assert "step 7 was run twice, and 1 of 2 leaves differs: loss; do" in str(result.stop_reason)
    assert result.history["train/corrupt"][-1] == 1
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") == 4


def test_the_metrics_of_the_step_before_may_be_in_the_event_before_or_unknown():
    hook = Shown(on_nonfinite())
    hook(train(4, {"train/loss": np.array([1.0, 2.0])}))
    hook(train(6, {"train/loss": np.array([np.nan, 3.0])}))
    assert (found(hook).step, found(hook).before) == (5, {"train/loss": 2.0})
    hook.start()
    hook(train(6, {"train/loss": np.array([np.nan, 3.0])}))
    assert found(hook).before == {}
    # A metric that is new after a resume has no value in earlier steps.
    for bad, wanted in ((2, {"train/new": 8.0}), (1, {})):
        losses = np.ones(4)
        losses[bad] = np.nan
        hook = Shown(on_nonfinite())
        hook(train(12, {"train/loss": losses, "train/new": np.array([8.0, 9.0])}))
        metrics = dict(found(hook).metrics)
        assert np.isnan(metrics.pop("train/loss"))
        assert (found(hook).step, metrics) == (9 + bad, wanted)
