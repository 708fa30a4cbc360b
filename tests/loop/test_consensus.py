import os
import signal
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from stepfold.loop import consensus as consensus_module
from stepfold.loop.consensus import Alone, Several
from stepfold.loop.hooks.base import GoBack, Stop
from stepfold.loop.requests import Kind, Request, Requests, Signals, WaitInterrupted, of_hook


def handler(consensus=None):
    """Make the signal handlers of a run, and what they ask."""
    consensus = consensus or Alone()
    return Signals(consensus.ask_to_end, consensus.ask_to_save), consensus


def agreed(consensus):
    """Return the signal that the processes agree to end by."""
    request = consensus.requests.get(Kind.SIGNAL)
    return None if request is None else request.reason


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request):
    return request.param


def test_a_signal_is_kept_and_the_handlers_are_put_back(number):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signals, consensus = handler()
    with signals.handle():
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received is agreed(consensus) is number
    assert {one: signal.getsignal(one) for one in before} == before


def test_a_handler_of_ones_own_is_put_back_after_an_error(number):
    mine = lambda *_: None
    before = signal.signal(number, mine)
    try:
        with pytest.raises(OSError), handler()[0].handle():
            raise OSError
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_a_second_one_leaves_at_once(number):
    signals, _ = handler()
    with signals.handle():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signals.received, signals.was_repeated) == (number, True)


def test_a_thread_of_its_own_watches_nothing():
    found = []

    def work():
        with handler()[0].handle():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_waiting_is_interrupted(number):
    signals, _ = handler()
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    signals.is_waiting = True
    with signals.handle(), pytest.raises(WaitInterrupted):
        time.sleep(60)
    assert time.monotonic() - began < 2


def test_nothing_else_is_interrupted(number):
    signals, _ = handler()
    with signals.handle():
        os.kill(os.getpid(), number)
    assert signals.received is number


def test_a_signal_that_is_ignored_stays_ignored_afterwards():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with handler()[0].handle():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# Requests


def test_the_highest_request_that_is_due_comes_first():
    requests = Requests()
    for request in (
        Request(Kind.SAVE),
        of_hook(Stop("corrupt", "a leaf differs"), 20, 24),
        of_hook(GoBack(why="a spike"), 10, 14),
        of_hook(Stop("hook", "flat"), 10, 14),
    ):
        requests.add(request)
    kinds = [requests.due(step).kind for step in (9, 10, 13, 14, 20)]
    assert kinds == [Kind.SAVE, Kind.GO_BACK, Kind.GO_BACK, Kind.STOP, Kind.CORRUPTION]


def test_the_first_request_of_a_kind_counts_until_it_is_done():
    requests = Requests()
    for reason in ("first", "second"):
        requests.add(of_hook(Stop("hook", reason), 10, 10))
    assert requests.due(10).reason.message == "first"
    requests.done(Kind.STOP)
    assert requests.due(10) is None


def test_going_back_forgets_what_hooks_asked_for_and_nothing_else():
    requests = Requests()
    requests.add(of_hook(GoBack(), 10, 10))
    requests.add(Request(Kind.STOP, 0, Stop("error", "the lock was lost")))
    requests.add(Request(Kind.SIGNAL, 0, signal.SIGTERM))
    requests.set_state(None)
    assert {request.kind for request in requests} == {Kind.STOP, Kind.SIGNAL}


# Votes of several processes


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
    monkeypatch.setattr(consensus_module, "Gather", lambda group: gather)
    return votes


def agreed_on(stop):
    consensus = Several()
    if stop is not None:
        consensus.ask(of_hook(stop, 1, 1))
    consensus.settle()
    request = consensus.requests.due(1)
    return request and request.reason


def test_several_processes_stop_if_one_has_a_reason(others):
    assert agreed_on(None) is None
    others[1][1] = Kind.STOP
    assert agreed_on(None) == Stop("hook", "process 1 stopped")
    assert agreed_on(Stop("hook", "my own")) == Stop("hook", "my own")


def test_several_processes_stop_if_one_is_signalled(others):
    others[0][0] = int(signal.SIGTERM)
    assert agreed_on(Stop("hook", "my own")) == signal.SIGTERM


def test_corruption_in_one_process_outranks_a_spike_in_another(others):
    others[0][1] = Kind.CORRUPTION
    consensus = Several()
    consensus.ask(of_hook(GoBack(why="a spike"), 1, 1))
    consensus.settle()
    assert consensus.requests.due(1).kind is Kind.CORRUPTION


def test_the_signal_of_another_process_is_no_first_one_of_this(others, number):
    others[0][0] = int(number)
    signals, consensus = handler(Several())
    consensus.settle()
    with signals.handle():
        os.kill(os.getpid(), number)
    assert not signals.was_repeated


def test_a_signal_during_a_vote_counts_in_the_next(others, number):
    signals, consensus = handler(Several())
    with signals.handle():
        consensus.poll(1)
        signal.raise_signal(number)
        consensus.poll(2)  # reads the first votes
        assert (signals.received, agreed(consensus)) == (number, None)
        consensus.poll(3)
    assert agreed(consensus) is number


def steps_of_votes(monkeypatch, others, seconds, last, events=()):
    """Return the steps at which votes are dispatched if a step takes as long in a slow process."""
    steps, now = [], [0.0]
    monkeypatch.setattr(consensus_module.time, "perf_counter", lambda: now[0])
    consensus = Several()
    for step in range(1, last):
        now[0] += 1e-3
        others[0][2] = int(seconds * 1e6)
        if step in events:
            consensus.note_event()
        before = consensus._votes
        consensus.poll(step)
        if consensus._votes is not before:
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
        signals, consensus = handler()
        signals.is_waiting = True  # which only a signal to stop interrupts
        with signals.handle():
            assert not consensus.requests
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert [request.kind for request in consensus.requests] == [Kind.SAVE]
            assert signals.received is None
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@usr1
def test_a_handler_of_the_program_for_sigusr1_stays():
    calls = []
    earlier = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        signals, consensus = handler()
        with signals.handle():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (calls, bool(consensus.requests)) == ([1], False)
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def saves(consensus, steps):
    """Vote at each step, and return the steps at which the processes agree on a save."""
    found = []
    for step in steps:
        consensus.poll(step)
        if Kind.SAVE in consensus.requests:
            found.append(step)
            consensus.done(Kind.SAVE)
    return found


def test_several_processes_save_once_for_each_request_of_one(others):
    others[0][2] = 10_000_000  # a step takes ten seconds, so that each has a vote
    consensus = Several()
    assert saves(consensus, range(1, 5)) == []
    others[1][4] = 1
    assert saves(consensus, range(5, 10)) == [6]  # voted at 5, read at 6
    consensus.ask(Request(Kind.SAVE))
    others[1][4] = 2
    assert saves(consensus, range(10, 15)) == [11]
    assert not consensus.requests


def test_a_request_in_a_vote_that_is_not_read_is_part_of_the_next(others):
    others[0][2] = 10_000_000
    consensus = Several()
    consensus.ask(Request(Kind.SAVE))
    consensus.poll(1)
    assert not consensus.requests
    consensus.settle()  # drops the vote of step 1
    assert Kind.SAVE in consensus.requests
