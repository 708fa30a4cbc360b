"""Parameters go out as safetensors and come back as they were, to where they are wanted."""

import errno
import os
import re
import resource
import subprocess
import sys
import textwrap

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import stepfold as sf
from stepfold.checkpoint.tensors import CODES

DTYPES = [jnp.dtype(name) for name in CODES]
# What jax holds without jax_enable_x64.
NARROW = [dtype for dtype in DTYPES if jax.dtypes.canonicalize_dtype(dtype) == dtype]


def params():
    return {
        "layers": [
            {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)},
            {"kernel": jnp.arange(12).reshape(3, 4), "bias": jnp.zeros((), bool)},
        ],
        "empty": jnp.zeros((0, 4), jnp.float8_e4m3fn),
        "none": None,
    }


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def same(got, wanted):
    """Assert that two trees have the same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert not getattr(one, "weak_type", False)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def mesh():
    return sf.make_mesh((2, 4), ("dp", "fsdp"))


# Round trips


@pytest.mark.parametrize("shard_size", [1, 30, 10**9])
def test_what_was_exported_is_loaded(tmp_path, shard_size):
    sf.export_params(tmp_path, params(), shard_size=shard_size)
    same(sf.load_params(tmp_path, params()), params())
    same(sf.load_params(tmp_path, abstract(params())), params())


def test_names_and_metadata_are_as_torch_has_them(tmp_path):
    sf.export_params(tmp_path / "m.safetensors", params(), metadata={"step": "3"})
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {
            *("layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias", "empty"),
        }
        assert file.metadata() == {"format": "pt", "step": "3"}
        kernel = file.get_tensor("layers.0.kernel")
    assert kernel.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_format_can_be_another(tmp_path):
    sf.export_params(tmp_path, params(), metadata={"format": "flax"})
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "flax"}


def test_files_have_at_most_shard_size_and_keep_the_order_of_the_tree(tmp_path):
    tree = {f"{i:02d}": jnp.ones(size, jnp.int8) for i, size in enumerate([5, 5, 6, 30, 1, 9, 0])}
    sf.export_params(tmp_path, tree, shard_size=10)
    held = [
        sorted(safetensors.numpy.load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))
    ]
    assert held == [["00", "01"], ["02"], ["03"], ["04", "05", "06"]]


def test_arrays_of_a_file_are_aligned(tmp_path):
    sf.export_params(tmp_path, {"a": jnp.ones(3, jnp.int8), "b": jnp.ones(3), "c": jnp.ones(2)})
    content = (tmp_path / "model.safetensors").read_bytes()
    starts = [content.index(np.ones(2, np.float32).tobytes()), content.index(b"\1\1\1")]
    assert starts[0] % 8 == 0
    assert starts[1] == len(content) - 3


def test_names_rename_both_ways(tmp_path):
    names = lambda path: path.replace("/", ".").replace("kernel", "weight")
    sf.export_params(tmp_path, params(), names=names)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert "layers.1.weight" in file.keys()  # noqa: SIM118  it is no dict
    same(sf.load_params(tmp_path, params(), names=names), params())


def test_what_another_program_wrote_is_loaded(tmp_path):
    arrays = {
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(7, np.int32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    like = {"a": {"weight": jnp.zeros((2, 3))}, "b": jnp.int32(0)}
    same(
        sf.load_params(tmp_path / "m.safetensors", like),
        {"a": {"weight": arrays["a.weight"]}, "b": arrays["b"]},
    )


@pytest.mark.torch
def test_torch_loads_it_into_a_layer_of_its_own(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    rng = np.random.default_rng(0)
    layer = {"kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "bias": jnp.ones(2)}
    as_torch = layer | {"kernel": layer["kernel"].T}
    names = lambda path: path.replace("kernel", "weight")
    sf.export_params(tmp_path / "linear.safetensors", as_torch, names=names)
    linear = torch.nn.Linear(3, 2)
    linear.load_state_dict(load_file(tmp_path / "linear.safetensors"))
    x = rng.normal(size=(4, 3)).astype(np.float32)
    wanted = x @ np.asarray(layer["kernel"]) + 1
    np.testing.assert_allclose(linear(torch.from_numpy(x)).detach().numpy(), wanted, rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_torch_reads_every_dtype(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    sf.export_params(tmp_path, {"a": jnp.arange(4).astype(dtype)})
    got = load_file(tmp_path / "model.safetensors")["a"]
    wanted = jnp.arange(4).astype(dtype)
    assert str(got.dtype).removeprefix("torch.") == dtype.name
    assert bytes(got.view(torch.uint8).tolist()) == np.asarray(wanted).tobytes()


def test_an_equinox_module_goes_out_and_in(tmp_path, key):
    model = eqx.nn.MLP(2, 3, 4, 1, key=key)
    arrays, rest = eqx.partition(model, eqx.is_array)
    sf.export_params(tmp_path, arrays)
    back = eqx.combine(sf.load_params(tmp_path, arrays), rest)
    assert (back(jnp.ones(2)) == model(jnp.ones(2))).all()


# Laws


def orders(array):
    """Give the same values, laid out in memory in other ways."""
    wide = np.repeat(array[..., None], 2, axis=-1)[..., 0] if array.ndim else array
    turned = np.ascontiguousarray(array.T).T
    backwards = np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array
    return [array, wide, turned, backwards, np.asfortranarray(array)]


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def leaves(draw):
    dtype, shape = draw(st.sampled_from(NARROW)), draw(shapes)
    size = int(np.prod(shape))
    bits = np.frombuffer(draw(st.binary(min_size=size * 8, max_size=size * 8)), np.uint8)
    kept = bits[: size * dtype.itemsize]
    array = (kept & 1 if dtype.name == "bool" else kept).view(dtype).reshape(shape)
    array = draw(st.sampled_from(orders(array)))
    if draw(st.booleans()) and array.dtype.newbyteorder(">") != array.dtype:
        array = array.astype(array.dtype.newbyteorder(">"))
    return array


trees = st.recursive(
    leaves(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abcé.", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    tree=st.dictionaries(st.sampled_from("abc"), trees, min_size=1), shard_size=st.integers(1, 99)
)
def test_any_tree_round_trips_and_the_package_reads_the_same(tmp_path_factory, tree, shard_size):
    paths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        paths[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    if len(paths) != len(jax.tree.leaves(tree)) or not paths:
        with pytest.raises(sf.ConfigError, match="would both be called|expected arrays, got none"):
            sf.export_params("nowhere", tree, shard_size=shard_size)
        return
    folder = tmp_path_factory.mktemp("law")
    sf.export_params(folder, tree, shard_size=shard_size)
    native = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), tree)
    same(sf.load_params(folder, native), native)
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dict
                part, leaf = opened.get_slice(name), paths.pop(name)
                assert part.get_shape() == list(leaf.shape)
                if not leaf.dtype.name.startswith("float8"):
                    np.testing.assert_array_equal(opened.get_tensor(name), leaf)
    assert not paths


# Where arrays come from and go to


@pytest.mark.parametrize(
    "spec", [(), ("dp",), ("dp", "fsdp"), (None, "fsdp"), (("dp", "fsdp"),)], ids=str
)
def test_sharded_arrays_go_out_and_come_in_sharded(tmp_path, mesh, spec):
    place = NamedSharding(mesh, PartitionSpec(*spec))
    wanted = {"w": jnp.arange(128.0).reshape(16, 8)}
    sf.export_params(tmp_path, jax.device_put(wanted, place))
    like = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=place)}
    back = sf.load_params(tmp_path, like)
    same(back, wanted)
    assert back["w"].sharding == place
    assert back["w"].committed


def test_without_a_sharding_arrays_may_move_as_jax_likes(tmp_path):
    sf.export_params(tmp_path, params())
    back = sf.load_params(tmp_path, jax.tree.map(np.asarray, params()))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back))
    for like in (params(), abstract(params())):
        back = jax.tree.leaves(sf.load_params(tmp_path, like))
        assert not any(leaf.committed for leaf in back)
        assert {leaf.sharding for leaf in back} == {SingleDeviceSharding(jax.devices()[0])}
    one = jax.device_put(params(), jax.devices()[3])
    back = jax.tree.leaves(sf.load_params(tmp_path, one))
    assert {leaf.devices().pop() for leaf in back} == {jax.devices()[3]}


@pytest.mark.parametrize("spec", [None, (), ("dp",), (("dp", "fsdp"),)], ids=str)
def test_nothing_is_shared_with_the_file(tmp_path, mesh, spec):
    place = None if spec is None else NamedSharding(mesh, PartitionSpec(*spec))
    like = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=place)}
    # jax uses numpy's memory where it lies if that is aligned by 64 bytes, as in this file.
    entry = b'{"w":{"dtype":"F32","shape":[64,64],"data_offsets":[0,16384]}}'.ljust(120)
    ones = np.ones((64, 64), np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes((120).to_bytes(8, "little") + entry + ones)
    back = sf.load_params(tmp_path, like)
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    assert (back["w"] == 1).all()
    shards = [shard.data for shard in back["w"].addressable_shards]
    assert len({shard.unsafe_buffer_pointer() for shard in shards}) == len(shards)
    twice = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    doubled = twice(back)["w"]
    assert all((np.asarray(shard.data) == 2).all() for shard in doubled.addressable_shards)


def test_a_sharded_array_is_read_in_its_parts(tmp_path, mesh, monkeypatch):
    sf.export_params(tmp_path, {"w": jnp.arange(128.0).reshape(16, 8)})
    read, original = [], np.array
    monkeypatch.setattr(
        np,
        "array",
        lambda part, *rest, **options: (
            read.append(np.shape(part)),
            original(part, *rest, **options),
        )[1],
    )
    place = NamedSharding(mesh, PartitionSpec("dp", "fsdp"))
    sf.load_params(tmp_path, {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=place)})
    assert (8, 2) in read
    assert (16, 8) not in read


def test_the_host_holds_one_array_at_a_time(tmp_path):
    code = """
        import resource, sys, jax, jax.numpy as jnp, stepfold as sf
        jax.config.update("jax_num_cpu_devices", 8)
        place = jax.sharding.NamedSharding(sf.make_mesh(), jax.sharding.PartitionSpec("fsdp"))
        make = jax.jit(lambda i: jnp.full((16, 1 << 18), i, jnp.float32), out_shardings=place)
        tree = jax.block_until_ready({f"{i}": make(float(i)) for i in range(16)})
        sf.export_params(sys.argv[1], {"first": make(0.0)})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sf.export_params(sys.argv[1], tree)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    mebibytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert mebibytes < 128  # of 256, which all arrays have, and would keep if numpy asked them


