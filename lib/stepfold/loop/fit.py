"""`fit`: the default training loop, built from the parts that custom loops use too."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax

from stepfold.checkpoint.policy import Checkpoints
from stepfold.checkpoint.results import drop_results
from stepfold.checkpoint.series import Series
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.state import is_available
from stepfold.core.validation import as_integer
from stepfold.errors import refuse, warn
from stepfold.loop.arguments import (
    WatchedMetrics,
    check_batches,
    check_checkpoints,
    check_end,
    check_epochs,
    check_evaluations,
    check_hooks,
    check_kinds,
    check_numbers,
    check_resumable,
    check_resume,
    split_parts,
    with_default_hooks,
    write_config,
)
from stepfold.loop.data import BatchFeed
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.fold import Alone
from stepfold.loop.hooks.base import GoBack, Hook, HookDispatcher, Stop, call_optional, may_stop
from stepfold.loop.hooks.progress import DefaultProgress, progress
from stepfold.loop.hooks.stop import Nonfinite
from stepfold.loop.initial_state import InitialState
from stepfold.loop.metrics import History
from stepfold.loop.patience import end_with_others
from stepfold.loop.peers import Several
from stepfold.loop.replay.capsule import Capsule, save_capsule, take_capsule
from stepfold.loop.run import Kind, Request
from stepfold.loop.run_directory import Moved, RunDirectory, RunFiles, read_run_directory
from stepfold.loop.run_info import read_config, run_metadata
from stepfold.loop.session import Options, Session
from stepfold.loop.signals import Signals, print_waiting, raise_signal


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
    hooks: Hook | Sequence[Hook] = (),
    log_every: int = 10,
    resume: bool | Sequence[str] = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
    **moved: Unpack[Moved],
) -> "FitResult":
    """Train: fold batches into a state, log, evaluate, and save checkpoints.

    After a step, and where it is due, `fit` logs the metrics, evaluates, calls hooks at the end of
    an epoch, does the parts of the user, saves, and then pulls the next batch. With `checkpoints`,
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
        logged as its mean over the steps, each of which has weight one, whatever the size of its
        batch.
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
      hooks: functions of an `Event`, or a `Part` of the run, as `stepfold.loop.fold` describes it.
        Unless one of them is `stop_on_nonfinite`, a NaN or inf in the loss stops the run; the
        result then has a `capsule` for `replay`. Unless one of them shows progress, as `progress`
        and `log_to(console_writer())` do, a run of more than a few seconds prints a line on stderr
        now and then; `progress("none")` turns that off, and the line that says from where a run
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
    run_directory = read_run_directory(run_dir, moved)
    restored_parts = check_resume(resume)
    may_resume = checkpoints is not None and restored_parts is None
    initial = InitialState.read(state, may_resume=may_resume)
    evaluations = check_evaluations(evaluation, initial.state)
    user_parts, user_hooks = split_parts(check_hooks(hooks))
    check_kinds(user_hooks, evaluations)
    lengths = {"steps": steps, "epochs": epochs, "more_steps": more_steps}
    runner = check_numbers(step, lengths, log_every, steps_per_call)
    lengths = {name: as_integer(length) for name, length in lengths.items()}
    steps, epochs, more_steps = lengths.values()
    log_every, steps_per_call = int(log_every), int(steps_per_call)
    check_checkpoints(checkpoints, evaluations)
    config = read_config(run_directory.config)
    all_hooks = with_default_hooks(user_hooks, time_limit)
    feed = BatchFeed(batches, epochs, steps_per_call=steps_per_call, keep_recent=True)
    check_epochs(feed, [*evaluations, checkpoints], all_hooks)
    check_batches(feed, evaluations, steps_per_call)
    check_end(feed, [*lengths.values(), time_limit], user_hooks)
    watched = WatchedMetrics(user_hooks, checkpoints, evaluations)
    check_resumable(checkpoints, feed, all_hooks)

    has_writer = any(getattr(hook, "writes_metrics", False) for hook in user_hooks)
    with ExitStack() as unless_opened:  # an argument may be refused
        directory = RunFiles(run_directory, has_writer=has_writer)
        series = _open_series(checkpoints, directory)
        if series is not None:
            unless_opened.callback(series.close)
        arguments: dict[str, Any] = {**lengths, "log_every": log_every, "time_limit": time_limit}
        arguments |= {"steps_per_call": steps_per_call, "upload": run_directory.upload}
        describe = partial(
            run_metadata, initial.state, batches, arguments, evaluations, checkpoints, config
        )
        all_hooks += directory.make_hooks(all_hooks, describe, series)
        to_do = more_steps or feed.total  # of the epochs, if they are given
        session = Session(
            runner,
            initial,
            feed,
            _make_dispatcher(all_hooks, user_hooks, directory, config, watched),
            series,
            Alone() if jax.process_count() == 1 else Several(),
            Options(evaluations, log_every, directory.metrics_path is None, restored_parts),
            total=initial.step + to_do if to_do else steps,
        )
        unless_opened.pop_all()
    session.user_parts, session.parts = user_parts, [directory]
    del state, initial, describe  # so that a restored state can take the memory
    with _attach_result(session), _opened(session, directory, moved):
        _start_or_resume(session, directory, more_steps, resume)
        _show_start(session, directory)
        _fold_to_the_end(session, directory, more_steps)
        _take_capsule(session, directory)
    result = _make_result(session, _stop_reason(session) or Stop("error", ""))
    raise_signal(session.peers, session.run, result)
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
    capsule: Capsule | None = None

    def __repr__(self) -> str:
        last = {name: curve[-1] for name, curve in self.history.items() if curve}
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in list(last.items())[:6])
        more = ", …" if len(last) > 6 else ""
        return (
            f"FitResult(steps={self.steps}, stop_reason={str(self.stop_reason)!r}, "
            f"history={{{metrics}{more}}}, best={self.best}, resumed={self.resumed})"
        )


