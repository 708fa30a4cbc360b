"""Hooks that stop a run."""

import functools
import itertools
import json
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import STEP, TX, start

import stepfold as sf
from stepfold.loop.hooks import stop
from stepfold.loop.hooks.base import Event, Stop
from stepfold.loop.hooks.stop import (
    TimeLimit,
    roll_back_on_nonfinite,
    roll_back_on_spike,
    stop_early,
    stop_on_corruption,
    stop_on_nonfinite,
    stop_on_spike,
    watchdog,
)


def train(step, values=None, **metrics):
    return Event(step, None, metrics, None, values or {})


def evaluation(step, value, name="eval/loss", state=None):
    return Event(step, None, {name: value}, state, kind=name.split("/")[0])


def test_every_hook_here_declares_what_it_may_do():
    hooks = [
        TimeLimit(1),
        stop_on_nonfinite(),
        stop_early("a", patience=1, mode="max"),
        stop_on_spike(),
    ]
    assert all(hook.can_stop and hook.provides == () for hook in hooks)
    assert [hook.metric for hook in hooks] == [None, None, "a", "train/loss"]
    assert [hook.replaces_nonfinite_stop for hook in hooks] == [False, True, False, False]
    assert (watchdog(60).provides, watchdog(60).can_stop) == ((), False)


@pytest.mark.parametrize("hook", [stop_on_nonfinite(), stop_on_spike(), stop_on_corruption()])
def test_evaluations_are_ignored(hook):
    assert hook(evaluation(1, np.nan)) is None


