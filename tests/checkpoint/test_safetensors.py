"""Parameters go out as safetensors and come back as they were, in whole or not at all."""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import textwrap

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
from tests.small import ones

import stepfold as sf
from stepfold.checkpoint import safetensors as safetensors_module
from stepfold.core.processes import KeyValues

from .folders import names

CODES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
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


def test_names_and_metadata_are_as_torch_has_them(tmp_path):
    file = tmp_path / "m.safetensors"
    sf.checkpoint.export_params(file, params(), metadata={"step": "3"})
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert set(opened.keys()) == {
            *("layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias", "empty"),
        }
        assert opened.metadata() == {"format": "pt", "step": "3"}
        assert opened.get_tensor("layers.0.kernel").tolist() == [[0, 1, 2], [3, 4, 5]]
    sf.checkpoint.export_params(file, params(), metadata={"format": "flax"})
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == {"format": "flax"}


def test_files_have_at_most_shard_size_and_keep_the_order_of_the_tree(tmp_path):
    tree = {f"{i:02d}": jnp.ones(size, jnp.int8) for i, size in enumerate([5, 5, 6, 30, 1, 9, 0])}
    sf.checkpoint.export_params(tmp_path, tree, shard_size=10)
    held = [
        sorted(safetensors.numpy.load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))
    ]
    assert held == [["00", "01"], ["02"], ["03"], ["04", "05", "06"]]


def test_names_rename_both_ways(tmp_path):
    names = lambda path: path.replace("/", ".").replace("kernel", "weight")
    sf.checkpoint.export_params(tmp_path, params(), names=names)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert "layers.1.weight" in file.keys()  # noqa: SIM118  it is no dict
    same(sf.checkpoint.load_params(tmp_path, params(), names=names), params())


@pytest.mark.torch
def test_torch_loads_it_into_a_layer_of_its_own(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    rng = np.random.default_rng(0)
    layer = {"kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "bias": jnp.ones(2)}
    as_torch = layer | {"kernel": layer["kernel"].T}
    names = lambda path: path.replace("kernel", "weight")
    sf.checkpoint.export_params(tmp_path / "linear.safetensors", as_torch, names=names)
    linear = torch.nn.Linear(3, 2)
    linear.load_state_dict(load_file(tmp_path / "linear.safetensors"))
    x = rng.normal(size=(4, 3)).astype(np.float32)
    wanted = x @ np.asarray(layer["kernel"]) + 1
    np.testing.assert_allclose(linear(torch.from_numpy(x)).detach().numpy(), wanted, rtol=1e-5)


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
        with pytest.raises(
            sf.errors.ConfigError, match="would both be called|expected arrays, got none"
        ):
            sf.checkpoint.export_params("nowhere", tree, shard_size=shard_size)
        return
    folder = tmp_path_factory.mktemp("law")
    sf.checkpoint.export_params(folder, tree, shard_size=shard_size)
    native = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), tree)
    same(sf.checkpoint.load_params(folder, native), native)
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dict
                part, leaf = opened.get_slice(name), paths.pop(name)
                assert part.get_shape() == list(leaf.shape)
                if not leaf.dtype.name.startswith("float8"):
                    np.testing.assert_array_equal(opened.get_tensor(name), leaf)
    assert not paths


# Where arrays come from and go to


def test_without_a_sharding_arrays_may_move_as_jax_likes(tmp_path):
    sf.checkpoint.export_params(tmp_path, params())
    back = sf.checkpoint.load_params(tmp_path, jax.tree.map(np.asarray, params()))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back))
    for like in (params(), abstract(params())):
        back = jax.tree.leaves(sf.checkpoint.load_params(tmp_path, like))
        assert not any(leaf.committed for leaf in back)
        assert {leaf.sharding for leaf in back} == {SingleDeviceSharding(jax.devices()[0])}
    one = jax.device_put(params(), jax.devices()[3])
    back = jax.tree.leaves(sf.checkpoint.load_params(tmp_path, one))
    assert {leaf.devices().pop() for leaf in back} == {jax.devices()[3]}


