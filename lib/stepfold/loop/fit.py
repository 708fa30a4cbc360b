"""`fit`: the default training loop, built from the parts that custom loops use too."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepfold import tree
from stepfold.checkpoint.manifest import to_json
from stepfold.checkpoint.series import Checkpoints, Series
from stepfold.checkpoint.steps import check_shared, read_directory
from stepfold.core.processes import agreement, broadcast_from_first, report_failed_peer
from stepfold.core.state import check_not_donated, is_available, strengthen
from stepfold.core.validation import check_count, check_flags, check_positive, spell_call, takes
from stepfold.errors import ConfigError
from stepfold.loop.data import BatchFeed
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import (
    BaseHook,
    Event,
    Hook,
    HookDispatcher,
    Stop,
    call_optional,
    check_spelling,
    hook_name,
    may_stop,
)
from stepfold.loop.hooks.stop import Nonfinite, stop_after, stop_on_nonfinite
from stepfold.loop.metrics import History
from stepfold.loop.replay.capsule import Capsule, save_capsule, take_capsule
from stepfold.loop.report.report_writer import ReportWriter
from stepfold.loop.run_info import move_previous_run, run_metadata
from stepfold.loop.run_lock import RunLock
from stepfold.loop.step_runner import StepRunner
from stepfold.loop.train_loop import TrainLoop
from stepfold.loop.upload import Upload
from stepfold.loop.writers.combinators import async_writer, log_to
from stepfold.loop.writers.jsonl import jsonl_writer, read_rows


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    more_steps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    upload: str | None = None,
    evaluation: Evaluation | Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    hooks: Hook | Sequence[Hook] = (),
    log_every: int = 10,
    resume: bool = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
) -> "FitResult":
    """Train: fold batches into a state, log, evaluate, and save checkpoints.

    The order of operations: a step is dispatched. Where it is due, metrics are logged, then the
    state is evaluated, then it is saved, and then the next batch is pulled, so a saved data
    position is that of the next batch. The metrics of a log point at which nothing else is due are
    read up to four steps later, to keep the device busy.

    With `checkpoints`, a run resumes from the newest good one, with the same state, data order,
    metrics and hooks as if it had not been interrupted. A reason to stop that a hook gave takes
    effect at the same step then, even if a signal or an exception came in between. SIGINT and
    SIGTERM let the current step finish, save, and then raise `KeyboardInterrupt` or
    `SystemExit(143)`; a second signal leaves at once, except for a save that is being written.
    SIGUSR1 saves after the current step without stopping, as `Checkpoints.request` does; a handler
    that the program has for it stays in place. An exception reaches the caller after a save. With
    several processes, all save if a hook raised it, or batches of unknown number. Otherwise there
    is no save, since the others are in a step; they print the exception, and end within the time
    given to `start_distributed`. Each of these has the result so far as its `.result`, if the state
    is still available.

    With several processes, a signal or a reason to stop in one of them ends the run in all, at the
    same step, within about a second or five steps. They also stop together where the batches of one
    end. If the number of batches is not known, as of a generator, the processes wait for each other
    before each step to agree on it; `sf.batches` and lists know it.

    Args:
      step: a `StepFn`. It is compiled once, before the first step; for each batch size, if that
        changes. A jitted or compiled one is used as it is.
      state: the initial state. It is donated to the step: do not use it again.
      batches: any iterable of batches. With `get_state` and `set_state`, as `sf.batches` has, it
        can be resumed.
      steps: the step at which the run ends, counted from step 0 of the state: a state of step 10
        does 10 more with `steps=20`.
      epochs: the number of epochs of the data to do, instead, counted from where the data is.
      more_steps: the number of steps to do, instead, after those of the state or, for a complete
        run that is resumed, of its checkpoint. An interrupted run keeps its target. Without any of
        the three, all batches are used.
      run_dir: the directory of the run: `metrics.jsonl` and `metrics.csv`, `run.json` (arguments,
        versions, how it ended), `report.html`, checkpoints unless they have a directory, and the
        capsule of a step that went wrong. A resumed run appends. Files of an earlier run that is
        not resumed are moved to `run_dir/previous-1` and so on, with a warning. One run at a time
        may use it: while its process lives, another run raises. If that was on another host, the
        new run waits for up to a minute to find out.
      upload: a URL in object storage, such as `s3://bucket/run`, to which metrics, `run.json` and
        the report are copied at each checkpoint and at the end. A run that resumes without
        `metrics.jsonl` in its `run_dir`, as on another host, gets it from there.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions of an `Event`. Unless one of them is `stop_on_nonfinite`, a NaN or inf in
        the loss stops the run; the result then has a `capsule` for `replay`.
      log_every: the steps between log points.
      resume: whether to resume from a checkpoint; if False, an existing one is an error.
      steps_per_call: how many steps are dispatched in one call at most. No call goes past a log
        point, an evaluation, a save, or a step at which a hook can stop the run. The result is the
        same to rounding: XLA may compile a step in a loop with other fusions than a single step.
      time_limit: the number of seconds after which to stop, checked at log points and after
        evaluations.

    Returns:
      The state, the history of metrics, and why the run stopped.

    Raises:
      ConfigError: if an argument is not as described, or another run uses `run_dir`.
      CheckpointError: if not all processes can see the same directory.
      DataError: if there is no batch, or the batches cannot be resumed.
      StepfoldError: if a hook raised an error in another process; all have saved at the same step.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    >>> batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    >>> result = sf.fit(step, state, batches, steps=20)
    >>> result.steps, str(result.stop_reason), result.history["train/loss"].steps
    (20, 'all 20 steps were done', [10, 20])
    """
    check_flags(resume=resume)
    lengths = {"steps": steps, "epochs": epochs, "more_steps": more_steps}
    set_lengths = {name: check_count(name, n) for name, n in lengths.items() if n is not None}
    if len(set_lengths) > 1:
        values = " and ".join(map(str, set_lengths.values()))
        raise ConfigError(f"{', '.join(set_lengths)}: expected one of them, got {values}")
    check_count("log_every", log_every)
    runner = StepRunner(step)
    if check_count("steps_per_call", steps_per_call) > 1 and runner.is_compiled:
        raise ConfigError(
            f"steps_per_call={steps_per_call}: expected a step that is neither jitted nor "
            f"compiled, to compile several of them as one, got {tree.spell(step)}"
        )
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise ConfigError(
            f"checkpoints: expected sf.Checkpoints(every=…), got {tree.spell(checkpoints)}"
        )
    evaluations, user_hooks = _check_evaluations(evaluation), _check_hooks(hooks)
    is_guarded = any(getattr(hook, "replaces_nonfinite_stop", False) for hook in user_hooks)
    all_hooks: list[Hook] = [*([] if is_guarded else [stop_on_nonfinite()]), *user_hooks]
    if time_limit is not None:
        check_positive("time_limit", time_limit, allow_zero=True, unit="seconds")
        all_hooks.append(stop_after(time_limit))
    feed = BatchFeed(batches, epochs)
    _check_epochs(feed, [*evaluations, checkpoints], all_hooks)
    may_end = set_lengths or time_limit is not None or any(map(may_stop, user_hooks))
    if feed.endless and not may_end:
        length = f" or epochs=… (an epoch has {feed.epoch_steps} steps)" if feed.epoch_steps else ""
        raise ConfigError(
            "steps, epochs: expected one of them for batches without an end, got neither; give "
            f"steps=…{length}"
        )
    watched = _WatchedMetrics(user_hooks, checkpoints, evaluations)
    check_not_donated(state)
    state = strengthen(state)
    _check_resumable(checkpoints, feed, all_hooks)

    directory = metrics_path = series = report = uploader = None
    with agreement("fit: not started"):
        if run_dir is not None:
            directory = read_directory(run_dir, make=True)
    if directory is not None:
        check_shared(directory)
    if checkpoints is not None:
        if checkpoints.directory is None and directory is None:
            raise ConfigError(
                "checkpoints: expected a directory, got none; give run_dir=…, or "
                "sf.Checkpoints('path')"
            )
        series = checkpoints.open(directory and directory / "checkpoints")
    if upload is not None:
        uploader = Upload(directory, upload, series)
    metadata: dict[str, Any] = {}
    if directory is not None:
        if not any(getattr(hook, "writes_metrics", False) for hook in user_hooks):
            metrics_path = directory / "metrics.jsonl"
            writer = jsonl_writer(metrics_path, csv=directory / "metrics.csv")
            all_hooks.append(log_to(async_writer(writer)))
        arguments: dict[str, Any] = {**lengths, "log_every": log_every, "time_limit": time_limit}
        arguments |= {"steps_per_call": steps_per_call, "upload": upload}
        metadata = run_metadata(state, batches, arguments, evaluations, checkpoints, all_hooks)
        report = ReportWriter(directory, metadata)
        all_hooks += [report, *([] if uploader is None else [uploader])]  # flushed in order
    loop = TrainLoop(
        runner,
        state,
        feed,
        steps=steps,
        more_steps=more_steps,
        evaluations=evaluations,
        series=series,
        hooks=HookDispatcher([watched, *all_hooks] if watched.unseen else all_hooks),
        log_every=log_every,
        steps_per_call=steps_per_call,
        save_history=metrics_path is None,
    )
    del state  # so that a restored one can take its memory
    rollbacks = loop.rollbacks
    with _attach_result(loop), ExitStack() as stack:
        if series is not None:
            stack.callback(series.close)  # also if another run has the directory
        if directory is not None:
            lock = RunLock(directory, loop.preemption.request_stop)
            stack.callback(lock.release)
            with agreement(f"run_dir: {directory}: not opened"):
                if jax.process_index() == 0:
                    lock.acquire()
        if uploader is not None:  # first in, last out: after the last page
            stack.callback(uploader.finish)
        if report is not None:  # its last page shows everything
            stack.push(
                lambda _, error, __: report.finish(loop.step, _stop_reason(loop, all_hooks), error)
            )
        for hook in all_hooks:
            stack.callback(call_optional, hook, "close")
        stack.enter_context(loop.preemption.handle_signals())  # until the last save is on disk
        if series is not None and rollbacks is not None:
            stack.enter_context(series)
            stack.callback(_print_waiting, loop)
            if not _has_checkpoint(series):
                rollbacks.restart()
            elif resume:
                rollbacks.resume()
                if rollbacks.done:
                    loop.skip([rollback.skipped for rollback in rollbacks.done])
                    metadata["rollbacks"] = rollbacks.as_json()
                with agreement(f"{series.directory}: not resumed"):
                    loop.restore(series)
                    if uploader is not None:
                        uploader.fetch()
            else:
                raise ConfigError(
                    "resume=False: expected a directory without checkpoints to start in, got "
                    f"steps {', '.join(map(str, series.steps()))} in {series.directory}; "
                    "delete them, or give another directory"
                )
        with agreement(f"run_dir: {directory}: not opened"):
            if loop.resumed is not None and metrics_path is not None:
                _continue_metrics(loop, metrics_path)
            elif loop.resumed is None and directory is not None and jax.process_index() == 0:
                move_previous_run(directory, loop.step)
        with report_failed_peer():
            loop.run()
            while loop.go_back is not None and series is not None and rollbacks is not None:
                loop.hooks.flush()  # rows that wait in a thread are of later steps
                rollback = rollbacks.go_back(loop.go_back, loop.step)
                if report is not None:
                    report.end_attempt(loop.step, Stop("go_back", str(rollback)))
                metadata["rollbacks"] = rollbacks.as_json()
                loop.restore(series)
                loop.skip([rollback.skipped])
                if metrics_path is not None:
                    _continue_metrics(loop, metrics_path)
                loop.run()
    stop, capsule = _stop_reason(loop, all_hooks), None
    if (nonfinite := _find_nonfinite(loop, all_hooks)) is not None:
        capsule = take_capsule(
            nonfinite,
            loop.state,
            feed.batches,
            positions=loop.positions,
            directory=None if series is None else series.directory,
        )
        capsule = replace(capsule, rollbacks=tuple(map(str, rollbacks.done if rollbacks else ())))
        capsule = capsule if directory is None else save_capsule(capsule, directory)
        if stop is not None and capsule.path is not None:
            stop = stop._replace(message=f"{stop.message}; see {capsule.path}")
    result = _result(loop, stop, capsule)
    _raise_signal(loop, result)
    for metric, argument in watched.unseen.items() if watched.saw_event else ():
        if metric in result.history:  # measured before a resume
            continue
        warnings.warn(
            f"{metric}: expected a metric that is measured, got "
            f"{', '.join(sorted(result.history))}; {argument} had no effect",
            stacklevel=2,
        )
    if loop.was_complete and result.steps == result.resumed:
        warnings.warn(
            f"nothing was trained: {result.stop_reason}; give more_steps=…, a larger steps=…, more "
            "batches, or another directory",
            stacklevel=2,
        )
    return result


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the state after the last step.
      steps: the number of steps done, with those before a resume.
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


def _check_evaluations(evaluation: Any) -> list[Evaluation]:
    evaluations = list(evaluation) if isinstance(evaluation, list | tuple) else [evaluation]
    for item in evaluations:
        if not isinstance(item, Evaluation):
            raise ConfigError(f"evaluation: expected sf.Evaluation(…), got {tree.spell(item)}")
    names = [item.name for item in evaluations]
    if len(set(names)) < len(names) or any(name.split("/")[0] == "train" for name in names):
        raise ConfigError(
            f"evaluation: expected different names, none of them train, got {names}; give name=…"
        )
    return evaluations


def _check_hooks(hooks: Any) -> list[Hook]:
    checked: list[Hook] = list(hooks) if isinstance(hooks, list | tuple) else [hooks]
    for hook in checked:
        if not callable(hook) or isinstance(hook, type) or not takes(hook, 1):
            advice = f", which takes {spell_call(hook)}" if callable(hook) else ""
            if isinstance(hook, type):
                advice = f"; call it with its arguments, as in {spell_call(hook)}"
            elif callable(getattr(hook, "write_scalars", None)):
                advice = "; sf.log_to(writer) makes a hook of a writer"
            raise ConfigError(
                f"hooks: expected functions of an event, got {tree.spell(hook)}{advice}"
            )
    return checked


def _check_epochs(feed: BatchFeed, recurring: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse schedules by epoch if the batches do not know the length of an epoch."""
    if feed.epoch_ends is not None:
        return
    got = tree.spell(feed.batches)
    if any(item is not None and item.every_epochs for item in recurring):
        raise ConfigError(
            "every_epochs: expected batches that know how many steps an epoch has, got "
            f"{got}; give every=…, or sf.batches(data, …)"
        )
    if any(hasattr(hook, "end_epoch") for hook in hooks):
        raise ConfigError(
            "hooks: expected batches that know how many steps an epoch has, for a hook that is "
            f"called after epochs, got {got}; give sf.batches(data, …)"
        )


