"""A run as one immutable value: all that steps and hooks change. Only its history grows in place.

A checkpoint keeps the state, the position of the data, and what `to_checkpoint` returns. To resume,
to go back and to continue after an exception are the same: fold from another value.

Hooks, signals, the lock of the run directory and other processes make requests. The run acts on
them between two steps, the highest kind first. They are part of the run, and say why it ends.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from signal import Signals as Signal
from time import perf_counter
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.errors import refuse
from stepfold.loop.events import GoBack, Stop
from stepfold.loop.feed import DataPosition
from stepfold.loop.intervals import Steps, intervals_from_json, intervals_to_json
from stepfold.loop.metrics import History

FORMAT = 3  # of a run in a checkpoint; to increment when the meaning changes
_MAX_NOTES = 100
# Attributes that a checkpoint keeps as they are, and their types.
_PLAIN = {
    "epoch_ended_at": int,
    "logged_step": int,
    "began": int,
    "is_complete": bool,
    "evaluated": dict,
    "logged_metrics": dict,
    "hyperparams": dict,
}


class Kind(enum.IntEnum):
    """Kinds of requests; a higher one comes first."""

    SAVE = 1
    GO_BACK = 2
    STOP = 3  # for a reason that a hook or the lock gave
    SIGNAL = 4
    END = 5  # all steps are done, or the batches ended
    CORRUPTION = 6  # of the state, or another run may own the directory: nothing is saved
    ERROR = 7  # user code raised one, in some process


class Request(NamedTuple):
    """Something to do after `step`, or as soon as possible if that has passed.

    Requests of hooks belong to the state of the run. A checkpoint keeps a reason to stop until the
    run has stopped for it. Going back drops what hooks requested after the checkpoint.
    """

    kind: Kind
    step: int = 0
    reason: Any = None  # a Stop, a GoBack, or the number of a signal
    by_hook: bool = False


class Requests(tuple[Request, ...]):
    """Pending requests: the first of each kind, with those of hooks apart.

    >>> requests = Requests().add(Request(Kind.STOP, 7, Stop("hook", "enough")))
    >>> requests.due(6), requests.due(7).reason.message, requests.without(Kind.STOP).has(Kind.STOP)
    (None, 'enough', False)
    """

    __slots__ = ()

    def has(self, *kinds: Kind) -> bool:
        """Whether a request of one of the kinds is pending."""
        return any(request.kind in kinds for request in self)

    def get(self, kind: Kind) -> Request | None:
        """Return the first request of a kind."""
        return next((request for request in self if request.kind is kind), None)

    def add(self, *requests: Request) -> "Requests":
        """Add requests, unless others of their kind are pending."""
        known, waiting = {(each.kind, each.by_hook) for each in self}, list(self)
        for request in requests:
            if (request.kind, request.by_hook) not in known:
                known.add((request.kind, request.by_hook))
                waiting.append(request)
        return Requests(waiting)

    def without(self, *kinds: Kind) -> "Requests":
        """Return all requests but those of some kinds."""
        return Requests(request for request in self if request.kind not in kinds)

    def due(self, step: int) -> Request | None:
        """Return the request of the highest kind that is due after a step; the first of several."""
        due = (request for request in self if request.step <= step)
        return max(due, key=lambda request: request.kind, default=None)

    def carried_over(self) -> "Requests":
        """Return the requests that still count when the run continues from an earlier value.

        That value has its own requests of hooks, and the batches will end again.
        """
        obsolete = Kind.SAVE, Kind.END
        return Requests(each for each in self if not each.by_hook and each.kind not in obsolete)

    def to_checkpoint(self) -> list[Any] | None:
        """Return the step and the reason of a pending stop by a hook, or None."""
        stops = (each for each in self if each.kind is Kind.STOP and each.by_hook)
        return next(([stop.step, *stop.reason] for stop in stops), None)


def stop_from_checkpoint(saved: Any) -> Iterable[Request]:
    """Return the reason of a hook to stop that a checkpoint has, if any."""
    if saved is None:
        return ()
    step, kind, message = saved
    if type(step) is not int:
        refuse("stop", "a step", repr(step), kind=TypeError)
    return (Request(Kind.STOP, step, Stop(str(kind), str(message)), by_hook=True),)


def make_hook_request(reason: Stop | GoBack, step: int, stops_at: int) -> Request:
    """Make a request of what a hook returned at `step`; a plain reason stops at `stops_at`."""
    if isinstance(reason, GoBack):
        return Request(Kind.GO_BACK, step, reason, by_hook=True)
    if reason.kind == "corrupt":
        return Request(Kind.CORRUPTION, step, reason, by_hook=True)
    return Request(Kind.STOP, stops_at, reason, by_hook=True)


class Run(NamedTuple):
    """All that changes during a run.

    Attributes:
      state: the state after `step`; the next step may donate it.
      step: the number of steps done.
      batches_used: the number of batches that steps have used, counted from the first of the data.
      current: the interval of train metrics since the last log point.
      batch: the batch of the last step.
      is_complete: whether all steps were done, so that a resume has nothing to finish.
      total: the step at which the run ends; None if the batches say so.
      began: the step at which the run began.
      epoch_ended_at: the last step at which hooks were called for the end of an epoch.
      logged_step, logged_metrics: the step of the last event, and all metrics of that step.
      evaluated: the last step of each evaluation, by name.
      hyperparams: of the optimizer: those that the script sets, with the values that the run uses.
      history: the curves of all metrics. This field grows in place, since a copy at each event
        would make the cost of a run quadratic. Curves only grow at their end, so those of an
        earlier run are the beginning of those of a later one. `from_checkpoint` makes another
        history, which ends at the checkpoint.
      closed: the intervals of earlier log points that hooks have not seen yet.
      hook_states: the states of the hooks and sinks, in their order.
      requests: what to do between two steps.
      notes: replacements of the state, as lists (step, why), or of the weights of a mixture, as
        lists (step, why, "weights").
      marks: positions of the data at the start and at the last log points.
      resumed: the step of the checkpoint that it resumed from, or last went back to; or None.
      has_news: whether hooks saw an event that the last checkpoint lacks.
      unsaved: why its state was not saved at the end, if it was not.
      go_back_request: the request to go back that ended it, with the step of the checkpoint.
    """

    # What each step changes:
    state: Any
    step: int
    batches_used: int
    current: Steps
    batch: Any
    is_complete: bool
    # What changes between steps:
    total: int | None
    began: int
    epoch_ended_at: int
    logged_step: int
    logged_metrics: Mapping[str, float]
    evaluated: Mapping[str, int]
    hyperparams: Mapping[str, Any]
    history: History
    closed: tuple[Steps, ...] = ()
    hook_states: tuple[Any, ...] = ()
    requests: Requests = Requests()
    notes: tuple[Any, ...] = ()
    marks: tuple[DataPosition, ...] = ()
    resumed: int | None = None
    has_news: bool = False
    unsaved: str = ""
    go_back_request: GoBack | None = None

    @classmethod
    def start(
        cls,
        state: Any,
        step: int,
        batches_used: int,
        total: int | None,
        hyperparams: Mapping[str, Any],
    ) -> "Run":
        """Return a run that begins after a step."""
        return cls(
            state=state,
            step=step,
            batches_used=batches_used,
            current=Steps(),
            batch=None,
            is_complete=total is not None and step >= total,
            total=total,
            began=step,
            epoch_ended_at=step,
            logged_step=step,
            logged_metrics={},
            evaluated={},
            hyperparams=hyperparams,
            history=History(),
        )

    def __repr__(self) -> str:
        return f"Run(step={self.step}, total={self.total}, began={self.began}, end={self.end})"

    # Steps

    @property
    def is_at_start(self) -> bool:
        """Whether no step was done since the run began or resumed."""
        return self.step in (self.began, self.resumed)

    def close_interval(self, waited: float, mark: DataPosition | None = None) -> "Run":
        """Close the interval of train metrics; nothing if it is empty.

        `waited` is the number of seconds spent waiting for batches so far. At a log point, `mark`
        is the position of the data. The marks of the start and of the last three log points are
        kept, so that one of them precedes each step that hooks have not seen.
        """
        if not self.current:
            return self
        now = perf_counter()
        closed = Steps(self.current.returned, self.current.before, self.step, now, waited)
        marks = self.marks if mark is None else (*self.marks[:1], *self.marks[1:][-2:], mark)
        return self._replace(current=Steps(), closed=(*self.closed, closed), marks=marks)

    def log(self, step: int, metrics: Mapping[str, float], hook_states: tuple[Any, ...]) -> "Run":
        """Add the metrics of an event. Those of an earlier step do not become the last ones."""
        self.history.add(step, metrics)
        if step < self.logged_step:
            return self._replace(hook_states=hook_states, has_news=True)
        before = self.logged_metrics if step == self.logged_step else {}
        return self._replace(
            logged_step=step,
            logged_metrics={**before, **metrics},
            hook_states=hook_states,
            has_news=True,
        )

    def note(self, *note: Any) -> "Run":
        """Note a replacement of the state, or of the weights of a mixture."""
        return self._replace(notes=(*self.notes[1 - _MAX_NOTES :], [self.step, *note]))

    def has_note(self, *note: Any) -> bool:
        """Whether a note of this step begins with these values; without values, any note."""
        expected = [self.step, *note]
        return any(each[: len(expected)] == expected for each in self.notes)

    # Requests

    def ask(self, *requests: Request) -> "Run":
        """Add requests."""
        return self._replace(requests=self.requests.add(*requests))

    def without(self, *kinds: Kind) -> "Run":
        """Return the run without requests of some kinds, which are done."""
        return self._replace(requests=self.requests.without(*kinds))

    @property
    def end(self) -> Request | None:
        """The request that ends the run now, if any."""
        due = self.requests.due(self.step) if self.requests else None
        has_all = self.total is not None and self.step >= self.total
        if has_all and (due is None or due.kind < Kind.END):
            stop = Stop("completed", f"all {self.total} steps were done")
            return Request(Kind.END, self.step, stop)
        return None if due is None or due.kind is Kind.SAVE else due

    @property
    def stop(self) -> Stop | None:
        """Why the run ends, in words."""
        if (end := self.end) is None:
            return None
        match end.kind:
            case Kind.SIGNAL:
                kind, message = "signal", f"{Signal(end.reason).name} at step {self.step}"
            case Kind.GO_BACK:
                is_request = isinstance(end.reason, GoBack)
                kind, message = "go_back", end.reason.why if is_request else str(end.reason)
            case Kind.END:
                kind, message = end.reason
            case _:
                kind, message = end.reason
                message = f"{message}; stopped at step {self.step}".removeprefix("; ")
        why = f"; not saved, because {self.unsaved}" if self.unsaved else ""
        return Stop(kind, f"{message}{why}")

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal or an error ends the run, so that a resume has to finish it."""
        return self.requests.has(Kind.SIGNAL, Kind.ERROR)

    # Checkpoints

    def to_checkpoint(
        self, hooks: Sequence[Any], *, has_history: bool = True, logs_epochs: bool = True
    ) -> Any:
        """Return what a checkpoint keeps next to the state and the position of the data.

        `hooks` are the names and states of hooks.
        Its size does not grow with the run. Without `has_history`, the history is in a file.
        Without `logs_epochs`, a hook that a resume adds does not see an epoch that ends here.
        """
        saved = {name: getattr(self, name) for name in _PLAIN}
        saved |= {} if logs_epochs else {"epoch_ended_at": self.step}
        return saved | {
            "format": FORMAT,
            "total": self.total,
            "batches_used": self.batches_used,
            "history": self.history.get_state() if has_history else {},
            "buffer": intervals_to_json(self.current, self.closed),
            "hooks": hooks,
            "stop": self.requests.to_checkpoint(),
            "replacements": [*self.notes],
        }

    def from_checkpoint(self, saved: Mapping[str, Any], state: Any, step: int) -> "Run":
        """Return this run as of a checkpoint: `saved` is what `to_checkpoint` returned there.

        `saved` may hold anything, and is empty if the checkpoint has only a state. The result keeps
        the total of this run, and the requests that did not come from hooks. `continue_from` sets
        the number of batches, the states of hooks and perhaps the total, since they depend on the
        arguments of `fit`.
        """
        run = Run.start(state, step, step, self.total, {})._replace(
            is_complete=False,
            requests=self.requests.carried_over(),
            resumed=self.resumed,
        )
        if not saved:
            return run
        plain = {name: saved[name] for name in _PLAIN}
        for name, value in [*plain.items(), ("replacements", saved["replacements"])]:
            if type(value) is not _PLAIN.get(name, list):
                raise TypeError(f"{name}: {tree.describe_value(value)}")
        if type(saved["total"]) not in (int, type(None)):
            raise TypeError(f"total: {tree.describe_value(saved['total'])}")
        # A checkpoint has the last points, unless all are in a file; earlier ones stay.
        history = History(self.history if saved["history"] else ())
        history.set_state(saved["history"])
        current, closed = intervals_from_json(saved["buffer"])
        return run.ask(*stop_from_checkpoint(saved["stop"]))._replace(
            **plain,
            history=history,
            current=current,
            closed=closed,
            notes=tuple(saved["replacements"]),
        )
