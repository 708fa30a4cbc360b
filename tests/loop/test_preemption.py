import os
import signal
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from stepfold.loop import preemption as preemption_module
from stepfold.loop.hooks.base import Stop
from stepfold.loop.preemption import Preemption, WaitInterrupted


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request):
    return request.param


def test_a_signal_is_kept_and_the_handlers_are_put_back(number):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    preemption = Preemption()
    with preemption.handle_signals():
        assert preemption.received is None
        os.kill(os.getpid(), number)
        assert preemption.received is preemption.agreed is number
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
    assert preemption.received is number


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
    assert preemption.received is number


def test_a_signal_that_is_ignored_stays_ignored_afterwards():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Preemption().handle_signals():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


class Votes(NamedTuple):
    rows: np.ndarray

    def addressable_data(self, index):
        return self.rows


@pytest.fixture
def others(monkeypatch):
    """Be the last of three processes; give the votes of the others."""
    votes = [[0] * 5, [0] * 5]
    gather = lambda mine: Votes(np.array([*votes, mine]))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(preemption_module, "Gather", lambda: gather)
    return votes


def agreed_on(stop):
    preemption = Preemption()
    preemption.add_event(stop)
    preemption.agree()
    return preemption.agreed_stop


def test_several_processes_stop_if_one_has_a_reason(others):
    assert agreed_on(None) is None
    others[1][1] = 1
    assert agreed_on(None) == Stop("hook", "process 1 stopped")
    assert agreed_on(Stop("hook", "my own")) == Stop("hook", "my own")


def test_several_processes_stop_if_one_is_signalled(others):
    preemption = Preemption()
    others[0][0] = int(signal.SIGTERM)
    preemption.add_event(Stop("hook", "my own"))
    preemption.agree()
    assert (preemption.agreed, preemption.agreed_stop) == (signal.SIGTERM, None)


def test_the_signal_of_another_process_is_no_first_one_of_this(others, number):
    others[0][0] = int(number)
    preemption = Preemption()
    preemption.agree()
    with preemption.handle_signals():
        os.kill(os.getpid(), number)
    assert not preemption.was_repeated


def test_a_signal_during_a_vote_counts_in_the_next(others, number):
    preemption = Preemption()
    with preemption.handle_signals():
        preemption.vote(1)
        signal.raise_signal(number)
        preemption.vote(2)  # reads the first votes
        assert (preemption.received, preemption.agreed) == (number, None)
        preemption.vote(3)
    assert preemption.agreed is number


def steps_of_votes(monkeypatch, others, seconds, last, events=()):
    """Return the steps at which votes are dispatched if a step takes as long in a slow process."""
    steps, now = [], [0.0]
    monkeypatch.setattr(preemption_module.time, "perf_counter", lambda: now[0])
    preemption = Preemption()
    for step in range(1, last):
        now[0] += 1e-3
        others[0][2] = int(seconds * 1e6)
        if step in events:
            preemption.add_event(None)
        before = preemption._votes
        preemption.vote(step)
        if preemption._votes is not before:
            steps.append(step)
    return steps


def test_all_vote_about_four_times_a_second_at_the_pace_of_the_slowest(monkeypatch, others):
    assert steps_of_votes(monkeypatch, others, 10.0, 9) == [1, 2, 3, 4, 5, 6, 7, 8]
    steps = steps_of_votes(monkeypatch, others, 0.01, 500)
    assert np.diff(steps)[-8:].tolist() == [25] * 8
    own_pace = steps_of_votes(monkeypatch, others, 0.0, 3000)  # 1 ms
    assert np.diff(own_pace)[-5:].tolist() == pytest.approx([250] * 5, abs=1)


def test_votes_are_sooner_after_an_event(monkeypatch, others):
    steps = steps_of_votes(monkeypatch, others, 0.01, 500, events=[400, 440])
    assert {400, 440} <= set(steps)


# Saves by request

usr1 = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")


@usr1
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_sigusr1_requests_saves_and_stops_nothing(before):
    earlier = signal.signal(signal.SIGUSR1, before)
    try:
        preemption = Preemption()
        preemption.is_waiting = True  # which only a signal to stop interrupts
        with preemption.handle_signals():
            assert not preemption.has_agreed
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert (preemption.has_agreed, preemption.agreed_save) == (True, True)
            assert (preemption.received, preemption.agreed) == (None, None)
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@usr1
def test_a_handler_of_the_program_for_sigusr1_stays():
    calls = []
    earlier = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        preemption = Preemption()
        with preemption.handle_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (calls, preemption.has_agreed) == ([1], False)
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def saves(preemption, steps):
    """Vote at each step, and return the steps at which the processes agree on a save."""
    agreed = []
    for step in steps:
        preemption.vote(step)
        if preemption.agreed_save:
            agreed.append(step)
            preemption.agreed_save = preemption.has_agreed = False
    return agreed


def test_several_processes_save_once_for_each_request_of_one(others):
    others[0][2] = 10_000_000  # a step takes ten seconds, so that each has a vote
    preemption = Preemption()
    assert saves(preemption, range(1, 5)) == []
    others[1][4] = 1
    assert saves(preemption, range(5, 10)) == [6]  # voted at 5, read at 6
    preemption.request_save()
    others[1][4] = 2
    assert saves(preemption, range(10, 15)) == [11]
    assert not preemption.has_agreed


def test_a_request_in_a_vote_that_is_not_read_is_part_of_the_next(others):
    others[0][2] = 10_000_000
    preemption = Preemption()
    preemption.request_save()
    preemption.vote(1)
    assert not preemption.agreed_save
    preemption.agree()  # drops the vote of step 1
    assert (preemption.agreed_save, preemption.has_agreed) == (True, True)
