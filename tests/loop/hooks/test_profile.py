"""A window of the run for the profiler."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf


def run(*hooks, steps=12, log_every=2, **options):
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    return sf.fit(step, state, batches, steps=steps, log_every=log_every, hooks=hooks, **options)


def traces(folder):
    return sorted(folder.rglob("*.trace.json.gz"))


def executions(folder):
    """Count how often the device ran a step, in the only trace there is."""
    (path,) = traces(folder)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(str(event.get("name")).startswith("ThunkExecutor::Execute") for event in events)


@pytest.mark.parametrize(("count", "held"), [(6, 6), (5, 6), (1, 2)])
def test_a_trace_holds_the_steps_it_says_exact_to_the_log_points(tmp_path, count, held):
    hook = sf.profile(3, count, tmp_path)
    run(hook, steps=20)
    assert (hook.begun, hook.ended) == (5, 5 + held)
    assert executions(tmp_path) == held


def test_a_run_that_ends_before_closes_the_trace(tmp_path):
    hook = sf.profile(4, 1000, tmp_path)
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
        run(sf.profile(4, 1000, tmp_path), fail)
    assert len(traces(tmp_path)) == 1


def test_what_was_traced_before_a_resume_is_not_traced_again(tmp_path):
    checkpoints = sf.Checkpoints(tmp_path / "checkpoints", every=6)
    run(sf.profile(2, 2, tmp_path / "a"), steps=8, checkpoints=checkpoints)
    run(sf.profile(2, 2, tmp_path / "b"), steps=20, checkpoints=checkpoints)
    assert len(traces(tmp_path / "a")) == 1
    assert not (tmp_path / "b").exists()


def test_another_window_is_traced_after_a_resume(tmp_path):
    first, second = sf.profile(2, 2, tmp_path), sf.profile(20, 2, tmp_path)
    first.set_state({**first.get_state(), "over": True})
    second.set_state(first.get_state())
    second(sf.Event(20, None, {"train/loss": 1.0}, None))
    second.close()
    assert len(traces(tmp_path)) == 1


def test_of_several_processes_the_first_is_traced(tmp_path, monkeypatch):
    hook = sf.profile(2, 2, tmp_path / "a")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    hook(sf.Event(2, None, {"train/loss": 1.0}, None))
    hook.close()
    assert not (tmp_path / "a").exists()


def test_arguments_are_checked(tmp_path):
    with pytest.raises(sf.ConfigError, match="first: expected an integer of at least 0, got -1"):
        sf.profile(-1, 1, tmp_path)
    with pytest.raises(sf.ConfigError, match="count: expected an integer of at least 1, got 0"):
        sf.profile(1, 0, tmp_path)
    with pytest.raises(sf.ConfigError, match="folder: expected one for the trace, got None"):
        sf.profile(1, 1, None)
