"""`evaluate` over batches of several processes, which may have unequal numbers of them."""

import json

import pytest


def evaluates(start, kind, counts):
    """Evaluate on the batches of this process; print the result, or the error."""
    import json

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start()
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


@pytest.mark.parametrize(
    ("kind", "counts", "words"),
    [
        ("list", [5, 3], "the same number of batches in every process, got [5, 3]; "),
        (
            "generator",
            [5, 3],
            "the same number of batches in every process, got 3 in process 1, and more in ",
        ),
        ("generator", [0, 0], "at least one batch"),
    ],
)
def test_unequal_numbers_of_batches_and_none_are_refused_in_all(processes, kind, counts, words):
    for text in processes.run(evaluates, kind, counts):
        assert json.loads(text).startswith(f"evaluate: expected {words}")


def test_a_generator_of_equally_many_is_evaluated_whole(processes):
    outputs = processes.run(evaluates, "generator", [5, 5])
    assert [json.loads(text) for text in outputs] == [{"loss": 8.0}] * 2
