"""A watchdog for runs that hang."""

import faulthandler
import sys
import time
from typing import TextIO

from stepfold import tree
from stepfold.core.validation import check_positive
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import BaseHook, Event


class watchdog(BaseHook):  # noqa: N801
    """Dump the stacks of all threads when no event has come for some seconds, or abort.

    The time starts with the run, and has to cover everything between two events: compiling, an
    evaluation, a save. The timer may fire up to a tenth later. It is the one of `faulthandler`,
    of which a process has one, and fires even if a library hangs while it holds the GIL. With
    `abort` the process exits with code 1 and saves nothing: a launcher that starts it again resumes
    from the last checkpoint. Stacks go to stderr, or to a `file` that has a descriptor.

    >>> import stepfold as sf
    >>> hook = sf.watchdog(600)
    >>> hook.open(0, None)
    >>> hook.close()
    """

    def __init__(self, seconds: float, abort: bool = False, *, file: TextIO | None = None) -> None:
        self._seconds = check_positive("watchdog", seconds, unit="seconds")
        if not isinstance(abort, bool):
            raise ConfigError(f"abort: expected True or False, got {tree.spell(abort)}")
        self._abort, self._file = abort, file
        self._started: float | None = None

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self._started = time.monotonic()
        file = self._file or sys.__stderr__ or sys.stderr
        seconds, repeat = 1.1 * self._seconds, not self._abort
        faulthandler.dump_traceback_later(seconds, repeat=repeat, file=file, exit=self._abort)

    def __call__(self, event: Event) -> None:
        # Restarting the timer costs a thread, so not at every event.
        if self._started is None or time.monotonic() - self._started > 0.1 * self._seconds:
            self.open(event.step, event.total)

    def close(self) -> None:
        if self._started is not None:
            self._started = None
            faulthandler.cancel_dump_traceback_later()