# What is refused before anything is written


@pytest.mark.parametrize(
    ("tree", "options", "words"),
    [
        ({}, {}, "export_params: params: expected arrays, got none: dict {}"),
        ({"a": {"b": 1}, "a.b": 2}, {}, "a/b and a.b would both be called 'a.b'"),
        ({"a": [1.0]}, {}, "a/0: expected an array, got float 1.0; leave out what is no parameter"),
        ({"a": jax.nn.relu}, {}, "a: expected an array, got "),
        ({"a": np.ma.ones(2)}, {}, "a: expected an array, got float64[2]"),
        ({"a": np.ones(2, "c16")}, {}, "a: expected a dtype that safetensors has (bool, int8,"),
        ({"a": jnp.ones(2, jnp.int4)}, {}, "got int4[2]; cast it, or leave it out"),
        ({"a": np.array(["x"])}, {}, "got <U1[1]; cast it, or leave it out"),
        ({"a": np.ones(2)}, {"shard_size": 0}, "shard_size: expected bytes, an integer"),
        ({"a": np.ones(2)}, {"shard_size": "5GB"}, "shard_size: expected bytes, an integer"),
        ({"a": np.ones(2)}, {"metadata": {"step": 3}}, "metadata: expected text for text, got"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(tmp_path, tree, options, words):
    with pytest.raises(sf.ConfigError, match=re.escape(words)):
        sf.export_params(tmp_path / "new", tree, **options)
    assert not (tmp_path / "new").exists()


def test_random_keys_are_no_parameters(tmp_path, key):
    with pytest.raises(sf.ConfigError, match=r"b: .*, got the random key key<fry>\[\]; leave it"):
        sf.export_params(tmp_path, {"a": jnp.ones(2), "b": key})


def test_export_is_no_part_of_a_jitted_function(tmp_path):
    with pytest.raises(sf.ConfigError, match="a: expected an array, got a tracer; export outside"):
        jax.jit(lambda a: sf.export_params(tmp_path, {"a": a}))(jnp.ones(2))


# What the disk refuses


def listing(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("shard_size", [3_000, 10**9])
def test_a_full_disk_leaves_what_was_there(tmp_path, shard_size):
    sf.export_params(tmp_path, {"a": jnp.ones(3)})
    before = listing(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tree = {f"{i}": jnp.ones(500) for i in range(4)} | {"last": jnp.ones(2_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(sf.CheckpointError) as caught:
            sf.export_params(tmp_path, tree, shard_size=shard_size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"export_params: {tmp_path}/model.safetensors cannot be written: File too large; give a "
        "path that can be written to"
    )
    assert isinstance(caught.value.__cause__, OSError)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "make room there"), (errno.EROFS, "give a path that can be written to")],
)
def test_it_is_said_what_to_do(tmp_path, monkeypatch, code, advice):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        sf.CheckpointError, match=f"cannot be written: {os.strerror(code)}; {advice}"
    ):
        sf.export_params(tmp_path, params())
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are_something_else_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "x.safetensors").mkdir()
    for path, words in (
        ("file", "File exists; give a directory, or a file that ends in .safetensors"),
        ("file/x", "Not a directory; give a directory, or a file that ends in .safetensors"),
        ("x.safetensors", "Is a directory; give a name in it that ends in .safetensors"),
    ):
        with pytest.raises(sf.CheckpointError, match=words):
            sf.export_params(tmp_path / path, params())
    with pytest.raises(sf.ConfigError, match="path: expected one on a disk, got gs://b/x"):
        sf.export_params("gs://b/x", params())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(sf.CheckpointError, match="Permission denied; give a path that can be"):
        sf.export_params(tmp_path, params())


def test_a_killed_export_leaves_the_earlier_one(tmp_path):
    code = """
        import os, sys, threading, jax.numpy as jnp, stepfold as sf
        for value in range(1, 10_000):
            tree = {f"{i}": jnp.full(20_000, value, jnp.float32) for i in range(4)}
            sf.export_params(sys.argv[1], tree, shard_size=100_000)
            if value == 3:
                print("ready", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    like = {f"{i}": jax.ShapeDtypeStruct((20_000,), jnp.float32) for i in range(4)}
    values = {
        float(v) for leaf in sf.load_params(tmp_path, like).values() for v in (leaf[0], leaf[-1])
    }
    assert len(values) == 1
    assert values.pop() >= 3
    sf.export_params(tmp_path, {"a": jnp.ones(2)})
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
