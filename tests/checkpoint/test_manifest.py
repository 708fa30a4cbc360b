"""Manifests, and JSON files with a checksum."""

import json
import shutil
import zlib
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.checkpoint.leaves import from_json, leaves_of, to_json
from stepfold.checkpoint.manifest import (
    DamageError,
    ForeignError,
    NewerError,
    _read_leaf,
    read_checked,
    write_checked,
)
from stepfold.checkpoint.store import open_store
from stepfold.errors import CheckpointError, ConfigError


def read_metadata(step):
    return open_store(step.parent).read_metadata(int(step.name))


def read_manifest(step):
    return open_store(step.parent).read_manifest(int(step.name))


STATE = {"params": {"w": jnp.arange(8.0)}, "key": jax.random.key(3)}


@pytest.fixture
def step(tmp_path):
    """Give the folder of a step that is good."""
    sf.save(tmp_path, STATE, step=7, data={"step": 7}, metrics={"loss": 0.5}, extra=b"x")
    return tmp_path / "7"


def test_what_was_saved_is_told_without_its_arrays(step):
    found = read_manifest(step)
    assert found.metadata == read_metadata(step)
    assert found.metadata[:3] == (7, {"step": 7}, {"loss": 0.5})
    assert found.leaves == leaves_of(STATE)
    crc = zlib.crc32(np.arange(8, dtype=np.float32).tobytes())
    assert found.shards["params/w"] == {((0, 8),): crc}
    assert found.data == [{"step": 7}]
    listed = read_checked(step / "state" / "files.json")
    assert {"leaves-0.json", "_METADATA", "manifest.ocdbt"} <= set(listed)
    assert found.bytes == sum(listed.values())


def test_a_missing_file_is_damage(step):
    (step / "state" / "_METADATA").unlink()
    with pytest.raises(DamageError, match=r"^_METADATA: expected \d+ bytes, got none"):
        read_metadata(step)


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
    content = read_checked(path)
    write_checked(path, content | {"format": 3})
    words = "7: expected format 2 or older, got 3; it was saved by a newer stepfold: upgrade"
    with pytest.raises(CheckpointError, match=words) as caught:
        read_manifest(step)
    assert not isinstance(caught.value, DamageError)
    with pytest.raises(CheckpointError, match=words):
        sf.restore(step.parent, STATE)
    assert sorted(path.name for path in step.parent.iterdir()) == ["7"]


def rewrite(step, change):
    path = step / "state" / "leaves-0.json"
    content = read_checked(path)
    change(content)
    write_checked(path, content)
    files = step / "state" / "files.json"
    write_checked(files, read_checked(files) | {path.name: path.stat().st_size})


def test_an_unknown_field_is_of_a_newer_stepfold(step):
    rewrite(step, lambda content: content["metadata"].update(later_field=1))
    for read in (read_metadata, read_manifest):
        with pytest.raises(NewerError, match="later_field as well; it was saved by a newer stepf"):
            read(step)


@pytest.mark.parametrize("key", ["format", "metadata", "arrays", "leaves", "shards", "processes"])
def test_a_manifest_without_a_key_is_damage(step, key):
    rewrite(step, lambda content: content.pop(key))
    with pytest.raises(DamageError, match=f"expected manifests as stepfold writes.*'{key}'"):
        read_manifest(step)


def test_a_copy_under_another_number_is_not_that_step(step):
    shutil.copytree(step, step.with_name("20"))
    for read in (read_metadata, read_manifest):
        with pytest.raises(ForeignError, match="20: expected the checkpoint of step 20, got a cop"):
            read(step.with_name("20"))
    assert sf.latest_step(step.parent) == 7
    assert sf.restore(step.parent, STATE).step == 7
    assert (step.parent / "20").is_dir()


def test_the_manifest_is_json_that_anybody_reads(step):
    _, _, text = (step / "state" / "leaves-0.json").read_bytes().partition(b"\n")
    content = json.loads(text)
    assert content["leaves"]["params/w"] == [[8], "float32", None]
    assert content["metadata"]["metrics"] == {"loss": 0.5}


TEXT = st.text('aZ09 é€😀\u2028"\\\n\0')
ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
DOCUMENTS = st.recursive(
    ATOMS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_what_is_sealed_comes_back(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("sealed") / "words.json"
    write_checked(path, to_json(document, "extra"))
    assert from_json(read_checked(path)) == document


def test_what_json_has_another_word_for_becomes_plain():
    given = {"a": (1, np.float32(0.5)), "b": OrderedDict(c=np.bool_(True)), "d": np.int8(3)}
    made = to_json(given, "extra")
    assert made == {"a": [1, 0.5], "b": {"c": True}, "d": 3}
    assert json.loads(json.dumps(made)) == made


def test_infinities_come_back(tmp_path):
    write_checked(tmp_path / "a", [float("inf"), float("-inf"), float("nan")])
    more, less, none = read_checked(tmp_path / "a")
    assert (more, less) == (float("inf"), float("-inf"))
    assert none != none


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {1: "b"}}, "extra/a: expected keys of text, got 1; JSON has no others"),
        ({"a": [0, jnp.ones(2)]}, r"extra/a/1: expected what JSON can hold, got float32\[2\]; wri"),
        (np.ones(3), r"extra: expected what JSON can hold, got float64\[3\]; write it as te"),
        ({"f": print}, "extra/f: expected what JSON can hold, got builtin_function_or_method "),
        ({1, 2}, r"extra: expected what JSON can hold, got set \{1, 2\}; .*as text or numbers"),
    ],
)
def test_what_is_no_json_is_refused_with_its_path(value, words):
    with pytest.raises(ConfigError, match=words):
        to_json(value, "extra")


def test_a_flipped_bit_is_seen(tmp_path):
    path = tmp_path / "words.json"
    write_checked(path, {"step": 3, "data": [1, 2]})
    good = path.read_bytes()
    for at in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(DamageError, match="words.json: its checksum does not fit its content"):
            read_checked(path)


@pytest.mark.parametrize("length", [0, 5, -1])
def test_what_was_cut_off_is_seen(tmp_path, length):
    write_checked(tmp_path / "a", {"step": 3})
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:length])
    with pytest.raises(DamageError, match="a: its checksum does not fit"):
        read_checked(tmp_path / "a")


def test_what_is_missing_is_damage(tmp_path):
    with pytest.raises(DamageError, match="leaves-0.json: missing"):
        read_checked(tmp_path / "leaves-0.json")
    assert issubclass(DamageError, CheckpointError)


@pytest.mark.parametrize("shape", [[2**30, 2**30], [0, 2**40, 2**40]])
def test_a_shape_that_no_memory_holds_is_damage(shape):
    with pytest.raises(ValueError, match="leaf w cannot be"):
        _read_leaf("w", shape, "float32", None)
