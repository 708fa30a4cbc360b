"""A watchdog for runs that hang."""

import faulthandler
import sys
import time
from typing import TextIO

from stepfold import tree
from stepfold.core.validation import check_positive
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import BaseHook, Event

_SLACK = 0.1  # as a share of the time; the timer is restarted so often, not at every event


class watchdog(BaseHook):  # noqa: N801
    """Dump the stacks of all threads when no event has come for some time, or abort.

    The time starts with the run, and has to cover everything between two events: compiling, an
    evaluation, a save. The timer may fire up to a tenth later. It is the one of `faulthandler`,
    which needs no lock of Python's, so it fires even if a library hangs while it holds the GIL. A
    process has one such timer, so use one watchdog.

    With `abort` the process exits with code 1 immediately and nothing is saved: a launcher that
    starts it again resumes from the last checkpoint.

    Args:
      seconds: the time from one event to the next.
      abort: whether to end the process.
      file: where to write the stacks, instead of stderr; it needs a file descriptor.

    >>> import stepfold as sf
    >>> hook = sf.watchdog(600)
    >>> hook.open(0, None)
    >>> hook.close()
    """

    def __init__(self, seconds: float, abort: bool = False, *, file: TextIO | None = None) -> None:
        check_positive("watchdog", seconds, unit="seconds")
        if not isinstance(abort, bool):
            raise ConfigError(f"abort: expected True or False, got {tree.spell(abort)}")
        self._seconds, self._abort, self._file = float(seconds), abort, file
        self._started: float | None = None

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self._restart()

    def __call__(self, event: Event) -> None:  # noqa: ARG002
        if self._started is None or time.monotonic() - self._started > _SLACK * self._seconds:
            self._restart()

    def _restart(self) -> None:
        self._started = time.monotonic()
        faulthandler.dump_traceback_later(
            (1 + _SLACK) * self._seconds,
            repeat=not self._abort,
            file=self._file if self._file is not None else sys.__stderr__ or sys.stderr,
            exit=self._abort,
        )

    def close(self) -> None:
        if self._started is not None:
            self._started = None
            faulthandler.cancel_dump_traceback_later()
