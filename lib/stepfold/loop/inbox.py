"""What comes to a run from outside: signals, the clock, a lost lock, another process.

`Inbox` is that of a single process, which acts on each request at once. `Voting` in
`stepfold.cluster.voting` is that of several processes, which agree on them first.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from stepfold.core.processes import Position
from stepfold.loop.feed import BatchFeed
from stepfold.loop.run import Kind, Request, Run

NO_VALUE = object()  # in place of a value: none is left, or a signal interrupted the wait


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the fold waits for data or an evaluation."""


class Inbox:
    """Requests from outside the fold, until the fold reads them between two steps.

    The methods are where several processes differ from one:

    - `hear`, between two stretches, and `hear_after_visit` add the requests on which all agree,
      without waiting for them. Several processes dispatch a vote, and read the previous one.
    - `hear_during_event` adds those that came while hooks saw an event, so that a save comes after
      them. Several processes do not, since another may still call its hooks; they vote after the
      visit.
    - `settle`, after the last step, waits for a vote of all, so that all stop at the same step, for
      requests of the same kinds.
    - `conclude`, once hooks saw the last metrics, exchanges the requests with their reasons, which
      votes do not hold. From then on the run is the same in all processes.

    An error of user code ends a single process at once. With several, the others may be in a step
    or a vote already, which needs all of them. So the process whose hook raised does all that the
    others do, except to call hooks, until a vote shows it to them. Nothing else may depend on it.

    Attributes:
      agreed: the requests on which all processes agree, and which the fold has not read yet.
      position: how far this process is, if there are others.
      error: of a hook, if it is raised only once all processes have stopped and saved.
      signal: the number of the first signal to stop, once it has come.
      leaves_at_once: whether a second one has come.
      leave_together: whether all processes end the run with an error.
      is_waiting: for data or an evaluation, which a signal may interrupt.
    """

    is_alone = True
    position: Position | None = None

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.signal: int | None = None
        self.leaves_at_once = self.leave_together = self.is_waiting = False
        self.agreed = deque[Request]()

    def notify(self, request: Request) -> None:
        """Make a request from outside the fold; safe in any thread and in signal handlers."""
        self.agreed.append(request)

    # In the fold

    def join(self, feed: BatchFeed, run: Run) -> None:
        """Join the others at the start of a fold, and check that all have equally many batches."""

    def next_vote(self, step: int) -> float:  # noqa: ARG002
        """Return the step after which `hear` has something to do, even if nothing came."""
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

    def hear(self, run: Run) -> Run:
        """Add the requests on which all processes agree, without waiting for them."""
        if not self.agreed:
            return run
        requests = []
        while self.agreed:
            requests.append(self.agreed.popleft())
        return run.ask(*requests)

    def hear_after_visit(self, run: Run) -> Run:
        """Do the same as `hear`; several processes vote sooner, since hooks may have requests."""
        return self.hear(run)

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

    def move(self, doing: str, step: int) -> None:
        """Count how far this process is, to find out which one is stuck."""

    # In a visit

    def ask(self, run: Run, *requests: Request) -> Run:
        """Make requests of hooks, which count once all processes agree."""
        return run.ask(*requests)

    def call_hooks(self, run: Run, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ARG002
        """Call hooks by a function; return `NO_VALUE` if they see no more events after an error.

        `run` is the one before the event, which a resume then continues from.
        """
        return function(*args)

    def as_seen(self, run: Run) -> Run:
        """Return the run as a checkpoint keeps it, with the events that hooks have yet to see."""
        return run

    def hear_during_event(self, run: Run) -> Run:
        """Add the requests that came during an event."""
        return self.hear(run)

    def withdraw(self, run: Run, *kinds: Kind, instead: Sequence[Request] = ()) -> Run:
        """Return the run with `instead` in place of requests that are done, and end their votes."""
        return run.without(*kinds).ask(*instead)

    def forget(self) -> None:
        """Forget what hooks requested, since a checkpoint shows them later events again."""

    # At the end

    def settle(self, run: Run) -> Run:
        """Agree after the last step, on the kinds of requests."""
        return self.hear(run)

    def conclude(self, run: Run) -> Run:
        """Collect the requests of all processes, with their reasons."""
        return self.hear(run)

    def raise_error(self, run: Run) -> None:
        """Raise the error of a hook in any process, which has ended the run."""
