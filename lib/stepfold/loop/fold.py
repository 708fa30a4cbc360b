"""The fold of a step over batches: `iterate` alone, and with what happens between two steps.

A *part* is something that happens between two steps. After a call of the step, `fold` visits the
parts that are due, in their order. Those of `fit` are in `stepfold.loop.parts` and `saves`: `Log`
(hooks see the metrics of the steps up to a log point), `Evaluate`, `EndEpoch`, the parts of the
user, `Save`. `stepfold.loop.plan` says when each is due, and `ending` what happens after the fold.

`Alone` is in this file because each step of a single process passes through it.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from stepfold.core.processes import Position
from stepfold.errors import DataError, refuse, warn
from stepfold.loop.data import BatchFeed
from stepfold.loop.hooks.base import Stop
from stepfold.loop.run import Kind, Request, Run

_TOO_OFTEN = 1_000  # times that a part is done after one step
NO_VALUE = object()  # in place of a value: none is left, or a signal interrupted the wait


def iterate(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Fold batches into a state; yield the state and the metrics after each.

    Nothing is compiled, placed or waited for here. If the step donates its state, use each yielded
    state before the next iteration.

    Args:
      step: a `StepFn`, jitted or compiled for speed.
      state: the initial state.
      batches: any iterable of batches.

    >>> import itertools, jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = jax.jit(sf.make_train_step(lambda p, x, key: sf.mean((p["w"] - x) ** 2), tx))
    >>> for state, metrics in sf.iterate(step, state, itertools.repeat(jnp.zeros(4), 3)):
    ...     print(int(state.step), f"{metrics['loss'].compute():.2f}")
    1 1.00
    2 0.64
    3 0.41
    """
    for batch in batches:
        state, metrics = step(state, batch)
        yield state, metrics


class Part(Protocol):
    """Something that happens between two steps.

    It gets a run and returns the next one. It changes nothing of the run that it gets, so an
    exception leaves that run as it was before the part. A part that has nothing more to do returns
    the run itself. With several processes, all of them do the same parts at the same steps.

    `fit` takes parts among its hooks. It does them after the evaluations and the end of an epoch,
    and before a save. They may also have `open(run)`, called before the first step, and `close()`.
    Both are called again if the run goes back.

    >>> import math, jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> class Halve:
    ...     name, steps = "halving", [5, 10]
    ...     def next(self, run):
    ...         return min((step for step in self.steps if step > run.step), default=math.inf)
    ...     def is_due(self, run):
    ...         return run.step in self.steps and not run.has_note("halved")
    ...     def __call__(self, run):
    ...         halved = run.state._replace(params=0.5 * run.state.params)
    ...         return run._replace(state=halved).note("halved")
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p * x), tx := optax.sgd(0.0))
    >>> state = sf.init_state(jnp.array(8.0), tx, jax.random.key(0))
    >>> sf.fit(step, state, [np.ones(4, np.float32)] * 12, hooks=Halve()).state.params
    Array(2., dtype=float32)
    """

    name: str

    def next(self, run: Run) -> float:
        """Return the next step after which it may be due; no call of several steps crosses it."""

    def is_due(self, run: Run) -> bool:
        """Whether it has something to do before the next step."""

    def __call__(self, run: Run) -> Run:
        """Do it once, even if it is not due."""


Runs = Generator[Run, None, Run]
"""Yields each run, and returns the last."""


def fold(
    run: Run,
    step: Callable[[Any, Sequence[Any]], tuple[Any, Any]],
    feed: BatchFeed,
    parts: Sequence[Part],
    peers: "Alone",
) -> Runs:
    """Fold batches into a run until a request ends it.

    Yields the run after each step and part, so that after an exception the last one is known.
    """
    # First what is due at the start, or was interrupted.
    run = peers.agree_after_visit((yield from visit(parts, run, peers)))
    while run.end is None:
        following = next_due(parts, run)
        while run.step < following and not (run.requests and run.requests.due(run.step)):
            run, batches = peers.pull(feed, run, following)
            if batches:
                state, metrics = step(run.state, batches)  # dispatched, not awaited
                yield (run := run.after(state, metrics, batches))
                peers.move(Position.DEVICES, run.step)
                run = peers.agree(run) if run.step < following else run
            elif run.end is None:  # no request, such as a signal, has interrupted the wait
                run = exhaust(feed, run)
        # A request that ends the run between two visits leaves the rest to `Ending`.
        if run.step >= following or run.end is None:
            yield run  # with the requests on which all agree
            run = peers.agree_after_visit((yield from visit(parts, run, peers)))
    yield run
    return run


def next_due(parts: Sequence[Part], run: Run) -> float:
    """Return the next step after which a part may be due or the run ends."""
    following = math.inf if run.total is None else run.total
    for part in parts:
        if (step := part.next(run)) <= run.step:
            expected = f"next(run) to be a step after {run.step}"
            refuse(f"the part {part.name!r}", expected, repr(step), "return math.inf for none")
        if step < following:
            following = step
    return following


