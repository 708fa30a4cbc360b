"""Two processes save what one restores and the other way round, and agree on what is good."""

import json
import os
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from tests import s3
from tests.checkpoint.sameness import check_same
from tests.clients.rows import shows

import stepfold as sf
from stepfold.checkpoint import bucket
from stepfold.checkpoint import safetensors as module

SPECS = {"rows": P("fsdp"), "columns": P(None, "tp"), "both": P(("fsdp", "tp")), "whole": P()}


def placed(value, mesh):
    """Return a state of every kind of leaf, on a mesh of one process or of several."""
    state = {}
    for name, spec in SPECS.items():
        seed = sum(map(ord, name)) + value
        rows = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
        place = NamedSharding(mesh, spec)
        state[name] = jax.make_array_from_callback((16, 8), place, lambda i, rows=rows: rows[i])
    numbers = np.asarray(jax.random.key_data(jax.random.key(value)))
    place = NamedSharding(mesh, P())
    data = jax.make_array_from_callback((2,), place, lambda i: numbers[i])
    state["key"] = jax.random.wrap_key_data(data)
    return state | {"numpy": np.full(3, value), "number": value}


def works(start, folder):
    start()
    warnings.simplefilter("error")  # until the worker ends
    process, folder = jax.process_index(), Path(folder)
    mesh = sf.make_mesh((1, 2, 2, 1))
    seen = {}

    def same(found, wanted):
        """Compare the parts that are here."""
        for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            if isinstance(want, jax.Array):
                assert have.sharding == want.sharding
                if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
                    have, want = map(jax.random.key_data, (have, want))
                parts = zip(have.addressable_shards, want.addressable_shards, strict=True)
                for one, other in parts:
                    assert one.device == other.device
                    assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
            else:
                assert np.asarray(have).tobytes() == np.asarray(want).tobytes()
        return True

    # What one process saved on eight, four and one device.
    seen["from one"] = [
        same(sf.restore(folder / "one", placed(0, mesh), step=n).state, placed(n, mesh))
        for n in (8, 4, 1)
    ]
    # What two save, each with a position of its own at last.
    sf.save(folder / "two", placed(1, mesh), step=1, data={"at": 5}, metrics={"loss": 1.0})
    sf.save(folder / "two", placed(2, mesh), step=2, data={"at": process}, metrics={"loss": 0.5})
    found = sf.restore(folder / "two", placed(0, mesh))
    seen["to two"] = [same(found.state, placed(2, mesh)), found.step, found.data]
    seen["best"] = sf.restore(folder / "two", placed(0, mesh), step="best", best="loss").step
    # Arrays in the positions: one that all share, and then one of each process.
    series = folder / "run" / "checkpoints"
    sf.save(series, placed(1, mesh), step=1, data={"shared": np.arange(3)})
    own = {"own": np.full(3, process)}
    sf.save(series, placed(2, mesh), step=2, data=own, extra=[np.full(2, process)])
    found = sf.restore(folder / "run", placed(0, mesh))
    seen["arrays"] = [found.data["own"].tolist(), found.extra[0].tolist()]
    # A series in the background, of steps that give their state away.
    step = jax.jit(
        lambda tree: {name: leaf + 1 for name, leaf in tree.items()},
        donate_argnums=0,
        out_shardings=NamedSharding(mesh, P("fsdp")),
    )
    rows = NamedSharding(mesh, P("fsdp"))
    numbers = np.arange(1 << 16, dtype=np.float32)
    state = {"w": jax.make_array_from_callback(numbers.shape, rows, lambda i: numbers[i])}
    with sf.Checkpoints(folder / "series", keep=2, keep_every=4, every_minutes=60) as series:
        seen["due"] = series.due(1)
        for number in range(1, 8):
            series.save(state, step=number, data={"at": number})
            for _ in range(2):
                state = jax.block_until_ready(step(state))
        found = series.restore(state, step=7)
    wanted = numbers + np.float32(12)
    wanted = {"w": jax.make_array_from_callback(numbers.shape, rows, lambda i: wanted[i])}
    seen["series"] = [same(found.state, wanted), sorted(sf.checkpoint.verify(folder / "series"))]
    # A step of which only the second process reads what is damaged.
    for number in (1, 2):
        sf.save(folder / "damaged", wanted, step=number)
    jax.experimental.multihost_utils.sync_global_devices("saved")
    if process == 0:
        good = numbers[-100:] + np.float32(12)
        for path in (folder / "damaged" / "2").rglob("d/*"):
            text = path.read_bytes().replace(good.tobytes(), (-good).tobytes())
            path.write_bytes(text)
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = sf.restore(folder / "damaged", wanted)
    seen["damaged"] = [same(found.state, wanted), found.step, found.damaged[2]]
    seen["told"] = [str(one.message).rpartition(": step ")[2] for one in told]
    try:
        sf.save(folder / "two", placed(2, mesh), step=2)
    except sf.errors.CheckpointError as error:
        seen["there"] = str(error).partition(": ")[2]
    print(json.dumps(seen))


