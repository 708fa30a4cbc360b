import json
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.manifest import (
    Leaf,
    arrays_of,
    checksum,
    impl_of,
    leaf_of,
    leaves_of,
    read_manifest,
    read_words,
    region,
    shards_of,
)
from stepfold.checkpoint.sealed import DamageError, seal, unseal
from stepfold.errors import CheckpointError, ConfigError

STATE = {"params": {"w": jnp.arange(8.0)}, "key": jax.random.key(3)}


@pytest.fixture
def step(tmp_path):
    """Give the folder of a step that is good."""
    sf.save(tmp_path, STATE, step=7, data={"step": 7}, metrics={"loss": 0.5}, extra=b"x")
    return tmp_path / "7"


def test_leaves_are_called_as_everywhere_else():
    tx = optax.adam(0.1)
    state = sf.init_state({"w": jnp.ones((2, 3))}, tx, jax.random.key(0))
    leaves = leaves_of(state)
    assert list(leaves) == list(arrays_of(state))
    assert leaves["params/w"] == leaves["opt_state/0/mu/w"] == Leaf((2, 3), "float32")
    assert leaves["step"] == Leaf((), "int32")
    assert leaves["key"] == Leaf((2,), "uint32", "threefry2x32")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_is_known_by_its_kind(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    abstract = jax.eval_shape(lambda: keys)
    size = 2 if impl == "threefry2x32" else 4
    for key in (keys, abstract):
        assert impl_of(key) == impl
        assert leaf_of(key) == Leaf((3, size), "uint32", impl)
        assert str(leaf_of(key)) == f"key<{impl}>[3]"


def test_a_raw_key_is_an_array_of_numbers():
    raw = jax.random.key_data(jax.random.key(0))
    assert leaf_of(raw) == Leaf((2,), "uint32")
    assert str(leaf_of(raw)) == "uint32[2]"


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (3, "int64[]"),
        (True, "bool[]"),
        (0.5, "float64[]"),
        (1j, "complex128[]"),
        (np.float32(1), "float32[]"),
        (np.ones((2, 0), ml_dtypes.bfloat16), "bfloat16[2,0]"),
        (jnp.ones((), jnp.float8_e4m3fn), "float8_e4m3fn[]"),
        (jax.ShapeDtypeStruct((2,), jnp.int4), "int4[2]"),
    ],
)
def test_leaves_are_spelled_as_arrays(leaf, words):
    assert str(leaf_of(leaf)) == words


def test_bytes_are_counted():
    assert Leaf((3, 4), "bfloat16").bytes == 24
    assert Leaf((), "complex64").bytes == 8
    assert Leaf((1 << 20, 1 << 20), "float32").bytes == 1 << 42


