"""What comes to a run from outside: signals, a lost lock, another process.

`Inbox` is a queue of requests for a single process, which acts on them between two steps. `Voting`
in `stepfold.cluster.voting` is that of several processes, which first agree on them.
"""

import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepfold.core.processes import Position
from stepfold.loop.events import Event
from stepfold.loop.feed import BatchFeed
from stepfold.loop.hook import Hooks, States
from stepfold.loop.run import Kind, Request, Run

if TYPE_CHECKING:
    from stepfold.checkpoint.series import Series

NO_VALUE = object()  # in place of a value: none is left, or a signal interrupted the wait


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the fold waits for data or an evaluation."""


class Inbox:
    """Requests from outside the fold, until the fold takes them between two steps.

    Several processes must act on the same requests after the same steps, so the fold calls a method
    at each point of agreement. With a single process, each of them takes the requests so far:

    - `poll_votes` between two stretches, and `poll_votes_after_visit`. Several processes dispatch a
      vote and read the previous one, without waiting.
    - `take_if_alone` after an event, so that a save comes after requests made meanwhile. Several
      processes take nothing there, since another one may still call its hooks.
    - `vote_now` after the last step. Several processes wait for a vote, so that all stop at the
      same step.
    - `exchange_reasons` after hooks saw the last metrics, since votes hold only kinds of requests.
      From then on the run is the same in all processes.

    An error of user code ends a single process at once. With several, the others may be in a step
    or a vote already, which needs all of them. So the process whose hook raised does all that the
    others do, except to call hooks, until a vote shows it to them. Nothing else may depend on it.

    Attributes:
      agreed: the requests that the fold has not taken yet; all processes agree on them.
      position: the progress of this process, if there are others.
      signal: the number of the first signal to stop, once it has come.
      leaves_at_once: whether a second one has come.
      leave_together: whether all processes end the run with an error.
      is_waiting: for data or an evaluation, which a signal may interrupt.
    """

    is_alone = True
    position: Position | None = None

    def __init__(self) -> None:
        self.signal: int | None = None
        self.leaves_at_once = self.leave_together = self.is_waiting = False
        self.agreed = deque[Request]()

    def notify(self, request: Request) -> None:
        """Make a request from outside the fold; safe in any thread and in signal handlers."""
        self.agreed.append(request)

    def poll_votes(self, run: Run) -> Run:
        """Add the requests on which all processes agree."""
        if not self.agreed:
            return run
        requests = []
        while self.agreed:
            requests.append(self.agreed.popleft())
        return run.ask(*requests)

    poll_votes_after_visit = take_if_alone = vote_now = exchange_reasons = poll_votes

    # Batches

    def begin_fold(self, feed: BatchFeed, run: Run) -> None:
        """Check that all processes have the same number of batches, and start counting steps."""

    def next_vote(self, step: int) -> float:  # noqa: ARG002
        """Return the step after which `poll_votes` votes, even if there is no request."""
        return math.inf

    def pull(self, feed: BatchFeed, run: Run, step: int, state: Any, count: int) -> list[Any]:  # noqa: ARG002
        """Pull the batches of a call, at most `count`; none at the end, or if a signal comes.

        `run` is the one at the start of the stretch; `step` and `state` are those before the call.
        """
        batches: list[Any] = []
        for number in range(step, step + count):
            batch = self.wait_for(feed.next_batch, number, state, may_interrupt=feed.can_go_back)
            if batch is NO_VALUE:
                break
            batches.append(batch)
        return batches

    def wait_for(self, function: Callable[..., Any], *args: Any, may_interrupt: bool = True) -> Any:
        """Call a function that may block; return `NO_VALUE` on StopIteration or a signal."""
        try:
            self.is_waiting = may_interrupt
            if self.signal is not None:  # tested after that, or a signal in between is missed
                return NO_VALUE
            value = function(*args)
            # Not only in `finally`, where a signal would raise outside of this `try`.
            self.is_waiting = False
        except (StopIteration, WaitInterrupted):
            return NO_VALUE
        finally:
            self.is_waiting = False
        return value

    def track(self, doing: str, step: int) -> None:
        """Record what this process does, to find out which one is stuck."""

    # Hooks

    def propose(self, run: Run, *requests: Request) -> Run:
        """Make requests of hooks, which count once all processes agree."""
        return run.ask(*requests)

    def call_hooks(self, run: Run, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ARG002
        """Call hooks by a function; return `NO_VALUE` if they see no more events after an error.

        `run` is the one before the event. A resume continues from it.
        """
        return function(*args)

    def update_hooks(
        self,
        run: Run,  # noqa: ARG002
        hooks: Hooks,
        states: States,
        make_event: Callable[[], Event],
    ) -> Any:
        """Call hooks with an event with metrics; either all processes replace the state or none."""
        return hooks.update(states, make_event())

    def as_hooks_saw(self, run: Run) -> Run:
        """Return the run for a checkpoint: after an error, without events that no hook saw."""
        return run

    def drop_requests(self, run: Run, *kinds: Kind, instead: Sequence[Request] = ()) -> Run:
        """Return the run with `instead` in place of some kinds of requests; end their votes."""
        return run.without(*kinds).ask(*instead)

    def drop_hook_requests(self) -> None:
        """Drop what hooks requested; after going back, they see the same events again."""

    def raise_hook_error(self, run: Run) -> None:
        """Raise the error of a hook in any process, which has ended the run."""


# Signals: SIGINT and SIGTERM stop the run after its step and a save, SIGUSR1 saves.

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)  # not on Windows


@contextmanager
def handle_signals(inbox: Inbox) -> Iterator[None]:
    """Put signals into an inbox, and restore the previous handlers; only in the main thread.

    The run acts on them between two steps. A second signal to stop raises KeyboardInterrupt. The
    handler also raises where the run waits for a batch or an evaluation: that may take long, and an
    interrupt there loses nothing.
    """
    pid, previous = os.getpid(), dict[signal.Signals, Any]()

    def restore_handlers() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that a hook forked inherits the handlers
            restore_handlers()
            signal.raise_signal(number)
        elif number == _SAVE_SIGNAL:
            inbox.notify(Request(Kind.SAVE))
        elif inbox.signal is not None:
            inbox.leaves_at_once = True
            raise KeyboardInterrupt
        else:
            inbox.signal = signal.Signals(number)
            inbox.notify(Request(Kind.SIGNAL, 0, inbox.signal))
            if inbox.is_waiting:
                raise WaitInterrupted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous |= {number: signal.signal(number, handle) for number in _STOP_SIGNALS}
    # A handler that the program has for SIGUSR1 stays: schedulers and debuggers use it too.
    if _SAVE_SIGNAL and signal.getsignal(_SAVE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        previous[_SAVE_SIGNAL] = signal.signal(_SAVE_SIGNAL, handle)
    try:
        yield
    finally:
        restore_handlers()


def print_waiting(inbox: Inbox, series: "Series") -> None:
    """After a second signal, print that a save in progress delays the exit."""
    saving = series.saving
    if inbox.leaves_at_once and saving is not None:
        with suppress(OSError, ValueError):  # the other end of a pipe may be gone
            print(  # noqa: T201  a person interrupted twice, and sees nothing happen
                f"waiting for the checkpoint of step {saving}, which is being written",
                file=sys.stderr,
                flush=True,
            )


def raise_signal(inbox: Inbox, run: Run, result: Any) -> None:
    """Raise the exception for a signal, with the result attached."""
    # One that came after the last vote is raised too, now that everything is saved.
    agreed = run.requests.get(Kind.SIGNAL)
    number = inbox.signal if agreed is None else agreed.reason
    if number is None:
        return
    error: Any = SystemExit(128 + number)
    if number == signal.SIGINT:
        error = KeyboardInterrupt(
            f"{result.stop_reason}; the trained state is in this exception: in a notebook or "
            "console, type: import sys; result = sys.last_value.result"
        )
    error.result = result
    raise error
