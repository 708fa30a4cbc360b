"""Signals are kept until the processes of a run agree on what to do, which they do by votes."""

import contextlib
import inspect
import os
import signal
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from stepfold.cluster import voting as voting_module
from stepfold.cluster.voting import Voting
from stepfold.loop.events import GoBack, Stop
from stepfold.loop.inbox import Inbox, WaitInterrupted, handle_signals
from stepfold.loop.run import Kind, Request, Requests, Run, make_hook_request


def handler(inbox=None):
    """Make the signal handlers of a run, and the inbox that they ask."""
    inbox = inbox or Inbox()
    return lambda: handle_signals(inbox), inbox


def at(step, run=None):
    """Return a run at a step."""
    return (run or Run.start((), 0, 0, None, {}))._replace(step=step)


def agreed(run):
    """Return the signal that the processes agree to end by."""
    request = run.requests.get(Kind.SIGNAL)
    return None if request is None else request.reason


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request):
    return request.param


@contextlib.contextmanager
def handled_by(number, handler):
    """Let a program handle a signal before a run does."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_a_signal_is_kept_and_the_handlers_are_put_back(number, before):
    with handled_by(number, before):
        signals, inbox = handler()
        with contextlib.suppress(OSError), signals():
            assert inbox.signal is None
            os.kill(os.getpid(), number)
            assert inbox.signal is agreed(inbox.poll_votes(at(1))) is number
            raise OSError
        assert signal.getsignal(number) is before


def test_a_second_one_leaves_at_once(number):
    signals, inbox = handler()
    with signals():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (inbox.signal, inbox.leaves_at_once) == (number, True)


def test_a_thread_of_its_own_watches_nothing():
    found = []

    def work():
        with handler()[0]():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_waiting_is_interrupted(number):
    signals, inbox = handler()
    inbox.is_waiting = True

    def wait():
        os.kill(os.getpid(), number)
        time.sleep(10)

    with signals(), pytest.raises(WaitInterrupted):
        wait()


# Requests


def test_the_highest_request_that_is_due_comes_first():
    requests = Requests().add(
        Request(Kind.SAVE),
        make_hook_request(Stop("corrupt", "a leaf differs"), 20, 24),
        make_hook_request(GoBack(why="a spike"), 10, 14),
        make_hook_request(Stop("hook", "flat"), 10, 14),
    )
    kinds = [requests.due(step).kind for step in (9, 10, 13, 14, 20)]
    assert kinds == [Kind.SAVE, Kind.GO_BACK, Kind.GO_BACK, Kind.STOP, Kind.CORRUPTION]


def test_the_first_request_of_a_kind_counts_until_it_is_done():
    requests = Requests().add(
        *(make_hook_request(Stop("hook", why), 10, 10) for why in ("first", "second"))
    )
    assert requests.due(10).reason.message == "first"
    assert requests.without(Kind.STOP).due(10) is None


def test_going_back_forgets_what_hooks_asked_for_and_nothing_else():
    lost = Request(Kind.STOP, 0, Stop("error", "the lock was lost"))
    for first in (
        make_hook_request(GoBack(), 10, 10),
        make_hook_request(Stop("hook", "flat"), 10, 10),
    ):
        requests = Requests().add(first, lost, Request(Kind.SIGNAL, 0, signal.SIGTERM))
        assert {request.kind for request in requests.carried_over()} == {Kind.STOP, Kind.SIGNAL}


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
    monkeypatch.setattr(voting_module, "Gather", lambda: gather)
    return votes


def agreed_on(stop):
    inbox, run = Voting(), at(1)
    if stop is not None:
        run = inbox.propose(run, make_hook_request(stop, 1, 1))
    request = inbox.vote_now(run).requests.due(1)
    return request and request.reason


def test_several_processes_stop_if_one_has_a_reason_or_is_signalled(others):
    assert agreed_on(None) is None
    others[1][1] = Kind.STOP
    assert agreed_on(None) == Stop("hook", "process 1 stopped")
    assert agreed_on(Stop("hook", "my own")) == Stop("hook", "my own")
    others[0][0] = int(signal.SIGTERM)
    assert agreed_on(Stop("hook", "my own")) == signal.SIGTERM


def test_corruption_in_one_process_outranks_a_spike_in_another(others):
    others[0][1] = Kind.CORRUPTION
    inbox = Voting()
    run = inbox.vote_now(inbox.propose(at(1), make_hook_request(GoBack(why="a spike"), 1, 1)))
    assert run.requests.due(1).kind is Kind.CORRUPTION


def test_the_signal_of_another_process_is_no_first_one_of_this(others, number):
    others[0][0] = int(number)
    signals, inbox = handler(Voting())
    inbox.vote_now(at(1))
    with signals():
        os.kill(os.getpid(), number)
    assert not inbox.leaves_at_once


def test_a_signal_during_a_vote_counts_in_the_next(others, number):
    signals, inbox = handler(Voting())
    with signals():
        inbox.poll_votes(at(1))
        signal.raise_signal(number)
        run = inbox.poll_votes(at(2))  # reads the first votes
        assert (inbox.signal, agreed(run)) == (number, None)
        run = inbox.poll_votes(at(3))
    assert agreed(run) is number


def steps_of_votes(monkeypatch, others, seconds, last, visits=()):
    """Return the steps at which votes are dispatched if a step takes as long in a slow process."""
    steps, now = [], [0.0]
    monkeypatch.setattr(voting_module.time, "perf_counter", lambda: now[0])
    inbox = Voting()
    for step in range(1, last):
        now[0] += 1e-3
        others[0][2] = int(seconds * 1e6)
        before = inbox._votes
        poll = inbox.poll_votes_after_visit if step in visits else inbox.poll_votes
        poll(at(step))
        if inbox._votes is not before:
            steps.append(step)
    return steps


def test_all_vote_about_four_times_a_second_at_the_pace_of_the_slowest(monkeypatch, others):
    assert steps_of_votes(monkeypatch, others, 10.0, 9) == [1, 2, 3, 4, 5, 6, 7, 8]
    steps = steps_of_votes(monkeypatch, others, 0.01, 500)
    assert np.diff(steps)[-8:].tolist() == [25] * 8
    own_pace = steps_of_votes(monkeypatch, others, 0.0, 3000)  # 1 ms
    assert np.diff(own_pace)[-5:].tolist() == pytest.approx([250] * 5, abs=1)
    sooner = steps_of_votes(monkeypatch, others, 0.01, 500, visits=[400, 440])
    assert {400, 440} <= set(sooner)


# Saves by request


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_sigusr1_requests_saves_unless_the_program_handles_it_and_stops_nothing(before):
    with handled_by(signal.SIGUSR1, before):
        signals, inbox = handler()
        inbox.is_waiting = True  # which only a signal to stop interrupts
        with signals():
            assert not inbox.poll_votes(at(1)).requests
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
            kinds = [request.kind for request in inbox.poll_votes(at(1)).requests]
            assert kinds == ([] if inspect.isfunction(before) else [Kind.SAVE])
            assert inbox.signal is None
        assert signal.getsignal(signal.SIGUSR1) is before


def saves(inbox, steps):
    """Vote at each step, and return the steps at which the processes agree on a save."""
    return [step for step in steps if inbox.poll_votes(at(step)).requests.has(Kind.SAVE)]


def test_several_processes_save_once_for_each_request_of_one(others):
    others[0][2] = 10_000_000  # a step takes ten seconds, so that each has a vote
    inbox = Voting()
    assert saves(inbox, range(1, 5)) == []
    others[1][4] = 1
    assert saves(inbox, range(5, 10)) == [6]  # voted at 5, read at 6
    inbox.notify(Request(Kind.SAVE))
    others[1][4] = 2
    assert saves(inbox, range(10, 15)) == [11]


def test_a_request_in_a_vote_that_is_not_read_is_part_of_the_next(others):
    others[0][2] = 10_000_000
    inbox = Voting()
    inbox.notify(Request(Kind.SAVE))
    assert not inbox.poll_votes(at(1)).requests
    run = inbox.vote_now(at(1))  # drops the vote of step 1
    assert run.requests.has(Kind.SAVE)
