"""Telling hooks what happens: each thing once, though an exception may cut it off in the middle."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from stepfold.loop.event import Event, Hook, show
from stepfold.loop.history import History
from stepfold.loop.signals import Signals


class Telling:
    """Show events to hooks, and know what was measured.

    Attributes:
      hooks: the hooks.
      history: all that was measured, by name.
      by_epoch: whether any hook wants to hear of the ends of epochs.
    """

    def __init__(self, hooks: Sequence[Hook], signals: Signals) -> None:
        self.hooks, self.history = hooks, History()
        self._signals = signals
        self._named = _named(hooks)
        self._keeping = [(name, hook) for name, hook in self._named if hasattr(hook, "get_state")]
        self._ending: list[Any] = [hook for hook in hooks if hasattr(hook, "end_epoch")]
        self.by_epoch = bool(self._ending)
        self._before: list[Any] | None = None  # what hooks knew before what they are told now
        self._measured: dict[str, float] = {}
        self._measured_at = -1

    def open(self, step: int, total: int | None) -> None:
        """Tell where the run begins."""
        for hook in self.hooks:
            if hasattr(hook, "open"):
                hook.open(step, total)

    @contextmanager
    def wholly(self) -> Iterator[None]:
        """Keep what hooks knew until all were told, since after an exception they are told anew."""
        self._before = self._known()
        yield
        self._before = None

    def show(self, event: Event) -> str | None:
        """Show an event; of several processes' reasons to stop, all are given the first."""
        event, reasons = show(event, self.hooks)
        self.history.add(event.step, event.metrics)
        new = event.step != self._measured_at
        self._measured = dict(event.metrics) if new else {**self._measured, **event.metrics}
        self._measured_at = event.step
        self._signals.agree()
        if self._signals.got is not None:
            reasons.insert(0, self._signals.got.name)
        return _first_said([reason for reason in reasons if reason])

    def end_epoch(self, epoch: int) -> None:
        """Tell those that want to hear of it that an epoch is over."""
        for hook in self._ending:
            hook.end_epoch(epoch)

    def measured(self, step: int) -> dict[str, float]:
        """Give what was measured at a step."""
        return self._measured if self._measured_at == step else {}

    def get_state(self) -> list[Any]:
        """Give what hooks know, for a checkpoint; what they were told only in part they do not."""
        return self._known() if self._before is None else self._before

    def set_state(self, state: Sequence[Any]) -> None:
        """Give hooks back what they knew."""
        known = dict(state)
        for name, hook in self._named:
            if name in known and hasattr(hook, "set_state"):
                hook.set_state(known[name])

    def _known(self) -> list[Any]:
        return [[name, hook.get_state()] for name, hook in self._keeping]


def _first_said(reasons: Sequence[str]) -> str | None:
    """Give a reason to stop if any process has one; each has to ask."""
    mine = reasons[0] if reasons else None
    if jax.process_count() == 1:
        return mine
    asked = np.asarray(multihost_utils.process_allgather(np.array(bool(reasons))))
    if not asked.any():
        return None
    return mine or f"process {int(np.flatnonzero(asked)[0])} asked to stop"


def _named(hooks: Sequence[Hook]) -> list[tuple[str, Any]]:
    """Name hooks by what they are, so that a resume knows them again though others are there."""
    counts: Counter[str] = Counter()
    named = []
    for hook in hooks:
        kind = getattr(hook, "__qualname__", type(hook).__qualname__)
        counts[kind] += 1
        named.append((f"{kind} {counts[kind]}", hook))
    return named