EARLY = {"metric": "eval/loss", "patience": 1}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *(
            (TimeLimit, {"seconds": seconds}, "time_limit: expected seconds, a number of at least")
            for seconds in (-1, math.nan, "60", True, None)
        ),
        # It would never be seen, and the hook replaces the one that `fit` adds for the loss.
        (stop_on_nonfinite, {"metric": "eval/loss"}, "metric: expected a train metric such as"),
        (stop_on_nonfinite, {"pattern": "train/loss"}, "pattern: expected its new name, metric=…"),
        (roll_back_on_nonfinite, {"pattern": "train/loss"}, "pattern: expected its new name, met"),
        (roll_back_on_spike, {"sigma": 3.0}, "sigma: expected its new name, deviations=…, got the"),
        *(
            (stop_early, {**EARLY, **wrong}, message)
            for wrong, message in [
                ({"patience": 0}, "patience: expected an integer of at least 1, got 0"),
                ({"patience": 1.5}, "patience: expected an integer of at least 1, got 1.5"),
                ({"min_delta": -1}, "min_delta: expected a number of at least 0, got -1"),
                ({"min_delta": math.nan}, "min_delta: expected a number of at least 0"),
                ({"min_delta": "1"}, "min_delta: expected a number of at least 0, got '1'"),
                ({"mode": "least"}, "mode: expected one of 'min', 'max', got 'least'"),
                ({"metric": None}, "metric: expected the name of a metric, got None"),
                ({"metric": 3}, "metric: expected the name of a metric, got 3"),
                ({"metric": ""}, "expected the name of a metric, got ''"),
            ]
        ),
        (stop_on_spike, {"metric": "eval/loss"}, "metric: expected a train metric such as .train"),
        (stop_on_spike, {"window": 1}, "window: expected an integer of at least 2, got 1"),
        (stop_on_spike, {"deviations": 0}, "deviations: expected a number above 0, got 0"),
        *(
            (watchdog, {"seconds": seconds}, "expected seconds, a number above 0, got ")
            for seconds in (0, -1, True, "60", math.nan)
        ),
        (watchdog, {"seconds": 60, "abort": 1}, "abort: expected True or False, got int 1"),
    ],
)
def test_arguments_are_checked(make, options, message):
    with pytest.raises(sf.ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (stop_on_nonfinite("train/los"), "train/los.*train/loss"),
        (stop_on_spike("train/los"), "train/los.*train/loss"),
        (stop_early("eval/los", patience=1, mode="min"), "eval/los.*eval/loss"),
        (stop_on_corruption(), "train/corrupt: expected a metric that is measured"),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(hook, message):
    measure = sf.Evaluation(lambda state: {"loss": 1.0}, every=5)
    batches = [{"x": np.full(4, np.nan, np.float32)}] * 20
    with pytest.raises(sf.ConfigError, match=message):
        sf.fit(STEP, start(), batches, evaluation=measure, hooks=[hook])


# time_limit


def test_it_stops_when_the_time_is_over(monkeypatch):
    times = iter([100.0, 159.0, 160.0])
    monkeypatch.setattr(stop.time, "monotonic", lambda: next(times))
    hook = TimeLimit(60)
    assert hook(train(1)) is None
    assert hook(train(2)) == Stop("time_limit", "the time limit of 60 s was reached")


def test_the_time_may_be_infinite():
    assert TimeLimit(math.inf)(train(1)) is None


# stop_on_nonfinite


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
    hook = stop_on_nonfinite()
    assert str(hook(event)) == "train/b is inf in step 8"
    assert hook.found.before["train/a"] == 1
    assert str(stop_on_nonfinite("train/a")(event)) == "train/a is nan in step 9"
    with_loss = event._replace(per_step={**values, "train/loss": np.ones(3)})
    assert stop_on_nonfinite()(with_loss._replace(metrics={"train/loss": 1.0})) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_it_names_the_first_step_with_a_nan_or_inf(bad):
    hook = stop_on_nonfinite()
    assert hook(train(5, {"train/loss": np.ones(5)})) is None
    values = {"train/loss": np.array([1.0, 1.0, bad, 1.0, np.nan])}
    assert hook(train(10, values)) == Stop("nonfinite", f"train/loss is {bad} in step 8")


def test_the_metrics_of_the_step_before_may_be_in_the_event_before():
    hook = stop_on_nonfinite()
    hook(train(4, {"train/loss": np.array([1.0, 2.0])}))
    hook(train(6, {"train/loss": np.array([np.nan, 3.0])}))
    assert (hook.found.step, hook.found.before) == (5, {"train/loss": 2.0})
    hook.reset(0)
    hook(train(6, {"train/loss": np.array([np.nan, 3.0])}))
    assert hook.found.before == {}


def test_it_keeps_the_first_such_step_of_a_run_and_its_metrics():
    hook = stop_on_nonfinite()
    values = {"train/loss": np.array([1.0, np.inf, np.nan]), "train/hit": np.array([0.5, 0.25, 0])}
    hook(train(9, values | {"train/many": np.ones((3, 2))}))
    before = {"train/loss": 1.0, "train/hit": 0.5}
    wanted = (8, "train/loss", {"train/loss": np.inf, "train/hit": 0.25}, before)
    assert hook.found == wanted
    hook(train(12, values))
    assert hook.found == wanted
    hook.open(0, None)
    assert hook.found is None


def test_another_metric_can_be_watched():
    hook = stop_on_nonfinite("train/grad_norm")
    values = {"train/loss": np.array([np.nan]), "train/grad_norm": np.array([1.0])}
    assert hook(train(1, values)) is None
    reason = hook(train(2, {"train/grad_norm": np.array([np.inf])}))
    assert str(reason) == "train/grad_norm is inf in step 2"


def test_steps_without_weight_do_not_count():
    values = {"train/loss": np.array([1.0, np.nan, np.nan])}
    weights = {"train/loss": np.array([4.0, 0.0, 4.0])}
    hook = stop_on_nonfinite()
    reason = hook(Event(3, None, {"train/loss": math.nan}, None, values, weights=weights))
    assert str(reason) == "train/loss is nan in step 3"


@functools.cache
def masked_step(**options):
    def loss_fn(params, batch, key):
        return sf.mean(params["w"] * batch["x"], batch["mask"])

    return sf.make_train_step(loss_fn, TX, **options)


def fit(losses, hook, **options):
    """Run a step whose losses and masks are given."""
    batches = [{"x": np.float32([x]), "mask": np.array([mask])} for x, mask in losses]
    return sf.fit(masked_step(**options), start(), batches, log_every=2, hooks=hook)


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        (
            [(0.0, True)] * 3 + [(np.nan, True)] + [(0.0, True)] * 4,
            {},
            "train/loss is nan in step 4; stopped at step 5",
        ),
        ([(1.0, True), (1.0, False), (1.0, True), (1.0, True)], {}, "the batches ended at step 4"),
        (
            [(1.0, True), (np.nan, True), (1.0, True), (1.0, True)],
            {"skip_nonfinite": True},
            "the batches ended at step 4",
        ),
    ],
    ids=["nan", "masked", "skipped"],
)
def test_a_run_stops_with_a_nan_but_not_with_a_masked_batch_or_a_skipped_step(
    losses, options, message
):
    result = fit(losses, stop_on_nonfinite(), **options)
    assert str(result.stop_reason).startswith(message)
    assert result.stop_reason.kind == ("exhausted" if "ended" in message else "nonfinite")


