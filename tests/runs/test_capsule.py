"""A capsule holds what replays the step that failed, and is read back as it was written."""

import os
import shutil
import weakref
from collections import namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.small import TX, start

import stepfold as sf
from stepfold.checkpoint.manifest import DamageError, read_checked, write_checked
from stepfold.debug.rerun import replay
from stepfold.hooks.stop import Nonfinite
from stepfold.loop.feed import BatchFeed, DataPosition, RecentBatches
from stepfold.loop.run import Run
from stepfold.runs.capsule import (
    Capsule,
    CheckpointReference,
    read_capsule,
    save_capsule,
    take_capsule,
)

STEP = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), TX)
DATA = np.arange(40, dtype=np.float32)


def with_nan(step):
    data = DATA.copy()
    data[4 * step - 1] = np.nan
    return data


def run(batches, folder=None, steps=10, **options):
    plan = sf.Checkpoints(every=3, keep=None) if folder else None
    options = {"log_every": 4, "steps": steps, **options}
    return sf.fit(STEP, start(), batches, run_dir=folder, checkpoints=plan, **options)


def take(step, batches, position=None, state=None, directory=None):
    feed = batches if isinstance(batches, BatchFeed) else BatchFeed(batches)
    run = Run.start(start() if state is None else state, 0, feed.first_used, None, {})
    run = run._replace(marks=(position or DataPosition(0, None),))
    return take_capsule(Nonfinite(step, "train/loss", {}), run, feed, directory=directory)


# What a run leaves.


def test_it_has_the_step_its_batch_and_its_key():
    assert run(sf.batches(DATA, 4)).capsule is None  # nothing failed
    capsule = run(sf.batches(with_nan(6), 4)).capsule
    assert (capsule.step, capsule.metric, capsule.lost) == (6, "train/loss", ())
    assert set(capsule.metrics) == {"train/loss", "train/grad_norm"}
    assert np.isnan(capsule.metrics["train/loss"])
    assert np.array_equal(capsule.batch, with_nan(6)[20:24], equal_nan=True)
    key = jax.random.fold_in(start().key, 5)  # the sixth step folds in 5
    assert (jax.random.key_data(capsule.key) == jax.random.key_data(key)).all()
    assert " batch=" not in repr(capsule)
    assert take(1, [1], state={"w": 1}).key is None


def test_it_refers_to_the_newest_checkpoint_before_the_step(tmp_path):
    capsule = run(sf.batches(with_nan(6), 4), tmp_path).capsule
    assert capsule.checkpoint == (tmp_path / "checkpoints", 3)
    assert (capsule.mark.step, capsule.mark.position["step"], capsule.distance) == (3, 3, 2)
    assert str(capsule) == (
        "step 6: train/loss is nan; replay begins with the checkpoint of step 3, 2 steps before it"
    )


@pytest.mark.parametrize("log_every", [1, 4, 100])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_batch_that_cannot_be_read_again_is_kept(tmp_path, log_every, steps_per_call):
    options = {"log_every": log_every, "steps_per_call": steps_per_call}
    batches = (rows for rows in with_nan(6).reshape(-1, 4))
    capsule = sf.fit(STEP, start(), batches, run_dir=tmp_path, **options).capsule
    for taken in (capsule, read_capsule(capsule.path)):
        assert (taken.step, taken.lost, taken.can_reread) == (6, (), False)
        assert np.array_equal(taken.batch, with_nan(6)[20:24], equal_nan=True)


def test_a_batch_that_is_no_longer_kept_is_reported(monkeypatch):
    monkeypatch.setattr(RecentBatches, "LIMIT", 2 * DATA[:4].nbytes)
    capsule = run(iter(list(sf.batches(with_nan(6), 4, epochs=1)))).capsule
    assert capsule.batch is None
    reason = "it cannot be read again, and only those from step 9 on were kept"
    assert capsule.lost == (f"the batch: {reason}",)
    assert "not kept: the batch" in str(capsule)
    batches = sf.batches(DATA, 4, epochs=1)
    capsule = take(12, batches, DataPosition(0, batches.get_state()))
    assert capsule.lost == ("the batch: when read again, the batches ended before it",)


def test_a_batch_on_a_device_is_not_kept():
    """It would keep memory of the device for each step since the last log point."""
    alive = []

    def generate():
        for rows in with_nan(6).reshape(-1, 4):
            batch = jnp.asarray(rows)
            alive.append(weakref.ref(batch))
            assert sum(each() is not None for each in alive) <= 4
            yield batch

    result = sf.fit(STEP, start(), generate(), log_every=100)
    reason = "it cannot be read again, and none were kept, since they are on devices or too large"
    assert (result.capsule.step, result.capsule.lost) == (6, (f"the batch: {reason}",))


