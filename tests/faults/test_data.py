"""What sources do wrong reaches the loop, at its step and in words; and nothing hangs."""

import gc
import os
import signal
import textwrap
import threading
import time

import numpy as np
import pytest

import stepfold as sf

WRAPS = {
    "plain": lambda batches: batches,
    "ahead": lambda batches: sf.prefetch(batches, size=2),
    "far ahead": lambda batches: sf.prefetch(sf.prefetch(batches, size=1), size=16),
}


@pytest.fixture(params=WRAPS)
def wrap(request):
    return WRAPS[request.param]


class Source:
    """Twenty numbers, of which reading one goes wrong."""

    def __init__(self, index=-1, fault=None):
        self.index, self.fault, self.length = index, fault, 20

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.fault() if index == self.index else np.int64(index)


def raising(error):
    def fault():
        raise error

    return fault


def taken(stream, kind):
    """Take batches until it goes wrong; give them, and the error."""
    batches = []
    with pytest.raises(kind) as caught:
        batches.extend(batch.tolist() for batch in stream)  # keeps those before the error
    return batches, caught.value


def rows(steps):
    return [list(range(4 * step, 4 * step + 4)) for step in range(steps)]


@pytest.mark.parametrize("index", [0, 6, 19])
@pytest.mark.parametrize("error", [OSError("disk"), KeyError("row"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_the_source_comes_at_its_step(wrap, index, error):
    stream = wrap(sf.batches(Source(index, raising(error)), 4))
    batches, caught = taken(stream, type(error))
    assert batches == rows(index // 4)
    assert caught is error
    assert stream.get_state()["step"] == index // 4


def test_none_is_no_example(wrap):
    stream = wrap(sf.batches(Source(9, lambda: None), 4))
    batches, error = taken(stream, sf.DataError)
    assert batches == rows(2)
    assert "expected an example, got None as example 9 of the source" in str(error)


def test_a_source_that_changes_its_length_is_noticed(wrap):
    source = Source()

    def transform(example):
        if example == 7:
            source.length -= 1
        return example

    batches, error = taken(wrap(sf.batches(source, 4, transform=transform)), sf.DataError)
    assert batches == rows(2)
    assert "expected the 20 examples it had when the batches were made, got 19" in str(error)


def test_a_stop_iteration_in_a_transform_does_not_end_an_epoch(wrap):
    transform = lambda example: example if example != 9 else next(iter(()))
    batches, error = taken(wrap(sf.batches(Source(), 4, transform=transform)), sf.DataError)
    assert batches == rows(2)
    assert "StopIteration came up at step 2" in str(error)


def test_a_slow_source_is_waited_for(wrap):
    slow = lambda: time.sleep(0.2) or np.int64(9)
    stream = wrap(sf.batches(Source(9, slow), 4, epochs=1))
    assert [batch.tolist() for batch in stream] == rows(5)


def test_a_thread_whose_iterator_is_in_a_cycle_ends_when_it_is_collected():
    before = set(threading.enumerate())
    stream = sf.prefetch(sf.batches(Source(), 4))
    next(stream)
    (thread,) = set(threading.enumerate()) - before
    stream.cycle = stream
    del stream
    assert thread.is_alive()
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


START = """
import itertools, threading, time
import numpy as np
import stepfold as sf

def slow(after):
    yield from itertools.repeat(np.ones(3), after)
    print("waiting", flush=True)
    time.sleep(60)
    yield np.ones(3)

"""


def runs(source):
    exec(source, globals())


def started(forks, code):
    """Start a program, and wait until its source waits; return the process ID."""
    pid = forks.start(runs, START + textwrap.dedent(code))
    deadline = time.monotonic() + 30
    while not forks.output():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pid


def ended(forks, within):
    """Wait until a program has ended, and check that it ends in time."""
    start = time.monotonic()
    end = forks.wait(30)
    assert time.monotonic() - start < within
    return end


def test_an_interrupt_reaches_a_loop_that_waits_for_a_batch(forks):
    pid = started(forks, """
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
    os.kill(pid, signal.SIGINT)
    end = ended(forks, within=5)
    assert end.output == "waiting\ninterrupted ['MainThread']\n"
    assert end.errors.rstrip().endswith("KeyboardInterrupt")
    assert end.errors.count("Traceback") == 1
    assert end.code == -signal.SIGINT


def test_an_interrupt_leaves_an_iterator_that_goes_on(forks):
    pid = started(forks, """
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
    os.kill(pid, signal.SIGINT)
    output = "waiting\n[1, 'interrupted', 2] ['MainThread']\n"
    assert ended(forks, within=5) == (0, output, "")


@pytest.mark.parametrize(
    "code",
    [
        "stream = sf.prefetch(slow(1)); next(stream); time.sleep(0.2)",
        "with sf.prefetch(slow(1)) as stream: next(stream); time.sleep(0.2)",
        "stream = sf.prefetch(sf.prefetch(slow(3))); next(stream); time.sleep(0.2)",
        "next(sf.prefetch(slow(1))); time.sleep(0.2)",
    ],
    ids=["open", "closed", "nested", "dropped"],
)
def test_a_program_ends_although_its_source_waits(forks, code):
    started(forks, code)
    assert ended(forks, within=5) == (0, "waiting\n", "")


def test_a_program_ends_although_batches_are_being_placed(forks):
    started(forks, """
        import jax
        stream = sf.prefetch(itertools.repeat(np.ones((64, 512))), sharding=jax.device_put, size=99)
        next(stream)
        print("waiting", flush=True)
        """)  # fmt: skip
    assert ended(forks, within=30) == (0, "waiting\n", "")
