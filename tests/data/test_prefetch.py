"""Prefetching changes when a batch is made, and nothing else."""

import gc
import itertools
import json
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
from stepfold.data import prefetch as module


def numbered(count=12, size=3, **options):
    return sf.batches({"x": np.arange(count)}, size, **{"seed": 0, "epochs": 2, **options})


def seen(batches):
    return [batch["x"].tolist() for batch in batches]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def gone(started, within=5.0):
    """Return whether threads end, which they do a little after they are stopped."""
    until = time.monotonic() + within
    while any(thread.is_alive() for thread in started) and time.monotonic() < until:
        time.sleep(0.005)
    return not any(thread.is_alive() for thread in started)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    if not gone(threads(), within=0.2):
        gc.collect()
    assert gone(threads())


@pytest.mark.parametrize("size", [1, 2, 16])
def test_batches_are_the_same_in_the_same_order(size):
    assert seen(sf.prefetch(numbered(), size=size)) == seen(numbered())
    assert list(sf.prefetch([1, 2, 3], size=size)) == [1, 2, 3]
    assert list(sf.prefetch(range(0))) == []


def test_thread_starts_with_the_first_batch_and_reads_ahead_by_size():
    made = []
    stream = sf.prefetch((made.append(i) or i for i in itertools.count()), size=3)
    assert (made, threads()) == ([], [])
    assert next(stream) == 0
    until = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]


def test_latency_of_a_source_is_hidden():
    wait = 0.02

    def source():
        for i in range(10):
            time.sleep(wait)
            yield i

    stream = sf.prefetch(source())
    next(stream)
    start = time.perf_counter()
    for _ in stream:
        time.sleep(wait)
    assert time.perf_counter() - start < 1.5 * 9 * wait  # one after the other takes twice as long


def test_length_is_that_of_the_batches():
    stream = sf.prefetch(numbered())
    assert (len(stream), iter(stream)) == (8, stream)
    assert bool(sf.prefetch([]))
    with pytest.raises(TypeError, match="no length without epochs"):
        len(sf.prefetch(numbered(epochs=None)))
    with pytest.raises(TypeError, match="has no len"):
        len(sf.prefetch(iter([1])))


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
    stream = sf.prefetch(numbered(16, 8), sharding=sharding)
    for placed, batch in zip(stream, numbered(16, 8), strict=True):
        assert isinstance(placed["x"], jax.Array)
        assert placed["x"].sharding.is_equivalent_to(place, 1)
        assert placed["x"].tolist() == batch["x"].tolist()
    called = []
    place = lambda batch: called.append(threading.current_thread().name) or batch
    list(sf.prefetch([1, 2], sharding=place))
    assert called == ["prefetch"] * 2


@pytest.mark.parametrize("sharding", [None, jax.device_put, lambda batch: batch])
@pytest.mark.parametrize("buffers", [1, 2, 3])
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


def test_batches_in_order_are_still_read_only_views():
    source = np.arange(40)
    given = list(sf.prefetch(sf.batches(source, 4, epochs=1)))
    assert np.shares_memory(given[-1], source)
    assert not given[-1].flags.writeable


def test_only_batches_that_cannot_be_overwritten_are_passed_without_a_copy():
    source = np.arange(40)
    buffer = np.zeros(4, int)

    def fill(examples):
        buffer[:] = examples
        return buffer

    with_buffer = sf.batches(source, 4, epochs=1, collate=fill)
    kept = list(sf.prefetch(with_buffer, size=3))
    assert np.concatenate(kept).tolist() == source.tolist()
    batch = next(sf.prefetch(sf.batches(iter(source), 4, collate=lambda examples: buffer)))
    assert not np.shares_memory(batch, buffer)
    whole = [np.ones(2)]
    assert not np.shares_memory(next(sf.prefetch(whole)), whole[0])
    array = jnp.zeros(2)
    batch = next(sf.prefetch([{"x": array, "n": 3, "text": "a", "none": None}]))
    assert batch["x"] is array
    assert (batch["n"], batch["text"], batch["none"]) == (3, "a", None)