LAYOUTS = {8: (1, 4, 2, 1), 4: (1, 1, 4, 1), 1: (1, 1, 1, 1)}


def mesh_of(count):
    return sf.make_mesh(LAYOUTS[count], devices=jax.devices()[:count])


@pytest.fixture(scope="module")
def both(processes, tmp_path_factory):
    """Let two processes do all that they do in one go."""
    folder = tmp_path_factory.mktemp("processes")
    for count in LAYOUTS:
        sf.save(folder / "one", placed(count, mesh_of(count)), step=count)
    outputs = processes.run(works, str(folder))
    return folder, [json.loads(output) for output in outputs]


def seen(both, what):
    return [one[what] for one in both[1]]


def test_two_processes_restore_a_save_of_one_and_their_own_with_a_data_position_each(both):
    assert seen(both, "from one") == [[True] * 3] * 2
    assert seen(both, "to two") == [[True, 2, {"at": 0}], [True, 2, {"at": 1}]]
    assert seen(both, "best") == [2, 2]


def test_each_of_two_processes_restores_the_arrays_of_its_position(both):
    assert seen(both, "arrays") == [[[0, 0, 0], [0, 0]], [[1, 1, 1], [0, 0]]]
    folder, like = both[0] / "run", placed(0, mesh_of(1))
    assert np.array_equal(sf.restore(folder, like, step=1).data["shared"], np.arange(3))
    with pytest.raises(
        sf.errors.CheckpointError, match="data: expected 2 processes, each with the pos"
    ):
        sf.restore(folder, like, step=2)
    found = sf.restore(folder, like, step=2, parts=("rows",))
    assert (found.data, found.extra[0].tolist()) == (None, [0, 0])
    assert list(sf.checkpoint.contents(folder).arrays) == ["data/0/own", "data/1/own", "extra/0"]
    assert sf.checkpoint.verify(folder) == {1: [], 2: []}
    path = folder / "checkpoints" / "2" / "state" / "arrays-1.bin"
    path.write_bytes(path.read_bytes()[::-1])
    assert sf.checkpoint.verify(folder)[2] == [
        "data/1/own: the values are not those that were saved"
    ]


@shows(
    "Trainer Protocol",
    "Required methods: save_pretrained",
    {
        "sharded and distributed saving": "each process writes its shards; any number of "
        "processes restores them"
    },
)
@pytest.mark.parametrize("count", LAYOUTS)
def test_one_process_restores_a_save_of_two(both, count):
    folder, _ = both
    wanted = placed(1, mesh_of(count))
    like = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        wanted,
    )
    found = sf.restore(folder / "two", like, step=1)
    check_same(found.state, wanted)
    assert (found.data, found.metrics) == ({"at": 5}, {"loss": 1.0})


def test_one_process_verifies_a_save_of_two_and_refuses_their_data_positions(both):
    folder, _ = both
    words = "data: expected 2 processes, each with the position it saved, got 1; start 2, or use"
    with pytest.raises(sf.errors.CheckpointError, match=words):
        sf.restore(folder / "two", placed(0, mesh_of(1)), step=2)
    assert sf.checkpoint.verify(folder / "two") == {1: [], 2: []}
    assert sf.checkpoint.verify(folder / "series") == {4: [], 6: [], 7: []}


def test_two_processes_save_in_the_background(both):
    assert seen(both, "series") == [[True, [4, 6, 7]]] * 2
    assert seen(both, "due") == [False, False]
    folder, _ = both
    for step in (4, 6, 7):
        found = sf.restore(folder / "series", {"w": np.zeros(1 << 16, np.float32)}, step=step)
        assert np.array_equal(found.state["w"], np.arange(1 << 16) + 2 * (step - 1))
        assert found.data == {"at": step}


def test_two_processes_agree_on_an_older_step_after_damage(both):
    one, other = seen(both, "damaged")
    assert one == [True, 1, ["another process found it damaged"]]
    assert other[:2] == [True, 1]
    assert other[2][0].endswith("the values are not those that were saved")
    assert [len(told) for told in seen(both, "told")] == [1, 1]
    assert seen(both, "told")[0][0].startswith("2 is damaged, and an older one")
    folder, _ = both
    assert sorted(path.name for path in (folder / "damaged").iterdir()) == ["1", "2"]