@pytest.mark.parametrize("spec", [None, (), ("dp",), (("dp", "fsdp"),)], ids=str)
def test_nothing_is_shared_with_the_file(tmp_path, mesh, spec):
    place = None if spec is None else NamedSharding(mesh, PartitionSpec(*spec))
    like = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=place)}
    # jax uses numpy's memory where it lies if that is aligned by 64 bytes, as in this file.
    entry = b'{"w":{"dtype":"F32","shape":[64,64],"data_offsets":[0,16384]}}'.ljust(120)
    ones = np.ones((64, 64), np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes((120).to_bytes(8, "little") + entry + ones)
    back = sf.checkpoint.load_params(tmp_path, like)
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    assert (back["w"] == 1).all()
    shards = [shard.data for shard in back["w"].addressable_shards]
    assert len({shard.unsafe_buffer_pointer() for shard in shards}) == len(shards)
    twice = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    doubled = twice(back)["w"]
    assert all((np.asarray(shard.data) == 2).all() for shard in doubled.addressable_shards)


@pytest.mark.full
def test_the_host_holds_one_shard_at_a_time(tmp_path):
    code = """
        import resource, sys, jax, jax.numpy as jnp, stepfold as sf
        jax.config.update("jax_num_cpu_devices", 8)
        place = jax.sharding.NamedSharding(sf.make_mesh(), jax.sharding.PartitionSpec("fsdp"))
        make = jax.jit(lambda i: jnp.full((8, 1 << 18), i, jnp.float32), out_shardings=place)
        tree = jax.block_until_ready({f"{i}": make(float(i)) for i in range(16)})
        sf.checkpoint.export_params(sys.argv[1], {"first": make(0.0)})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sf.checkpoint.export_params(sys.argv[1], tree, shard_size=1 << 24)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    mebibytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert mebibytes < 64  # of 128 in all, in shards of 16


# What is refused before anything is written


@pytest.mark.parametrize(
    ("tree", "options", "words"),
    [
        ({}, {}, "export_params: params: expected arrays, got none: dict {}"),
        ({"a": {"b": 1}, "a.b": 2}, {}, "a/b and a.b would both be called 'a.b'"),
        ({"a": [1.0]}, {}, "a/0: expected an array, got float 1.0; drop it, or make an"),
        ({"a": jax.nn.relu}, {}, "a: expected an array, got "),
        ({"a": np.ma.ones(2)}, {}, "a: expected an array, got float64[2]"),
        ({"a": np.ones(2, "c16")}, {}, "a: expected a dtype that safetensors has (bool, int8,"),
        ({"a": ones(2, jnp.int4)}, {}, "got int4[2]; cast it, or leave it out"),
        ({"a": np.array(["x"])}, {}, "got <U1[1]; cast it, or leave it out"),
        ({"a": jax.random.key(0)}, {}, "got key<fry>[]; cast it, or leave it out"),
        ({"a": np.ones(2)}, {"shard_size": 0}, "shard_size: expected an integer of at least"),
        ({"a": np.ones(2)}, {"shard_size": "5GB"}, "shard_size: expected an integer of at least"),
        ({"a": np.ones(2)}, {"metadata": {"step": 3}}, "metadata: expected text for text, got"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(tmp_path, tree, options, words):
    with pytest.raises(sf.errors.ConfigError, match=re.escape(words)):
        sf.checkpoint.export_params(tmp_path / "new", tree, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["", "a\0b", 3, None])
def test_what_is_not_a_path_is_refused(path):
    words = re.escape(f"path: expected a path, got {path!r}")
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.checkpoint.load_params(path, {"a": np.ones(2)})


def test_export_is_no_part_of_a_jitted_function(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="a: expected an array, got a tracer; export outside"
    ):
        jax.jit(lambda a: sf.checkpoint.export_params(tmp_path, {"a": a}))(jnp.ones(2))


# What the disk refuses


def test_a_full_disk_leaves_what_was_there(tmp_path):
    sf.checkpoint.export_params(tmp_path, {"a": jnp.ones(3)})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(
            sf.errors.CheckpointError, match="model.safetensors cannot be written: File to"
        ):
            sf.checkpoint.export_params(
                tmp_path, {"a": np.ones(100), "last": np.ones(2_000)}, shard_size=3_000
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "make room there"), (errno.EROFS, "give a path that can be written to")],
)
def test_it_is_said_what_to_do(tmp_path, monkeypatch, code, advice):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        sf.errors.CheckpointError, match=f"cannot be written: {os.strerror(code)}; {advice}"
    ):
        sf.checkpoint.export_params(tmp_path, params())
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are_something_else_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "x.safetensors").mkdir()
    for path, words in (
        ("file", "File exists; give a directory, or a file that ends in .safetensors"),
        ("file/x", "Not a directory; give a directory, or a file that ends in .safetensors"),
        ("x.safetensors", "Is a directory; give a name in it that ends in .safetensors"),
    ):
        with pytest.raises(sf.errors.CheckpointError, match=words):
            sf.checkpoint.export_params(tmp_path / path, params())
    with pytest.raises(sf.errors.ConfigError, match="path: expected one on a disk, got gs://b/x"):
        sf.checkpoint.export_params("gs://b/x", params())
    assert (tmp_path / "file").read_text() == "mine"
    for path in (3, "", "a\0b", None):
        with pytest.raises(sf.errors.ConfigError, match="path: expected a path, got"):
            sf.checkpoint.export_params(path, params())


# Files as one thing


def save(target, values):
    """Export small arrays, each of them in the file of its number."""
    tree = {name: np.full(10, value, np.float32) for name, value in values.items()}
    sf.checkpoint.export_params(target, tree, shard_size=40)


def loaded(path, names="abc"):
    like = {name: np.zeros(10, np.float32) for name in names}
    return {
        float(value) for leaf in sf.checkpoint.load_params(path, like).values() for value in leaf
    }


def test_files_are_called_as_hugging_face_does(tmp_path):
    tree = {"a": np.float32([1, 2]), "b": np.float32(3), "c": np.float32([4])}
    sf.checkpoint.export_params(tmp_path / "new" / "m.safetensors", tree)
    assert names(tmp_path / "new") == ["m.safetensors"]
    sf.checkpoint.export_params(tmp_path / "d", tree, shard_size=12)
    assert names(tmp_path / "d") == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = tmp_path / "d" / "model.safetensors.index.json"
    assert json.loads(index.read_text()) == {
        "metadata": {"total_size": 16},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    for path in (tmp_path / "d", tmp_path / "d" / "model.safetensors", index):
        same(sf.checkpoint.load_params(path, tree), tree)


class Stopped(BaseException):
    """What no handler of errors catches, as a kill."""


@contextlib.contextmanager
def stopped_at(number, calls):
    """Stop before a change of the file system; list the changes before."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            original = getattr(os, name)

            def counted(*args, original=original, **options):
                calls.append(args)
                if len(calls) == number:
                    raise Stopped
                return original(*args, **options)

            patch.setattr(os, name, counted)
        with contextlib.suppress(Stopped):
            yield


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_a_reader_finds_the_old_or_the_new_wherever_it_is_stopped(tmp_path, before, after):
    tree = lambda value: {name: np.full(10, value, np.float32) for name in "abc"}
    size = {1: 1000, 3: 40}
    found = []
    for number in itertools.count(1):
        folder, calls = tmp_path / str(number), []
        sf.checkpoint.export_params(folder, tree(1), shard_size=size[before])
        with stopped_at(number, calls):
            sf.checkpoint.export_params(folder, tree(2), shard_size=size[after])
        values = loaded(folder)
        assert values in ({1}, {2})
        found += values
        if len(calls) < number:
            break
        # The next export leaves itself, and nothing of those before.
        sf.checkpoint.export_params(folder, tree(3), shard_size=size[after])
        assert loaded(folder) == {3}
        assert len(names(folder)) == (1 if after == 1 else 4)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)
    assert number > 3


