"""`fit`: the default training loop, built from the parts that custom loops use too."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax

from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.core.processes import agreement
from stepfold.core.state import is_available
from stepfold.core.validation import as_integer
from stepfold.errors import refuse, warn
from stepfold.hooks.progress import DefaultProgress
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Nonfinite, Stop
from stepfold.loop.feed import BatchFeed
from stepfold.loop.hook import AnyHook, Hooks, Sink, Stopwatch, call_optional
from stepfold.loop.inbox import Inbox, handle_signals, print_waiting, raise_signal
from stepfold.loop.metrics import History
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.schedule import Schedule
from stepfold.runs.arguments import (
    check_batches,
    check_checkpoints,
    check_end,
    check_epochs,
    check_evaluations,
    check_kinds,
    check_numbers,
    check_resumable,
    check_resume,
    read_hooks,
    watch_metrics,
    with_default_hooks,
    write_config,
)
from stepfold.runs.directory import Moved, RunDirectory, read_run_directory
from stepfold.runs.session import InitialState, Session

if TYPE_CHECKING:
    from stepfold.checkpoint.series import Series
    from stepfold.runs.capsule import Capsule
    from stepfold.runs.files import RunFiles


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    more_steps: int | None = None,
    run_dir: RunDirectory | str | os.PathLike[str] | None = None,
    evaluation: Evaluation | Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    hooks: AnyHook | Sequence[AnyHook] = (),
    log_every: int = 10,
    resume: bool | Sequence[str] = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
    **moved: Unpack[Moved],
) -> "FitResult":
    """Train: fold batches into a state, log, evaluate, and save checkpoints.

    After a step, and where it is due, `fit` logs the metrics, evaluates, calls hooks at the end of
    an epoch, calls parts of the user, saves, and then pulls the next batch. With `checkpoints`,
    the same call resumes from the newest good one: state, data, history and hooks continue as if
    the run had not been interrupted.

    SIGINT and SIGTERM let the current step finish, save, and then raise `KeyboardInterrupt` or
    `SystemExit(143)`. A second signal leaves at once, except for a save that is being written.
    SIGUSR1 saves and continues. An exception of a hook or of the data reaches the caller after a
    save. Each of these exceptions has an attribute `result`, the result so far. With several
    processes, all of them stop at the same step; if one dies, jax ends the others, and the same
    call resumes. The guide explains :doc:`/ideas/between-two-steps`.

    Args:
      step: a `StepFn`. It is compiled before the first step, once for each batch size. A jitted or
        compiled one is used as it is. Its metrics are those of clu, or plain numbers: a number is
        logged as its mean over the steps, each of which has weight one for any size of its batch.
      state: the initial state. It is donated to the step: do not use it again. Or a function that
        makes it, such as `lambda: sf.init_state(…)`, so that a restart is faster: it is only traced
        if there is a checkpoint to resume from. An abstract state, with shardings, can only resume.
      batches: any iterable of batches. With `get_state` and `set_state`, as `sf.batches` has, it
        can be resumed. Batches that depend on the parameters have a method `read_state`: it gets
        the state before each pull, and may use it until the pull returns.
      steps: the step at which the run ends, counted from step 0 of the state: a state of step 10
        does 10 more with `steps=20`.
      epochs: the number of epochs to do, instead of `steps`, from the position of the data on.
      more_steps: the number of steps to do, instead of `steps`, after those of the state or, for a
        complete run that is resumed, of its checkpoint. An interrupted run keeps its target.
        Without any of the three, all batches are used.
      run_dir: a `RunDirectory`, which also takes the config of the run and where its files are
        copied, or just the path of the directory: it gets the metrics, `run.json`, `report.html`,
        and checkpoints unless they have a directory.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions of an `Event`, a `Hook` if it has a state, a `Sink` for what shows or writes
        events, or a `Part` of the run, as `stepfold.loop.fold` describes it. Unless one of them is
        `on_nonfinite`, a NaN or inf in the loss stops the run; the result then has a `capsule`
        for `replay`. Unless one of them shows progress, as `progress` and
        `log_to(console())` do, a run of more than a few seconds prints a line on stderr now
        and then; `progress("none")` turns that off, and the line that says from where a run
        resumes.
      log_every: the steps between log points.
      resume: whether to resume from a checkpoint; if False, an existing one is an error. Or the
        parts of the state to restore, as `restore(parts=…)` takes them, to continue with another
        optimizer: `("params", "model_state", "step", "key")` keeps the optimizer state of `state`.
        Only the first resume does so: later ones restore the whole state that this run has saved.
      steps_per_call: the largest number of steps in one dispatch. No call crosses a log point, an
        evaluation, a save, or a step at which a hook can stop the run. The result is the same up
        to rounding: XLA may fuse the operations of a step differently in a loop.
      time_limit: the number of seconds after which to stop, checked at log points and after
        evaluations.
      **moved: arguments of version 0.2: `upload`, `config` and `compilation_cache`, which belong to
        `RunDirectory`, and `patience`, which belongs to `start_distributed`. They still work, with
        a DeprecationWarning.

    Returns:
      The state, the history of metrics, and why the run stopped.

    Raises:
      ConfigError: if an argument is not as described, or another run uses `run_dir`.
      CheckpointError: if not all processes can see the same directory.
      DataError: if there is no batch, or the batches cannot be resumed.
      StepfoldError: if a hook raised an error in another process; all have saved at the same step.
        Any other error of one process ends the others with code 1, once they have printed it.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    >>> batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    >>> result = sf.fit(step, state, batches, steps=20)
    >>> result.steps, str(result.stop_reason), result.history["train/loss"].steps
    (20, 'all 20 steps were done', [10, 20])
    """
    directory = read_run_directory(run_dir, moved) if run_dir is not None or moved else None
    restored_parts = check_resume(resume)
    may_save = checkpoints is not None
    may_resume = may_save and restored_parts is None
    initial = InitialState.read(state, may_resume=may_resume, may_save=may_save)
    evaluations = check_evaluations(evaluation, initial.state)
    parts, own_hooks, sinks = read_hooks(hooks)
    check_kinds(own_hooks, evaluations)
    lengths = {"steps": steps, "epochs": epochs, "more_steps": more_steps}
    runner = check_numbers(step, lengths, log_every, steps_per_call)
    lengths = {name: as_integer(length) for name, length in lengths.items()}
    steps, epochs, more_steps = lengths.values()
    log_every, steps_per_call = int(log_every), int(steps_per_call)
    check_checkpoints(checkpoints, evaluations)
    all_hooks = with_default_hooks(own_hooks, time_limit)
    feed = BatchFeed(batches, epochs, steps_per_call=steps_per_call, keep_recent=True)
    check_epochs(feed, [*evaluations, checkpoints], all_hooks)
    check_batches(feed, evaluations, steps_per_call)
    check_end(feed, [*lengths.values(), time_limit], own_hooks)
    watched = watch_metrics(own_hooks, checkpoints, evaluations)
    check_resumable(checkpoints, feed, all_hooks)

    with ExitStack() as on_error:  # an argument may be refused
        files = None if directory is None else _open_files(directory, sinks)
        series = None if checkpoints is None else _open_series(checkpoints, files)
        if series is not None:
            on_error.callback(series.close)
        all_sinks = [*sinks]
        if files is not None:
            settings: dict[str, Any] = {"log_every": log_every, "time_limit": time_limit}
            settings = {**lengths, **settings, "steps_per_call": steps_per_call}
            described = {"state": initial.state, "batches": batches, "arguments": settings}
            described |= {"evaluations": evaluations, "checkpoints": checkpoints}
            all_sinks += files.make_sinks(all_hooks, sinks, series, described)
            del described
        if not any(sink.shows_progress for sink in sinks):
            all_sinks.append(DefaultProgress())
        stopwatch = Stopwatch() if files is None else files.stopwatch
        check = None if watched is None else watched.check
        run_hooks = Hooks(all_hooks, all_sinks, stopwatch, check)
        to_do = more_steps or feed.total  # of the epochs, if they are given
        total = initial.step + to_do if to_do else steps
        session = Session(
            schedule=Schedule(
                log_every,
                recurring=[*evaluations, *(checkpoints.schedules if checkpoints else ())],
                logs_epochs=run_hooks.wants_epochs,
                delay=0 if run_hooks.exact else Schedule.delay_of(log_every),
            ),
            runner=runner,
            feed=feed,
            hooks=run_hooks,
            inbox=Inbox() if jax.process_count() == 1 else _voting(),
            evaluations=[each for each in evaluations if not each.remote],
            parts=parts,
            run=Run.start(initial.state, initial.step, feed.first_used, total, initial.hyperparams),
            make_state=initial.make,
            series=series,
            files=files,
            remote_evaluations=[each for each in evaluations if each.remote],
            restored_parts=restored_parts,
        )
        on_error.pop_all()
    if directory is not None and directory.config is not None:
        session.on_open = partial(write_config, sinks, directory.config)
    del state, initial  # so that a restored state can take the memory
    with _attach_result(session), _opened(session, moved):
        _start_or_resume(session, more_steps, resume)
        session.fold()
        while (request := session.run.go_back_request) is not None:
            from stepfold.runs.resume import go_back  # lazy: for checkpoints

            go_back(session, request, more_steps)
            session.fold()
        _take_capsule(session)
    result = _make_result(session, _stop_reason(session) or Stop("error", ""))
    raise_signal(session.inbox, session.run, result)
    if watched is not None:
        watched.warn_of_unseen(result.history)
    _warn_if_untrained(session, result)
    return result


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the state after the last step.
      steps: the number of steps done, including those before a resume.
      history: the values of each metric; `history["train/loss"].steps` are their steps.
      stop_reason: why it stopped, a `Stop` with `kind` and `message`.
      best: the step of the best checkpoint, if `Checkpoints(best=…)` ranks them.
      resumed: the step of the checkpoint that it resumed from, or last went back to; or None.
      capsule: if a NaN or inf ended the run, the inputs of that step for `replay`.
      hooks: the states of hooks and sinks at the end, by name.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), tx)
    >>> result = sf.fit(step, state, [np.ones(4, np.float32)] * 3)
    >>> result.stop_reason.kind, str(result.stop_reason)
    ('exhausted', 'the batches ended at step 3')
    """

    state: Any
    steps: int
    history: History
    stop_reason: Stop
    best: int | None
    resumed: int | None
    capsule: "Capsule | None" = None
    hooks: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        last = {name: curve[-1] for name, curve in self.history.items() if curve}
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in list(last.items())[:6])
        more = ", …" if len(last) > 6 else ""
        return (
            f"FitResult(steps={self.steps}, stop_reason={str(self.stop_reason)!r}, "
            f"history={{{metrics}{more}}}, best={self.best}, resumed={self.resumed})"
        )