def test_two_processes_refuse_an_existing_step(both):
    assert len(set(seen(both, "there"))) == 1
    assert "step 2 already exists; delete it" in seen(both, "there")[0]


def differs(start, folder):
    start()
    place = NamedSharding(sf.make_mesh(), P("fsdp"))

    def placed(numbers):
        return jax.make_array_from_callback(numbers.shape, place, lambda i: numbers[i])

    # An array that each process has for itself.
    try:
        sf.save(Path(folder, "alone"), {"a": {"w": jax.numpy.ones(3)}}, step=1)
    except sf.StepfoldError as error:
        print(str(error).splitlines()[0])
    # What does not fit lies in the second process alone.
    sf.save(Path(folder, "large"), {"w": placed(np.array([1, 2, 3, 300], np.int32))}, step=1)
    try:
        sf.restore(Path(folder, "large"), {"w": placed(np.zeros(4, np.int8))}, cast=True)
    except sf.StepfoldError as error:
        print(type(error).__name__, "another process" in str(error))
    print(sorted(path.name for path in Path(folder, "large").iterdir()))


def test_what_does_not_fit_in_one_process_is_an_error_in_both(processes, tmp_path):
    outputs = [output.splitlines() for output in processes.run(differs, str(tmp_path))]
    for local, *_ in outputs:
        assert local.startswith("a/w: expected ")
    first, second = outputs
    assert first[1:] == ["CheckpointError True", "['1']"]
    assert second[1:] == ["TreeMismatchError False", "['1']"]


