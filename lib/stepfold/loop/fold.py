"""Fold a step over batches: `iterate` does only that, `fold` also does what is due between steps.

A run is folded by *stretches* of steps, with *visits* between them:

    stretch   the bare loop, until something is due or a request comes
    visit     log, evaluate, end the epoch, call parts of the user, save: each where it is due
    end       the last events, evaluations and save, after the last step

`Schedule` knows when something is due. Requests from outside come through the `Inbox`. A visit is
idempotent: a second one at a step does only what the first one has not done. A fold begins with a
visit, which finishes what an exception interrupted.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import jax

from stepfold.core.processes import Position, agreement, broadcast_from_first
from stepfold.data.epochs import size_at
from stepfold.errors import ConfigError, DataError, refuse, warn
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Event, EventMetrics, HookRequest, Replace, Reweight, Stop
from stepfold.loop.feed import BatchFeed, batch_sizes
from stepfold.loop.hook import Hooks
from stepfold.loop.inbox import NO_VALUE, Inbox, WaitInterrupted
from stepfold.loop.intervals import Steps
from stepfold.loop.metrics import Interval
from stepfold.loop.run import Kind, Request, Run, make_hook_request
from stepfold.loop.saves import Saves
from stepfold.loop.schedule import Schedule
from stepfold.loop.step_runner import StepRunner

_TOO_OFTEN = 1_000  # calls of a part after one step

Runs = Generator[Run, None, Run]
"""Yields each run, so that after an exception the last one is known, and returns the last."""


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
    """User code between two steps: a function from a run to the next run.

    It must not change the run that it gets, since `fit` saves that one after an exception. If there
    is nothing left to do, it returns the same run. With several processes, all of them call the
    same parts at the same steps.

    `fit` takes parts among its hooks. It calls them after the evaluations and the end of an epoch,
    and before a save; after a signal, a resume calls those that are due. They may also have
    `open(run)`, called before the first step, and `close()`. Both are called again if the run goes
    back.

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


class Remote(Protocol):
    """Evaluations that another process makes; `stepfold.runs.remote` reads their results."""

    def open(self, run: Run) -> None: ...
    def end(self, run: Run) -> None: ...
    def is_due(self, run: Run) -> bool: ...
    def take(self, run: Run, setup: "Setup") -> Run:
        """Show hooks the next result; without one, return the same run."""

    def awaits(self, run: Run) -> Sequence[str]:
        """Return the evaluations that a checkpoint of the step awaits."""

    def finish(self, run: Run, setup: "Setup") -> Run:
        """Wait for the next result and show it. At the end, return the run unchanged."""


@dataclass(kw_only=True, eq=False, repr=False)
class Setup:
    """What folds a run: its step, batches, hooks and schedule. It stays the same during a fold."""

    schedule: Schedule
    runner: StepRunner
    feed: BatchFeed
    hooks: Hooks
    inbox: Inbox
    evaluations: Sequence[Evaluation] = ()  # those that this process makes
    remote: Remote | None = None
    parts: Sequence[Part] = ()
    saves: Saves | None = None


def fold(run: Run, setup: Setup) -> Runs:
    """Fold batches into a run until a request ends it, and end it."""
    inbox, feed = setup.inbox, setup.feed
    run = yield from _start(run, setup)
    run = yield from visit(run, setup)
    run = inbox.poll_votes_after_visit(run)
    while run.end is None:
        due_step = next_due(run, setup)
        while run.step < due_step and not (run.requests and run.requests.due(run.step)):
            held, run = [run.batch, run.state], run._replace(state=None, batch=None)
            yield run  # without the state: the first step can only free what nothing else holds
            run, error = stretch(run, held, setup, min(due_step, inbox.next_vote(run.step)))
            yield run
            if error is StopIteration:
                run = inbox.poll_votes(run)
                run = exhaust(feed, run) if run.end is None else run
            elif error is not None:
                raise error
            elif run.step < due_step:
                run = inbox.poll_votes(run)
        # If a request ends the run before the next step that has a visit, `end` does the rest.
        if run.step >= due_step or run.end is None:
            run = yield from visit(run, setup)
            run = inbox.poll_votes_after_visit(run)
    yield run
    return (yield from end(run, setup))