def _open_files(directory: RunDirectory, sinks: Sequence[Sink]) -> "RunFiles | None":
    if directory.path is None:
        return None
    from stepfold.runs.files import RunFiles  # lazy: a run without a directory has none

    return RunFiles(directory, has_writer=any(sink.writes_metrics for sink in sinks))


def _open_series(checkpoints: Checkpoints, files: "RunFiles | None") -> "Series":
    """Open the checkpoints of a run, in its directory unless they have one."""
    path: Any = checkpoints.directory
    if path is None and files is None:
        refuse("checkpoints", "a directory", "none", "give run_dir=…, or sf.Checkpoints('path')")
    return checkpoints.open(path or files.path / "checkpoints")  # type: ignore[union-attr]


def _voting() -> Inbox:
    from stepfold.cluster.voting import Voting  # lazy: a run of one process has no use for it

    return Voting()


@contextmanager
def _opened(session: Session, moved: Moved) -> Iterator[None]:
    """Open what belongs to the run, and close it in reverse order, however the run ends."""
    series, inbox, hooks = session.series, session.inbox, session.hooks
    with ExitStack() as stack:
        if series is not None:
            stack.callback(series.close)  # even if another run holds the lock
        if session.files is not None:
            session.files.programs.show = partial(_show, hooks.sinks)
            session.runner.on_compile = session.files.programs.note_step
            how_it_ended = lambda: (session.run, _stop_reason(session))
            on_lost_lock = lambda stop: inbox.notify(Request(Kind.CORRUPTION, 0, stop))
            stack.enter_context(session.files.lock(on_lost_lock, how_it_ended))
        for sink in hooks.sinks:
            stack.callback(sink.close)
        stack.enter_context(handle_signals(inbox))  # until the last save is on disk
        if series is not None:
            stack.enter_context(series)
            stack.callback(print_waiting, inbox, series)
        stack.callback(hooks.stopwatch.end)
        if not inbox.is_alone:
            from stepfold.cluster.patience import end_with_others  # lazy: for several processes

            stack.enter_context(end_with_others(inbox, hooks.sinks, moved))
        yield
        if series is not None and not inbox.is_alone:
            series.wait_together()