# stop_early


def follow(hook, values, name="eval/loss", state=lambda step: None, first=1):
    """Evaluate until the hook stops; return the step and the message."""
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
    stopped = follow(stop_early("eval/loss", **options), values)
    assert (stopped and stopped[0]) == step


def test_the_message_names_the_best_value():
    hook = stop_early("eval/accuracy", patience=2)
    assert follow(hook, [0.5, 0.75, 0.75, 0.5], "eval/accuracy") == (
        4,
        "eval/accuracy has not become better than 0.75 for 2 evaluations, since step 2",
    )
    assert (hook.best, hook.best_step) == (0.75, 2)


def test_other_metrics_are_not_its_concern():
    hook = stop_early("eval/loss", patience=1)
    assert follow(hook, [1, 2, 3], "train/loss") is None


def states(count):
    return [
        {"w": jnp.full((3,), float(step)), "half": jnp.bfloat16(step), "key": jax.random.key(step)}
        for step in range(count)
    ]


def test_it_keeps_a_copy_of_the_best_state_on_the_host_if_asked_to():
    hook = stop_early("eval/loss", patience=3, keep_state=True)
    shown = states(4)
    follow(hook, [3, 1, 2], state=lambda step: shown[step])
    best = hook.best_state
    assert type(best["w"]) is type(best["half"]) is np.ndarray
    assert best["half"].dtype == jnp.bfloat16
    donate = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    donate(shown[2])
    assert shown[2]["w"].is_deleted()  # the copy does not keep its buffer
    jax.tree.map(lambda leaf: leaf.delete(), shown)
    assert best["w"].tolist() == [2.0] * 3
    assert (jax.random.key_data(best["key"]) == jnp.array([0, 2], jnp.uint32)).all()


def test_the_best_state_can_be_trained_further():
    state = start()
    hook = stop_early("eval/loss", patience=3, keep_state=True)
    hook(evaluation(0, 1.0, state=state))
    batch = {"x": np.zeros(4, np.float32)}
    train = jax.jit(STEP)
    before, after = train(state, batch)[0], train(hook.best_state, batch)[0]
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


def test_it_keeps_no_state_by_default():
    hook = stop_early("eval/loss", patience=3)
    follow(hook, [3, 1], state=lambda step: {"w": jnp.ones(())})
    assert hook.best_state is None


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_resumed_run_stops_where_the_uninterrupted_one_would_have(cut):
    values = [3, 2, 2.5, 2.5, 2.5, 1]
    hook = stop_early("eval/loss", patience=3)
    hook.open(0, None)
    assert follow(hook, values[:cut]) is None
    other = stop_early("eval/loss", patience=3)
    other.set_state(json.loads(json.dumps(hook.get_state())))
    other.open(cut, None)
    assert follow(other, values[cut:], first=cut + 1) == (
        5,
        "eval/loss has not become better than 2 for 3 evaluations, since step 2",
    )


def test_it_starts_afresh_in_the_next_run():
    hook = stop_early("eval/loss", patience=2, keep_state=True)
    for values in ([1, 2, 3], [10, 9, 11, 12]):
        hook.open(0, None)
        assert follow(hook, values, state=lambda step: {"n": jnp.float32(step)})[0] == len(values)
        hook.close()
    assert (hook.best, hook.best_step, hook.best_state["n"]) == (9, 2, 2)
    hook.open(0, None)
    assert math.isnan(hook.best)
    assert (hook.best_step, hook.best_state) == (-1, None)


def test_a_restored_state_counts_for_one_run_only():
    first = stop_early("eval/loss", patience=2)
    follow(first, [1, 2])
    hook = stop_early("eval/loss", patience=2)
    hook.set_state(first.get_state())
    hook.open(2, None)
    assert follow(hook, [3]) is not None
    hook.close()
    hook.open(0, None)
    assert follow(hook, [3, 4]) is None
    hook.set_state(first.get_state())  # by a run that was already completed, and never opened it
    hook.close()
    hook.open(0, None)
    assert follow(hook, [3, 4]) is None