def test_state_is_that_of_the_last_batch_returned():
    stream, plain = sf.prefetch(numbered(), size=5), numbered()
    assert stream.get_state() == plain.get_state()
    for _ in range(len(plain)):
        next(stream), next(plain)
        assert json.loads(json.dumps(stream.get_state())) == plain.get_state()
    assert next(stream, None) is None
    assert stream.get_state() == plain.get_state()


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
    with pytest.raises(sf.DataError, match="seed was 1 and is 0"):
        stream.set_state(other)
    assert next(stream)["x"].tolist() == whole[0]
    with pytest.raises(sf.DataError, match="seed was 1 and is 0"):
        stream.set_state(other)
    assert stream.get_state()["step"] == 1
    assert seen(stream) == whole[1:]
    with pytest.raises(sf.DataError, match="seed was 1 and is 0"):
        stream.set_state(other)
    assert list(stream) == []


def test_iterator_is_exhausted_after_a_refused_state():
    stream = sf.prefetch(sf.batches(iter(range(20)), 2, epochs=1), size=3)
    assert next(stream).tolist() == [0, 1]
    given = stream.get_state()
    with pytest.raises(sf.DataError):
        stream.set_state({**given, "step": 5})
    assert stream.get_state() == given  # and not that of what has been read ahead
    assert list(stream) == []
    fresh = sf.prefetch(sf.batches(iter(range(4)), 2, epochs=1))
    with pytest.raises(sf.DataError):
        fresh.set_state({**given, "step": 5})
    assert [batch.tolist() for batch in fresh] == [[0, 1], [2, 3]]  # nothing had been read


def test_batches_without_a_state_are_refused_on_resume():
    stream = sf.prefetch(iter([1, 2]))
    next(stream)
    for name in ("get_state", "set_state"):
        assert not hasattr(stream, name)
        with pytest.raises(
            sf.DataError, match="expected batches with get_state.*got list_iterator"
        ):
            getattr(stream, name)
    with pytest.raises(AttributeError, match="Prefetch has no attribute 'at'"):
        stream.at  # noqa: B018
    assert hasattr(sf.prefetch(numbered()), "get_state")


class OneState:
    """An iterator that returns the same dict for all states, and writes into it."""

    def __init__(self):
        self.state = {"number": 0}

    def __iter__(self):
        return self

    def __next__(self):
        self.state["number"] += 1
        return self.state["number"]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state.update(state)


def test_state_is_copied_before_the_iterator_advances():
    stream = sf.prefetch(OneState(), size=3)
    for number in range(1, 4):
        assert next(stream) == number
        time.sleep(0.01)
        assert stream.get_state() == {"number": number}
    stream.close()


def test_iterators_of_grain_resume():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(np.arange(40)).shuffle(seed=3).batch(4).to_iter_dataset()
    whole = [batch.tolist() for batch in dataset]
    stream = sf.prefetch(dataset, size=3)
    for step in range(len(whole)):
        saved = stream.get_state()
        assert next(stream).tolist() == whole[step]
        resumed = sf.prefetch(dataset)
        resumed.set_state(saved)
        assert [batch.tolist() for batch in resumed] == whole[step:]


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


@pytest.mark.parametrize("index", [0, 1, 5])
def test_error_follows_the_batches_before_it_with_its_traceback(index):
    error = OSError("disk")
    stream = sf.prefetch(broken_at(index, error), size=2)
    assert [next(stream) for _ in range(index)] == list(range(index))
    with pytest.raises(OSError, match="disk") as caught:
        next(stream)
    assert caught.value is error
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert functions[-1] == "broken_at"
    assert "__next__" in functions
    assert next(stream, "over") == "over"  # as after an error of a generator