def _open_series(checkpoints: Checkpoints | None, directory: RunFiles) -> Series | None:
    """Open the checkpoints of a run, in its directory unless they have one."""
    if checkpoints is None:
        return None
    if checkpoints.directory is None and directory.path is None:
        refuse("checkpoints", "a directory", "none", "give run_dir=…, or sf.Checkpoints('path')")
    path: Any = checkpoints.directory
    return Series(checkpoints, path or directory.path / "checkpoints")  # type: ignore[operator]


def _make_dispatcher(
    hooks: Sequence[Hook],
    user_hooks: Sequence[Hook],
    directory: RunFiles,
    config: Any,
    watched: WatchedMetrics,
) -> HookDispatcher:
    """Return what calls all hooks, with one that shows progress unless the user gives one."""
    shows_progress = any(getattr(hook, "shows_progress", False) for hook in user_hooks)
    return HookDispatcher(
        [*hooks, *([] if shows_progress else [DefaultProgress()])],
        directory.stopwatch,
        opened=None if config is None else partial(write_config, user_hooks, config),
        check=watched.check if watched.unseen else None,
    )


@contextmanager
def _opened(session: Session, directory: RunFiles, moved: Moved) -> Iterator[None]:
    """Open what belongs to the run, and close it in reverse order, however the run ends."""
    series, peers, hooks = session.series, session.peers, session.hooks.hooks
    with ExitStack() as stack:
        if series is not None:
            stack.callback(series.close)  # even if another run holds the lock
        ended = lambda: (session.run, _stop_reason(session))
        lose = lambda stop: peers.notify(Request(Kind.CORRUPTION, 0, stop))
        stack.enter_context(directory.lock(lose, ended))
        for hook in hooks:
            stack.callback(call_optional, hook, "close")
        stack.enter_context(Signals(peers).handle())  # until the last save is on disk
        if series is not None:
            stack.enter_context(series)
            stack.callback(print_waiting, peers, series)
        stack.callback(directory.stopwatch.end)
        if isinstance(peers, Several):
            stack.enter_context(end_with_others(peers, hooks, moved))
        yield
        if series is not None and not peers.is_alone:
            series.wait_together()


