"""Arrays are read from the parts that were stored, and only damage is called damage."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint.arrays import ArrayReader
from stepfold.checkpoint.leaves import Leaf
from stepfold.checkpoint.manifest import DamageError
from stepfold.checkpoint.store import open_store
from stepfold.errors import CheckpointError

VALUES = np.arange(48, dtype=np.float32).reshape(8, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Give a step with an array in eight parts, one in one part, an empty one and a scalar."""
    folder = tmp_path_factory.mktemp("saved")
    mesh = sf.make_mesh((1, 4, 2, 1))
    state = {
        "parts": jax.device_put(VALUES, NamedSharding(mesh, P("fsdp", "tp"))),
        "whole": VALUES.astype(np.int16).T,
        "none": jnp.zeros((3, 0), jnp.bfloat16),
        "one": jnp.float32(-0.0),
    }
    sf.save(folder, state, step=1)
    return folder / "1"


def reader_of(step, **changes):
    manifest = open_store(step.parent).read_manifest(int(step.name))
    return ArrayReader(step, manifest._replace(leaves=manifest.leaves | changes))


def test_a_leaf_is_read_as_a_whole(saved):
    reader = reader_of(saved)
    assert np.array_equal(reader.read_leaf("parts"), VALUES)
    assert np.array_equal(reader.read_leaf("whole"), VALUES.astype(np.int16).T)
    assert (reader.read_leaf("none").shape, reader.read_leaf("none").dtype) == (
        (3, 0),
        jnp.bfloat16,
    )
    assert reader.read_leaf("one").tobytes() == np.float32(-0.0).tobytes()
    assert reader.read_leaf("one").shape == ()


def test_what_is_read_is_nobody_elses(saved):
    reader = reader_of(saved)
    parts = reader.read_regions("whole", [((0, 6), (0, 8)), ((0, 3), (0, 8))])
    for part in (*parts.values(), reader.read_leaf("one")):
        part[...] = 7
    assert np.array_equal(reader.read_leaf("whole"), VALUES.astype(np.int16).T)


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (Leaf((8, 6), "int32"), r"expected int32\[8,6\], got float32\[8,6\]"),
        (Leaf((6, 8), "float32"), r"expected float32\[6,8\], got float32\[8,6\]"),
        (Leaf((8, 7), "float32"), r"expected float32\[8,7\], got float32\[8,6\]"),
    ],
)
def test_what_is_stored_has_to_be_what_was_saved(saved, leaf, got):
    reader = reader_of(saved, parts=leaf)
    with pytest.raises(DamageError, match=f"parts: {got}"):
        reader.read_leaf("parts")
    assert len(reader.problems("parts")) == 1


def test_a_leaf_that_is_not_there_is_damage(saved):
    manifest = open_store(saved.parent).read_manifest(int(saved.name))
    leaves, shards = ({"gone": found["parts"]} for found in (manifest.leaves, manifest.shards))
    reader = ArrayReader(saved, manifest._replace(leaves=leaves, shards=shards))
    with pytest.raises(DamageError, match="gone: cannot be read: "):
        reader.read_leaf("gone")


def test_only_the_part_that_changed_is_named(saved):
    manifest = open_store(saved.parent).read_manifest(int(saved.name))
    shards = dict(manifest.shards["parts"])
    for number, part in enumerate([*shards][:2]):
        shards[part] = dataclasses.replace(shards[part], checksum=number)
    reader = ArrayReader(saved, manifest._replace(shards={"parts": shards}))
    told = "the values are not those that were saved"
    found = [str(problem) for problem in reader.problems("parts")]
    assert found == [f"parts[0:2, 0:3]: {told}", f"parts[0:2, 3:6]: {told}"]
    with pytest.raises(DamageError, match=r"parts\[0:2, 0:3\]: the values are not those"):
        reader.read_leaf("parts")
    rows = ((6, 8), (0, 6))
    assert np.array_equal(reader.read_regions("parts", [rows])[rows], VALUES[6:])


@pytest.mark.parametrize("place", ["open", "read"])
@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (MemoryError(), False),
        (ValueError("RESOURCE_EXHAUSTED: Too many open files"), False),
        (ValueError("INTERNAL: Out of threads"), False),
        (ValueError("CANCELLED: "), False),
        (ValueError("DATA_LOSS: Digest mismatch"), True),
        (ValueError("NOT_FOUND: Error reading"), True),
        (ValueError('Error opening "zarr" driver: Error reading Byte range'), True),
        (ValueError("FAILED_PRECONDITION: Error parsing"), True),
    ],
)
def test_only_errors_about_the_files_are_damage(saved, monkeypatch, place, error, is_damage):
    def fail(*_, **__):
        raise error

    reader = reader_of(saved)
    if place == "open":
        monkeypatch.setattr("tensorstore.open", fail)
    else:
        monkeypatch.setattr("stepfold.checkpoint.arrays.as_slices", fail)
    with pytest.raises(CheckpointError, match="whole.*: cannot be read: ") as caught:
        reader.read_leaf("whole")
    assert isinstance(caught.value, DamageError) == is_damage
    assert [type(problem) for problem in reader.problems("whole")] == [type(caught.value)]
