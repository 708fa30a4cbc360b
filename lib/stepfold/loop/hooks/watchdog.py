"""A run that hangs."""

import faulthandler
import sys
import time
from typing import Any, TextIO

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Event

_SLACK = 0.1  # it is wound up anew when this share of the time has gone by, not at every event


class watchdog:  # noqa: N801  it is called as the functions beside it are
    """Dump the stack of every thread when no event came for so long, and abort if asked to.

    The time runs from the beginning of the run, and has to cover what there is between two events:
    compiling, an evaluation, a save. It is up to a tenth longer than said. The clock is
    `faulthandler`'s own thread, which needs no lock of Python's: it goes off where a library hangs
    and holds it, too. There is one such clock in a process, so there can be one watchdog.

    With `abort` the process leaves at once with exit code 1, and nothing is saved: a run whose
    launcher starts it again goes on from its last checkpoint.

    >>> import stepfold as sf
    >>> hook = sf.watchdog(600)
    >>> hook.open(0, None)
    >>> hook.close()
    """

    def __init__(self, seconds: float, abort: bool = False, *, file: TextIO | None = None) -> None:
        """Say how long to wait.

        Args:
          seconds: the time from one event to the next.
          abort: whether to end the process.
          file: where the stacks go, in place of stderr; it has to have a file descriptor.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ConfigError(f"watchdog: expected seconds, a number above 0, got {seconds!r}")
        if not isinstance(abort, bool):
            raise ConfigError(f"abort: expected True or False, got {tree.spell(abort)}")
        self._seconds, self._abort, self._file = float(seconds), abort, file
        self._wound: float | None = None

    def open(self, *_: Any) -> None:
        """Begin to watch."""
        self._wind(time.monotonic())

    def __call__(self, _: Event) -> None:
        """See that something happens."""
        now = time.monotonic()
        if self._wound is None or now - self._wound > _SLACK * self._seconds:
            self._wind(now)

    def _wind(self, now: float) -> None:
        self._wound = now
        faulthandler.dump_traceback_later(
            (1 + _SLACK) * self._seconds,
            repeat=not self._abort,
            file=self._file if self._file is not None else sys.__stderr__ or sys.stderr,
            exit=self._abort,
        )

    def close(self) -> None:
        """Watch no longer."""
        if self._wound is not None:
            self._wound = None
            faulthandler.cancel_dump_traceback_later()
