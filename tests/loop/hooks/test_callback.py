"""Callbacks as trainers have them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

STEPS = 6  # of an epoch


class Epochs:
    """Batches that can be resumed, and know how many make an epoch."""

    steps_per_epoch = STEPS

    def __init__(self):
        self._batches = sf.batches(np.arange(4.0 * STEPS, dtype=np.float32), 4, seed=0)
        self.get_state, self.set_state = self._batches.get_state, self._batches.set_state

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._batches)


def run(*hooks, epochs=3, log_every=4, **options):
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b) ** 2), tx)
    evaluation = sf.Evaluation(lambda state: {"w": state.params["w"]}, every_epochs=1)
    return sf.fit(
        *(step, state, Epochs()),
        epochs=epochs,
        log_every=log_every,
        evaluation=evaluation,
        hooks=hooks,
        **options,
    )


def recorder(seen):
    return sf.callback(lambda trainer, epoch, metrics: seen.append((trainer, epoch, metrics)), "me")


def test_it_is_called_after_every_epoch_and_its_evaluation_the_last_one_too():
    seen = []
    result = run(recorder(seen))
    assert [(trainer, epoch) for trainer, epoch, _ in seen] == [("me", 0), ("me", 1), ("me", 2)]
    assert [metrics["eval_w"] for *_, metrics in seen] == list(result.history["eval/w"])
    assert set(seen[0][2]) == {"train_loss", "train_grad_norm", "eval_w"}


def test_train_metrics_are_means_over_the_steps_of_the_epoch_whatever_is_logged_when():
    each = []
    run(lambda event: each.extend(event.each.get("train/loss", ())))
    wanted = np.reshape(each, (3, STEPS)).mean(axis=1)
    for log_every in (1, 4, STEPS, 100):
        seen = []
        run(recorder(seen), log_every=log_every)
        losses = [metrics["train_loss"] for *_, metrics in seen]
        np.testing.assert_allclose(losses, wanted, rtol=1e-12)


def test_the_epoch_that_is_stopped_at_counts():
    seen = []
    stop = lambda event: "enough" if event.step == STEPS and "eval/w" in event.metrics else None
    result = run(stop, recorder(seen))
    assert result.steps == STEPS
    assert [epoch for _, epoch, _ in seen] == [0]


def test_an_epoch_that_is_not_over_does_not_count():
    seen = []
    run(lambda event: "enough" if event.step == 7 else None, recorder(seen), log_every=7)
    assert [epoch for _, epoch, _ in seen] == [0]


@pytest.mark.parametrize("every", [4, STEPS])
def test_a_resumed_run_calls_for_each_epoch_once(tmp_path, every):
    whole, seen = [], []
    run(recorder(whole), epochs=4)
    checkpoints = sf.Checkpoints(tmp_path, every=every)
    for epochs in (1, 2, 4):
        run(recorder(seen), epochs=epochs, checkpoints=checkpoints)
    assert seen == whole


def test_an_exception_reaches_the_user_after_a_save_and_the_epoch_is_told_again(tmp_path):
    def fail(trainer, epoch, metrics):
        if epoch == 1:
            raise RuntimeError("mine")

    seen = []
    checkpoints = sf.Checkpoints(tmp_path, every=100)
    with pytest.raises(RuntimeError, match="mine"):
        run(sf.callback(fail), checkpoints=checkpoints)
    assert sf.latest_step(tmp_path) == 2 * STEPS
    run(recorder(seen), checkpoints=checkpoints)
    assert [epoch for _, epoch, _ in seen] == [1, 2]


def test_batches_that_know_no_epochs_are_refused():
    endless = iter([np.zeros(4, np.float32)])
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b) ** 2), tx)
    with pytest.raises(sf.ConfigError, match="hooks: expected batches that know how many steps an"):
        sf.fit(step, state, endless, steps=1, hooks=[sf.callback(print)])


def test_what_is_called_is_a_function():
    said = r"callback: expected a function \(trainer, epoch, metrics\), got None"
    with pytest.raises(sf.ConfigError, match=said):
        sf.callback(None)
