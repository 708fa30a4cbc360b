"""The speed of a run, the memory it takes, and traces of some steps."""

import gzip
import json
import time
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from tests.small import STEP, Shown, full_but, start

import stepfold as sf
from stepfold.hooks.objects import as_hook
from stepfold.hooks.performance import memory_use, pace_after, profile, throughput
from stepfold.loop.events import Event

BATCH = {"step": np.array(3), "x": np.zeros((8, 16))}


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def train(step, data_wait=0.0, batch=BATCH):
    metrics = {"train/loss": 1.0}
    return Event(step, None, metrics, None, batch=batch, data_wait_seconds=data_wait)


def evaluation(step):
    # A hook may add numbers of any name to an evaluation.
    return Event(step, None, {"eval/loss": 1.0, "train/lr": 0.1}, None, kind="eval")


def measure(hook, clock, seconds=5.0, data_wait=0.0):
    """Show a `Shown` hook two events some seconds apart; return the numbers of the second."""
    assert hook(train(10)) is None
    clock[0] += seconds
    speed = hook(train(20, data_wait))
    return {name.removeprefix("throughput/"): value for name, value in speed.items()}


# throughput


def test_time_examples_and_other_units(clock):
    hook = Shown(throughput(tokens=lambda batch: batch["x"].size))
    hook.start()
    assert measure(hook, clock, 5.0, data_wait=1.0) == {
        "step_seconds": 0.5,
        "waiting": 0.2,
        "goodput": 1.0,
        "examples_per_second": 16.0,
        "tokens_per_second": 256.0,
    }
    assert measure(Shown(throughput(flops=1e12, peak=4e12)), clock)["mfu"] == 0.5
    assert "mfu" not in measure(Shown(throughput(flops=1e12)), clock)  # unknown for a CPU


def test_a_batch_without_rows_has_no_examples(clock):
    hook = Shown(throughput())
    hook.start()
    hook(train(10, batch={"temperature": np.float32(1.0)}))
    clock[0] += 1.0
    speed = hook(train(20, batch={"temperature": np.float32(1.0)}))
    assert speed["throughput/examples_per_second"] == 0.0


def test_an_evaluation_takes_no_time_of_steps_and_lowers_the_goodput(clock):
    hook = Shown(throughput())
    hook(train(10))
    clock[0] += 30.0
    assert hook(evaluation(10)) is None
    clock[0] += 10.0
    speed = hook(train(20))
    assert speed["throughput/step_seconds"] == 1.0
    assert speed["throughput/goodput"] == 0.25


def test_examples_of_all_processes_are_counted(clock, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert measure(Shown(throughput()), clock)["examples_per_second"] == 64.0


def test_goodput_counts_pauses_and_lost_steps(clock):
    hook = Shown(throughput())
    hook.start()
    first = measure(hook, clock, 10.0)
    saved = hook.save()
    clock[0] += 20.0
    hook(train(30))  # lost: the checkpoint is older
    clock[0] += 10.0
    resumed = Shown(throughput())
    resumed.resume(saved, 20)
    assert resumed(train(20)) is None  # compiles
    clock[0] += 10.0
    assert resumed(train(30))["throughput/goodput"] == 20.0 / 50.0
    hook.resume(saved, 20)  # a run that goes back waits for nothing between its attempts
    clock[0] += 50.0
    assert hook(train(20)) is None
    again = Shown(resumed.hook)  # in the next run
    again.start()
    assert measure(again, clock, 10.0) == first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: throughput(flops=0), "flops: expected a number above 0, got 0"),
        (lambda: throughput(peak=-1), "peak: expected a number above 0, got -1"),
        (lambda: throughput(tokens=9), "tokens: expected a function of a batch, got int 9"),
        (lambda: profile(-1, 1, "a"), "first: expected an integer of at least 0, got -1"),
        (lambda: profile(1, 0, "a"), "count: expected an integer of at least 1, got 0"),
        (lambda: profile(1, 1, None), "folder: expected the path of a folder, got None"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        make()


# Pace


def test_the_rate_is_smoothed_over_times_without_the_first_interval_which_compiles(clock):
    pace, interval = pace_after(None, train(10))
    assert (pace.rate, interval) == (None, None)
    clock[0] += 1
    pace, interval = pace_after(pace, train(20))
    assert (pace.rate, interval) == (10.0, (10, 1.0))
    clock[0] += 2
    pace, _ = pace_after(pace, train(30))
    assert pace.rate == pytest.approx(10 / (0.7 * 1 + 0.3 * 2))


# memory_use

EVENT = Event(10, None, {}, None)


def test_memory_use_declares_what_it_returns():
    hook = as_hook(memory_use)
    assert (hook.provides, hook.returns, hook.name) == (("memory/",), [], "memory_use")
    assert hook.update(None, EVENT) == (None, memory_use(EVENT))


def test_host_memory_is_that_of_the_process():
    before = memory_use(EVENT)["memory/host"]
    more = np.ones(2**26, np.int8)  # a sixteenth of a GiB
    assert memory_use(EVENT)["memory/host"] - before > 0.06
    assert more[0] == 1


def test_the_fullest_device_counts_if_it_has_statistics(monkeypatch):
    assert set(memory_use(EVENT)) == {"memory/host"}

    class Device:
        def __init__(self, use, peak):
            self._stats = {"bytes_in_use": use * 2**30, "peak_bytes_in_use": peak * 2**30}

        def memory_stats(self):
            return self._stats

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(1, 4), Device(2, 3)])
    memory = memory_use(EVENT)
    assert (memory["memory/device"], memory["memory/device_peak"]) == (2.0, 4.0)


