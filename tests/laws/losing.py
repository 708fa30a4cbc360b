"""Runs that lose devices, simulated in one process: each device stands for a process that may die.

The meetings of one process return at once, so a loss is an exception at a drawn place: a pull, an
evaluation, or a meeting. `Several` votes as in a run of several processes, but after each step.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from tests.laws import random_runs

from stepfold.core.processes import Disbanded, Group
from stepfold.loop.elastic import Elastic, Segments

WAITING = "waiting for a save"  # meetings as often as a clock says


class Lost(Disbanded):
    """A device died."""

    def __init__(self):
        super().__init__(())


class Losses:
    """The places at which devices die, each once."""

    def __init__(self, places, error=Lost, *, forgets=False):
        self.places, self.error, self.forgets = list(places), error, forgets
        self.meetings, self._was_waiting = None, False  # not counted yet
        self.is_in_event = lambda: False  # hooks that have seen it would see it again

    def __call__(self, *place):
        if place in self.places:
            self.places.remove(place)
            raise self.error

    def meet(self, about):
        """Count a meeting, which may be that of a loss."""
        was_waiting, self._was_waiting = self._was_waiting, WAITING in about
        is_same = was_waiting and self._was_waiting
        if self.meetings is not None and not is_same and not self.is_in_event():
            self.meetings += 1
            self("meet", self.meetings)


@dataclass(frozen=True)
class CutGroup(Group):
    """One process, whose meetings may be cut."""

    losses: Any = None

    def only(self, processes):
        assert 0 in processes
        return self

    def meet(self, value=None, about=""):
        self.losses.meet(about)
        return super().meet(value, about)


class CutSegments(Segments):
    """Segments on devices that die."""

    def __init__(self, elastic, losses):
        self._losses, self._left = losses, jax.devices()
        notices = SimpleNamespace(call=lambda *_: None, end=lambda _: None)
        super().__init__(elastic, CutGroup((0,), (0,), losses=losses), notices)

    @property
    def devices(self):
        return self._left

    def attach(self, session):
        super().attach(session)
        self._is_due, self._is_in_event, peers = False, False, session.peers
        settle, hear, dispatch = peers.settle, peers.hear, session.hooks.dispatch

        def begin_event(event):
            self._is_in_event = True
            return dispatch(event)

        def end_event(run):
            self._is_in_event = False
            return hear(run)

        session.hooks.dispatch, peers.hear, peers.agree = begin_event, end_event, settle
        self._losses.is_in_event = lambda: self._is_in_event

    def keep(self, state, step):
        super().keep(state, step)
        self._losses.meetings = self._losses.meetings or 0

    def leave(self, error):
        if not isinstance(error, Lost):
            return super().leave(error)
        self._is_in_event = False
        self._is_due |= bool(self._session.run.requests)  # what was agreed on
        used = random_runs.devices_of(self.plan)
        if len(used) > 1:
            self._left = [device for device in self._left if device != used[-1]]
        if self._losses.forgets:
            self._copy.drop()
        return f"device {used[-1].id} died"

    def repeat(self, session, lost):
        super().repeat(session, lost)
        if self._is_due:  # a vote, which would come a step later
            session.run = session.peers.settle(session.run)
        self._is_due = False


class CutElastic(Elastic):
    """The elastic step of a draw."""

    def __init__(self, build, losses, **options):
        super().__init__(build, **options)
        object.__setattr__(self, "losses", losses)

    def segments(self):
        return CutSegments(self, self.losses)
