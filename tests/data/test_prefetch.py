"""Prefetching changes when a batch is made, and nothing else."""

import gc
import itertools
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import stepfold as sf
from stepfold.internals import jax as internals


def numbered(count=12, size=3, **options):
    return sf.batches({"x": np.arange(count)}, size, **{"seed": 0, "epochs": 2, **options})


def seen(batches):
    return [batch["x"].tolist() for batch in batches]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_until(condition, within=5.0):
    """Return whether a condition becomes true in time."""
    until = time.monotonic() + within
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return condition()


def gone(started, within=5.0):
    """Return whether threads end, which they do a little after they are stopped."""
    return wait_until(lambda: not any(thread.is_alive() for thread in started), within)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    if not gone(threads(), within=0.2):
        gc.collect()
    assert gone(threads())


@pytest.mark.parametrize("size", [1, 2, 16])
def test_batches_are_the_same_in_the_same_order(size):
    stream = sf.prefetch(numbered(), size=size)
    assert (len(stream), stream.steps_per_epoch, iter(stream)) == (8, 4, stream)
    assert seen(stream) == seen(numbered())
    assert list(sf.prefetch([1, 2, 3], size=size)) == [1, 2, 3]
    empty = sf.prefetch(range(0))
    assert (list(empty), empty.steps_per_epoch, bool(empty)) == ([], None, True)


def test_thread_starts_with_the_first_batch_and_reads_ahead_by_size():
    made = []
    stream = sf.prefetch((made.append(i) or i for i in itertools.count()), size=3)
    assert (made, threads()) == ([], [])
    assert next(stream) == 0
    assert wait_until(lambda: len(made) == 4)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]


def placements():
    mesh = sf.make_mesh()
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names[:2]))
    one = SingleDeviceSharding(jax.devices()[1])
    return {
        "sharding": (spread, spread),
        "tree": ({"x": one}, one),
        "function": (lambda batch: sf.shard_batch(batch, mesh), spread),
    }


@pytest.mark.parametrize("kind", placements())
def test_batches_are_placed_in_the_thread(kind):
    sharding, place = placements()[kind]
    for placed, batch in zip(
        sf.prefetch(numbered(16, 8), sharding=sharding), numbered(16, 8), strict=True
    ):
        assert placed["x"].sharding.is_equivalent_to(place, 1)
        assert placed["x"].tolist() == batch["x"].tolist()
    called = []
    place = lambda batch: called.append(threading.current_thread().name) or batch
    list(sf.prefetch([1, 2], sharding=place))
    assert called == ["prefetch"] * 2


@pytest.mark.parametrize("sharding", [None, jax.device_put, lambda batch: batch])
@pytest.mark.parametrize("buffers", [1, 3])
def test_source_may_reuse_its_buffers(sharding, buffers):
    # Large and aligned, so that jax on CPU takes the memory itself and not a copy.
    ring = [np.zeros((64, 1024), np.float32) for _ in range(buffers)]

    def source():
        for number in range(12):
            buffer = ring[number % buffers]
            buffer[:] = number
            yield {"x": buffer}

    kept = list(sf.prefetch(source(), sharding=sharding, size=2))
    assert [float(batch["x"].min()) for batch in kept] == list(range(12))
    assert [float(batch["x"].max()) for batch in kept] == list(range(12))


def test_only_batches_that_cannot_be_overwritten_are_passed_without_a_copy():
    source, buffer = np.arange(40), np.zeros(4, int)
    view = list(sf.prefetch(sf.batches(source, 4, epochs=1)))[-1]
    assert np.shares_memory(view, source)
    assert not view.flags.writeable

    def fill(examples):
        buffer[:] = examples
        return buffer

    kept = list(sf.prefetch(sf.batches(source, 4, epochs=1, collate=fill), size=3))
    assert np.concatenate(kept).tolist() == source.tolist()
    streamed = sf.batches(iter(source), 4, collate=lambda examples: buffer)
    assert not np.shares_memory(next(sf.prefetch(streamed)), buffer)
    array = jnp.zeros(2)
    batch = next(sf.prefetch([{"x": array, "n": 3, "text": "a", "none": None}]))
    assert batch["x"] is array
    assert (batch["n"], batch["text"], batch["none"]) == (3, "a", None)


def test_state_can_be_set_while_batches_are_ahead_and_after_the_end():
    stream, whole = sf.prefetch(numbered(), size=3), seen(numbered())
    states = [stream.get_state(), *(stream.get_state() for _ in stream)]
    for step in (5, 0, 8, 3):
        stream.set_state(states[step])
        assert stream.get_state() == states[step]
        assert seen(itertools.islice(stream, 2)) == whole[step : step + 2]
    stream.close()
    assert stream.get_state() == states[5]
    stream.set_state(states[7])
    assert seen(stream) == whole[7:]


