"""How much a run gets done in its time."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

BATCH = {"step": np.array(3), "x": np.zeros((8, 16))}


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def train(step, waited=0.0, batch=BATCH):
    return sf.Event(step, None, {"train/loss": 1.0}, None, batch=batch, waited=waited)


def measured(hook, clock, seconds=5.0, waited=0.0):
    assert hook(train(10)) is None
    clock[0] += seconds
    found = hook(train(20, waited))
    return {name.removeprefix("throughput/"): value for name, value in found.items()}


def test_time_examples_and_what_else_is_counted(clock):
    hook = sf.throughput(tokens=lambda batch: batch["x"].size)
    assert measured(hook, clock, 5.0, waited=1.0) == {
        "step_seconds": 0.5,
        "waiting": 0.2,
        "goodput": 1.0,
        "examples_per_second": 16.0,
        "tokens_per_second": 256.0,
    }


def test_an_evaluation_takes_no_time_of_steps_and_lessens_the_goodput(clock):
    hook = sf.throughput()
    hook(train(10))
    clock[0] += 30.0
    assert hook(sf.Event(10, None, {"eval/loss": 1.0}, None, waited=0.0)) is None
    clock[0] += 10.0
    found = hook(train(20))
    assert found["throughput/step_seconds"] == 1.0
    assert found["throughput/goodput"] == 0.25


def test_examples_of_all_processes_count_once(clock, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert measured(sf.throughput(), clock)["examples_per_second"] == 64.0


def test_mfu_where_the_peak_is_known(clock):
    assert measured(sf.throughput(flops=1e12, peak=4e12), clock)["mfu"] == 0.5
    assert "mfu" not in measured(sf.throughput(flops=1e12), clock)  # of a CPU it is not


def test_goodput_counts_pauses_and_steps_that_were_lost(clock):
    hook = sf.throughput()
    measured(hook, clock, 10.0)
    kept = hook.get_state()
    clock[0] += 20.0
    hook(train(30))  # lost: the checkpoint is older
    clock[0] += 10.0
    again = sf.throughput()
    again.set_state(kept)
    again(train(20))
    clock[0] += 10.0
    found = again(train(30))
    assert found["throughput/goodput"] == 20.0 / 50.0


def test_fit_measures_a_slow_source():
    class Slow:
        def __iter__(self):
            for _ in range(20):
                time.sleep(0.02)
                yield np.zeros((8, 4), np.float32)

    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(4), tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p - b) ** 2), tx)
    result = sf.fit(step, state, Slow(), steps=20, log_every=5, hooks=[sf.throughput()])
    assert result.history["throughput/waiting"].steps == [10, 15, 20]
    assert min(result.history["throughput/waiting"]) > 0.5
    assert min(result.history["throughput/step_seconds"]) >= 0.015


def test_arguments_are_checked():
    with pytest.raises(sf.ConfigError, match="flops: expected a number above 0, got 0"):
        sf.throughput(flops=0)
    with pytest.raises(sf.ConfigError, match="tokens: expected a function of a batch, got int 9"):
        sf.throughput(tokens=9)
