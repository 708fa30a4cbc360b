import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import stepfold as sf
from stepfold.loop.signals import Signals
from stepfold.loop.telling import Telling


class Counting:
    def __init__(self):
        self.seen = 0
        self.ended = []

    def __call__(self, event):
        self.seen += 1

    def end_epoch(self, epoch):
        self.ended.append(epoch)

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = state


def event(step, **metrics):
    return sf.Event(step, None, metrics, None)


def test_what_is_measured_at_a_step_is_put_together():
    telling = Telling([lambda event: {"twice": 2 * event.metrics["loss"]}], Signals())
    telling.show(event(10, loss=1.0))
    telling.show(sf.Event(10, None, {"loss": 1.0, "eval": 3.0}, None))
    assert telling.measured(10) == {"loss": 1.0, "twice": 2.0, "eval": 3.0}
    telling.show(event(20, loss=4.0))
    assert telling.measured(20) == {"loss": 4.0, "twice": 8.0}
    assert telling.measured(10) == {}
    assert telling.history["twice"].steps == [10, 20]


def test_the_first_reason_to_stop_is_the_one():
    telling = Telling([lambda event: None, lambda event: "enough", lambda event: "late"], Signals())
    assert telling.show(event(1)) == "enough"
    assert Telling([lambda event: None], Signals()).show(event(1)) is None


def test_what_hooks_know_is_what_they_knew_before_they_were_told_in_part():
    hook = Counting()

    def failing(event):
        raise ZeroDivisionError

    telling = Telling([hook, failing], Signals())
    with pytest.raises(ZeroDivisionError), telling.wholly():
        telling.show(event(1))
    assert (hook.seen, telling.get_state()) == (1, [["Counting 1", 0]])


def test_hooks_of_one_kind_are_known_again_by_their_order():
    one, other = Counting(), Counting()
    telling = Telling([one, lambda event: None, other], Signals())
    with telling.wholly():
        telling.show(event(1))
    other.seen = 7
    kept = telling.get_state()
    assert kept == [["Counting 1", 1], ["Counting 2", 7]]
    again = [Counting(), Counting(), Counting()]
    Telling(again, Signals()).set_state(kept)
    assert [hook.seen for hook in again] == [1, 7, 0]


def test_who_wants_to_hear_of_epochs_does():
    hook = Counting()
    telling = Telling([hook, lambda event: None], Signals())
    telling.end_epoch(3)
    assert (telling.by_epoch, hook.ended) == (True, [3])
    assert not Telling([lambda event: None], Signals()).by_epoch


@pytest.fixture
def others(monkeypatch):
    """Be one of three processes, of which the others ask to stop as they are told to."""
    asked = [False, False]
    signals = [0, 0]
    gather = lambda mine: np.array([*(asked if mine.dtype == bool else signals), mine])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    return asked


def test_of_several_reasons_to_stop_the_first_counts():
    say = lambda *said: Telling([lambda event, s=s: s for s in said], Signals()).show(event(1))
    assert (say(None, ""), say("a", "b")) == (None, "a")


def test_several_processes_stop_where_one_has_a_reason(others):
    say = lambda said: Telling([lambda event: said], Signals()).show(event(1))
    assert say(None) is None
    others[1] = True
    assert say(None) == "process 1 asked to stop"
    assert say("my own") == "my own"