class _WatchedMetrics(BaseHook):
    """Check that the metrics exist on which hooks and `Checkpoints(best=…)` depend."""

    provides = ()

    def __init__(
        self,
        hooks: Sequence[Hook],
        checkpoints: Checkpoints | None,
        evaluations: Sequence[Evaluation],
    ) -> None:
        named: Any = [(getattr(hook, "metric", None), "hooks") for hook in hooks]
        self.unseen: dict[str, str] = {metric: argument for metric, argument in named if metric}
        if checkpoints is not None and checkpoints.best is not None:
            self.unseen[checkpoints.best] = "Checkpoints(best=…)"
        self.saw_event = False
        provided = [getattr(hook, "provides", None) for hook in hooks]
        self._knows_names = None not in provided
        prefixes = ["train/", *(f"{evaluation.name}/" for evaluation in evaluations)]
        prefixes += [prefix for names in provided for prefix in names or ()]
        for metric, argument in self.unseen.items() if self._knows_names else ():
            if not metric.startswith(tuple(prefixes)):
                advice = "" if evaluations else "; add evaluation=sf.Evaluation(…) for eval/…"
                raise ConfigError(
                    f"{argument}: expected one of {', '.join(f'{prefix}…' for prefix in prefixes)},"
                    f" got {metric}{advice}"
                )

    def __call__(self, event: Event) -> None:
        self.saw_event = True
        for metric, argument in self.unseen.items():
            check_spelling(metric, event)
            is_own_kind = metric.rpartition("/")[0] == event.kind
            if is_own_kind and metric not in event.metrics and self._knows_names:
                names = ", ".join(sorted(event.metrics))
                raise ConfigError(
                    f"{metric}: expected a metric that is measured, got {names}; {argument} needs "
                    "one of them"
                )
        unseen = self.unseen.items()
        self.unseen = {metric: arg for metric, arg in unseen if metric not in event.metrics}


