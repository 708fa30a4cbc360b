"""With several processes, the one that the others wait for is named, with its host."""

import json
import socket
import statistics


def trains(start, cases):
    """Fit with a slow input pipeline or hook in some processes; print what process 0 reports."""
    import json
    import time
    import warnings

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start()
    rank = jax.process_index()
    mesh, tx = sf.make_mesh(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = sf.make_train_step(lambda p, b, key: sf.mean(((b["x"] - p["w"]) ** 2).mean(-1)), tx)
    for kind, slow in cases:
        params = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}
        state = sf.init_state(params, tx, jax.random.key(0), sharding=whole)
        is_slow = rank in slow

        class Rows(list):
            def __iter__(self, is_slow=is_slow, kind=kind):
                for number in range(len(self)):
                    time.sleep(0.12 if kind == "data" and is_slow else 0)
                    yield {"x": np.full((4, 8), number, np.float32)}

        def hook(event, is_slow=is_slow, kind=kind):
            time.sleep(0.15 if kind == "hook" and is_slow else 0)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = sf.fit(
                step, state, Rows([None] * 40), hooks=[sf.stragglers(), hook], log_every=5
            )
        named = {
            name.split("_")[-1]: list(curve)
            for name, curve in result.history.items()
            if "slowest" in name
        }
        print(json.dumps([named, [str(warning.message) for warning in caught]]))


def test_a_slow_process_is_named(processes):
    cases = [("data", [1]), ("hook", [0]), ("data", [0, 1])]
    one, other = processes.run(trains, cases, timeout=90)
    reports = [json.loads(line) for line in one.splitlines()]
    for (kind, slow), (named, warned) in zip(cases, reports, strict=True):
        assert named["process"], named
        if len(slow) == 2:
            assert max(named["ratio"]) < 1.5
            assert warned == []
            continue
        assert set(named["process"]) == set(slow), (kind, named)
        assert statistics.median(named["ratio"]) > 1.5
        (warning,) = warned
        assert f"process {slow[0]} on {socket.gethostname()} takes" in warning
    assert [json.loads(line) for line in other.splitlines()] == [[{}, []]] * len(cases)
