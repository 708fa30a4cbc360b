"""A request to save in one process saves in all, at the same step; temporary saves are shared."""

import json

import pytest

from . import launch


def saves(start, folder, who, how, kind):
    """Fit, and request a save in some processes at some steps; print what was done."""
    import json
    import os
    import signal
    import threading
    import time

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start()
    rank = jax.process_index()
    mesh, tx = sf.make_mesh(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}
    state = sf.init_state(params, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean(((b["x"] - p["w"]) ** 2).mean(-1)), tx)
    checkpoints = sf.Checkpoints(folder, every=10_000, keep=None)

    def ask():
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif how == "thread":
            thread = threading.Thread(target=checkpoints.request)
            thread.start()
            thread.join()

    def rows():
        for number in range(40):
            time.sleep(0.03)
            if number == 10 and rank in who:
                ask()
            yield {"x": np.full((4, 8), number, np.float32)}

    class Known(list):  # a list, whose length is known
        def __iter__(self):
            return rows()

    def hook(event):
        if how == "hook" and rank in who and event.step == 10:
            checkpoints.request()

    batches = Known([None] * 40) if kind == "list" else rows()
    result = sf.fit(step, state, batches, checkpoints=checkpoints, hooks=hook, log_every=5)
    saved = sf.Checkpoints(folder).steps()
    restored = {
        k: float(sf.restore(folder, result.state, step=k).state.params["w"][0]) for k in saved
    }
    print(json.dumps({"steps": result.steps, "saved": saved, "w": restored}))


@pytest.mark.parametrize(
    ("who", "how", "kind"),
    [
        ((1,), "signal", "list"),
        ((0,), "hook", "list"),
        ((1,), "thread", "generator"),
        ((0, 1), "hook", "list"),
    ],
)
def test_requests_save_once_in_all_processes_at_one_step(processes, tmp_path, who, how, kind):
    one, other = map(json.loads, processes.run(saves, str(tmp_path), who, how, kind))
    assert one == other
    assert one["steps"] == 40
    requested, last = one["saved"]
    assert (10 <= requested <= 30, last) == (True, 40)


def resumes(start, folder, local, steps, stop_at):
    """Fit with temporary saves, from the newest step of either directory."""
    import json

    import jax
    import numpy as np
    import optax

    import stepfold as sf

    start()
    mesh, tx = sf.make_mesh(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}
    state = sf.init_state(params, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean(((b["x"] - p["w"]) ** 2).mean(-1)), tx)
    temporary = sf.Temporary(local, every=2, every_minutes=60)
    described = sf.Checkpoints(folder, every=8, keep=None, temporary=temporary)
    data = {"x": np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)}
    with described as series:
        batches = sf.batches(data, 8, seed=0)
        resumed = None
        if series.latest_step() is not None:
            restored = series.restore(state)
            state, resumed = restored.state, restored.step
            batches.set_state(restored.data)
        fold = jax.jit(step)
        for number in range(int(state.step) + 1, stop_at + 1):
            state, _ = fold(state, sf.shard_batch(next(batches), mesh))
            if series.due(number):
                series.save(state, data=batches)
        series.wait()
        found = [series.steps(), sf.Checkpoints(folder).steps()]
    if stop_at < steps:
        ended = None
    else:
        ended = np.asarray(state.params["w"].addressable_data(0)).tobytes().hex()
    print(json.dumps([resumed, found, ended]))


def test_several_processes_resume_from_a_temporary_step(processes, tmp_path):
    def go(folder, stop_at):
        args = (str(tmp_path / folder), str(tmp_path / "local"), 20, stop_at)
        one, other = map(json.loads, processes.run(resumes, *args))
        assert one[0] == other[0]
        assert one[2] == other[2]
        return one

    resumed, (every, permanent), _ = go("a", 13)
    assert (resumed, every, permanent) == (None, [8, 12], [8])
    resumed, _, ended = go("a", 20)
    assert resumed == 12
    assert ended == go("b", 20)[2]


def fills(start, folder, where):
    """Save while the disk of process 1 is full; print the error and how long it took."""
    import errno
    import json
    import time

    import jax
    import numpy as np

    import stepfold as sf
    from stepfold.checkpoint import manifest

    start(shutdown=5)
    whole = jax.sharding.NamedSharding(sf.make_mesh(), jax.sharding.PartitionSpec())
    state = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if jax.process_index() == 1:
        setattr(manifest, where, full)
    began, problem = time.monotonic(), ""
    try:
        with sf.Checkpoints(folder) as series:
            series.save(state, step=1)
    except sf.CheckpointError as error:
        problem = str(error)
    steps = sf.verify(folder) if jax.process_index() == 0 else None
    print(json.dumps({"problem": problem, "seconds": time.monotonic() - began, "steps": steps}))


def test_a_disk_that_is_full_in_one_process_is_an_error_in_all_within_seconds(tmp_path):
    ends = launch.ends_of_processes(fills, 2, timeout=60, args=(str(tmp_path), "write_leaves"))
    first, second = (json.loads(end.output.splitlines()[-1]) for end in ends)
    assert "no space left on the device; make room" in second["problem"]
    assert "process 1" in first["problem"]
    assert "no space left on the device" in first["problem"]
    assert max(first["seconds"], second["seconds"]) < 15
    assert first["steps"] == {}