def _check_resumable(
    checkpoints: Checkpoints | None, feed: BatchFeed, hooks: Sequence[Hook]
) -> None:
    """Check before the first step that a checkpoint can hold the data position and hook state."""
    for hook in hooks:
        if getattr(hook, "goes_back", False) and may_stop(hook):
            feed.skippable()
            if checkpoints is None:
                raise ConfigError(
                    f"hooks: {hook_name(hook)}: expected checkpoints=… to go back to, got none; "
                    "give sf.Checkpoints(every=…)"
                )
    if checkpoints is None:
        return
    if not feed.is_resumable:
        warnings.warn(
            f"batches: expected get_state and set_state, to resume from a checkpoint, got "
            f"{tree.spell(feed.batches)}; the state is saved, but a resume will be refused: give "
            "sf.batches(data, …)",
            stacklevel=3,
        )
    to_json(feed.position(), "batches: get_state()")
    feed.check_next_position = feed.is_resumable
    for hook in hooks:
        state, name = call_optional(hook, "get_state"), hook_name(hook)
        to_json(state, f"hooks: {name}: get_state()")
        if state is not None and not callable(getattr(hook, "set_state", None)):
            raise ConfigError(
                f"hooks: {name}: expected set_state next to get_state, to be resumed, got "
                f"{tree.spell(getattr(hook, 'set_state', None))}; add it, or drop get_state"
            )


