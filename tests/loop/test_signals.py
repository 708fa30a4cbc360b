import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from stepfold.loop.signals import Signals


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request):
    return request.param


def test_a_signal_is_kept_and_the_handlers_are_put_back(number):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signals = Signals()
    with signals.watched():
        assert signals.got is None
        os.kill(os.getpid(), number)
        assert signals.got is number
    assert {one: signal.getsignal(one) for one in before} == before


def test_a_handler_of_ones_own_is_put_back_after_an_error(number):
    mine = lambda *_: None
    before = signal.signal(number, mine)
    try:
        with pytest.raises(OSError), Signals().watched():
            raise OSError
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_a_second_one_leaves_at_once(number):
    signals = Signals()
    with signals.watched():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signals.got is number


def test_a_thread_of_its_own_watches_nothing():
    found = []

    def work():
        with Signals().watched():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_batch_is_given_and_the_end_is_none():
    signals, batches = Signals(), iter([None])
    with signals.watched():
        assert signals.wait_for(lambda step: next(batches), 0) == [None]
        assert signals.wait_for(lambda step: next(batches), 1) is None


def test_after_a_signal_no_batch_is_pulled(number):
    signals = Signals()
    with signals.watched():
        os.kill(os.getpid(), number)
        assert signals.wait_for(lambda step: pytest.fail("pulled"), 0) is None


def test_waiting_is_broken_off(number):
    signals = Signals()
    begun = time.monotonic()

    def waits(step):
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        time.sleep(60)

    with signals.watched():
        assert signals.wait_for(waits, 0) is None
    assert time.monotonic() - begun < 2


def test_an_error_comes_through_and_ends_the_waiting(number):
    def fails(step):
        raise OSError("disk")

    signals = Signals()
    with signals.watched():
        with pytest.raises(OSError, match="disk"):
            signals.wait_for(fails, 0)
        os.kill(os.getpid(), number)  # does not break off anything
    assert signals.got is number


def test_a_process_that_ignores_the_signal_goes_on_ignoring_it_afterwards():
    code = (
        "import os, signal; from stepfold.loop.signals import Signals;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with Signals().watched(): pass\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('there')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "there\n"
