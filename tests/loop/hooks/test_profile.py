"""Profiler traces of some steps."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.hooks.base import Event
from stepfold.loop.hooks.profile import profile


def run(*hooks, steps=12, log_every=2, **options):
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    return sf.fit(step, state, batches, steps=steps, log_every=log_every, hooks=hooks, **options)


def train(step):
    return Event(step, None, {"train/loss": 1.0}, None)


def traces(folder):
    return sorted(folder.rglob("*.trace.json.gz"))


def executions(folder):
    """Count how often the device ran a step in the only trace."""
    (path,) = traces(folder)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(str(event.get("name")).startswith("ThunkExecutor::Execute") for event in events)


@pytest.mark.parametrize(("count", "traced"), [(6, 6), (5, 6), (1, 2)])
def test_a_trace_holds_the_given_steps_exact_to_the_log_points(tmp_path, count, traced):
    hook = profile(3, count, tmp_path)
    run(hook, steps=20)
    assert (hook.begun, hook.ended) == (5, 5 + traced)
    assert executions(tmp_path) == traced


def test_a_run_that_ends_earlier_closes_the_trace(tmp_path):
    hook = profile(4, 1000, tmp_path)
    run(hook)
    assert len(traces(tmp_path)) == 1
    assert hook.ended is None
    jax.profiler.start_trace(tmp_path / "another")  # raises while one is open
    jax.profiler.stop_trace()


def test_an_exception_closes_the_trace(tmp_path):
    def fail(event):
        if event.step == 8:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run(profile(4, 1000, tmp_path), fail)
    assert len(traces(tmp_path)) == 1


def test_steps_that_were_traced_before_a_resume_are_not_traced_again(tmp_path):
    checkpoints = sf.Checkpoints(tmp_path / "checkpoints", every=6)
    run(profile(2, 2, tmp_path / "a"), steps=8, checkpoints=checkpoints)
    run(profile(2, 2, tmp_path / "b"), steps=20, checkpoints=checkpoints)
    assert len(traces(tmp_path / "a")) == 1
    assert not (tmp_path / "b").exists()


def test_other_steps_are_traced_after_a_resume(tmp_path):
    first, second = profile(2, 2, tmp_path / "a"), profile(20, 2, tmp_path / "b")
    first(train(2))
    first.close()
    second.set_state(first.get_state())
    second.open(10, None)
    second(train(20))
    second.close()
    assert len(traces(tmp_path / "b")) == 1


def test_the_next_run_of_a_hook_is_traced_too(tmp_path):
    hook = profile(2, 2, tmp_path)
    state = sf.TrainState(jnp.array(3), {}, (), (), jax.random.key(0))
    for _ in range(2):
        hook.open(0, None)
        assert (hook.begun, hook.ended) == (None, None)
        hook(train(2)._replace(state=state))
        hook(train(4)._replace(state=state))
        hook(train(6)._replace(state=state))
        hook.close()
        assert (hook.begun, hook.ended) == (3, 3)
        for trace in traces(tmp_path):
            trace.unlink()  # the folder of a trace is named by the second
    assert traces(tmp_path) == []


def test_an_evaluation_does_not_start_a_trace(tmp_path):
    hook = profile(2, 2, tmp_path / "a")
    hook(Event(2, None, {"eval/loss": 1.0, "train/lr": 0.1}, None, kind="eval"))
    hook.close()
    assert not (tmp_path / "a").exists()


def test_of_several_processes_the_first_is_traced(tmp_path, monkeypatch):
    hook = profile(2, 2, tmp_path / "a")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    hook(train(2))
    hook.close()
    assert not (tmp_path / "a").exists()


def test_arguments_are_checked(tmp_path):
    with pytest.raises(sf.ConfigError, match="first: expected an integer of at least 0, got -1"):
        profile(-1, 1, tmp_path)
    with pytest.raises(sf.ConfigError, match="count: expected an integer of at least 1, got 0"):
        profile(1, 0, tmp_path)
    with pytest.raises(sf.ConfigError, match="folder: expected one for the trace, got None"):
        profile(1, 1, None)