def _start_or_resume(session: Session, more_steps: int | None, resume: Any) -> None:
    """Resume from a checkpoint if there is one."""
    series, rollbacks, files = session.series, session.rollbacks, session.files
    if series is not None and rollbacks is not None:
        from stepfold.runs.resume import resume_if_possible  # lazy: for checkpoints

        if resume_if_possible(session, series, rollbacks, more_steps, resume):
            where = series.directory if files is None else files.path
            _show(session.hooks.sinks, f"resuming from step {session.run.resumed} of {where}")
            return
    if session.make_state is not None:
        with agreement("state: not initialized"):
            session.run = session.run._replace(state=session.make_state())
    if files is not None:
        files.start(session.run)
    has_writer = any(getattr(sink, "written_files", ()) for sink in session.hooks.sinks)
    if has_writer or files is not None:
        from stepfold.runs.files import move_earlier_files  # lazy: for files

        move_earlier_files(files, session.hooks.sinks, session.run.step)


def _show(sinks: Sequence[Sink], line: str) -> None:
    """Let the sinks that show progress say how a run starts."""
    for sink in sinks:
        if sink.shows_progress:
            call_optional(sink, "show", line)


def _find_nonfinite(session: Session) -> Nonfinite | None:
    """Return the first NaN or inf that a hook has found, if it may stop the run."""
    for hook, state in zip(session.hooks.hooks, session.run.hook_states, strict=False):
        if hook.declares(Nonfinite) and hook.declares(Stop):
            found = getattr(hook.source, "found", None)
            while found is None and isinstance(state, dict):
                found, state = state.get("_found"), state.get("hook")  # that of a wrapped hook
            if found is not None:
                return found  # type: ignore[no-any-return]
    return None