@pytest.mark.parametrize("kind", [lambda batches: batches, list, sf.prefetch])
def test_a_batch_that_can_be_read_again_is_not_in_the_file(tmp_path, kind):
    batches = kind(sf.batches(with_nan(6), 4, epochs=1))
    taken = sf.fit(STEP, start(), batches, run_dir=tmp_path).capsule
    assert taken.has_batch
    read = read_capsule(taken.path)
    assert (read.batch, read.lost, read.has_batch) == (None, (), False)
    assert not (taken.path / "batch").exists()


def test_an_error_of_the_source_does_not_cost_the_result():
    reads = []

    def once(value):
        reads.append(float(value))
        if reads.count(20) == 2:
            raise LookupError("that is archived")
        return value

    result = run(sf.batches(with_nan(6), 4, transform=once))
    assert result.capsule.step == 6
    assert result.capsule.lost == ("the batch: it cannot be read again: that is archived",)


@pytest.mark.parametrize("step", [1, 4, 5, 8, 9])
def test_the_batch_is_that_of_the_step_wherever_the_log_points_are(step):
    for batches in (sf.batches(with_nan(step), 4), list(sf.batches(with_nan(step), 4, epochs=1))):
        capsule = run(batches, steps_per_call=3).capsule
        wanted = with_nan(step)[4 * step - 4 : 4 * step]
        assert np.array_equal(capsule.batch, wanted, equal_nan=True)


def test_a_step_before_the_resumed_checkpoint_has_no_batch():
    batches = sf.batches(DATA, 4, start=5)
    capsule = take(3, batches, DataPosition(5, batches.get_state()))
    assert capsule.lost == (
        "the batch: its step is older than the checkpoint that the run resumed from",
    )
    with pytest.raises(
        sf.errors.ConfigError, match="expected a checkpoint of a state before step 3"
    ):
        replay(capsule, STEP, state=start())


# The files.


def capsule(run_dir, **changes):
    fields = {
        "step": 120,
        "metric": "train/loss",
        "metrics": {"train/loss": float("nan"), "train/accuracy": 0.1},
        "key": jax.random.key(3),
        "batch": {"x": np.arange(6, dtype=np.int64), "y": [np.ones(2, np.float16), None]},
        "lost": (),
        "checkpoint": CheckpointReference(run_dir / "checkpoints", 100),
        "mark": DataPosition(100, {"step": 100, "stream": b"\x00\xff"}),
        "began": 0,
    }
    return Capsule(**{**fields, **changes})


def write(run_dir, **changes):
    """Write a capsule and return its path."""
    return save_capsule(capsule(run_dir, **changes), run_dir).path


def there_and_back(batch, folder):
    back = read_capsule(write(folder, batch=batch))
    return back.batch, list(back.lost)


def test_a_capsule_is_read_as_it_was_written(tmp_path):
    path = write(tmp_path)
    assert path == tmp_path / "capsules" / "120"
    read, wanted = read_capsule(path), capsule(tmp_path)
    same = ("step", "metric", "lost", "checkpoint", "mark", "began")
    assert [getattr(read, name) for name in same] == [getattr(wanted, name) for name in same]
    assert repr(read.metrics) == repr(wanted.metrics)
    assert (jax.random.key_data(read.key) == jax.random.key_data(wanted.key)).all()
    signature = lambda batch: jax.tree.map(lambda x: (x.dtype, x.tolist()), batch)
    assert signature(read.batch) == signature(wanted.batch)
    assert (read.path, read.like, read.batches) == (path, None, None)
    # An older capsule of the same step is replaced, and missing parts are None.
    write(tmp_path, metric="train/other", key=None, checkpoint=None, batch=None)
    read = read_capsule(path)
    assert [read.metric, read.key, read.checkpoint, read.batch] == ["train/other", *[None] * 3]
    assert (os.listdir(tmp_path / "capsules"), os.listdir(path)) == (["120"], ["capsule.json"])


Pair = namedtuple("Pair", "first second")
DTYPES = [
    *("bool", "int8", "int64", "uint32", "float16", "float32", "float64", "complex64"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.float4_e2m1fn),
]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)], ids=str)
def test_every_bit_of_an_array_is_read_back(tmp_path, shape):
    rng = np.random.default_rng(0)
    batch = {str(dtype): rng.integers(0, 7, shape).astype(dtype) for dtype in DTYPES}
    batch["payload"] = np.full(shape, 0x7FC00001, np.uint32).view(np.float32)  # of a NaN
    batch["fortran"] = np.asfortranarray(rng.normal(size=shape))
    batch["device"] = jnp.ones(shape, jnp.bfloat16)
    back, lost = there_and_back(batch, tmp_path)
    signature = lambda array: (type(array), array.dtype, array.shape, array.tobytes())
    batch = jax.tree.map(np.asarray, batch)
    assert jax.tree.map(signature, back) == jax.tree.map(signature, batch)
    assert lost == []