def next_due(run: Run, setup: Setup) -> float:
    """Return the next step after which something may be due or the run ends."""
    schedule, step = setup.schedule, run.step
    reads = [each.step + schedule.delay for each in run.closed]
    due = [schedule.next_due(step), *(each for each in reads if each > step)]
    for part in setup.parts:
        if (following := part.next(run)) <= step:
            argument, expected = f"part {part.name!r}: next(run)", f"a step after {step}"
            refuse(argument, expected, repr(following), "return math.inf for none")
        due.append(following)
    return min(due)


def stretch(run: Run, held: list[Any], setup: Setup, until: float) -> tuple[Run, Any]:
    """Run steps up to a step, or until a request comes: the bare loop.

    `held` is `[batch, state]`. It is emptied, so that the first step can free both. Returns the run
    after the last completed step, and the error: None, an exception, or `StopIteration` if the
    batches ended.
    """
    feed, inbox = setup.feed, setup.inbox
    call, max_steps = _call_of(run, setup), feed.steps_per_call
    agreed, may_interrupt = inbox.agreed, feed.can_go_back  # requests, as they come
    pull = feed.next_batch if max_steps == 1 and inbox.is_alone else None
    error: Any = None
    batch, state = held
    held.clear()
    step, returned = run.step, run.current.returned
    try:
        while step < until and not agreed:
            if pull is not None:  # as `Inbox.pull` does it, which costs more calls
                inbox.is_waiting = may_interrupt
                if inbox.signal is not None:
                    break
                try:
                    batch = pull(step, state)
                except StopIteration:
                    error = StopIteration
                    break
                inbox.is_waiting = False
                state, metrics = call(state, batch)  # dispatched, not awaited
                step += 1
            else:
                batches = inbox.pull(feed, run, step, state, int(min(max_steps, until - step)))
                if not batches:
                    error = StopIteration
                    break
                state, metrics = call(state, batches)
                batch, step = batches[-1], step + len(batches)
                inbox.track(Position.DEVICES, step)
            returned = metrics, returned
    except WaitInterrupted:
        pass  # the signal is in the inbox
    except BaseException as raised:  # noqa: BLE001  raised by `fold`, once it has the run
        error = raised
    finally:
        inbox.is_waiting = False
    done = step - run.step
    run = run._replace(
        state=state,
        step=step,
        batches_used=run.batches_used + done,
        current=Steps(returned, run.current.before),
        batch=batch,
        is_complete=run.is_complete and not done,
    )
    return run, error