def _stop_reason(session: Session) -> Stop | None:
    """Return why the run stopped; only corruption takes precedence over a NaN or inf."""
    nonfinite, stop = _find_nonfinite(session), session.run.stop
    if nonfinite is None or stop is None or stop.kind == "corrupt":
        return stop
    why = f"{nonfinite.metric} is {nonfinite.metrics[nonfinite.metric]} in step {nonfinite.step}"
    kind, message = stop
    if why not in message:
        is_end = kind in ("completed", "exhausted")
        message = f"{why}{', seen when ' if is_end else '; '}{message}"
    path = None if session.capsule is None else session.capsule.path
    return Stop("nonfinite", message if path is None else f"{message}; see {path}")


def _take_capsule(session: Session) -> None:
    """Take the capsule of a step with a NaN or inf, if any, and write it to the run's directory."""
    if (nonfinite := _find_nonfinite(session)) is None:
        return
    from stepfold.runs.capsule import save_capsule, take_capsule  # lazy: rarely needed

    run, series, files = session.run, session.series, session.files
    with session.hooks.stopwatch.measure("capsule"):
        if series is not None:
            series.wait()
        saves = None if series is None else series.directory
        rollbacks = session.rollbacks.done if session.rollbacks else ()
        capsule = take_capsule(nonfinite, run, session.feed, directory=saves, rollbacks=rollbacks)
        session.capsule = capsule if files is None else save_capsule(capsule, files.path)


def _make_result(session: Session, stop: Stop, error: BaseException | None = None) -> FitResult:
    """Return the result so far; with `error`, a failure to make it is a note on that."""
    run, series, best = session.run, session.series, None
    try:
        best = None if series is None else series.best_step()
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"the best step is not known: {type(failure).__name__}: {failure}")
    states = zip(session.hooks.names, run.hook_states, strict=False)
    hooks = {name: state for name, state in states if state is not None}
    return FitResult(
        run.state, run.step, run.history, stop, best, run.resumed, session.capsule, hooks
    )


@contextmanager
def _attach_result(session: Session) -> Iterator[None]:
    """Attach the result so far to any exception, unless a second signal forced the exit."""
    try:
        yield
    except BaseException as error:
        if not session.inbox.leaves_at_once and is_available(session.run.state):
            stop = Stop("error", f"{type(error).__name__}: {error}")
            error.result = _make_result(session, stop, error)  # type: ignore[attr-defined]
        raise


def _warn_if_untrained(session: Session, result: FitResult) -> None:
    run, reason = session.run, result.stop_reason
    if run.is_at_start and (session.was_over or run.resumed is None):
        advice = "give more_steps=…, a larger steps=…, more batches"
        if reason.kind not in ("completed", "already_completed", "exhausted"):
            advice = "change the arguments of the hook that stopped the run, give it another name=…"
        warn(f"nothing was trained: {reason}; {advice}, or another directory")
