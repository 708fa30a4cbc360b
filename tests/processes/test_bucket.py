"""Two processes save into a bucket together: all of a step or nothing, and none waits for ever."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests import s3

import stepfold as sf

from . import launch


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, s3.Server() as server:
        s3.use_credentials(patch)
        yield server


def saves(start, url, credentials):
    import json
    import os
    import time

    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import stepfold as sf
    from stepfold.checkpoint import bucket

    os.environ.update(credentials)
    start(shutdown=10)
    bucket._OBJECT = 1000
    process, seen = jax.process_index(), {}
    mesh = sf.make_mesh((1, 2, 2, 1))
    numbers = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)

    def placed(spec, value):
        place = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(numbers.shape, place, lambda i: numbers[i] + value)

    def same(found, value):
        parts = (np.array_equal(s.data, numbers[s.index] + value) for s in found.addressable_shards)
        return all(parts)

    # A series in the background, of steps that give their state away.
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"w": placed(P("fsdp"), 0), "v": placed(P(None, "tp"), 0), "whole": placed(P(), 0)}
    with sf.Checkpoints(url, keep=2) as series:
        for number in range(4):
            data = {"at": process, "buffer": np.full(300, process)}
            series.save(state, step=number, data=data, metrics={"loss": number})
            state = step(state)
        found = series.restore({**state, "w": placed(P(("fsdp", "tp")), 9)}, step=3)
    assert found.data["buffer"].tolist() == [process] * 300
    seen["restored"] = [found.step, found.data["at"], *(same(x, 3) for x in found.state.values())]
    # What only one process cannot do.
    begun = time.monotonic()
    for failing in (0, 1):

        def fail(failing=failing):
            if process == failing:
                raise OSError(f"cut in process {failing}")

        series = sf.Checkpoints(url, keep=None).open()
        series.save(state, step=10 + failing, before_commit=fail)
        try:
            series.close()
        except sf.CheckpointError as error:
            seen[f"failing {failing}"] = str(error)
    seen["seconds"] = time.monotonic() - begun
    # A process that has ended writes no manifest.
    bucket._PATIENCE = 1.0
    give_up = bucket.BucketStore._write_stream
    bucket.BucketStore._write_stream = lambda *args: time.sleep(4) if process else give_up(*args)
    try:
        sf.save(url, state, step=20)
    except sf.CheckpointError as error:
        seen["late"] = str(error)
    jax.experimental.multihost_utils.sync_global_devices("end")
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def both(server, tmp_path_factory):
    """Let two processes do all that they do in one go, since each start costs seconds."""
    url = server.url(tmp_path_factory.mktemp("bucket").name)
    outputs = launch.run_processes(saves, 2, timeout=90, args=(url, s3.CREDENTIALS))
    return url, [json.loads(output) for output in outputs]


def test_two_processes_restore_what_they_saved_with_a_position_each(both):
    _, (first, second) = both
    assert first["restored"] == [3, 0, True, True, True]
    assert second["restored"] == [3, 1, True, True, True]


def test_one_process_restores_it_on_any_mesh(both):
    url, _ = both
    numbers = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) + 3
    for count, dims in {8: (1, 4, 2, 1), 1: (1, 1, 1, 1)}.items():
        mesh = sf.make_mesh(dims, devices=jax.devices()[:count])
        place = NamedSharding(mesh, P("fsdp"))
        like = {name: jax.device_put(0 * numbers, place) for name in ("w", "v", "whole")}
        found = sf.restore(url, like, step=3, parts=("w", "v", "whole"))
        for leaf in found.state.values():
            assert leaf.sharding == place
            assert np.array_equal(leaf, numbers)


def test_a_failure_of_one_process_is_that_of_the_save(both):
    url, (first, second) = both
    assert "OSError: cut in process 0" in first["failing 0"]
    assert "process 1 cannot save its part: cut in process 1" in first["failing 1"]
    assert "OSError: cut in process 1" in second["failing 1"]
    assert first["seconds"] < 20
    words = "expected the part of process 1 within 1 s of process 0, got none"
    assert words in first["late"]
    assert sf.verify(url) == {2: [], 3: []}