def test_refused_state_changes_nothing():
    stream, whole = sf.prefetch(numbered(), size=3), seen(numbered())
    other = numbered(seed=1, start=3).get_state()
    for step in range(3):
        with pytest.raises(sf.errors.DataError, match="seed was 1 and is 0"):
            stream.set_state(other)
        assert (next(stream)["x"].tolist(), stream.get_state()["step"]) == (whole[step], step + 1)
    assert seen(stream) == whole[3:]
    with pytest.raises(sf.errors.DataError, match="seed was 1 and is 0"):
        stream.set_state(other)
    assert list(stream) == []


def test_batches_without_a_state_are_refused_on_resume():
    stream = sf.prefetch(iter([1, 2]))
    next(stream)
    for name in ("get_state", "set_state"):
        assert not hasattr(stream, name)
        with pytest.raises(
            sf.errors.DataError, match="expected batches with get_state.*got list_iterato"
        ):
            getattr(stream, name)
    with pytest.raises(AttributeError, match="Prefetch has no attribute 'at'"):
        stream.at  # noqa: B018


class Counting:
    """An iterator that returns the same dict for all states, and writes into it."""

    def __init__(self):
        self.state = {"number": 0}
        self.get_state, self.set_state = lambda: self.state, self.state.update

    def __iter__(self):
        return self

    def __next__(self):
        self.state["number"] += 1
        return self.state["number"]


@pytest.mark.parametrize("wrap", [sf.prefetch, lambda made: sf.workers(made, 0)])
def test_the_result_has_the_attributes_of_its_batches(wrap):
    mixture = sf.mix([({"x": np.arange(9)}, 1)])
    for batches in (sf.batches({"x": np.arange(9)}, 2), sf.batches(mixture, 2)):
        own = {name for name in dir(batches) if not name.startswith("_")} - {"copied"}
        lacking = {name for name in own if not hasattr(wrap(batches), name)}
        assert lacking <= {"at"}  # of prefetch, where it would not be placed
        assert wrap(batches).count_rows(0) == batches.count_rows(0)


def test_state_is_copied_before_the_iterator_advances():
    stream = sf.prefetch(Counting(), size=3)
    for number in range(1, 4):
        assert next(stream) == number
        time.sleep(0.01)
        assert stream.get_state() == {"number": number}
    stream.close()


@pytest.mark.full
def test_worker_processes_of_grain_resume():
    grain = pytest.importorskip("grain")
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # as the docstring says
    dataset = grain.MapDataset.source(range(40)).map(str).map(len).batch(4).to_iter_dataset()
    whole = [batch.tolist() for batch in dataset]
    stream = sf.prefetch(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    assert [next(stream).tolist() for _ in range(3)] == whole[:3]
    saved = stream.get_state()
    assert next(stream).tolist() == whole[3]
    stream.set_state(saved)
    assert [batch.tolist() for batch in stream] == whole[3:]


def broken_at(index, error):
    yield from range(index)
    raise error


@pytest.mark.parametrize(
    ("index", "error"),
    [
        *((index, OSError("disk")) for index in (0, 1, 5)),
        *((1, kind("disk")) for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)),
    ],
    ids=repr,
)
def test_error_follows_the_batches_before_it_with_its_traceback(index, error):
    stream = sf.prefetch(broken_at(index, error), size=2)
    assert [next(stream) for _ in range(index)] == list(range(index))
    with pytest.raises(type(error)) as caught:
        next(stream)
    assert caught.value is error
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert functions[-1] == "broken_at"
    assert "__next__" in functions
    assert next(stream, "over") == "over"  # as after an error of a generator


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wrap", [sf.prefetch, lambda batches, **_: sf.prefetch(batches)])
def test_batches_that_can_be_retried_continue_after_a_read_error(size, wrap):
    fails = [True, True]

    def transform(example):
        if example["x"] == 7 and fails:
            fails.pop()
            raise OSError("disk")
        return example

    batches = numbered(seed=None, epochs=1, transform=transform)
    stream, read, positions = sf.prefetch(wrap(batches, size=2), size=size), [], []
    while len(read) < 4:
        try:
            read.append(next(stream)["x"].tolist())
        except OSError:
            positions.append(stream.get_state()["step"])
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert positions == [2, 2]
    assert next(stream, "over") == "over"


def test_a_batch_that_could_not_be_placed_is_placed_again():
    fails = [True, True]

    def place(batch):
        if batch == 2 and fails and fails.pop():
            raise MemoryError
        return 10 * batch

    stream = sf.prefetch([1, 2, 3], sharding=place)
    assert next(stream) == 10
    for _ in range(2):
        with pytest.raises(MemoryError):
            next(stream)
    assert list(stream) == [20, 30]
    with pytest.raises(
        sf.errors.DataError, match="^sharding: StopIteration was raised while a batch"
    ):
        next(sf.prefetch([1], sharding=lambda batch: next(iter(()))))
    with pytest.raises(
        sf.errors.DataError, match="sharding: expected a batch, got None; return what"
    ):
        next(sf.prefetch([1], sharding=lambda batch: None))