def test_batch_can_be_read_again_after_an_error():
    fails = [True]

    def transform(example):
        if example["x"] == 7 and fails.pop():
            raise OSError("disk")
        return example

    stream = sf.prefetch(numbered(seed=None, epochs=1, transform=transform))
    with pytest.raises(OSError, match="disk"):
        list(stream)
    assert stream.get_state()["step"] == 2
    fails.append(False)
    stream.set_state(stream.get_state())
    assert seen(stream) == [[6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["source", "stream", "nested"])
def test_batches_that_can_be_retried_continue_after_a_read_error(kind, size):
    fails = [True, True]

    def transform(example):
        if example["x"] == 7 and fails:
            fails.pop()
            raise OSError("disk")
        return example

    batches = numbered(seed=None, epochs=1, transform=transform)
    if kind == "stream":
        batches = sf.batches(Retried(transform), 3, epochs=1)
    elif kind == "nested":
        batches = sf.prefetch(batches)
    stream, read, positions = sf.prefetch(batches, size=size), [], []
    while len(read) < 4:
        try:
            read.append(next(stream)["x"].tolist())
        except OSError:
            positions.append(stream.get_state()["step"])
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert positions == [2, 2]
    assert next(stream, "over") == "over"


class Retried:
    """An iterator over twelve examples that reads the same one again after an error."""

    def __init__(self, transform):
        self.step, self.transform = 0, transform

    def __iter__(self):
        return self

    def __next__(self):
        if self.step == 12:
            raise StopIteration
        example = self.transform({"x": np.int64(self.step)})
        self.step += 1
        return example


def test_a_batch_that_could_not_be_placed_is_placed_again():
    fails = [True]

    def place(batch):
        if batch == 2 and fails and fails.pop():
            raise MemoryError
        return 10 * batch

    stream = sf.prefetch([1, 2, 3], sharding=place)
    assert next(stream) == 10
    with pytest.raises(MemoryError):
        next(stream)
    assert list(stream) == [20, 30]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_other_exceptions_are_raised_too(kind):
    error = kind("disk")
    stream = sf.prefetch(broken_at(1, error), size=5)
    assert next(stream) == 0
    with pytest.raises(kind) as caught:
        next(stream)
    assert caught.value is error


def test_error_of_placement_is_raised_at_its_step_and_no_batch_is_lost():
    stream = sf.prefetch([1, 0, 2], sharding=lambda batch: 1 // batch)
    assert next(stream) == 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            next(stream)
    with pytest.raises(sf.DataError, match="^sharding: StopIteration came up while a batch was p"):
        next(sf.prefetch([1], sharding=lambda batch: next(iter(()))))
    with pytest.raises(sf.DataError, match="sharding: expected a batch, got None; return what"):
        next(sf.prefetch([1], sharding=lambda batch: None))


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ("text", "expected an iterable of batches, got str 'text'; give batches of numbers"),
        ({"x": np.ones(3)}, "got dict .*; make batches of it with sf.batches"),
        (np.ones((4, 2)), r"got float64\[4,2\]; make batches of it with sf.batches"),
        (jnp.ones(3), r"got float32\[3\]; make batches of it"),
        (lambda: [1], "got function .*; give what the function returns"),
        (3, "got int 3; give a list of batches"),
        (None, "got NoneType None; give a list of batches"),
    ],
)
def test_invalid_batches_are_refused(batches, says):
    with pytest.raises(sf.DataError, match=says):
        sf.prefetch(batches)


class Elsewhere(SingleDeviceSharding):
    """A sharding as each of several processes sees it."""

    is_fully_addressable = False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "size: expected an integer of at least 1, got 0"),
        ({"size": 1.5}, "size: expected an integer of at least 1, got 1.5"),
        ({"sharding": "dp"}, "sharding: expected a sharding, a tree of them, or a function of a b"),
        ({"sharding": {}}, "got dict {}; for a mesh give lambda batch: sf.shard_batch"),
        ({"sharding": PartitionSpec("dp")}, "sharding: expected a sharding, a tree of them"),
    ],
)
def test_invalid_arguments_are_refused(options, says):
    with pytest.raises(sf.ConfigError, match=says):
        sf.prefetch([1], **options)


def test_mesh_and_sharding_over_processes_are_refused():
    with pytest.raises(sf.ConfigError, match="got Mesh .*; for a mesh give lambda batch: sf.shard"):
        sf.prefetch([1], sharding=sf.make_mesh())
    with pytest.raises(sf.ConfigError, match="got one that spans other processes; give lambda b"):
        sf.prefetch([1], sharding={"x": Elsewhere(jax.devices()[0])})


def started(batches, **options):
    """Start to prefetch, and return the thread."""
    before = threads()
    stream = sf.prefetch(batches, **options)
    next(stream)
    (thread,) = (thread for thread in threads() if thread not in before)
    return stream, thread