def _has_checkpoint(series: Series) -> bool:
    """Whether process 0 sees a checkpoint, which may be damaged; collective."""
    with agreement(f"{series.directory}: not resumed"):
        found = series.has_checkpoint() if jax.process_index() == 0 else False
    return broadcast_from_first([found])[0]


def _continue_metrics(loop: TrainLoop, path: Path) -> None:
    """Load the history of the resumed run; drop later rows, which will be logged again."""
    # The checkpoint has the row of `logged_step`; later events may have changed it in the file.
    last_row = loop.logged_step - 1 if loop.logged_metrics else loop.logged_step
    for step, metrics in read_rows(path, until=last_row):
        loop.history.add(step, metrics)
    loop.history.add(loop.logged_step, loop.logged_metrics)
    if path.exists() and jax.process_index() == 0:
        writer = jsonl_writer(path)
        writer.resume(last_row)
        writer.write_scalars(loop.logged_step, loop.logged_metrics)
        writer.close()


def _find_nonfinite(loop: TrainLoop, hooks: Sequence[Hook]) -> Nonfinite | None:
    if not loop.positions:  # hooks were not opened, and may have that of an earlier run
        return None
    results = [getattr(hook, "found", None) for hook in hooks if may_stop(hook)]
    return next((result for result in results if isinstance(result, Nonfinite)), None)