def _start_or_resume(
    session: Session,
    directory: RunFiles,
    more_steps: int | None,
    resume: bool | Sequence[str],
) -> None:
    """Resume from a checkpoint if there is one."""
    series, rollbacks = session.series, session.rollbacks
    if series is None or rollbacks is None or not _has_checkpoint(series):
        if rollbacks is not None:
            rollbacks.drop_note()
        if series is not None:
            with agreement(f"{series.directory}: not started"):
                if jax.process_index() == 0:
                    drop_results(series.store)
        if series is not None and (others := series.steps()):
            steps = ", ".join(map(str, others))
            text = f"{series.directory} has steps {steps} of another program"
            advice = "the run starts from the beginning; sf.restore may read these steps"
            warn(f"checkpoints: {text}; {advice}")
        session.initialize()
        directory.start(session)
        return
    if resume is False:
        expected = "a directory without checkpoints to start in"
        got = f"steps {', '.join(map(str, series.steps()))} in {series.directory}"
        refuse("resume=False", expected, got, "delete them, or give another directory")
    rollbacks.load()
    if rollbacks.done:
        session.skip([rollback.skipped for rollback in rollbacks.done])
    with agreement(f"{series.directory}: not resumed"):
        session.continue_from_checkpoint(series, more_steps)
    directory.fetch(session)
    directory.continue_from(session)


def _has_checkpoint(series: Series) -> bool:
    """Whether process 0 sees a checkpoint, which may be damaged; collective."""
    with agreement(f"{series.directory}: not resumed"):
        has_checkpoint = jax.process_index() == 0 and series.has_checkpoint()
    return broadcast_from_first([has_checkpoint])[0]


def _show_start(session: Session, directory: RunFiles) -> None:
    """Let hooks that show progress say from where the run resumes, and what it compiles."""
    step, series, programs = session.run.resumed, session.series, directory.programs
    hooks = [hook for hook in session.hooks.hooks if isinstance(hook, progress)]

    def show(line: str) -> None:
        for hook in hooks:
            hook.show(line)

    programs.show = show
    session.runner.on_compile = programs.note_step
    if step is not None and series is not None:
        show(f"resuming from step {step} of {directory.path or series.directory}")


def _fold_to_the_end(session: Session, directory: RunFiles, more_steps: int | None) -> None:
    """Fold to the end; go back where a hook asks for it."""
    session.fold()
    while session.run.go_back_request is not None:
        _go_back(session, directory, session.run.go_back_request, more_steps)
        session.fold()


def _go_back(
    session: Session, directory: RunFiles, request: GoBack, more_steps: int | None
) -> None:
    """Restore an earlier checkpoint, and skip the batches that the request names."""
    series, rollbacks, run = session.series, session.rollbacks, session.run
    if series is None or rollbacks is None:
        return
    session.hooks.flush()  # rows of later steps may still wait in a thread
    rollback = rollbacks.note(request, run.step, run.batches_used)
    directory.end_attempt(run.step, Stop("go_back", str(rollback)))
    del run  # so that the restored state can take the memory
    rollbacks.delete_later()
    session.continue_from_checkpoint(series, more_steps)
    session.skip([rollback.skipped])
    directory.continue_from(session)


def _find_nonfinite(session: Session) -> Nonfinite | None:
    if not session.run.marks:  # hooks were not opened, and may have the result of an earlier run
        return None
    results = [getattr(hook, "found", None) for hook in session.hooks.hooks if may_stop(hook)]
    return next((result for result in results if isinstance(result, Nonfinite)), None)


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


def _take_capsule(session: Session, directory: RunFiles) -> None:
    """Take the capsule of a step with a NaN or inf, if any, and write it to the run's directory."""
    if (nonfinite := _find_nonfinite(session)) is None:
        return
    run, series = session.run, session.series
    with directory.stopwatch.measure("capsule"):
        if series is not None:
            series.wait()
        saves = None if series is None else series.directory
        rollbacks = session.rollbacks.done if session.rollbacks else ()
        capsule = take_capsule(nonfinite, run, session.feed, directory=saves, rollbacks=rollbacks)
        session.capsule = save_capsule(capsule, directory.path) if directory.path else capsule


def _make_result(session: Session, stop: Stop, error: BaseException | None = None) -> FitResult:
    """Return the result so far; with `error`, a failure to make it is a note on that."""
    run, series, best = session.run, session.series, None
    try:
        best = None if series is None else series.best_step()
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"the best step is not known: {type(failure).__name__}: {failure}")
    return FitResult(run.state, run.step, run.history, stop, best, run.resumed, session.capsule)


@contextmanager
def _attach_result(session: Session) -> Iterator[None]:
    """Attach the result so far to any exception, unless a second signal forced the exit."""
    try:
        yield
    except BaseException as error:
        if not session.peers.leaves_at_once and is_available(session.run.state):
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
