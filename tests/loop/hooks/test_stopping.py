import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.hooks import stopping


def event(step, metrics=None, each=None, state=None):
    return sf.Event(step, None, metrics or {}, state, each or {})


# stop_after


def test_it_stops_when_the_time_is_up(monkeypatch):
    now = iter([100.0, 159.0, 160.0])
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(now))
    hook = sf.stop_after(60)
    assert hook(event(1)) is None
    assert hook(event(2)) == "the time limit of 60 s was reached"


@pytest.mark.parametrize("seconds", [-1, math.nan, "60", True, None])
def test_what_is_no_time_is_refused(seconds):
    with pytest.raises(sf.ConfigError, match="stop_after: expected seconds, a number of at least"):
        sf.stop_after(seconds)


def test_an_endless_time_is_one():
    assert sf.stop_after(math.inf)(event(1)) is None


# stop_on_nonfinite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_it_names_the_first_step_that_is_not_finite(bad):
    hook = sf.stop_on_nonfinite()
    assert hook(event(5, each={"train/loss": np.ones(5)})) is None
    each = {"train/loss": np.array([1.0, 1.0, bad, 1.0, np.nan])}
    assert hook(event(10, each=each)) == f"train/loss is {bad} in step 8"


def test_it_remembers_the_first_step_and_what_it_said():
    hook = sf.stop_on_nonfinite()
    each = {"train/loss": np.array([1.0, np.inf, np.nan]), "train/hit": np.array([0.5, 0.25, 0.0])}
    hook(event(9, each=each | {"train/many": np.ones((3, 2))}))
    wanted = (8, "train/loss", {"train/loss": np.inf, "train/hit": 0.25})
    assert hook.found == wanted
    hook(event(12, each=each))
    assert hook.found == wanted
    hook.open(0, None)
    assert hook.found is None


def test_it_looks_at_another_metric_where_it_is_told_to():
    hook = sf.stop_on_nonfinite("train/grad_norm")
    each = {"train/loss": np.array([np.nan]), "train/grad_norm": np.array([1.0])}
    assert hook(event(1, each=each)) is None
    each = {"train/grad_norm": np.array([np.inf])}
    assert hook(event(2, each=each)) == "train/grad_norm is inf in step 2"


def test_an_evaluation_is_nothing_to_it():
    assert sf.stop_on_nonfinite()(event(1, {"eval/loss": np.nan})) is None


def train(losses, hook, **options):
    """Run a step whose losses and weights are given."""
    tx = optax.sgd(0.1)

    def loss_fn(params, batch, key):
        return sf.mean(params["w"] * batch["x"], batch["mask"])

    step = sf.make_train_step(loss_fn, tx, **options)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    batches = [{"x": np.float32([x]), "mask": np.array([mask])} for x, mask in losses]
    return sf.fit(step, state, batches, log_every=2, hooks=hook)


def test_it_stops_a_run_that_has_gone_wrong():
    result = train([(0.0, True)] * 3 + [(np.nan, True)] + [(0.0, True)] * 4, sf.stop_on_nonfinite())
    assert result.stopped.startswith("train/loss is nan in step 4 at step 5")


def test_a_batch_that_is_masked_is_no_reason_to_stop():
    result = train([(1.0, True), (1.0, False), (1.0, True), (1.0, True)], sf.stop_on_nonfinite())
    assert result.stopped == "the batches ended at step 4"


def test_a_step_that_was_skipped_is_no_reason_to_stop():
    losses = [(1.0, True), (np.nan, True), (1.0, True), (1.0, True)]
    result = train(losses, sf.stop_on_nonfinite(), skip_nonfinite=True)
    assert result.stopped == "the batches ended at step 4"


# stop_early


def follow(hook, values, name="eval/loss", state=lambda step: None, first=1):
    """Show a hook values until it stops; give the step and the words."""
    for step, value in enumerate(values, first):
        said = hook(event(step, {name: value}, state=state(step)))
        if said:
            return step, said
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
def test_it_stops_after_so_many_that_are_no_better(options, values, step):
    found = follow(sf.stop_early("eval/loss", **options), values)
    assert (found and found[0]) == step


def test_it_says_why():
    hook = sf.stop_early("eval/accuracy", patience=2)
    assert follow(hook, [0.5, 0.75, 0.75, 0.5], "eval/accuracy") == (
        4,
        "eval/accuracy has not become better than 0.75 for 2 evaluations, since step 2",
    )
    assert (hook.best, hook.best_step) == (0.75, 2)


def test_another_metric_is_nothing_to_it():
    hook = sf.stop_early("eval/loss", patience=1)
    assert follow(hook, [1, 2, 3], "train/loss") is None