def test_the_structure_is_read_back(tmp_path):
    leaves = [None, True, 2**70, 0.1, "text", {}, [], ()]
    batch = {"": leaves, "tuple": (*leaves, {0: leaves, -1: ()}), "a/b": {"c": [[1], {"d": 2}]}}
    back, lost = there_and_back(batch, tmp_path)
    assert (back, lost) == (batch, [])
    assert jax.tree.structure(back) == jax.tree.structure(batch)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_read_back(tmp_path, impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    back, _ = there_and_back({"keys": keys}, tmp_path)
    assert back["keys"].dtype == keys.dtype
    assert (jax.random.key_data(back["keys"]) == jax.random.key_data(keys)).all()


class Text:
    def __repr__(self):
        return "Text()"


def test_what_a_file_cannot_hold_is_reported_and_the_rest_is_kept(tmp_path):
    objects = {"text": Text(), "objects": np.array([object()])}
    batch = {"pair": Pair(np.ones(2), {"x": 3}), "rest": 4, **objects}
    back, lost = there_and_back(batch, tmp_path)
    assert back["pair"]["first"].tolist() == [1, 1]
    assert (back["pair"]["second"], back["rest"]) == ({"x": 3}, 4)
    assert (back["text"], back["objects"]) == (None, None)
    assert sorted(lost) == [
        "batch/objects: object[1] is not an array of numbers",
        "batch/pair: a Pair, written as a dict",
        "batch/text: Text Text() is not an array of numbers",
    ]


def test_a_run_can_be_moved_with_its_checkpoints(tmp_path):
    elsewhere = CheckpointReference(tmp_path / "far", 100)
    assert read_capsule(write(tmp_path / "a", checkpoint=elsewhere)).checkpoint == elsewhere
    write(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    read = read_capsule(str(tmp_path / "b" / "capsules" / "120"))
    assert read.checkpoint.directory == tmp_path / "b" / "checkpoints"


def test_a_position_that_json_cannot_hold_is_reported_and_its_batch_kept(tmp_path):
    mark = DataPosition(100, {"at": object()})
    read = read_capsule(write(tmp_path, mark=mark, can_reread=True))
    assert read.mark == (100, None)
    assert read.notes[0].startswith("the position in the data: position/at: expected what JSON")
    assert (read.lost, read.batch["x"].tolist()) == ((), list(range(6)))


@pytest.mark.parametrize("batch", [None, np.ones(3)], ids=["without a batch", "with one"])
def test_a_full_disk_warns_and_keeps_the_capsule(tmp_path, monkeypatch, batch):
    write(tmp_path, metric="train/older")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = "the capsule of step 120 cannot be written, and is only in the result: .*(?i:no space)"
    with pytest.warns(RuntimeWarning, match=words):
        kept = save_capsule(capsule(tmp_path, batch=batch), tmp_path)
    assert (kept.step, kept.path) == (120, None)
    assert os.listdir(tmp_path / "capsules") == ["120"]
    assert read_capsule(tmp_path / "capsules" / "120").metric == "train/older"


def test_only_process_0_writes_and_a_file_in_the_way_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "capsules").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert save_capsule(capsule(tmp_path), tmp_path).path is None
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert save_capsule(capsule(tmp_path), tmp_path / "b").path is None
    assert not (tmp_path / "b").exists()


def test_with_several_processes_the_batch_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    taken = take(1, [np.ones(2)])
    assert taken.lost[0].startswith("the batch: with several processes each has its own rows")
    read = read_capsule(save_capsule(taken, tmp_path).path)  # without a wait for the other process
    assert (read.batch, read.lost) == (None, taken.lost)
    assert (jax.random.key_data(read.key) == jax.random.key_data(taken.key)).all()


@pytest.mark.parametrize(("path", "got"), [(None, "None"), (3, "int 3")])
def test_what_is_not_a_path_is_refused(tmp_path, path, got):
    with pytest.raises(
        sf.errors.ConfigError, match=f"expected a Capsule or the path of one, got {got}"
    ):
        read_capsule(path)
    with pytest.raises(
        sf.errors.CheckpointError, match="expected the directory of a capsule.* got none"
    ):
        read_capsule(tmp_path)


def test_another_version_and_a_missing_batch_are_refused(tmp_path):
    file = write(tmp_path) / "capsule.json"
    shutil.rmtree(file.parent / "batch")
    with pytest.raises(DamageError, match=r"missing; the capsule was copied in part"):
        read_capsule(file.parent)
    for version in (1, 3):
        write_checked(file, {**read_checked(file), "version": version})
        with pytest.raises(
            sf.errors.CheckpointError, match=f"a capsule of version 2, got {version}"
        ):
            read_capsule(file.parent)
