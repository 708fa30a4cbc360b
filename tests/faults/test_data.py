"""What sources do wrong reaches the loop, at its step and in words; and nothing hangs."""

import gc
import signal
import subprocess
import sys
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
    assert "expected an example at index 9, got None" in str(error)


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
import itertools, sys, threading, time
import numpy as np
import stepfold as sf

def slow(after):
    yield from itertools.repeat(np.ones(3), after)
    print("waiting", flush=True)
    time.sleep(60)
    yield np.ones(3)

"""


def started(code):
    command = [sys.executable, "-c", START + textwrap.dedent(code)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def ended(process, within):
    """Give the rest of what a program says, and see that it ends in time."""
    start = time.monotonic()
    try:
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - start < within
    return output, errors


def test_an_interrupt_reaches_a_loop_that_waits_for_a_batch():
    process = started("""
        def loop():
            for batch in sf.prefetch(slow(2)):
                pass

        try:
            loop()
        except KeyboardInterrupt:
            print("interrupted", [t.name for t in threading.enumerate() if not t.daemon])
            raise
        """)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = ended(process, within=5)
    assert output == "interrupted ['MainThread']\n"
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert process.returncode == -signal.SIGINT


def test_an_interrupt_leaves_an_iterator_that_goes_on():
    process = started("""
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
        """)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = ended(process, within=5)
    assert (process.returncode, errors) == (0, "")
    assert output == "[1, 'interrupted', 2] ['MainThread']\n"


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
def test_a_program_ends_although_its_source_waits(code):
    process = started(code)
    assert process.stdout.readline() == "waiting\n"
    output, errors = ended(process, within=5)
    assert (process.returncode, output, errors) == (0, "", "")


def test_a_program_ends_although_batches_are_being_placed():
    process = started("""
        import jax
        stream = sf.prefetch(itertools.repeat(np.ones((64, 512))), sharding=jax.device_put, size=99)
        next(stream)
        print("waiting", flush=True)
        """)
    output, errors = ended(process, within=30)
    assert (process.returncode, output, errors) == (0, "waiting\n", "")
