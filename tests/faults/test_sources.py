"""Sources and streams that break: the error is clear, nothing is lost, and no program hangs."""

import signal
import textwrap
import time

import jax
import numpy as np
import pytest

import stepfold as sf


def full(*values):
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


class Flaky:
    """A source or a stream of numbers that fails as often as it is told to."""

    def __init__(self, count, failures):
        self.count, self.failures, self.next = count, dict(failures), 0

    def give(self, index):
        if self.failures.get(index, 0):
            self.failures[index] -= 1
            raise ConnectionError(f"no answer about {index}")
        return index


class Indexed(Flaky):
    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.give(index)


class AtOnce(Indexed):
    def __getitems__(self, indices):
        return [self.give(index) for index in indices]


class InOrder(Flaky):
    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.count:
            raise StopIteration
        example = self.give(self.next)
        self.next += 1
        return example


def insisting(stream):
    """Ask again when there is an error, and count how often that was."""
    found, errors = [], 0
    while True:
        try:
            found.append(next(stream).tolist())
        except StopIteration:
            return found, errors
        except ConnectionError:
            errors += 1


@pytest.mark.parametrize("kind", [Indexed, AtOnce, InOrder])
def test_what_fails_for_a_while_is_asked_again_and_nothing_is_lost(kind):
    source, transform = kind(23, {0: 1, 7: 3, 8: 1, 22: 2}), Flaky(23, {3: 1, 11: 2}).give
    batches = sf.batches(source, 5, epochs=1, remainder="keep", transform=transform)
    found, errors = insisting(batches)
    assert [x for batch in found for x in batch] == list(range(23))
    assert errors == 10


def test_a_position_saved_after_an_error_is_that_of_the_last_whole_batch():
    import grain

    flaky = Flaky(20, {9: 1})
    make = lambda: grain.MapDataset.range(20).to_iter_dataset().map(flaky.give)
    stream = sf.batches(make(), 4)
    next(stream), next(stream)
    with pytest.raises(ConnectionError):
        next(stream)
    resumed = sf.batches(make(), 4)
    resumed.set_state(stream.get_state())
    assert next(resumed).tolist() == [8, 9, 10, 11]


def broken(count, at):
    for index in range(count):
        if index == at:
            raise OSError("disk")
        yield index


def test_a_generator_that_raised_does_not_end_as_if_all_were_well():
    stream = sf.batches(broken(20, at=9), 4, remainder="keep")
    assert [next(stream).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="disk") as caught:
        next(stream)
    note = "reading example 9 of epoch 0 of the stream, for the batch of step 2"
    assert caught.value.__notes__ == [note]
    for _ in range(2):
        says = r"continues after an error, got one that ended after raising OSError\('disk'\)"
        with pytest.raises(sf.errors.DataError, match=says) as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, OSError)
    assert stream.get_state()["step"] == 2


def test_a_function_that_cannot_begin_anew_says_in_which_epoch():
    beginnings = iter([range(4)])
    stream = sf.batches(lambda: next(beginnings, None), 4)
    next(stream)
    with pytest.raises(sf.errors.DataError, match="got one that makes NoneType None") as caught:
        next(stream)
    assert "reading example 0 of epoch 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("process", [0, 1])
def test_a_missing_example_of_a_stream_is_refused_on_every_process(process):
    share = {"process_index": process, "process_count": 2}
    stream = sf.batches(iter([0, 1, 2, 3, 4, None, 6, 7]), 4, **share)
    next(stream)
    for _ in range(2):
        with pytest.raises(
            sf.errors.DataError, match="got None as example 5 of the stream"
        ) as caught:
            next(stream)
        assert "making the batch of step 1: examples 4 to 7" in caught.value.__notes__[0]


def test_a_stream_of_what_does_not_stack_says_which_and_keeps_it():
    ragged = [np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(2)]
    stream = sf.batches(iter(ragged), 2)
    next(stream)
    for _ in range(2):
        with pytest.raises(
            sf.errors.DataError, match=r"float64\[3\] at index 2 and float64\[2\] at in"
        ):
            next(stream)
    padded = sf.batches(iter(ragged), 2, collate=lambda rows: sf.collate(rows, length=3))
    assert [jax.tree.map(np.shape, batch) for batch in padded][1]["mask"] == (2, 3)


# Programs whose source waits


START = """
import itertools, threading, time
import numpy as np
import stepfold as sf

waits = threading.Event()

def slow(after):
    yield from itertools.repeat(np.ones(3), after)
    print("waiting", flush=True)
    waits.set()
    time.sleep(600)
    yield np.ones(3)

"""


def runs(source):
    exec(source, globals())


def started(forks, code):
    """Start a program, and wait until its source waits."""
    process = forks.start(runs, START + textwrap.dedent(code))
    deadline = time.monotonic() + 60
    while not process.output():
        assert time.monotonic() < deadline, process.errors()
        time.sleep(0.01)
    return process


def test_an_interrupt_reaches_a_loop_that_waits_for_a_batch(forks):
    process = started(forks, """
        def loop():
            for batch in sf.prefetch(slow(2)):
                pass

        try:
            loop()
        except KeyboardInterrupt:
            print("interrupted", [t.name for t in threading.enumerate() if not t.daemon])
            raise
        """)  # fmt: skip
    time.sleep(0.1)
    process.kill(signal.SIGINT)
    end = process.wait()
    assert end.output == "waiting\ninterrupted ['MainThread']\n"
    assert end.errors.rstrip().endswith("KeyboardInterrupt")
    assert end.errors.count("Traceback") == 1
    assert end.code == -signal.SIGINT


def test_an_interrupt_leaves_an_iterator_that_goes_on(forks):
    process = started(forks, """
        def source():
            yield 1
            print("waiting", flush=True)
            time.sleep(1)
            yield 2

        stream = sf.prefetch(source())
        got = [next(stream)]
        try:
            got += [next(stream)]
        except KeyboardInterrupt:
            got += ["interrupted"]
        print(got + list(stream), [t.name for t in threading.enumerate()])
        """)  # fmt: skip
    time.sleep(0.1)
    process.kill(signal.SIGINT)
    output = "waiting\n[1, 'interrupted', 2] ['MainThread']\n"
    assert process.wait() == (0, output, "")


@pytest.mark.parametrize(
    "code",
    [
        "stream = sf.prefetch(slow(1)); next(stream); time.sleep(0.2)",
        *full(
            "with sf.prefetch(slow(1)) as stream: next(stream); time.sleep(0.2)",
            "stream = sf.prefetch(sf.prefetch(slow(3))); next(stream); time.sleep(0.2)",
            "s = sf.prefetch(slow(1)); next(s); waits.wait(); del s; time.sleep(0.2)",
        ),
    ],
)
def test_a_program_ends_although_its_source_waits(forks, code):
    assert started(forks, code).wait() == (0, "waiting\n", "")


@pytest.mark.full
def test_a_program_ends_although_batches_are_being_placed(forks):
    process = started(forks, """
        import jax
        stream = sf.prefetch(itertools.repeat(np.ones((64, 512))), sharding=jax.device_put, size=99)
        next(stream)
        print("waiting", flush=True)
        """)  # fmt: skip
    assert process.wait() == (0, "waiting\n", "")