def exports_and_loads(start, folder):
    start()
    mesh = sf.make_mesh()
    places = {"w": PartitionSpec("fsdp"), "b": PartitionSpec(), "half": PartitionSpec(None, "fsdp")}
    places = {name: NamedSharding(mesh, spec) for name, spec in places.items()}
    whole = {
        "w": np.arange(32, dtype=np.float32).reshape(8, 4),
        "b": np.arange(3, dtype=np.int32),
        "half": np.arange(16).reshape(2, 8).astype(jnp.bfloat16),
    }
    params = {
        name: jax.make_array_from_callback(array.shape, places[name], lambda i, a=array: a[i])
        for name, array in whole.items()
    }
    assert not params["w"].is_fully_addressable
    for size in (10**9, 40):
        sf.checkpoint.export_params(
            folder, params | {"local": np.ones(2, np.float32)}, shard_size=size
        )
        # Every process returns when the files are there.
        like = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=places[name])
            for name, array in whole.items()
        }
        like["local"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        back = sf.checkpoint.load_params(folder, like)
        assert back["local"].tolist() == [1, 1]
        for name, array in whole.items():
            assert back[name].sharding == places[name]
            for shard in back[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()
        jax.experimental.multihost_utils.sync_global_devices("read")
    if jax.process_index() == 0:
        print(sorted(safetensors.numpy.load_file(f"{folder}/model-00001-of-00003.safetensors")))


def test_two_processes_export_as_one(processes, tmp_path):
    assert processes.run(exports_and_loads, str(tmp_path)) == ["['b']\n", ""]


def names_of_others(start, folder):
    start()
    mesh = sf.make_mesh()
    names = sf.checkpoint.NameMap([
        sf.checkpoint.NameRule(("query", "key"), "h.{layer}.attn", axis=1),
        sf.checkpoint.NameRule("up", "h.{layer}.up", transpose=(1, 0)),
    ])  # fmt: skip
    specs = {"query": PartitionSpec(None, "fsdp"), "up": PartitionSpec(None, None, "fsdp")}
    specs["key"] = PartitionSpec("fsdp")  # over the layers
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    whole = {
        name: np.arange(4 * 8 * size, dtype=np.float32).reshape(4, 8, size)
        for name, size in (("query", 6), ("key", 2), ("up", 16))
    }
    params = {
        name: jax.make_array_from_callback(array.shape, places[name], lambda i, a=array: a[i])
        for name, array in whole.items()
    }
    sf.checkpoint.export_params(folder, params, names=names)
    read, original = [], module.converted
    module.converted = lambda *rest: (read.append(rest[-1].nbytes), original(*rest))[1]
    back = sf.checkpoint.load_params(folder, params, names=names)
    for name, array in whole.items():
        assert back[name].sharding == places[name]
        for shard in back[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()
    jax.experimental.multihost_utils.sync_global_devices("read")
    print(sum(read), sum(array.nbytes for array in whole.values()))
    if jax.process_index() == 0:
        arrays = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        assert len(arrays) == 8
        joined = np.concatenate([whole["query"], whole["key"]], -1)
        for i in range(4):
            assert np.array_equal(arrays[f"h.{i}.attn"], joined[i])
            assert np.array_equal(arrays[f"h.{i}.up"], whole["up"][i].T)


def test_each_process_reads_its_part_under_the_names_of_others(processes, tmp_path):
    assert processes.run(names_of_others, str(tmp_path)) == ["1536 3072\n"] * 2


def cannot_write(start, folder):
    start()
    mesh = sf.make_mesh()
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    leaf = jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=place)()
    try:
        sf.checkpoint.export_params(f"{folder}/file", {f"{i}": leaf for i in range(5)})
    except sf.errors.CheckpointError as error:
        print(error)


def test_write_error_of_the_first_process_is_raised_in_all(processes, tmp_path):
    (tmp_path / "file").write_text("mine")
    outputs = processes.run(cannot_write, str(tmp_path))
    words = (
        f"export_params: {tmp_path}/file/model.safetensors cannot be written: File exists; give a "
        "directory, or a file that ends in .safetensors\n"
    )
    other = f"{tmp_path}/file/model.safetensors: not exported: process 0 raised CheckpointError: "
    assert outputs == [words, other + words]


def exports_what_each_has(start, folder):
    start()
    params = {"w": jnp.full(3, jax.process_index())}
    if jax.process_index() == 0:
        sf.checkpoint.export_params(f"{folder}/guarded", params)
    sf.checkpoint.export_params(f"{folder}/all", params)
    if jax.process_index() == 0:
        for name in ("guarded", "all"):
            print(sf.checkpoint.load_params(f"{folder}/{name}", params)["w"].tolist())


def test_first_process_writes_local_params_and_none_waits(processes, tmp_path):
    first, _ = processes.run(exports_what_each_has, str(tmp_path))
    assert first == "[0, 0, 0]\n" * 2


def saves_in_a_bucket(start, url, credentials, gave_up):
    os.environ.update(credentials)
    start()
    before = bucket._OBJECT, bucket._PATIENCE, bucket.BucketStore.write_stream
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
    for failing in (0, 1):

        def fail(failing=failing):
            if process == failing:
                raise OSError(f"cut in process {failing}")

        series = sf.Checkpoints(url, keep=None).open()
        series.save(state, step=10 + failing, before_commit=fail)
        try:
            series.close()
        except sf.errors.CheckpointError as error:
            seen[f"failing {failing}"] = str(error)
    # A process that has ended writes no manifest.
    bucket._PATIENCE = 1.0

    def write_late(*args):
        while not Path(gave_up).exists():
            time.sleep(0.01)

    if process == 1:
        bucket.BucketStore.write_stream = write_late
    try:
        sf.save(url, state, step=20)
    except sf.errors.CheckpointError as error:
        seen["late"] = str(error)
    Path(gave_up).touch()
    bucket._OBJECT, bucket._PATIENCE, bucket.BucketStore.write_stream = before
    jax.experimental.multihost_utils.sync_global_devices("end")
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def both_in_a_bucket(server, processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    url = server.url(folder.name)
    args = (url, s3.CREDENTIALS, str(folder / "gave up"))
    outputs = processes.run(saves_in_a_bucket, *args)
    return url, [json.loads(output) for output in outputs]


@pytest.mark.full
def test_two_processes_restore_what_they_saved_with_a_position_each(both_in_a_bucket):
    _, (first, second) = both_in_a_bucket
    assert first["restored"] == [3, 0, True, True, True]
    assert second["restored"] == [3, 1, True, True, True]


@pytest.mark.full
def test_one_process_restores_it_on_any_mesh(both_in_a_bucket):
    url, _ = both_in_a_bucket
    numbers = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) + 3
    for count, dims in {8: (1, 4, 2, 1), 1: (1, 1, 1, 1)}.items():
        mesh = sf.make_mesh(dims, devices=jax.devices()[:count])
        place = NamedSharding(mesh, P("fsdp"))
        like = {name: jax.device_put(0 * numbers, place) for name in ("w", "v", "whole")}
        found = sf.restore(url, like, step=3, parts=("w", "v", "whole"))
        for leaf in found.state.values():
            assert leaf.sharding == place
            assert np.array_equal(leaf, numbers)


@pytest.mark.full
def test_a_failure_of_one_process_is_that_of_the_save(both_in_a_bucket):
    url, (first, second) = both_in_a_bucket
    assert "OSError: cut in process 0" in first["failing 0"]
    assert "process 1 cannot save its part: OSError: cut in process 1" in first["failing 1"]
    assert "OSError: cut in process 1" in second["failing 1"]
    words = "process 1 did not save its part within 1 s of process 0; it may"
    assert words in first["late"]
    assert sf.checkpoint.verify(url) == {2: [], 3: []}