def test_what_numpy_holds_is_copied():
    array = np.arange(3)
    arrays = arrays_of({"a": array})
    array[:] = 0
    assert arrays["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"f": print}, "f: expected an array, got builtin_function_or_method .*extra=…"),
        ({"a": {"b": "x"}}, "a/b: expected an array, got str 'x'; keep functions and settings out"),
        ({"a": np.array(["x"])}, "a: expected an array, got <U1.1.; keep"),
        ({"a": np.array([None])}, "a: expected an array, got object.1.; keep"),
        ({"a": [jax.ShapeDtypeStruct((2,), jnp.int32)]}, "a/0: expected an array, got int32.2.;"),
        (
            {"a": {"b": 1}, "a/b": 2},
            "state: expected a name of its own for every leaf, got 'a/b' and 'a/b', which are",
        ),
        (
            {"a": {"b": 1}, "a.b": 2},
            "state: expected a name of its own for every leaf, got 'a/b' and 'a.b', which are "
            "stored under one; rename a key",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(state, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        arrays_of(state)
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, state, step=1)
    assert sf.verify(tmp_path) == {}


def test_an_index_is_spelled_out():
    assert region((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert region((slice(4, None),), (8, 5)) == ((4, 8), (0, 5))
    assert region((), ()) == ()


def test_each_part_is_accounted_for_once():
    mesh = sf.make_mesh((1, 4, 2, 1))
    array = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("fsdp")))
    parts = shards_of(array)
    assert list(parts) == [((2 * i, 2 * i + 2), (0, 2)) for i in range(4)]
    assert all(
        np.array_equal(part, np.asarray(array)[slice(*index[0])]) for index, part in parts.items()
    )
    assert list(shards_of(jax.device_put(array, NamedSharding(mesh, P())))) == [((0, 8), (0, 2))]
    assert list(shards_of(np.ones((2, 3)))) == [((0, 2), (0, 3))]


def test_a_checksum_is_of_the_elements_in_order():
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    assert checksum(array) == zlib.crc32(array.tobytes())
    assert checksum(array.T) == zlib.crc32(array.T.tobytes())
    assert checksum(array[::2, 1:3]) == zlib.crc32(array[::2, 1:3].tobytes())
    assert checksum(np.float32(-0.0)) != checksum(np.float32(0.0))
    assert checksum(np.array(2.0, ml_dtypes.bfloat16)) == zlib.crc32(b"\x00\x40")
    assert checksum(np.ones((3, 0))) == 0


def test_what_was_saved_is_told_without_its_arrays(step):
    found = read_manifest(step)
    assert found.words == read_words(step)
    assert found.words[:3] == (7, {"step": 7}, {"loss": 0.5})
    assert found.leaves == leaves_of(STATE)
    crc = zlib.crc32(np.arange(8, dtype=np.float32).tobytes())
    assert found.shards["params/w"] == {((0, 8),): crc}
    assert found.data == [{"step": 7}]
    listed = unseal(step / "state" / "files.json")
    assert {"leaves-0.json", "_METADATA", "manifest.ocdbt"} <= set(listed)
    assert found.bytes == sum(listed.values())


def test_a_missing_file_is_damage(step):
    (step / "state" / "_METADATA").unlink()
    with pytest.raises(DamageError, match=r"^_METADATA: expected \d+ bytes, got none"):
        read_words(step)


def test_a_longer_file_is_damage(step):
    path = step / "state" / "_METADATA"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0" * 1000)
    words = f"_METADATA: expected {size:,} bytes, got {size + 1000:,}"
    with pytest.raises(DamageError, match=words):
        read_manifest(step)


@pytest.mark.parametrize("name", ["files.json", "leaves-0.json"])
def test_a_manifest_that_is_gone_or_changed_is_damage(step, name):
    path = step / "state" / name
    path.write_bytes(path.read_bytes().replace(b"7", b"8").replace(b"0", b"1"))
    with pytest.raises(DamageError, match=f"{name}: its checksum does not fit its content"):
        read_manifest(step)
    path.unlink()
    with pytest.raises(DamageError, match=f"{name}: missing"):
        read_manifest(step)


def test_what_another_program_saved_is_told_apart(tmp_path):
    (tmp_path / "3" / "state").mkdir(parents=True)
    words = "3: expected a checkpoint that stepfold saved, got a folder without a manifest; .*save"
    with pytest.raises(CheckpointError, match=words) as caught:
        read_manifest(tmp_path / "3")
    assert not isinstance(caught.value, DamageError)


def test_what_a_newer_stepfold_saved_is_not_guessed_at(step):
    path = step / "state" / "leaves-0.json"
    content = unseal(path)
    path.write_bytes(seal(content | {"format": 2}))
    words = "7: expected format 1 or older, got 2; it was saved by a newer stepfold: upgrade"
    with pytest.raises(CheckpointError, match=words) as caught:
        read_manifest(step)
    assert not isinstance(caught.value, DamageError)
    with pytest.raises(CheckpointError, match=words):
        sf.restore(step.parent, STATE)
    assert sorted(path.name for path in step.parent.iterdir()) == ["7"]


def test_the_manifest_is_json_that_anybody_reads(step):
    _, _, text = (step / "state" / "leaves-0.json").read_bytes().partition(b"\n")
    content = json.loads(text)
    assert content["leaves"]["params/w"] == [[8], "float32", None]
    assert content["words"]["metrics"] == {"loss": 0.5}
