"""What hooks are shown, and what they may say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.event import check_measured, show

EVENT = sf.Event(10, None, {"train/loss": 2.0}, None)


def test_numbers_are_shown_to_the_hooks_after_and_not_to_those_before():
    seen = []
    look = lambda event: seen.append(dict(event.metrics))
    event, reasons = show(EVENT, [look, lambda event: {"rate": np.float32(0.5)}, look])
    assert seen == [{"train/loss": 2.0}, {"train/loss": 2.0, "rate": 0.5}]
    assert event.metrics == seen[1]
    assert type(event.metrics["rate"]) is float
    assert reasons == []
    assert EVENT.metrics == {"train/loss": 2.0}


def test_all_reasons_are_heard():
    hooks = [lambda event: "one", lambda event: None, lambda event: "two"]
    assert show(EVENT, hooks)[1] == ["one", "two"]


def test_a_hook_that_says_something_else_is_named():
    def mistaken(event):
        return True

    said = r"mistaken: expected a hook to return None, why to stop in words, .* got bool True"
    with pytest.raises(sf.ConfigError, match=said):
        show(EVENT, [mistaken])


def test_numbers_that_are_none_are_named():
    with pytest.raises(sf.ConfigError, match="rate: expected a number, got 'fast'"):
        show(EVENT, [lambda event: {"rate": "fast"}])


def test_an_evaluation_is_told_from_train_steps():
    assert EVENT.is_train
    assert not sf.Event(10, None, {"eval/loss": 2.0}, None).is_train


class Told:
    def __init__(self):
        self.calls = []

    def __call__(self, event):
        self.calls.append(event.step)
        return {"told/half": event.metrics["train/loss"] / 2, "told/waited": event.waited}

    def open(self, step, total):
        self.calls.append(("open", step, total))

    def close(self):
        self.calls.append("close")

    def get_state(self):
        return {"calls": len(self.calls)}

    def set_state(self, state):
        self.calls.append(("set_state", state))


def run(tmp_path, steps, hook):
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    checkpoints = sf.Checkpoints(tmp_path, every=10)
    return sf.fit(step, state, batches, steps=steps, checkpoints=checkpoints, hooks=[hook])


def test_fit_opens_hooks_shows_them_and_closes_them_and_a_resumed_one_gives_back_their_state(
    tmp_path,
):
    first, second, third = Told(), Told(), Told()
    result = run(tmp_path, 10, first)
    assert first.calls == [("open", 0, 10), 10, "close"]
    loss = result.history["train/loss"]
    assert result.history["told/half"] == [value / 2 for value in loss]
    assert result.history["told/waited"][0] > 0
    result = run(tmp_path, 20, second)
    assert second.calls == [("set_state", {"calls": 2}), ("open", 10, 20), 20, "close"]
    assert result.history["told/half"].steps == [10, 20]
    run(tmp_path, 20, third)  # was done before: nothing to open
    assert third.calls == [("set_state", {"calls": 3}), "close"]


def test_an_evaluation_has_what_is_looked_for_in_it():
    found = {"eval/loss": 1.0, "eval/hit": 0.5}
    check_measured(["eval/hit", "train/loss", "eval/long/loss"], "eval", found)
    said = "eval/accuracy: expected a metric that is measured, got eval/hit, eval/loss"
    with pytest.raises(sf.ConfigError, match=said):
        check_measured(["eval/accuracy"], "eval", found)