def visit(parts: Sequence[Part], run: Run, peers: "Alone") -> Runs:
    """Do the parts that are due: log, evaluate, end the epoch, save."""
    for part in parts:
        times = 0
        while part.is_due(run) and (changed := peers.do(part, run)) is not run:
            yield (run := changed)
            if (times := times + 1) == _TOO_OFTEN:
                expected = f"is_due(run) to become False once it is done after step {run.step}"
                advice = "note in the run or in the part that it is done"
                refuse(f"the part {part.name!r}", expected, f"True {times} times", advice)
    return run


def complete(part: Part, run: Run, peers: "Alone") -> Runs:
    """Do all that a part of `fit` has to do, even if it is not due; it then returns the run."""
    while (changed := peers.do(part, run)) is not run:
        yield (run := changed)
    return run


def exhaust(feed: BatchFeed, run: Run) -> Run:
    """Return a run that ends since there is no batch left."""
    if run.is_at_start and run.resumed is None:
        refuse("batches", "at least one", "none", kind=DataError)
    if run.total is not None and not feed.is_iterator:
        warn(
            f"batches: expected enough for {run.total} steps, got {run.batches_used};"
            " give epochs=… to iterate them several times, or steps=None to use them once",
        )
    stop = Stop("exhausted", f"the batches ended at step {run.step}")
    return run.ask(Request(Kind.END, run.step, stop))._replace(is_complete=True)


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the fold waits for data or an evaluation."""


class Alone:
    """The processes of a run, if it is a single one: it agrees to each request at once.

    `Several` in `stepfold.loop.peers` does the same for several processes.

    Requests that come from outside the fold, as from signals, wait in an inbox. Four methods bring
    processes together. Each is called where it is, because they differ in what they wait for:

    - `agree`, after each step, and `agree_after_visit`, after a visit of the parts, wait for
      nothing: several processes dispatch a vote, and read the previous one.
    - `hear`, after hooks saw an event, adds the requests that came meanwhile, so that a save comes
      after them. Several processes do not wait here, since another may still call its hooks; they
      vote after the visit.
    - `settle`, after the last step, waits for a vote of all, so that all stop at the same step, for
      requests of the same kinds.
    - `conclude`, once hooks saw the last metrics, exchanges the requests with their reasons, which
      votes do not hold. From then on the run is the same in all processes.

    An error of user code ends a single process at once. With several, the others may be in a step
    or a vote already, which needs all of them. So the process whose hook raised does all that the
    others do, except to call hooks, until a vote shows it to them. Nothing else may depend on it.

    Attributes:
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
        self._inbox = deque[Request]()

    def notify(self, request: Request) -> None:
        """Make a request from outside the fold; safe in any thread and in signal handlers."""
        self._inbox.append(request)

    # In the fold

    def join(self, feed: BatchFeed, run: Run) -> None:
        """Join the others at the start of a fold, and check that all have equally many batches."""

    def pull(self, feed: BatchFeed, run: Run, until: float) -> tuple[Run, list[Any]]:
        """Pull the batches of a call, which goes past no step after `until`; or none."""
        batches: list[Any] = []
        count = int(min(feed.steps_per_call, until - run.step))
        for step in range(run.step, run.step + count):
            may_interrupt = feed.can_go_back
            batch = self.wait_for(feed.next_batch, step, run.state, may_interrupt=may_interrupt)
            if batch is NO_VALUE:
                break
            batches.append(batch)
        return run if batches else self.agree(run), batches

    def do(self, part: Part, run: Run) -> Run:
        """Do a part once."""
        return part(run)

    def agree_after_visit(self, run: Run) -> Run:
        """Do the same as `agree`; several processes vote sooner, since hooks may have requests."""
        return self.agree(run)

    def agree(self, run: Run) -> Run:
        """Add the requests on which all processes agree, without waiting for them."""
        if not self._inbox:
            return run
        requests = []
        while self._inbox:
            requests.append(self._inbox.popleft())
        return run.ask(*requests)

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

    # In parts

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

    def hear(self, run: Run) -> Run:
        """Add the requests that came during an event."""
        return self.agree(run)

    def withdraw(self, run: Run, *kinds: Kind, instead: Sequence[Request] = ()) -> Run:
        """Return the run with `instead` in place of requests that are done, and end their votes."""
        return run.without(*kinds).ask(*instead)

    def forget(self) -> None:
        """Forget what hooks requested, since a checkpoint shows them later events again."""

    def move(self, doing: str, step: int) -> None:
        """Count how far this process is, to find out which one is stuck."""

    # At the end

    def settle(self, run: Run) -> Run:
        """Agree after the last step, on the kinds of requests."""
        return self.agree(run)

    def conclude(self, run: Run) -> Run:
        """Collect the requests of all processes, with their reasons."""
        return self.agree(run)

    def raise_error(self, run: Run) -> None:
        """Raise the error of a hook in any process, which has ended the run."""