def test_two_fits_with_one_hook_do_not_share_its_state():
    hook = stop_early("eval/score", patience=2, mode="max")
    step = jax.jit(lambda state, batch: ({"n": state["n"] + 1}, {"loss": sf.mean(state["n"])}))
    for best in (5.0, 2.0):
        measure = sf.Evaluation(lambda state, best=best: {"score": min(best, state["n"])}, every=1)
        state, batches = {"n": jnp.float32(0)}, itertools.repeat(np.float32(0), 9)
        result = sf.fit(step, state, batches, hooks=hook, evaluation=measure)
        assert result.stop_reason.kind == "early_stop"
        assert (hook.best, result.steps) == (best, best + 2)


def test_a_resume_with_another_metric_starts_afresh():
    hook = stop_early("eval/loss", patience=2)
    follow(hook, [0.5, 0.75])
    other = stop_early("eval/accuracy", patience=2)
    other.set_state(hook.get_state())
    other.open(2, None)
    other(evaluation(3, 0.25, "eval/accuracy"))
    assert (other.best, other.best_step) == (0.25, 3)


def test_no_state_is_kept_for_a_train_metric_since_it_would_be_that_of_a_later_step():
    hook = stop_early("train/loss", patience=5)
    step = jax.jit(lambda state, batch: ({"n": state["n"] + 1}, {"loss": sf.mean(state["n"])}))
    batches = itertools.repeat(np.float32(0), 9)
    sf.fit(step, {"n": jnp.float32(0)}, batches, hooks=hook, log_every=4)
    assert (hook.best_state, hook.best_step) == (None, 4)
    with pytest.raises(sf.ConfigError, match="keep_state: expected the metric of an evaluation"):
        stop_early("train/loss", patience=5, keep_state=True)


# stop_on_spike


def losses(step, values):
    return train(step, {"train/loss": np.array(values)})


def feed(hook, values, chunk):
    """Feed values in intervals of `chunk` steps; return the first message."""
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
    message = feed(stop_on_spike(window=50), values, chunk)
    assert message is not None
    assert message.startswith("train/loss is 4 in step 150, and the median of the 50 before it is ")


@pytest.mark.parametrize("chunk", [1, 20])
def test_each_value_is_compared_with_exactly_the_window_before_it(chunk):
    values = noise(40)
    median = np.median(values[20:30])
    width = 1.4826 * np.median(np.abs(values[20:30] - median))
    for sign in (-1, 1):
        values[30] = median + (10 + sign * 1e-6) * max(width, 0.01 * median)
        message = feed(stop_on_spike(window=10), values, chunk)
        assert (message is not None and "in step 31" in message) == (sign == 1)


def test_noise_and_a_falling_loss_are_not_spikes():
    assert feed(stop_on_spike(window=50), noise(1000), 10) is None
    assert feed(stop_on_spike(window=50), 10 / np.arange(1, 1001) + noise(1000), 10) is None


def test_a_flat_loss_may_move_by_a_tenth():
    flat = np.full(100, 0.5)
    flat[90] = 0.54
    assert feed(stop_on_spike(window=50), flat, 10) is None
    flat[90] = 0.56
    assert "in step 91" in feed(stop_on_spike(window=50), flat, 10)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_never_enter_the_window(bad):
    values = noise(200)
    values[60:140:2] = bad
    values[180] = 9.0
    hook = stop_on_spike(window=100)
    assert "train/loss is 9 in step 181" in feed(hook, values, 10)
    assert np.isfinite(hook.get_state()["latest"]).all()


def test_no_value_is_judged_before_the_window_is_full():
    values = noise(50)
    values[49] = 100.0
    assert feed(stop_on_spike(window=50), values, 10) is None
    assert feed(stop_on_spike(window=49), values, 10) is not None


def test_the_window_survives_a_resume():
    hook, resumed = stop_on_spike(window=50), stop_on_spike(window=50)
    hook(losses(60, noise(60)))
    resumed.set_state(json.loads(json.dumps(hook.get_state())))
    resumed.open(60, None)
    assert resumed(losses(61, [4.0])) == hook(losses(61, [4.0])) is not None


def test_a_narrower_window_after_a_resume_has_the_last_values():
    hook, resumed = stop_on_spike(window=100), stop_on_spike(window=10)
    hook(losses(100, [*noise(50), *(50 + noise(50))]))
    resumed.set_state(hook.get_state())
    resumed.open(100, None)
    assert resumed(losses(101, [52.0])) is None