def test_it_keeps_a_copy_of_the_best_state():
    hook = sf.stop_early("eval/loss", patience=3)
    states = [{"w": jnp.array(float(step)), "key": jax.random.key(step)} for step in range(4)]
    follow(hook, [3, 1, 2], state=lambda step: states[step])
    jax.tree.map(lambda leaf: leaf.delete(), states)
    assert float(hook.best_state["w"]) == 2.0
    assert (jax.random.key_data(hook.best_state["key"]) == jnp.array([0, 2], jnp.uint32)).all()


def test_it_keeps_none_where_it_is_told_not_to():
    hook = sf.stop_early("eval/loss", patience=3, keep_state=False)
    follow(hook, [3, 1], state=lambda step: {"w": jnp.ones(())})
    assert hook.best_state is None


@pytest.mark.parametrize("cut", range(1, 5))
def test_resumed_it_stops_where_it_would_have(cut):
    values = [3, 2, 2.5, 2.5, 2.5, 1]
    hook = sf.stop_early("eval/loss", patience=3, keep_state=False)
    assert follow(hook, values[:cut]) is None
    other = sf.stop_early("eval/loss", patience=3, keep_state=False)
    other.set_state(hook.get_state())
    assert follow(other, values[cut:], first=cut + 1) == (
        5,
        "eval/loss has not become better than 2 for 3 evaluations, since step 2",
    )


def test_resumed_with_another_metric_it_begins_anew():
    hook = sf.stop_early("eval/loss", patience=2, keep_state=False)
    follow(hook, [0.5, 0.75])
    other = sf.stop_early("eval/accuracy", patience=2, keep_state=False)
    other.set_state(hook.get_state())
    other(sf.Event(3, None, {"eval/accuracy": 0.25}, None))
    assert (other.best, other.best_step) == (0.25, 3)


def test_no_state_is_kept_for_a_train_metric_since_it_would_be_that_of_a_later_step():
    hook = sf.stop_early("train/loss", patience=5)
    step = jax.jit(lambda state, batch: ({"n": state["n"] + 1}, {"loss": sf.mean(state["n"])}))
    batches = itertools.repeat(np.float32(0), 9)
    sf.fit(step, {"n": jnp.float32(0)}, batches, hooks=hook, log_every=4)
    assert (hook.best_state, hook.best_step) == (None, 4)
    with pytest.raises(sf.ConfigError, match="keep_state: expected the metric of an evaluation"):
        sf.stop_early("train/loss", patience=5, keep_state=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "patience: expected an integer of at least 1, got 0"),
        ({"patience": 1.5}, "patience: expected an integer of at least 1, got 1.5"),
        ({"patience": 1, "min_delta": -1}, "min_delta: expected a number of at least 0, got -1"),
        ({"patience": 1, "min_delta": math.nan}, "min_delta: expected a number of at least 0"),
        ({"patience": 1, "min_delta": "1"}, "min_delta: expected a number of at least 0, got '1'"),
        ({"patience": 1, "mode": "least"}, "mode: expected 'min' or 'max', got 'least'"),
        ({"patience": 1, "metric": None}, "metric: expected the name of one, got None"),
        ({"patience": 1, "metric": 3}, "expected the name of a metric, got 3"),
    ],
)
def test_what_cannot_be_watched_is_refused(options, words):
    with pytest.raises(sf.ConfigError, match=words):
        sf.stop_early(**{"metric": "eval/loss", **options})


def test_a_metric_that_is_not_looked_at_step_by_step_is_refused():
    """It would never be seen, and takes the place of the watch that `fit` keeps on the loss."""
    with pytest.raises(sf.ConfigError, match="pattern: expected a metric of train steps"):
        sf.stop_on_nonfinite("eval/loss")


def test_a_misspelt_metric_is_said_and_does_not_leave_the_loss_unwatched():
    tx = optax.sgd(0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), tx)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    batches = [np.full(4, np.nan, np.float32)] * 20
    with pytest.raises(sf.ConfigError, match="train/los.*train/loss"):
        sf.fit(step, state, batches, hooks=[sf.stop_on_nonfinite("train/los")])


def test_an_early_stop_by_a_metric_that_nobody_measures_is_said():
    tx = optax.sgd(0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b) ** 2), tx)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    evaluation = sf.Evaluation(lambda state: {"loss": 1.0}, every=5)
    hook = sf.stop_early("eval/los", patience=1)
    with pytest.raises(sf.ConfigError, match="eval/los.*eval/loss"):
        sf.fit(step, state, [np.zeros(4, np.float32)] * 20, evaluation=evaluation, hooks=[hook])
