"""A save writes what the state was at the call, in the layout of orbax, or leaves nothing."""

import errno
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint import manifest
from stepfold.checkpoint.manifest import StepMetadata
from stepfold.checkpoint.store import open_store
from stepfold.errors import CheckpointError

from .sameness import bits, check_same

STATE = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "layers": [1, np.ones(2)]},
    "key": jax.random.wrap_key_data(np.array([0, 7], np.uint32)),
    "half": jax.device_put(np.array([1.5, -0.0], jnp.bfloat16)),
}


@pytest.fixture
def folder(tmp_path):
    sf.save(tmp_path, STATE, step=4)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
def test_orbax_reads_the_arrays_by_itself(folder):
    item = ocp.args.Composite(state=ocp.args.PyTreeRestore())
    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == 4
        found = manager.restore(4, args=item).state
    assert found["params"]["w"].tolist() == STATE["params"]["w"].tolist()
    assert sorted(found["params"]["layers"]) == ["0", "1"]
    assert bits(found["half"]) == bits(STATE["half"])
    assert bits(found["key"]) == bits(STATE["key"])


def add_one(tree):
    return jax.tree.map(lambda leaf: leaf + 1, tree)


@pytest.mark.parametrize("spec", [None, P(), P("fsdp")], ids=["one", "replicated", "sharded"])
def test_what_is_given_to_a_step_at_once_is_saved_as_it_was(tmp_path, spec):
    place = spec is not None and NamedSharding(sf.make_mesh(), spec)
    arrays = {"a": np.arange(1 << 18, dtype=np.float32), "b": np.ones((8, 3), np.float32)}
    state = jax.device_put(arrays, place or None)
    step = jax.jit(add_one, donate_argnums=0, out_shardings=place or None)
    with sf.Checkpoints(tmp_path, keep=None) as series:
        for number in range(0, 12, 3):
            series.save(state, step=number)
            for _ in range(3):
                state = jax.block_until_ready(step(state))
    assert set(map(len, sf.checkpoint.verify(tmp_path).values())) == {0}
    for number in range(0, 12, 3):
        found = sf.restore(tmp_path, arrays, step=number).state
        check_same(found, jax.tree.map(lambda leaf: leaf + np.float32(number), arrays))


def test_what_is_written_to_at_once_is_saved_as_it_was(tmp_path):
    state = {"a": np.arange(1 << 18, dtype=np.float32), "b": np.zeros(())}
    with sf.Checkpoints(tmp_path, keep=None) as series:
        for number in range(3):
            series.save(state, step=number)
            state["a"] += 1
            state["b"][...] = number + 1
    assert set(map(len, sf.checkpoint.verify(tmp_path).values())) == {0}
    for number in range(3):
        found = sf.restore(tmp_path, state, step=number).state
        wanted = np.arange(1 << 18, dtype=np.float32) + np.float32(number)
        check_same(found, {"a": wanted, "b": np.full((), float(number))})


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["write_leaves", "write_files"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_SPACE, "no space left on the device; make room, or keep fewer checkpoints"),
        (PermissionError(13, "Permission denied"), "no permission to write there; change it, or"),
        (OSError("Too many open files"), "too many open files; allow more of them, with ulimit"),
        (OSError("of its own\nkind"), "OSError: of its own$"),
    ],
)
def test_what_goes_wrong_is_told_with_the_step(tmp_path, monkeypatch, place, error, words):
    def fail(*_):
        raise error

    monkeypatch.setattr(manifest, place, fail)
    store = open_store(tmp_path, save=True)
    save = store.begin(STATE, StepMetadata(3))
    with pytest.raises(CheckpointError, match=f"{tmp_path}/3: not saved: {words}") as caught:
        save.commit()
    assert caught.value.__cause__ is not None
    assert sf.checkpoint.latest_step(tmp_path) is None


def test_what_cannot_begin_is_told_with_the_step(tmp_path):
    store = open_store(tmp_path / "file", save=True)
    (tmp_path / "file").rmdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/3: not saved: NotADirectoryError: "):
        store.begin(STATE, StepMetadata(3))


def test_a_save_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    written, may_write = manifest.write_leaves, threading.Event()

    def slowly(*args):
        assert may_write.wait(60)
        written(*args)

    monkeypatch.setattr(manifest, "write_leaves", slowly)
    store = open_store(tmp_path, save=True)
    save = store.begin(STATE, StepMetadata(3))
    assert sf.checkpoint.latest_step(tmp_path) is None
    may_write.set()
    save.commit()
    assert sf.checkpoint.latest_step(tmp_path) == 3


@pytest.mark.parametrize("years", [56, -30])
def test_a_clock_that_jumps_ends_no_save(tmp_path, monkeypatch, years):
    """As the clock of a machine that starts in 1970 and is then set."""
    now, offset, written = time.time, [0.0], manifest.write_leaves

    def jump(*args):
        time.sleep(0.2)  # until orbax waits
        offset[0] += years * 365 * 86400
        time.sleep(0.2)
        written(*args)

    monkeypatch.setattr(manifest, "write_leaves", jump)
    monkeypatch.setattr(time, "time", lambda: now() + offset[0])
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=3)
    assert sf.checkpoint.verify(tmp_path) == {3: []}
