"""A checkpoint of which anything was changed on the disk is restored as it was, or not at all."""

import random
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.laws import course

import stepfold as sf
from stepfold.checkpoint.leaves import map_arrays


def make_state(seed):
    """Make a state of every kind of leaf: shards, scalars, keys, odd dtypes, and what is empty."""
    rng = np.random.default_rng(seed)
    mesh = sf.make_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    params = {
        "spread": jax.device_put(rng.normal(size=(64, 96)).astype(np.float32), spread),
        "whole": jax.device_put(rng.normal(size=(5, 7)).astype(jnp.bfloat16), whole),
        "flags": jnp.asarray(rng.integers(2, size=70).astype(bool)),
        "empty": jnp.zeros((0, 3), jnp.float32),
    }
    return sf.TrainState(
        step=jnp.asarray(seed, jnp.int32),
        params=params,
        opt_state={"count": jnp.asarray(seed * 3), "nu": jnp.asarray(rng.normal(size=300))},
        model_state={"seen": rng.integers(0, 2**40, size=9), "lr": 0.1 * seed},
        key=jax.random.key(seed),
    )


def words_of(seed):
    """Give what is saved beside a state."""
    return {
        "data": {"step": seed, "pipeline": {"seed": 0, "length": 10**6}},
        "metrics": {"eval/loss": 1 / seed, "eval/accuracy": 0.25 * seed},
        "extra": {"config": {"layers": [1, 2, seed]}, "buffer": np.full(300, seed)},
    }


def bits(restored):
    """Spell all that was restored, to the bit, with its places."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored.state):
        numbers = leaf
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            numbers = jax.random.key_data(leaf)
        array = np.asarray(numbers)
        kind = (type(leaf).__name__, str(array.dtype), array.shape)
        leaves[jax.tree_util.keystr(path)] = (
            *kind,
            getattr(leaf, "sharding", None),
            array.tobytes(),
        )
    extra = map_arrays(restored.extra, "extra", lambda _, array: (array.dtype, array.tolist()))
    return leaves, restored.step, restored.data, restored.metrics, extra


class Saved(NamedTuple):
    """Two steps, what is right for each, and the files of the newer one."""

    folder: Path
    right: dict
    files: list[Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with sf.Checkpoints(folder, keep=None, best="eval/loss") as series:
        for seed in (1, 2):
            series.save(make_state(seed), **words_of(seed))
    right = {seed: bits(sf.restore(folder, make_state(3), step=seed)) for seed in (1, 2)}
    assert right[1] != right[2]
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    return Saved(folder, right, [path.relative_to(folder) for path in files])


def flip(path, chance):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def flip_many(path, chance):
    for _ in range(64):  # one alone may be in bytes that belong to no value
        flip(path, chance)


def zero(path, chance):
    content = bytearray(path.read_bytes())
    size = min(len(content), chance.choice((64, 512, 4096)))
    start = chance.randrange(len(content) - size + 1)
    content[start : start + size] = bytes(size)
    path.write_bytes(content)


def truncate(path, chance):
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def empty(path, chance):
    path.write_bytes(b"")


def grow(path, chance):
    path.write_bytes(path.read_bytes() + b"\0" * chance.choice((1, 64)))


def delete(path, chance):
    path.unlink()


def to_folder(path, chance):
    path.unlink()
    path.mkdir()


DAMAGES = (flip, truncate, delete, zero, empty, grow, to_folder)


DRAWN = (flip, flip, zero, truncate, empty, grow, delete, to_folder)


@pytest.fixture
def damaged(saved, tmp_path):
    """Give a function that makes a copy in which one file is damaged, by chance."""

    def copy(file, damage, chance):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved.folder, folder)
        damage(folder / file, chance)
        return folder

    return copy


def is_found(saved, folder):
    """Hold all that can be asked of a damaged folder against what is right; tell if it was found.

    Damage that is not found is right only where every value is.
    """
    problems = sf.checkpoint.verify(folder)
    found = bool(problems[2])
    assert problems[1] == []
    assert found or sf.checkpoint.latest_step(folder) == 2
    for asked in ({"step": 2}, {"fall_back": False}, {"step": "best", "fall_back": False}):
        by_itself = restored(folder, **asked)
        assert by_itself in [saved.right[2]] * (not found) + [None, saved.right[1]] * found
        assert by_itself != saved.right[1] or asked.get("step") == "best"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = sf.restore(folder, make_state(3))
    assert bits(got) == saved.right[1 if found else 2]
    assert list(got.damaged) == [2] * found
    assert [warning.category for warning in told] == [RuntimeWarning] * found
    assert {path.name for path in folder.iterdir()} == {"1", "2"}
    return found


def restored(folder, **options):
    """Restore, and give what was, or None where that is refused."""
    try:
        return bits(sf.restore(folder, make_state(3), **options))
    except sf.errors.CheckpointError:
        return None


def test_damage_to_each_file(saved, damaged, count):
    # Each file is damaged in one way, or in each.
    chance, share = random.Random(0), len(DAMAGES) // count(1, len(DAMAGES))
    for number, damage in enumerate(DAMAGES):
        found = {}
        for file in saved.files[number % share :: share]:
            found[file] = is_found(saved, damaged(file, damage, chance))
        print(f"{damage.__name__}: {len(found)} files, found in {sum(found.values())}, not in")
        print(*(str(file) for file in found if not found[file]), sep="\n")


@pytest.mark.full
def test_damage_drawn_by_chance(saved, damaged, count):
    chance, found = random.Random(1), []
    for _ in range(count(10, 60)):
        file, damage = chance.choice(saved.files), chance.choice(DRAWN)
        try:
            found.append(is_found(saved, damaged(file, damage, chance)))
        except Exception as error:
            error.add_note(f"{damage.__name__} of {file}")
            raise
    print(f"{len(found)} damages by chance, found {sum(found)}, immaterial {found.count(False)}")


@pytest.mark.parametrize("damage", [flip_many, delete], ids=lambda each: each.__name__)
def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_over(tmp_path, damage):
    course.run(tmp_path, steps=5, checkpoints=sf.Checkpoints(every=5))
    array = max(
        (tmp_path / "checkpoints/5/state").rglob("d/*"), key=lambda path: path.stat().st_size
    )
    damage(array, random.Random(0))
    for _ in range(2):
        with pytest.raises(
            sf.errors.CheckpointError, match="no checkpoint can be restored: step 5"
        ):
            course.run(tmp_path, steps=10, checkpoints=sf.Checkpoints(every=5))