def _stop_reason(loop: TrainLoop, hooks: Sequence[Hook]) -> Stop | None:
    """Return why the run stopped; a NaN or inf takes precedence over other reasons."""
    nonfinite = _find_nonfinite(loop, hooks)
    if nonfinite is None or loop.stop is None:
        return loop.stop
    why = f"{nonfinite.metric} is {nonfinite.metrics[nonfinite.metric]} in step {nonfinite.step}"
    message = loop.stop.message
    return Stop("nonfinite", message if why in message else f"{why}; {message}")


def _result(loop: TrainLoop, stop: Stop | None, capsule: Capsule | None = None) -> FitResult:
    best = None if loop.series is None else loop.series.best_step()
    stop = stop or Stop("error", "")
    return FitResult(loop.state, loop.step, loop.history, stop, best, loop.resumed, capsule)


@contextmanager
def _attach_result(loop: TrainLoop) -> Iterator[None]:
    """Attach the result so far to any exception, unless a second signal forced the exit."""
    try:
        yield
    except BaseException as error:
        if not loop.preemption.was_repeated and is_available(loop.state):
            stop = Stop("error", f"{type(error).__name__}: {error}")
            error.result = _result(loop, stop)  # type: ignore[attr-defined]
        raise


def _print_waiting(loop: TrainLoop) -> None:
    """After a second signal, print that a save in progress delays the exit."""
    saving = loop.series and loop.series.saving
    if loop.preemption.was_repeated and saving is not None:
        with suppress(OSError, ValueError):  # the other end of a pipe may be gone
            print(  # noqa: T201  a person interrupted twice, and sees nothing happen
                f"waiting for the checkpoint of step {saving}, which is being written",
                file=sys.stderr,
                flush=True,
            )


def _raise_signal(loop: TrainLoop, result: FitResult) -> None:
    """Raise the exception for a signal, with the result attached."""
    # One that came after the last vote is raised too, now that everything is saved.
    number = loop.preemption.agreed or loop.preemption.received
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