# A sharding as each of several processes sees it.
Elsewhere = type("Elsewhere", (SingleDeviceSharding,), {"is_fully_addressable": False})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batches": "text"}, "expected an iterable of batches, got str 'text'; give batches of"),
        ({"batches": {"x": np.ones(3)}}, "got dict .*; make batches of it with sf.batches"),
        ({"batches": np.ones((4, 2))}, r"got float64\[4,2\]; make batches of it with sf.batches"),
        ({"batches": lambda: [1]}, "got function .*; give what the function returns"),
        ({"batches": None}, "got NoneType None; give a list of batches"),
        ({"size": 0}, "size: expected an integer of at least 1, got 0"),
        ({"sharding": "dp"}, "sharding: expected a sharding, a tree of them, or a function of a b"),
        ({"sharding": {}}, "got dict {}; for a mesh give lambda batch: sf.shard_batch"),
        ({"sharding": sf.make_mesh()}, "got Mesh .*; for a mesh give lambda batch: sf.shard_batch"),
        ({"sharding": {"x": Elsewhere(jax.devices()[0])}}, "got one that spans other processes; g"),
    ],
)
def test_invalid_arguments_are_refused(options, says):
    kind = sf.errors.DataError if "batches" in options else sf.errors.ConfigError
    with pytest.raises(kind, match=says):
        sf.prefetch(**{"batches": [1], **options})


def started(batches, **options):
    """Start to prefetch, and return the thread."""
    before = threads()
    stream = sf.prefetch(batches, **options)
    next(stream)
    (thread,) = (thread for thread in threads() if thread not in before)
    return stream, thread


@pytest.mark.parametrize("size", [1, 50])
def test_thread_ends_with_close_and_the_block_and_when_a_state_is_set(size):
    stream, thread = started(numbered(epochs=None), size=size)
    stream.set_state(stream.get_state())
    assert not thread.is_alive()
    assert threads() == []  # the next one starts with the next batch
    next(stream)
    (thread,) = threads()
    with pytest.raises(ZeroDivisionError), stream:
        1 / 0  # noqa: B018
    assert not thread.is_alive()  # close has joined it
    assert next(stream, "over") == "over"
    stream.close()


def test_thread_ends_with_the_last_batch_and_with_an_error_and_when_deleted():
    stream, thread = started(numbered())
    list(stream)
    assert gone([thread])
    stream, thread = started(broken_at(40, OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        list(stream)
    assert gone([thread])
    stream, thread = started(numbered(epochs=None))
    del stream
    assert gone([thread])  # without a collection, since there is no cycle


class Batch:
    """A batch that can be referred to weakly."""


def test_close_does_not_wait_for_a_blocked_source():
    go, running = threading.Event(), threading.Event()

    def source():
        yield Batch()
        running.set()
        go.wait(60)
        yield Batch()

    before = threads()
    stream = sf.prefetch(source())
    known = weakref.ref(next(stream))
    (thread,) = (thread for thread in threads() if thread not in before)
    running.wait(5)
    assert known() is None  # the thread keeps no batch alive while it waits for the next one
    start = time.perf_counter()
    stream.close()
    assert time.perf_counter() - start < 5
    assert thread.is_alive()
    go.set()
    assert gone([thread])


def test_close_wakes_a_thread_that_waits_for_a_batch():
    go, got = threading.Event(), []
    stream = sf.prefetch(iter(lambda: go.wait(60), None))
    waiting = threading.Thread(target=lambda: got.append(next(stream, "over")))
    waiting.start()
    assert wait_until(threads)
    stream.close()
    waiting.join(5)
    go.set()
    assert got == ["over"]


def test_batches_are_left_out_after_the_last_one_returned():
    whole, stream = seen(numbered()), sf.prefetch(numbered(), size=3)
    assert seen(itertools.islice(stream, 2)) == whole[:2]
    left = stream.without([(2, 4), (6, 7)])
    assert (left.skipped, left.batch_index(2), len(left)) == ([(2, 4), (6, 7)], 4, 5)
    assert (seen(left), seen(stream)) == ([*whole[4:6], whole[7]], whole[2:])
    assert not hasattr(sf.prefetch([1, 2]), "without")


def test_the_thread_enters_every_context_of_jax():
    # A new version may add some: carry them, or say in `internals/jax.py` why not.
    contexts = {name for name in dir(jax) if type(getattr(jax, name)) is type(jax.enable_x64)}
    left_out = {"thread_guard", "jax2tf_associative_scan_reductions"}
    assert {*internals._CONTEXTS} == {*contexts - left_out, "disable_jit"}