def test_the_window_of_another_metric_is_not_restored():
    hook, resumed = stop_on_spike(window=10), stop_on_spike("train/norm", window=10)
    hook(losses(10, noise(10)))
    resumed.set_state(hook.get_state())
    resumed.open(10, None)
    assert resumed(train(11, {"train/norm": np.array([99.0])})) is None


def test_the_window_of_an_earlier_run_is_forgotten():
    hook = stop_on_spike(window=10)
    hook.open(0, None)
    hook(losses(10, noise(10)))
    hook.close()
    hook.open(0, None)
    assert hook(losses(1, [99.0])) is None


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
    hook = watchdog(0.1, file=stacks)
    hook(EVENT)
    thread.start()
    stuck_in_a_step()
    hook.close()
    thread.join()
    text = text_of(stacks)
    assert "Timeout (0:00:00.1" in text
    assert "in stuck_in_a_step" in text
    assert "in deep_in_the_data" in text


def hang(aborts_after):
    import time

    from stepfold.loop.hooks.stop import watchdog

    hook = watchdog(aborts_after, abort=True)
    hook.open(0, 9)
    time.sleep(60)


def test_with_abort_the_process_exits(forks):
    end = forks.run(hang, 0.2)
    assert end.code == 1
    assert "in hang" in end.errors


def test_a_watchdog_is_silent_while_events_come(stacks):
    hook = watchdog(0.5, file=stacks)
    hook.open(0, None)
    for _ in range(16):
        time.sleep(0.05)
        hook(EVENT)
    hook.close()
    assert text_of(stacks) == ""


@pytest.mark.parametrize("use", [lambda hook: None, lambda hook: (hook(EVENT), hook.close())])
def test_nothing_is_watched_before_the_run_nor_after_it(use, stacks):
    use(watchdog(0.05, file=stacks))
    time.sleep(0.2)
    assert text_of(stacks) == ""


# stop_on_corruption


def corrupt(words, step):
    words = np.array(words, np.uint32)
    state = {f"{i:02}": np.ones(1) for i in range(40)}
    return Event(step, None, {"train/corrupt": float(words.any())}, state, {"train/corrupt": words})


def test_it_names_the_first_corrupt_step_and_its_leaves():
    hook = stop_on_corruption()
    assert hook(corrupt([[0, 0]] * 4, 4)) is None
    reason = hook(corrupt([[0, 0], [1 << 3, 1 << 7], [0, 1], [0, 0]], 8))
    assert reason.kind == "corrupt"
    assert str(reason).startswith("step 6 was run twice, and 2 of 40 leaves differ: 03, 39; do not")


def test_a_long_list_of_leaves_is_cut():
    reason = stop_on_corruption()(corrupt([[2**32 - 1, 0]], 1))
    assert "32 of 40 leaves differ: 00, 01, 02, 03, 04, 05, 06, 07, …; do not" in str(reason)


CALLS = []  # of the function inside the step below


def corruptible_step(state, batch):
    def add(x):
        CALLS.append(x)
        return np.asarray(x) + np.spacing(np.float32(1)) * (len(CALLS) == 10)

    loss = jax.pure_callback(add, jax.ShapeDtypeStruct((), jnp.float32), state["loss"])
    return {"step": state["step"] + 1, "loss": loss}, {"loss": sf.mean(loss)}


CHECKED_STEP = sf.check_step(corruptible_step, every=2)


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
    assert sf.latest_step(tmp_path / "checkpoints") == 4


def test_by_default_a_run_goes_back_three_times():
    losses = {"train/loss": np.array([1.0, np.nan])}
    event = sf.Event(12, None, {"train/loss": np.nan}, None, losses)
    assert sf.roll_back_on_nonfinite()(event).limit == 3


def test_a_metric_that_is_new_after_a_resume_has_no_value_in_earlier_steps():
    losses = np.array([1.0, 2.0, np.nan, 4.0])
    per_step = {"train/loss": losses, "train/new": np.array([7.0, 8.0, 9.0])[1:]}
    for bad, wanted in ((2, {"train/new": 8.0}), (1, {})):
        losses[:] = 1.0
        losses[bad] = np.nan
        hook = sf.stop_on_nonfinite()
        hook(sf.Event(12, None, {"train/loss": np.nan}, None, per_step))
        found = dict(hook.found.metrics)
        assert np.isnan(found.pop("train/loss"))
        assert (hook.found.step, found) == (9 + bad, wanted)