def test_files_of_others_stay(tmp_path):
    others = ["config.json", "model-ema.safetensors", "other-00001-of-00002.safetensors", ".x"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for tree in ("abc", "a", "ab"):
        save(tmp_path, dict.fromkeys(tree, 1))
        assert set(others) < set(names(tmp_path))
        assert {(tmp_path / name).read_text() for name in others} == {"mine"}


def test_what_a_killed_export_left_is_removed(tmp_path):
    (tmp_path / ".model.safetensors.stepfold-abc").mkdir()
    (tmp_path / ".model.safetensors.stepfold-abc" / "model.safetensors").write_text("half")
    others = [".model.safetensors.backup", ".model.safetensors.stepfold-notes"]
    (tmp_path / others[0]).mkdir()
    (tmp_path / others[1]).write_text("a file")
    save(tmp_path, {"a": 1})
    assert names(tmp_path) == sorted([*others, "model.safetensors"])


def test_shards_are_on_the_disk_before_their_index(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    folder = tmp_path.stat().st_ino

    def note_sync(file):
        calls.append("sync" if os.fstat(file).st_ino == folder else "sync of a file")
        fsync(file)

    def note_replace(old, new):
        calls.append(os.path.basename(new))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    save(tmp_path, {"a": 1, "b": 1})
    index = calls.index("model.safetensors.index.json")
    assert calls[index - 2 : index] == ["model-00002-of-00002.safetensors", "sync"]


def test_any_error_of_an_export_is_raised_on_all_processes(tmp_path, monkeypatch):
    """The other processes wait for the outcome of process 0."""
    gathered = []

    def fail(*_):
        raise RuntimeError("of any kind")

    def gather(_, value, *__, **___):
        gathered.append(value)
        return [value]

    monkeypatch.setattr(KeyValues, "gather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("stepfold.checkpoint.safetensors._replace_files", fail)
    monkeypatch.setattr(type(jnp.ones(1)), "is_fully_addressable", False)
    monkeypatch.setattr(safetensors_module, "_on_host", lambda value, _: np.asarray(value))
    with pytest.raises(RuntimeError, match="of any kind"):
        sf.checkpoint.export_params(tmp_path, {"a": jnp.ones(1)})
    assert "of any kind" in gathered[0]


def test_others_may_read_the_files(tmp_path):
    mask = os.umask(0o022)
    try:
        save(tmp_path, {"a": 1, "b": 1})
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o644}


def test_the_single_file_is_taken_before_the_index(tmp_path):
    save(tmp_path, {"a": 1, "b": 1})
    sf.checkpoint.export_params(
        tmp_path / "aside", {name: np.full(10, 2, np.float32) for name in "ab"}
    )
    (tmp_path / "aside" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert loaded(tmp_path, "ab") == {2}
    assert loaded(tmp_path / "model.safetensors.index.json", "ab") == {1}


def refused(path, words):
    with pytest.raises(sf.errors.CheckpointError, match=re.escape(words)) as caught:
        sf.checkpoint.load_params(path, {"a": np.zeros(2, np.float32)})
    return str(caught.value)


def test_nothing_there_is_an_error(tmp_path):
    words = f"{tmp_path}: expected {tmp_path}/model.safetensors or model.safetensors.index.json"
    refused(tmp_path, words)
    refused(tmp_path / "y.safetensors", "or y.safetensors.index.json, got neither")
    refused(tmp_path / "m.json", "m.json: cannot be read: No such file")
    (tmp_path / "x.safetensors").mkdir()
    refused(tmp_path / "x.safetensors", "expected a regular file, got a directory")


def test_an_index_and_files_of_different_exports_are_refused(tmp_path):
    save(tmp_path, {"a": 1, "b": 2})
    arrays = {"a": np.ones(10, np.float32), "x": np.ones(10, np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "model-00001-of-00002.safetensors")
    refused(
        tmp_path,
        "expected the arrays of model-00001-of-00002.safetensors as the index lists them, got a "
        "difference in x;",
    )


# One file


def raw(file, header, data=b"", length=None):
    """Write any bytes as a header, and any length of it."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(header) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + header + data)


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    file = tmp_path / "t.safetensors"
    arrays = {name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name)) for name in CODES}
    sf.checkpoint.export_params(file, arrays)
    with safetensors.safe_open(file, framework="numpy") as handle:
        for name, code in CODES.items():
            part = handle.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (code, [2, 3])
            if not name.startswith("float8"):  # which the package cannot give numpy
                assert handle.get_tensor(name).tobytes() == arrays[name].tobytes()
    same(sf.checkpoint.load_params(file, arrays), arrays)


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({"a": entry(0, 8)}, b"x" * 7, None, "got one of 76 bytes of which the safetensors"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, None, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8, shape=(2**40, 2**40))}, b"x" * 8, None, "overflow"),
        ({}, b"", 1 << 60, "header too large"),
        (b"no json {", b"", None, "invalid JSON in header"),
    ],
)
def test_what_is_broken_is_refused_with_its_name(tmp_path, header, data, length, words):
    file = tmp_path / "t.safetensors"
    raw(file, header, data, length)
    text = refused(file, words)
    assert text.startswith(f"{file}: expected a whole safetensors file, got one of ")


def test_a_dtype_that_numpy_lacks_is_refused_with_its_name(tmp_path):
    file = tmp_path / "t.safetensors"
    raw(file, {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"x")
    text = refused(file, "expected a dtype of ")
    assert text.startswith(f"{file}: a: expected a dtype of ")


def test_without_the_package_it_is_said_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for use in (
        lambda: sf.checkpoint.export_params(tmp_path, {"a": np.ones(2)}),
        lambda: sf.checkpoint.load_params(tmp_path, {"a": np.ones(2)}),
    ):
        with pytest.raises(sf.errors.ConfigError, match="^safetensors is not installed; run pip"):
            use()
    assert list(tmp_path.iterdir()) == []


# Names


@pytest.mark.parametrize(
    ("params", "names", "words"),
    [
        ({"a": {"b": 1}, "a.b": 2}, None, "params: a/b and a.b would both be called 'a.b'; give"),
        ({"a": 1, "b": 2}, lambda path: "x", "params: a and b would both be called 'x'"),
        (np.ones(3), None, "expected a name for the array at '', got '', which safetensors does"),
        ({"__metadata__": 1}, None, "expected a name for the array at '__metadata__', got"),
        ({"a": 1}, {}.get, "expected a name for the array at 'a', got None"),
        ({"a": 1}, {"a": "b"}, "names: expected a function of a path, or a NameMap, got dict"),
        ({"a": None}, None, "params: expected arrays, got none: dict {'a': None}"),
    ],
)
def test_what_has_no_name_is_refused(tmp_path, params, names, words):
    with pytest.raises(sf.errors.ConfigError, match=re.escape(words)):
        sf.checkpoint.export_params(tmp_path, params, names=names)
    with pytest.raises(sf.errors.ConfigError, match=re.escape(words.removeprefix("params: "))):
        sf.checkpoint.load_params(tmp_path, params, names=names)


# What is loaded has to be what is wanted


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float8_e5m2"),
     ("int8", "int32"), ("int32", "uint8"), ("float32", "float32")],
)  # fmt: skip
def test_dtypes_are_converted_only_if_asked(tmp_path, mesh, saved, wanted):
    values = jnp.arange(8.0).astype(saved)
    sf.checkpoint.export_params(tmp_path, {"a": values})
    for place in (None, NamedSharding(mesh, PartitionSpec("fsdp"))):
        like = {"a": jax.ShapeDtypeStruct((8,), jnp.dtype(wanted), sharding=place)}
        if saved != wanted:
            with pytest.raises(
                sf.errors.TreeMismatchError, match=rf"a +{saved}\[8\] +{wanted}\[8\]"
            ):
                sf.checkpoint.load_params(tmp_path, like)
        back = sf.checkpoint.load_params(tmp_path, like, cast=True)["a"]
        assert back.dtype == wanted
        assert back.tobytes() == values.astype(wanted).tobytes()


def test_what_says_no_shape_or_no_device_is_refused(tmp_path):
    sf.checkpoint.export_params(tmp_path, {"a": jnp.ones(3)})
    with pytest.raises(
        sf.errors.ConfigError, match=r"a: expected an array or a jax.ShapeDtypeStruct, got"
    ):
        sf.checkpoint.load_params(tmp_path, {"a": 1.0})
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    like = {"a": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)}
    with pytest.raises(
        sf.errors.ConfigError, match="a: expected a sharding over devices, got one over"
    ):
        sf.checkpoint.load_params(tmp_path, like)