def test_thread_ends_with_the_last_batch_and_with_an_error():
    stream, thread = started(numbered())
    list(stream)
    assert gone([thread])
    stream, thread = started(broken_at(40, OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        list(stream)
    assert gone([thread])


@pytest.mark.parametrize("size", [1, 50])
def test_thread_ends_with_close(size):
    stream, thread = started(numbered(epochs=None), size=size)
    stream.close()
    assert not thread.is_alive()  # close has joined it
    assert list(stream) == []
    stream.close()


def test_thread_ends_with_the_block_and_its_error():
    stream, thread = started(numbered(epochs=None))
    with pytest.raises(ZeroDivisionError), stream:
        1 / 0  # noqa: B018
    assert not thread.is_alive()
    assert next(stream, "over") == "over"


def test_thread_ends_when_a_state_is_set():
    stream, thread = started(numbered(epochs=None))
    stream.set_state(stream.get_state())
    assert not thread.is_alive()
    assert threads() == []  # the next one starts with the next batch


def test_thread_ends_when_the_iterator_is_deleted():
    stream, thread = started(numbered(epochs=None))
    del stream
    assert gone([thread])  # without a collection, since there is no cycle


def test_handled_error_keeps_no_reference_to_the_iterator():
    stream = sf.prefetch(1 // batch for batch in [0])
    gc.disable()
    try:
        try:
            next(stream)
        except ZeroDivisionError as error:
            del error
        known = weakref.ref(stream)
        del stream
        assert known() is None
    finally:
        gc.enable()


def test_close_does_not_wait_for_a_blocked_source():
    go, running = threading.Event(), threading.Event()

    def source():
        yield 1
        running.set()
        go.wait(60)
        yield 2

    stream, thread = started(source())
    running.wait(5)
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
    while not threads():
        time.sleep(0.001)
    stream.close()
    waiting.join(5)
    go.set()
    assert got == ["over"]


def test_several_threads_may_iterate():
    stream, got = sf.prefetch(numbered(3000, 3, epochs=1), size=2), []

    def take():
        for batch in stream:
            got.append(batch["x"].tolist())  # noqa: PERF401

    takers = [threading.Thread(target=take) for _ in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(20)
    assert sorted(got) == sorted(seen(numbered(3000, 3, epochs=1)))
    assert stream.get_state()["step"] == 1000


def test_returned_batch_is_not_kept_alive():
    class Batch:
        pass

    go = threading.Event()

    def source():
        yield Batch()
        go.wait(60)

    stream = sf.prefetch(source())
    known = weakref.ref(next(stream))
    assert known() is None  # although the thread waits for the next one
    go.set()


def test_steps_per_epoch_are_those_of_the_batches():
    data = {"x": np.zeros(8, np.float32)}
    assert sf.prefetch(sf.batches(data, 2)).steps_per_epoch == 4
    assert sf.prefetch([1, 2]).steps_per_epoch is None


def test_batches_are_left_out_after_the_last_one_returned():
    whole, stream = seen(numbered()), sf.prefetch(numbered(), size=3)
    assert seen(itertools.islice(stream, 2)) == whole[:2]
    left = stream.without([(2, 4), (6, 7)])
    assert (left.skipped, left.batch_index(2), len(left)) == ([(2, 4), (6, 7)], 4, 5)
    assert left.epoch_ends.end(1) == 2
    assert seen(left) == [*whole[4:6], whole[7]]
    assert seen(stream) == whole[2:]  # its own position is the same
    with pytest.raises(sf.ConfigError, match="expected a list of pairs"):
        stream.without([2])
    assert not hasattr(sf.prefetch([1, 2]), "without")


def test_batches_of_a_stream_are_left_out_after_the_last_one_returned():
    class Numbers:
        def __init__(self):
            self.get_state, self.set_state, self.next = lambda: self.next, self._move, -1

        def __iter__(self):
            return self

        def __next__(self):
            self.next += 1
            return self.next

        def _move(self, state):
            self.next = state

    stream = sf.prefetch(sf.batches(Numbers(), 2), size=8)
    assert next(stream).tolist() == [0, 1]
    assert next(stream.without([(1, 3)])).tolist() == [6, 7]


def test_the_thread_enters_every_context_of_jax():
    # A new version may add some: carry them, or say in `prefetch.py` why not.
    contexts = {name for name in dir(jax) if type(getattr(jax, name)) is type(jax.enable_x64)}
    left_out = {"thread_guard", "jax2tf_associative_scan_reductions"}
    assert {*module._CONTEXTS, "disable_jit"} == {*contexts - left_out, "disable_jit"}
