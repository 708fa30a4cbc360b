"""Processes stop at the same step: at a signal, a reason of a hook, or the end of their batches."""

import json

import pytest

from . import launch


def stops(start, batches, options, folder=None, signal_at=None, hook_at=None):
    """Fit on the batches of this process; print where and why it stopped."""
    import json
    import os
    import signal
    import time
    import warnings

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start(**({"shutdown": 5} if batches[0][0] == "endless" else {}))
    rank = jax.process_index()
    mesh, tx = sf.make_mesh(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}
    state = sf.init_state(params, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean(((b["x"] - p["w"]) ** 2).mean(-1)), tx)
    kind, count, seconds = batches[rank]
    signalled = []

    def rows():
        for number in range(count):
            time.sleep(seconds)
            if signal_at is not None and number == signal_at and rank == 1:
                signalled.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
            yield {"x": np.full((4, 8), number, np.float32)}

    class Slow(list):  # a list, whose length is known
        def __iter__(self):
            return rows()

    class Endless:
        endless = True

        def __iter__(self):
            return rows()

    make = {"list": lambda: Slow([None] * count), "generator": rows, "endless": Endless}
    hook = lambda event: "enough" if rank == 1 and event.step == hook_at else None
    code, errors = 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = sf.fit(
                step, state, make[kind](), hooks=hook, **options,
                checkpoints=sf.Checkpoints(folder, every=10_000) if folder else None,
            )  # fmt: skip
        except SystemExit as error:
            result, code = error.result, error.code
        except sf.DataError as error:
            errors.append(str(error))
    ended = time.monotonic()
    seen = {"code": code, "errors": errors, "warned": [str(w.message) for w in caught]}
    if not errors:
        seen |= {"steps": result.steps, "kind": result.stop_reason.kind}
        seen |= {"message": str(result.stop_reason)}
        seen |= {"seconds": ended - signalled[0] if signalled else None}
        seen |= {"saved": sf.latest_step(folder) if folder else None}
    print(json.dumps(seen))


@pytest.mark.parametrize("per_call", [1, 4])
def test_batches_that_end_earlier_in_one_process_stop_all_at_the_same_step(
    processes, per_call, tmp_path
):
    batches = [("generator", 9, 0), ("generator", 6, 0)]
    options = {"steps_per_call": per_call, "log_every": 4}
    for process, text in enumerate(processes.run(stops, batches, options, str(tmp_path))):
        seen = json.loads(text)
        assert (seen["steps"], seen["kind"], seen["saved"]) == (6, "exhausted", 6)
        words = "got 6 in process 1, and more in the others"
        assert any(words in text for text in seen["warned"]), (process, seen)


def test_a_known_number_of_batches_that_differs_is_refused_before_the_first_step(processes):
    for text in processes.run(stops, [("list", 9, 0), ("list", 6, 0)], {}):
        (error,) = json.loads(text)["errors"]
        assert error.startswith(
            "batches: expected the same number of steps in every process, got [9, 6]; "
        )
        assert "steps=6" in error
    for text in processes.run(stops, [("list", 9, 0), ("list", 8, 0)], {"steps": 7}):
        seen = json.loads(text)
        assert (seen["steps"], seen["warned"]) == (7, [])


def test_batches_that_are_not_as_endless_as_they_say_end_all(tmp_path):
    batches = [("endless", 30, 0.01), ("endless", 8, 0.01)]
    first, second = launch.ends_of_processes(
        stops, 2, timeout=60, args=(batches, {"steps": 30, "log_every": 5})
    )
    assert "batches: expected no end after step 8, by their own count" in second.output
    assert first.code != 0 or "stepfold: process 1" in first.errors


@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.full), "generator"])
def test_a_signal_to_one_process_ends_all_within_a_few_steps(kind, tmp_path):
    options = {"steps": 300, "log_every": 1000}
    args = ([(kind, 300, 0.1)] * 2, options, str(tmp_path), 20)
    one, other = map(json.loads, launch.run_processes(stops, 2, args=args, timeout=40))
    assert one["steps"] == other["steps"] == one["saved"]
    assert 20 <= one["steps"] <= 30
    assert (one["code"], one["kind"], other["code"], other["kind"]) == (143, "signal") * 2
    assert other["seconds"] < 5


def test_a_reason_of_a_hook_in_one_process_ends_all_within_a_few_steps(processes):
    args = ([("list", 300, 0.05)] * 2, {"steps": 300, "log_every": 5}, None, None, 20)
    one, other = map(json.loads, processes.run(stops, *args))
    assert one["steps"] == other["steps"] <= 30
    assert one["message"].startswith("process 1 stopped")
    assert other["message"].startswith("enough")
