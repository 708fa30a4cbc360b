import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from stepfold.loop.hooks.base import Stop
from stepfold.loop.preemption import Preemption, WaitInterrupted


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request):
    return request.param


def test_a_signal_is_kept_and_the_handlers_are_put_back(number):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    preemption = Preemption()
    with preemption.handle_signals():
        assert preemption.signal is None
        os.kill(os.getpid(), number)
        assert preemption.signal is number
    assert {one: signal.getsignal(one) for one in before} == before


def test_a_handler_of_ones_own_is_put_back_after_an_error(number):
    mine = lambda *_: None
    before = signal.signal(number, mine)
    try:
        with pytest.raises(OSError), Preemption().handle_signals():
            raise OSError
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_a_second_one_leaves_at_once(number):
    preemption = Preemption()
    with preemption.handle_signals():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert preemption.signal is number


def test_a_thread_of_its_own_watches_nothing():
    found = []

    def work():
        with Preemption().handle_signals():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_waiting_is_interrupted(number):
    preemption = Preemption()
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    preemption.is_waiting = True
    with preemption.handle_signals(), pytest.raises(WaitInterrupted):
        time.sleep(60)
    assert time.monotonic() - began < 2


def test_nothing_else_is_interrupted(number):
    preemption = Preemption()
    with preemption.handle_signals():
        os.kill(os.getpid(), number)
    assert preemption.signal is number


def test_a_process_that_ignores_the_signal_goes_on_ignoring_it_afterwards():
    code = (
        "import os, signal; from stepfold.loop.preemption import Preemption;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with Preemption().handle_signals(): pass\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('there')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "there\n"


@pytest.fixture
def others(monkeypatch):
    """Be the last of three processes; give the votes of the others."""
    votes = [[0, 0], [0, 0]]
    gather = lambda mine: np.array([*votes, mine])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    return votes


def test_several_processes_stop_if_one_has_a_reason(others):
    agree = lambda stop: Preemption().agree(stop)
    assert agree(None) is None
    others[1][1] = 1
    assert agree(None) == Stop("hook", "process 1 stopped")
    assert agree(Stop("hook", "my own")) == Stop("hook", "my own")


def test_several_processes_stop_if_one_is_signalled(others):
    preemption = Preemption()
    others[0][0] = int(signal.SIGTERM)
    assert preemption.agree(Stop("hook", "my own")) == Stop("signal", "SIGTERM")
    assert preemption.signal is signal.SIGTERM
