"""Two processes export as one, and each loads its own part."""


def exports_and_loads(start, folder):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import safetensors.numpy
    from jax.sharding import NamedSharding, PartitionSpec

    import stepfold as sf

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
        sf.export_params(folder, params | {"local": np.ones(2, np.float32)}, shard_size=size)
        # Every process returns when the files are there.
        like = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=places[name])
            for name, array in whole.items()
        }
        like["local"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        back = sf.load_params(folder, like)
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
    import jax
    import numpy as np
    import safetensors.numpy
    from jax.sharding import NamedSharding, PartitionSpec

    import stepfold as sf
    from stepfold.checkpoint import safetensors as module

    start()
    mesh = sf.make_mesh()
    names = sf.NameMap([
        sf.NameRule(("query", "key"), "h.{layer}.attn", axis=1),
        sf.NameRule("up", "h.{layer}.up", transpose=(1, 0)),
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
    sf.export_params(folder, params, names=names)
    read, original = [], module.converted
    module.converted = lambda *rest: (read.append(rest[-1].nbytes), original(*rest))[1]
    back = sf.load_params(folder, params, names=names)
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
    import jax

    import stepfold as sf

    start()
    mesh = sf.make_mesh()
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    leaf = jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=place)()
    try:
        sf.export_params(f"{folder}/file", {f"{i}": leaf for i in range(5)})
    except sf.CheckpointError as error:
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
    import jax
    import jax.numpy as jnp

    import stepfold as sf

    start()
    params = {"w": jnp.full(3, jax.process_index())}
    if jax.process_index() == 0:
        sf.export_params(f"{folder}/guarded", params)
    sf.export_params(f"{folder}/all", params)
    if jax.process_index() == 0:
        print(
            [
                sf.load_params(f"{folder}/{name}", params)["w"].tolist()
                for name in ("guarded", "all")
            ]
        )


def test_first_process_writes_local_params_and_none_waits(processes, tmp_path):
    first, _ = processes.run(exports_what_each_has, str(tmp_path))
    assert first == "[[0, 0, 0], [0, 0, 0]]\n"