def _call_of(run: Run, setup: Setup) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return what runs the step: on a batch, or on the batches of a call."""
    runner, feed = setup.runner, setup.feed
    if setup.schedule.size_changes:
        sizes = batch_sizes(feed.batches)
        size = size_at(sizes, run.batches_used)
        if size != runner.batch_size:
            end = math.inf if run.total is None else run.total - run.step + run.batches_used
            later = [size for start, size in sizes if run.batches_used < start < end]
            runner.set_batch_size(size, later)
    return runner.one() if feed.steps_per_call == 1 and setup.inbox.is_alone else runner


def exhaust(feed: BatchFeed, run: Run) -> Run:
    """Return a run that ends since there is no batch left."""
    if run.is_at_start and run.resumed is None:
        refuse("batches", "at least one", "none", kind=DataError)
    if run.total is not None and not feed.is_iterator:
        warn(
            f"batches: expected enough for {run.total} steps, got {run.batches_used};"
            " give epochs=… to iterate them several times, or steps=None to use them once"
        )
    stop = Stop("exhausted", f"the batches ended at step {run.step}")
    return run.ask(Request(Kind.END, run.step, stop))._replace(is_complete=True)


# Between two stretches


def _start(run: Run, setup: Setup) -> Runs:
    """Show hooks the start of the run. A hook that stopped it before a resume stops it again.

    Process 0 decides for all, so that no process does a step before the first vote.
    """
    event = Event(run.step, run.total, {}, run.state, kind="start")
    with agreement("hooks: not opened"):
        states, _, requests = setup.hooks.update(run.hook_states, event)
    run = run._replace(hook_states=states)
    stops = [[*each] for each in requests if isinstance(each, Stop)]
    if not setup.inbox.is_alone:
        stops = broadcast_from_first(stops)
    if stops and not run.requests.has(Kind.STOP):
        run = run.ask(Request(Kind.STOP, run.step, Stop(*stops[0]), by_hook=True))
    yield run
    return run


def visit(run: Run, setup: Setup) -> Runs:
    """Do what is due after a step."""
    run = yield from log(run, setup)
    for evaluation in setup.evaluations:
        if setup.schedule.evaluates(evaluation, run.step, run.began):
            run = yield from evaluate(run, setup, evaluation)
    remote = setup.remote
    while remote is not None and remote.is_due(run):
        if (shown := remote.take(run, setup)) is run:
            break
        yield (run := shown)
    if run.step != run.total and run.end is None:
        run = yield from end_epoch(run, setup)
    for part in setup.parts:
        if not run.is_interrupted:  # or it would come before an evaluation that is cut
            run = yield from _call_part(part, run, setup.inbox)
    return (yield from save(run, setup))


def log(run: Run, setup: Setup) -> Runs:
    """Close the interval of metrics at a log point, and show hooks the intervals that are due."""
    schedule = setup.schedule
    if run.current and schedule.is_log_point(run.step) and not run.is_at_start:
        waited, mark = setup.feed.wait_seconds, setup.feed.mark(run.step, run.batches_used)
        yield (run := run.close_interval(waited, mark))
    if not run.closed:
        return run
    # A save by a signal waits until hooks saw all metrics, since they may find the state wrong.
    until = run.step if run.requests.has(Kind.SAVE) else schedule.read_until(run.step)
    return (yield from read(run, setup, until))


def read(run: Run, setup: Setup, until: int) -> Runs:
    """Show hooks the metrics of the log points up to a step."""
    setup.inbox.track("hooks", run.step)
    while run.closed and run.closed[0].step <= until:
        shown = run._replace(closed=run.closed[1:])
        yield (run := _show(run, shown, setup, run.closed[0].read, "train", run.closed[0].waited))
    return run


def evaluate(run: Run, setup: Setup, evaluation: Evaluation) -> Runs:
    """Evaluate the state, unless it was evaluated at this step, and show hooks the metrics."""
    inbox, name = setup.inbox, f"evaluation {evaluation.name}"
    if run.evaluated.get(evaluation.name) == run.step:
        return run
    inbox.track(name, run.step)
    with setup.hooks.stopwatch.measure(name):
        metrics = inbox.wait_for(evaluation, run.state, inbox.position)
    inbox.track("hooks", run.step)
    if metrics is NO_VALUE:  # a signal came
        run = inbox.take_if_alone(run)
    else:
        run = show_evaluation(run, setup, evaluation.name, metrics)
    yield run
    return run


def show_evaluation(
    run: Run, setup: Setup, name: str, metrics: Any, step: int | None = None
) -> Run:
    """Show hooks the metrics of an evaluation, of this step or an earlier one."""
    step = run.step if step is None else step
    interval = Interval(step, metrics, {}, {}, perf_counter())
    shown = run._replace(evaluated={**run.evaluated, name: step})
    return _show(run, shown, setup, lambda: interval, name, None)


def end_epoch(run: Run, setup: Setup) -> Runs:
    """Show hooks the end of an epoch, after all other events of its last step."""
    is_new = setup.schedule.logs_epochs and run.step > run.epoch_ended_at
    done = setup.schedule.epochs_done(run.step) if is_new else None
    if done is None:
        return run
    event = Event(run.step, run.total, {}, run.state, kind="epoch", epoch=done - 1)
    shown = run._replace(epoch_ended_at=run.step)
    called = setup.inbox.call_hooks(run, setup.hooks.update, shown.hook_states, event)
    if called is not NO_VALUE:
        states, _, requests = called
        shown = _act(shown._replace(hook_states=states), setup, requests, run.step, run.step)
    yield shown
    return shown


def save(run: Run, setup: Setup) -> Runs:
    """Save where it is due, once hooks know all metrics."""
    saves, step = setup.saves, run.step
    request = run.requests.get(Kind.SAVE)
    is_asked = request is not None and request.step <= step and run.end is None
    if saves is None and is_asked:
        warn("SIGUSR1 ignored: fit has no checkpoints; give checkpoints=…")
        return run.without(Kind.SAVE)
    if saves is None:
        return run
    due = saves.find_due(run)
    if due is None and not is_asked:
        return run
    setup.inbox.track("a save", step)
    if run.is_at_start:
        run = saves.save(run, due)
        if is_asked:  # once there is something new
            run = run.without(Kind.SAVE).ask(Request(Kind.SAVE, step + 1))
        yield run
        return run
    if due is not None and run.current and saves.is_wrong(run, due):
        run = run.close_interval(setup.feed.wait_seconds)  # a hook may find out more
    run = yield from read(run, setup, step)
    if run.end is not None:
        return run
    run = saves.save(run, due)
    if not is_asked:
        saves.warn_of_time(run)
    yield (run := run.without(Kind.SAVE) if is_asked else run)
    return run


def _call_part(part: Part, run: Run, inbox: Inbox) -> Runs:
    """Call a part of the user while it is due."""
    times = 0
    while part.is_due(run):
        inbox.track(part.name, run.step)
        if (changed := part(run)) is run:
            break
        yield (run := changed)
        if (times := times + 1) == _TOO_OFTEN:
            raise ConfigError(
                f"part {part.name!r} is always due: is_due(run) was True {times} times after step "
                f"{run.step}; note in the run or in the part that it is done"
            )
    return run


# Events


def _show(
    run: Run,
    shown: Run,
    setup: Setup,
    read: Callable[[], Interval],
    kind: str,
    waited: float | None,
) -> Run:
    """Show hooks an event; `shown` is the run once they have seen it."""
    inbox, feed = setup.inbox, setup.feed
    make_event = partial(_make_event, run, setup, read, kind, waited)
    called = inbox.update_hooks(run, setup.hooks, shown.hook_states, make_event)
    if called is NO_VALUE:
        return shown
    states, event, requests = called
    run = shown.log(event.step, event.metrics, states)
    if requests:
        at = setup.schedule.read_step(event.step) if kind == "train" else run.step
        run = _act(run, setup, requests, event.step, at)
    run = inbox.take_if_alone(run)
    if kind == "train" and feed.recent and not run.requests:
        feed.recent.drop_until(event.step)  # no hook asks for them
    return run


def _make_event(
    run: Run, setup: Setup, read: Callable[[], Interval], kind: str, waited: float | None
) -> Event:
    interval = read()
    leaves, structure = jax.tree.flatten(run.state)
    return Event(
        interval.step,
        run.total,
        EventMetrics(interval.metrics),
        per_step=interval.per_step,
        weights=interval.weights,
        time=interval.time,
        state=jax.tree.unflatten(structure, leaves),  # hooks may change its containers
        batch=run.batch,
        data_wait_seconds=setup.feed.wait_seconds if waited is None else waited,
        kind=kind,
        hook_seconds=setup.hooks.seconds,
        is_late=kind != "train" and interval.step < run.step,
    )


def _act(run: Run, setup: Setup, requests: Sequence[HookRequest], step: int, at: int) -> Run:
    """Act on requests of hooks at an event of `step`; a reason to stop ends the run after `at`."""
    for request in requests:
        if isinstance(request, Replace | Reweight):
            run = _replace(run, setup, request, at)
        else:
            run = setup.inbox.propose(run, make_hook_request(request, step, at))
    return run


def _replace(run: Run, setup: Setup, request: Replace | Reweight, at: int) -> Run:
    """Replace the state or the weights of a mixture, unless this step was saved before.

    New weights apply to the batches of the steps after `at`.
    """
    if setup.saves is not None and setup.saves.has_saved(run):
        if run.end is None:
            warn(
                f"step {run.step}: {type(request).__name__} ignored, since the step is already "
                f"saved: {request.why}"
            )
        return run
    if isinstance(request, Reweight):
        setup.feed.reweight(request.weights, run.batches_used + max(at, run.step) - run.step)
        return run.note(request.why, "weights")
    return run._replace(state=request.state).note(request.why)


# The end


def end(run: Run, setup: Setup) -> Runs:
    """End a run: show hooks the last metrics, then go back, finish it, or leave it to a resume."""
    inbox = setup.inbox
    run = inbox.vote_now(run)
    run = run._replace(is_complete=run.is_complete or run.step == run.total)
    if run.is_complete and not run.is_interrupted:
        run = run.close_interval(setup.feed.wait_seconds)
    run = yield from read(run, setup, run.step)
    run = _resolve_go_back(inbox.exchange_reasons(run), setup)
    if run.go_back_request is None:
        is_done = run.is_complete and not run.requests.has(Kind.ERROR)
        run = yield from _end_complete(run, setup) if is_done else _end_early(run, setup)
    yield run
    return run


def _end_complete(run: Run, setup: Setup) -> Runs:
    """Evaluate and save after the last batch, unless a signal comes."""
    inbox, saves = setup.inbox, setup.saves
    if not run.is_interrupted:
        run = yield from _last_events(run, setup)
        if setup.remote is not None and not run.requests.has(Kind.GO_BACK):
            yield (run := _save_last(run, saves))
            run = yield from _wait_for_remote(run, setup)
        run = _resolve_go_back(inbox.exchange_reasons(run), setup)
        if run.go_back_request is not None:
            return run
    # A reason to stop does not count once all steps are done.
    has_reason = run.requests.has(Kind.STOP)
    if has_reason and not run.is_interrupted and run.end and run.end.kind is not Kind.STOP:
        run = inbox.drop_requests(run, Kind.STOP)
    run = run._replace(is_complete=not run.is_interrupted)
    yield run
    return _save_last(run, saves)


def _end_early(run: Run, setup: Setup) -> Runs:
    """Save, so that a resume continues the open interval; then evaluate, unless interrupted."""
    inbox, saves = setup.inbox, setup.saves
    run = run._replace(is_complete=False)
    yield (run := inbox.take_if_alone(_save_last(run, saves)))
    if run.requests.has(Kind.GO_BACK):
        run = run._replace(unsaved="the run was to go back")
    if run.is_interrupted:
        return run
    extra = {} if saves is None else saves.describe_end(run)
    ended = yield from _last_events(run, setup)
    ended = inbox.exchange_reasons((yield from _wait_for_remote(ended, setup)))
    if saves is not None and not ended.is_interrupted:
        saves.add_end(run, ended, extra)
    return ended._replace(state=run.state, notes=run.notes)  # as saved


def _save_last(run: Run, saves: Saves | None) -> Run:
    """Save at the end, unless the state may be wrong."""
    return run if saves is None else saves.save(run, saves.find_last(run))


def _last_events(run: Run, setup: Setup) -> Runs:
    """Show hooks the open interval, evaluate a last time, and end the epoch."""
    inbox = setup.inbox
    yield (run := run.close_interval(setup.feed.wait_seconds))
    run = yield from read(run, setup, run.step)
    states = inbox.call_hooks(run, setup.hooks.end, run.hook_states)
    yield (run := run if states is NO_VALUE else run._replace(hook_states=states))
    for evaluation in setup.evaluations:
        run = yield from evaluate(run, setup, evaluation)
    remote = setup.remote
    while remote is not None and (shown := remote.take(run, setup)) is not run:
        yield (run := shown)
    run = yield from end_epoch(run, setup)
    return inbox.take_if_alone(run)


def _wait_for_remote(run: Run, setup: Setup) -> Runs:
    """Wait for the results of another process, and show them."""
    remote = setup.remote
    if remote is None or run.is_interrupted:
        return run
    if setup.saves is not None:
        setup.saves.wait()
    while (changed := remote.finish(run, setup)) is not run:
        yield (run := changed)
    return run


def _resolve_go_back(run: Run, setup: Setup) -> Run:
    """Find the checkpoint for a request to go back, unless a higher request is due."""
    request, inbox = run.requests.get(Kind.GO_BACK), setup.inbox
    if request is None or run.is_interrupted:
        return run
    others = run.requests.without(Kind.GO_BACK, Kind.END).due(run.step)
    if others is not None and others.kind > Kind.GO_BACK:
        return inbox.drop_requests(run, Kind.GO_BACK)
    if setup.saves is None:
        expected = "checkpoints=… for a hook that lets the run go back"
        advice = f"give sf.Checkpoints(every=…): {request.reason.why}"
        refuse("hooks", expected, "none", advice)
    target = setup.saves.find_target(request.reason)
    if isinstance(target, Stop):
        kind = Kind.END if run.is_complete else Kind.STOP
        stop = target._replace(message=f"{target.message}; stopped at step {run.step}")
        request = Request(kind, run.step, stop if run.is_complete else target)
        return inbox.drop_requests(run, Kind.GO_BACK, Kind.END, instead=[request])
    return run._replace(go_back_request=request.reason._replace(to=target))
