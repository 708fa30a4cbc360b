"""`evaluate` over batches of several processes, which may have unequal numbers of them."""

import json

import pytest

from . import launch


def evaluates(start, kind, counts):
    """Evaluate on the batches of this process; print the result, or the error."""
    import json

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start(shutdown=5)
    mesh = sf.make_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.make_array_from_process_local_data(whole, np.ones(4, np.float32))}
    state = sf.init_state(params, optax.sgd(0.1), jax.random.key(0), sharding=whole)
    measure = sf.make_eval_step(lambda p, b, key: sf.mean(b["x"] @ p["w"]))
    count = counts[jax.process_index()]
    rows = ({"x": np.full((4, 4), number, np.float32)} for number in range(count))
    try:
        print(json.dumps(sf.evaluate(measure, state, list(rows) if kind == "list" else rows)))
    except sf.DataError as error:
        print(json.dumps(str(error)))


def run(kind, counts):
    outputs = launch.run_processes(evaluates, 2, args=(kind, counts), timeout=40)
    return [json.loads(text) for text in outputs]


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_batches_that_end_earlier_in_one_process_are_refused_in_all(kind):
    got = {"list": "got [5, 3]", "generator": "got 3 in process 1, and more in the others"}[kind]
    for error in run(kind, [5, 3]):
        assert error.startswith(f"evaluate: expected as many batches in every process, {got}; ")


def test_a_generator_of_equally_many_is_evaluated_whole():
    assert run("generator", [5, 5]) == [{"loss": 8.0}] * 2


def test_no_batch_in_any_process_is_an_error():
    for error in run("generator", [0, 0]):
        assert error.startswith("evaluate: expected at least one batch")