# profile


def run(*hooks, steps=12, log_every=2, **options):
    batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    return sf.fit(STEP, start(), batches, steps=steps, log_every=log_every, hooks=hooks, **options)


def test_the_waits_of_an_interval_are_its_own_whenever_it_is_read():
    """At the end, two intervals are read at once."""

    def slow():
        for n in range(30):
            time.sleep(0.02 if n >= 20 else 0)
            yield {"x": np.zeros(4, np.float32)}

    result = sf.fit(STEP, start(), slow(), hooks=[sf.hooks.throughput()], log_every=10)
    assert result.history["throughput/waiting"].steps == [20, 30]
    before, last = result.history["throughput/waiting"]
    assert before < last
    assert last > 0.1


def traces(folder):
    return sorted(folder.rglob("*.trace.json.gz"))


def executions(folder):
    """Count how often the device ran a step in the only trace."""
    (path,) = traces(folder)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(str(event.get("name")).startswith("ThunkExecutor::Execute") for event in events)


@pytest.mark.parametrize(("count", "traced"), [(6, 6), (1, 2)])
def test_a_trace_holds_the_given_steps_exact_to_the_log_points(tmp_path, count, traced):
    hook = profile(3, count, tmp_path)
    run(hook, steps=20)
    assert (hook.begun, hook.ended) == (6, 6 + traced)
    assert executions(tmp_path) == traced


@pytest.mark.parametrize("fails", full_but([True], [False, True]))
def test_a_run_that_ends_earlier_or_fails_closes_the_trace(tmp_path, fails):
    def fail(event):
        if fails and event.step == 8:
            raise RuntimeError("mine")

    hook = profile(4, 1000, tmp_path)
    with pytest.raises(RuntimeError, match="mine") if fails else nullcontext():
        run(hook, fail)
    assert (len(traces(tmp_path)), hook.ended) == (1, None)
    jax.profiler.start_trace(tmp_path / "another")  # raises while one is open
    jax.profiler.stop_trace()


@pytest.mark.full
def test_steps_that_were_traced_before_a_resume_are_not_traced_again(tmp_path):
    checkpoints = sf.Checkpoints(tmp_path / "checkpoints", every=6)
    run(profile(2, 2, tmp_path / "a"), steps=8, checkpoints=checkpoints)
    run(profile(2, 2, tmp_path / "b"), steps=20, checkpoints=checkpoints)
    assert len(traces(tmp_path / "a")) == 1
    assert not (tmp_path / "b").exists()


def test_evaluations_and_other_processes_than_the_first_are_not_traced(tmp_path, monkeypatch):
    hook = Shown(profile(2, 2, tmp_path / "a"))
    hook(evaluation(2))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    hook(train(2))
    hook.hook.close()
    assert not (tmp_path / "a").exists()
