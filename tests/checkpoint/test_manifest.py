import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.leaves import (
    leaves_of,
)
from stepfold.checkpoint.manifest import read_manifest, read_words
from stepfold.checkpoint.sealed import DamageError, seal, unseal
from stepfold.errors import CheckpointError

STATE = {"params": {"w": jnp.arange(8.0)}, "key": jax.random.key(3)}


@pytest.fixture
def step(tmp_path):
    """Give the folder of a step that is good."""
    sf.save(tmp_path, STATE, step=7, data={"step": 7}, metrics={"loss": 0.5}, extra=b"x")
    return tmp_path / "7"


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
