"""`fit`: the default training loop, built from the parts that custom loops use too."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.leaves import check_values
from stepfold.checkpoint.series import Checkpoints, Series
from stepfold.core.processes import (
    Disbanded,
    Group,
    agreement,
    broadcast_from_first,
    report_failed_peer,
)
from stepfold.core.state import check_not_donated, is_available, step_of, strengthen
from stepfold.core.validation import read_instance, read_integer, spell_call, takes
from stepfold.errors import StepfoldError, refuse
from stepfold.loop.data import BatchFeed
from stepfold.loop.elastic import Attempts, Elastic
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import (
    Event,
    GoBack,
    Hook,
    HookDispatcher,
    Stop,
    call_optional,
    hook_name,
    may_stop,
)
from stepfold.loop.hooks.progress import DefaultProgress, progress
from stepfold.loop.hooks.stop import Nonfinite, TimeLimit, stop_on_nonfinite
from stepfold.loop.hooks.wrappers import check_kinds
from stepfold.loop.metrics import History
from stepfold.loop.patience import end_if_stuck
from stepfold.loop.replay.capsule import Capsule, save_capsule, take_capsule
from stepfold.loop.requests import Kind, Request
from stepfold.loop.run_directory import RunDirectory
from stepfold.loop.run_info import flatten_config, read_config, run_metadata
from stepfold.loop.step_runner import StepRunner
from stepfold.loop.train_loop import Options, TrainLoop
from stepfold.tree import describe_value


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]] | Elastic,
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    more_steps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    upload: str | None = None,
    config: Any = None,
    evaluation: Evaluation | Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    hooks: Hook | Sequence[Hook] = (),
    log_every: int = 10,
    resume: bool | Sequence[str] = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
) -> "FitResult":
    """Train: fold batches into a state, log, evaluate, and save checkpoints.

    After a step, and where it is due, `fit` logs the metrics, then evaluates, then saves, and then
    pulls the next batch. With `checkpoints`, the same call resumes from the newest good one: state,
    data, history and hooks continue as if the run had not been interrupted.

    SIGINT and SIGTERM let the current step finish, save, and then raise `KeyboardInterrupt` or
    `SystemExit(143)`. A second signal leaves at once, except for a save that is being written.
    SIGUSR1 saves and continues. An exception of a hook or of the data reaches the caller after a
    save. Each of these exceptions has an attribute `result`, the result so far. With several
    processes, all of them stop at the same step. The guide explains
    :doc:`/ideas/between-two-steps`.

    Args:
      step: a `StepFn`. It is compiled before the first step, once for each batch size. A jitted or
        compiled one is used as it is. With `Elastic`, the run continues if a process dies.
      state: the initial state. It is donated to the step: do not use it again.
      batches: any iterable of batches. With `get_state` and `set_state`, as `sf.batches` has, it
        can be resumed. Batches that depend on the parameters have a method `read_state`: it gets
        the state before each pull, and may use it until the pull returns.
      steps: the step at which the run ends, counted from step 0 of the state: a state of step 10
        does 10 more with `steps=20`.
      epochs: the number of epochs to do, instead of `steps`, from the position of the data on.
      more_steps: the number of steps to do, instead of `steps`, after those of the state or, for a
        complete run that is resumed, of its checkpoint. An interrupted run keeps its target.
        Without any of the three, all batches are used.
      run_dir: the directory of the run: `metrics.jsonl` and `metrics.csv`, `run.json` (arguments,
        versions, how it ended), `report.html`, checkpoints unless they have a directory, and the
        capsule of a step that went wrong. A resumed run appends. Files of an earlier run that is
        not resumed are moved to `run_dir/previous-1` and so on, with a warning. One run at a time
        may use it.
      upload: a URL in object storage, such as `s3://bucket/run`, to which metrics, `run.json` and
        the report are copied at each checkpoint and at the end. A run that resumes on another host
        gets them from there.
      config: the hyper-parameters of the run, a mapping or a dataclass, possibly nested, of values
        that JSON can hold. They are written to `run.json`, shown and compared in the report, and
        passed to the writers of `log_to`, such as W&B. A resume warns of changes.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions of an `Event`. Unless one of them is `stop_on_nonfinite`, a NaN or inf in
        the loss stops the run; the result then has a `capsule` for `replay`. Unless one of them
        shows progress, as `progress` and `log_to(console_writer())` do, a run of more than a few
        seconds prints a line on stderr now and then; `progress("none")` turns that off, and the
        line that says from where a run resumes.
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
    evaluations, parts = _check_evaluations(evaluation, state), _check_resume(resume)
    (step, state, attempts), user_hooks = _read_step(step, state), _check_hooks(hooks)
    for hook in user_hooks:
        check_kinds(hook, ["train", *(evaluation.name for evaluation in evaluations)])
    lengths = {"steps": steps, "epochs": epochs, "more_steps": more_steps}
    runner = _check_numbers(step, lengths, log_every, steps_per_call)
    _check_checkpoints(checkpoints)
    config = read_config(config)
    all_hooks = _with_default_hooks(user_hooks, time_limit)
    feed = BatchFeed(batches, epochs, keep_recent=True)
    _check_epochs(feed, [*evaluations, checkpoints], all_hooks)
    _check_batches(feed, evaluations, steps_per_call)
    _check_end(feed, [*lengths.values(), time_limit], user_hooks)
    watched = _WatchedMetrics(user_hooks, checkpoints, evaluations)
    check_not_donated(state)
    state = strengthen(state)
    _check_resumable(checkpoints, feed, all_hooks)

    has_writer = any(getattr(hook, "writes_metrics", False) for hook in user_hooks)
    live = None if attempts is None else attempts.live
    with ExitStack() as unless_opened:  # an argument may be refused
        with _needs_all():
            directory = RunDirectory(run_dir, upload, has_writer=has_writer, group=live)
            series = _open_series(checkpoints, directory, live)
            if series is not None:
                unless_opened.callback(series.close)
        arguments: dict[str, Any] = {**lengths, "log_every": log_every, "time_limit": time_limit}
        arguments |= {"steps_per_call": steps_per_call, "upload": upload}
        describe = partial(
            run_metadata, state, batches, arguments, evaluations, checkpoints, config
        )
        all_hooks += directory.make_hooks(all_hooks, describe, series)
        if not any(getattr(hook, "shows_progress", False) for hook in user_hooks):
            all_hooks.append(DefaultProgress())
        loop = TrainLoop(
            runner,
            state,
            feed,
            HookDispatcher(
                all_hooks,
                directory.stopwatch,
                opened=None if config is None else partial(_write_config, user_hooks, config),
                check=watched.check if watched.unseen else None,
            ),
            series,
            Options(evaluations, log_every, steps_per_call, directory.metrics_path is None, parts),
            total=step_of(state) + more if (more := more_steps or feed.total) else steps,
            attempts=attempts,
        )
        unless_opened.pop_all()
    del state, describe  # so that a restored state can take the memory
    with _attach_result(loop), _needs_all(), _opened(loop, directory, all_hooks):
        was_complete = _start(loop, directory, more_steps, resume=resume is not False)
        _show_resume(loop, directory, all_hooks)
        with report_failed_peer():
            _run(loop, directory, more_steps)
        if (nonfinite := _find_nonfinite(loop, all_hooks)) is not None:
            with directory.stopwatch.measure("capsule"):
                loop.capsule = _take_capsule(loop, nonfinite, feed, directory)
    result = _result(loop, _stop_reason(loop, all_hooks))
    _raise_signal(loop, result)
    watched.warn_of_unseen(result.history)
    if result.steps == loop.first_step and (was_complete or loop.resumed is None):
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


def _read_step(step: Any, state: Any) -> tuple[Any, Any, Attempts | None]:
    """Return the step, the state to start with, and the attempts of an elastic run."""
    if not isinstance(step, Elastic):
        return step, state, None
    with _needs_all():
        attempts = step.attempts()
        return step.step, state if attempts is None else attempts.stand_in(state), attempts


def _check_numbers(
    step: Any, lengths: Mapping[str, Any], log_every: Any, steps_per_call: Any
) -> StepRunner:
    """Check the numbers among the arguments, and the step that has to fit them."""
    set_lengths = {name: read_integer(name, n) for name, n in lengths.items() if n is not None}
    if len(set_lengths) > 1:
        values = " and ".join(map(str, set_lengths.values()))
        refuse(", ".join(set_lengths), "one of them", f"{values}")
    read_integer("log_every", log_every)
    runner = StepRunner(step)
    if read_integer("steps_per_call", steps_per_call) > 1 and runner.is_compiled:
        expected = "a step that is neither jitted nor compiled, to compile several of them as one"
        refuse(f"steps_per_call={steps_per_call}", expected, step)
    return runner


def _check_resume(resume: Any) -> tuple[str, ...] | None:
    if isinstance(resume, list | tuple) and resume and all(isinstance(p, str) for p in resume):
        return tuple(resume)
    if not isinstance(resume, bool):
        got = describe_value(resume)
        refuse("resume", "True, False, or parts such as ('params', 'step', 'key')", got)
    return None


def _check_checkpoints(checkpoints: Any) -> None:
    if checkpoints is not None:
        read_instance("checkpoints", checkpoints, Checkpoints, "sf.Checkpoints(every=…)")


def _with_default_hooks(hooks: Sequence[Hook], time_limit: Any) -> list[Hook]:
    """Add hooks that stop at a NaN and at the time limit."""
    is_guarded = any(getattr(hook, "replaces_nonfinite_stop", False) for hook in hooks)
    all_hooks: list[Hook] = [*([] if is_guarded else [stop_on_nonfinite()]), *hooks]
    if time_limit is not None:
        all_hooks.append(TimeLimit(time_limit))
    return all_hooks


def _write_config(hooks: Sequence[Hook], config: Mapping[str, Any]) -> None:
    for hook in hooks:
        call_optional(hook, "write_config", flatten_config(config))


def _check_end(feed: BatchFeed, limits: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse a run that nothing can end."""
    has_limit = any(limit is not None for limit in limits)
    if feed.endless and not has_limit and not any(map(may_stop, hooks)):
        epochs = f" or epochs=… (an epoch has {feed.epoch_steps} steps)" if feed.epoch_steps else ""
        expected = "one of them for batches without an end"
        refuse("steps, epochs", expected, "neither", f"give steps=…{epochs}")


def _check_evaluations(evaluation: Any, state: Any) -> list[Evaluation]:
    evaluations = list(evaluation) if isinstance(evaluation, list | tuple) else [evaluation]
    for item in evaluations:
        read_instance("evaluation", item, Evaluation, "sf.Evaluation(…)")
        item.check_state(state)
    names = [item.name for item in evaluations]
    if len(set(names)) < len(names) or any(name.split("/")[0] == "train" for name in names):
        refuse("evaluation", "different names, none of them train", f"{names}", "give name=…")
    return evaluations


def _check_batches(feed: BatchFeed, evaluations: Sequence[Evaluation], steps_per_call: int) -> None:
    if feed.reads_state and steps_per_call > 1:
        refuse("steps_per_call", "1 for batches that read the state", f"{steps_per_call}")
    for evaluation in evaluations:  # it would move the position of the training data
        if evaluation.batches is feed.batches and feed.is_iterator:
            advice = "give each its own sf.batches(…)"
            refuse("evaluation", "other batches than those of the training", "the same", advice)


def _check_hooks(hooks: Any) -> list[Hook]:
    checked: list[Hook] = list(hooks) if isinstance(hooks, list | tuple) else [hooks]
    for hook in checked:
        if not callable(hook) or isinstance(hook, type) or not takes(hook, 1):
            got, advice = describe_value(hook), ""
            if isinstance(hook, type):
                advice = f"call it with its arguments, as in {spell_call(hook)}"
            elif callable(getattr(hook, "write_scalars", None)):
                advice = "sf.log_to(writer) makes a hook of a writer"
            elif callable(hook):
                got += f", which takes {spell_call(hook)}"
            refuse("hooks", "functions of an event", got, advice)
    return checked


def _check_epochs(feed: BatchFeed, recurring: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse schedules by epoch if the batches do not know the length of an epoch."""
    if feed.epoch_ends is not None:
        return
    expected = "batches that know how many steps an epoch has"
    if any(item is not None and item.every_epochs for item in recurring):
        refuse("every_epochs", expected, feed.batches, "give every=…, or sf.batches(data, …)")
    if any(hasattr(hook, "end_epoch") for hook in hooks):
        expected += ", for a hook that is called after epochs"
        refuse("hooks", expected, feed.batches, "give sf.batches(data, …)")


class _WatchedMetrics:
    """Check that the metrics exist that hooks and `Checkpoints(best=…)` depend on."""

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
                expected = f"one of {', '.join(f'{prefix}…' for prefix in prefixes)}"
                advice = "" if evaluations else "add evaluation=sf.Evaluation(…) for eval/…"
                refuse(argument, expected, metric, advice)

    def check(self, event: Event) -> None:
        """Refuse a metric that this kind of event should have, if all names are known."""
        self.saw_event = True
        for metric, argument in self.unseen.items():
            is_own_kind = metric.rpartition("/")[0] == event.kind
            if is_own_kind and metric not in event.metrics and self._knows_names:
                near = get_close_matches(metric, event.metrics, n=1, cutoff=0.9)
                advice = f"{argument} needs one of them"
                advice += f"; did you mean {near[0]!r}?" if near else ""
                got = ", ".join(sorted(event.metrics))
                refuse(metric, "a metric that is measured", got, advice)
        unseen = self.unseen.items()
        self.unseen = {metric: arg for metric, arg in unseen if metric not in event.metrics}

    def warn_of_unseen(self, history: History) -> None:
        """Warn of metrics that were never measured, not even before a resume."""
        for metric, argument in self.unseen.items() if self.saw_event else ():
            if metric not in history:
                warnings.warn(
                    f"{metric}: expected a metric that is measured, got "
                    f"{', '.join(sorted(history))}; {argument} had no effect",
                    stacklevel=3,
                )


def _check_resumable(
    checkpoints: Checkpoints | None, feed: BatchFeed, hooks: Sequence[Hook]
) -> None:
    """Check before the first step that a checkpoint can hold the data position and hook state."""
    for hook in hooks:
        if getattr(hook, "goes_back", False) and may_stop(hook):
            feed.skippable()
            if checkpoints is None:
                argument, advice = f"hooks: {hook_name(hook)}", "give sf.Checkpoints(every=…)"
                refuse(argument, "checkpoints=… to go back to", "none", advice)
    if checkpoints is None:
        return
    if not feed.is_resumable:
        warnings.warn(
            "batches: expected get_state and set_state, to resume from a checkpoint, got "
            f"{describe_value(feed.batches)}; the state is saved, but a resume will be "
            "refused: give sf.batches(data, …)",
            stacklevel=3,
        )
    check_values(feed.position(), "batches: get_state()")
    feed.check_next_position = feed.is_resumable
    for hook in hooks:
        state, argument = call_optional(hook, "get_state"), f"hooks: {hook_name(hook)}"
        check_values(state, f"{argument}: get_state()")
        set_state = getattr(hook, "set_state", None)
        if state is not None and not callable(set_state):
            expected, got = "set_state next to get_state, to be resumed", describe_value(set_state)
            refuse(argument, expected, got, "add it, or drop get_state")


# The run


@contextmanager
def _needs_all() -> Iterator[None]:
    """End the run if a process of it dies before the first step."""
    try:
        yield
    except Disbanded as error:
        message = f"fit: {error} before the run had begun; start it again"
        raise StepfoldError(message) from error


def _open_series(
    checkpoints: Checkpoints | None, directory: RunDirectory, group: Group | None
) -> Series | None:
    if checkpoints is None:
        return None
    if checkpoints.directory is None and directory.path is None:
        refuse("checkpoints", "a directory", "none", "give run_dir=…, or sf.Checkpoints('path')")
    path: Any = checkpoints.directory
    return Series(checkpoints, path or directory.path / "checkpoints", group)  # type: ignore[operator]


@contextmanager
def _opened(loop: TrainLoop, directory: RunDirectory, hooks: Sequence[Hook]) -> Iterator[None]:
    """Open what belongs to the run, and close it in reverse order, however the run ends."""
    series = loop.series
    with ExitStack() as stack:
        if series is not None:
            stack.callback(series.close)  # even if another run holds the lock
        ended = lambda: (loop.step, _stop_reason(loop, hooks))
        lose = lambda stop: loop.consensus.ask(Request(Kind.CORRUPTION, 0, stop))
        stack.enter_context(directory.lock(lose, ended))
        for hook in hooks:
            stack.callback(call_optional, hook, "close")
        stack.enter_context(loop.signals.handle())  # until the last save is on disk
        if series is not None:
            stack.enter_context(series)
            stack.callback(_print_waiting, loop)
        stack.callback(directory.stopwatch.end)
        if loop.attempts is not None:
            stack.push(partial(_tell_spares, loop, loop.attempts))
            stack.enter_context(end_if_stuck(loop.attempts, hooks))
        yield


def _tell_spares(
    loop: TrainLoop, attempts: Attempts, _: Any, error: BaseException | None, __: Any
) -> None:
    """Tell spare processes of an error, since they do not meet the others."""
    if error is not None:
        attempts.end(loop.step, None, None, f"{type(error).__name__}: {error}"[:500])


def _start(
    loop: TrainLoop, directory: RunDirectory, more_steps: int | None, *, resume: bool
) -> bool:
    """Resume from a checkpoint if there is one; return whether the run was complete there."""
    series, rollbacks = loop.series, loop.rollbacks
    if loop.attempts is not None:
        loop.attempts.start(loop)
    if series is None or rollbacks is None or not _has_checkpoint(series):
        if rollbacks is not None:
            rollbacks.restart()
        directory.start(loop)
        return False
    if not resume:
        expected = "a directory without checkpoints to start in"
        got = f"steps {', '.join(map(str, series.steps()))} in {series.directory}"
        refuse("resume=False", expected, got, "delete them, or give another directory")
    rollbacks.resume()
    if rollbacks.done:
        loop.skip([rollback.skipped for rollback in rollbacks.done])
    with agreement(f"{series.directory}: not resumed", loop.group):
        was_complete = loop.restore(series, more_steps)
    directory.fetch(loop)
    directory.resume(loop)
    return was_complete


def _show_resume(loop: TrainLoop, directory: RunDirectory, hooks: Sequence[Hook]) -> None:
    if loop.resumed is not None and loop.series is not None:
        for hook in hooks:
            if isinstance(hook, progress):
                hook.show_resume(loop.resumed, directory.path or loop.series.directory)


def _run(loop: TrainLoop, directory: RunDirectory, more_steps: int | None) -> None:
    """Run to the end; go back where a hook asks for it, and continue where processes die."""
    attempts, lost, has_ended = loop.attempts, "", False
    while not has_ended:
        try:
            if attempts is not None and lost:
                directory.end_attempt(loop.step, Stop("process_died", lost))
                attempts.repeat(loop, lost)
                lost = ""
                if not attempts.is_spare:
                    directory.resume(loop)
            if attempts is not None and attempts.is_spare:
                lost = attempts.wait(loop)
                has_ended = not lost
                continue
            if loop.go_back is not None:
                _go_back(loop, directory, loop.go_back, more_steps)
            loop.run()
            has_ended = loop.go_back is None
        except (Exception, Disbanded) as error:
            died = "" if attempts is None else attempts.leave(error)
            if not died:
                raise
            lost = f"{lost}, {died}" if lost else died
    if attempts is not None:
        agreed = loop.consensus.requests.get(Kind.SIGNAL)
        attempts.end(loop.step, loop.stop, None if agreed is None else agreed.reason)


def _go_back(
    loop: TrainLoop, directory: RunDirectory, request: GoBack, more_steps: int | None
) -> None:
    """Restore an earlier checkpoint, and skip the batches that the request names."""
    series, rollbacks = loop.series, loop.rollbacks
    if series is None or rollbacks is None:
        return
    loop.hooks.flush()  # rows of later steps may still wait in a thread
    rollback = rollbacks.note(request, loop.step)
    if loop.attempts is not None:
        loop.attempts.drop()  # from the note on, only the checkpoint counts
    directory.end_attempt(loop.step, Stop("go_back", str(rollback)))
    rollbacks.delete_later()
    loop.restore(series, more_steps)
    loop.skip([rollback.skipped])
    directory.resume(loop)


def _has_checkpoint(series: Series) -> bool:
    """Whether process 0 sees a checkpoint, which may be damaged; collective."""
    with agreement(f"{series.directory}: not resumed", series.group):
        has_checkpoint = jax.process_index() == 0 and series.has_checkpoint()
    return broadcast_from_first([has_checkpoint], series.group)[0]


def _find_nonfinite(loop: TrainLoop, hooks: Sequence[Hook]) -> Nonfinite | None:
    if not loop.positions:  # hooks were not opened, and may have the result of an earlier run
        return None
    results = [getattr(hook, "found", None) for hook in hooks if may_stop(hook)]
    return next((result for result in results if isinstance(result, Nonfinite)), None)


def _take_capsule(
    loop: TrainLoop, nonfinite: Nonfinite, feed: BatchFeed, directory: RunDirectory
) -> Capsule:
    """Take the capsule of a step, and write it to the directory of the run."""
    checkpoints_in = None
    if loop.series is not None:
        loop.series.wait()
        checkpoints_in = loop.series.directory
    capsule = take_capsule(
        nonfinite, loop.state, feed, positions=loop.positions, directory=checkpoints_in
    )
    rollbacks = loop.rollbacks.done if loop.rollbacks else ()
    capsule = replace(capsule, rollbacks=tuple(map(str, rollbacks)))
    capsule = capsule.with_replacements(loop.progress.replacements)
    return save_capsule(capsule, directory.path) if directory.path else capsule


def _stop_reason(loop: TrainLoop, hooks: Sequence[Hook]) -> Stop | None:
    """Return why the run stopped; only corruption takes precedence over a NaN or inf."""
    nonfinite = _find_nonfinite(loop, hooks)
    if nonfinite is None or loop.stop is None or loop.stop.kind == "corrupt":
        return loop.stop
    why = f"{nonfinite.metric} is {nonfinite.metrics[nonfinite.metric]} in step {nonfinite.step}"
    kind, message = loop.stop
    if why not in message:
        is_end = kind in ("completed", "exhausted")
        message = f"{why}{', seen when ' if is_end else '; '}{message}"
    path = None if loop.capsule is None else loop.capsule.path
    return Stop("nonfinite", message if path is None else f"{message}; see {path}")


def _result(loop: TrainLoop, stop: Stop | None) -> FitResult:
    best = None if loop.series is None else loop.series.best_step()
    stop = stop or Stop("error", "")
    return FitResult(loop.state, loop.step, loop.history, stop, best, loop.resumed, loop.capsule)


@contextmanager
def _attach_result(loop: TrainLoop) -> Iterator[None]:
    """Attach the result so far to any exception, unless a second signal forced the exit."""
    try:
        yield
    except BaseException as error:
        if not loop.signals.was_repeated and is_available(loop.state):
            stop, best = Stop("error", f"{type(error).__name__}: {error}"), None
            try:
                best = None if loop.series is None else loop.series.best_step()
            except Exception as failure:  # noqa: BLE001  it must not replace the error
                error.add_note(f"the best step is not known: {type(failure).__name__}: {failure}")
            error.result = FitResult(  # type: ignore[attr-defined]
                loop.state, loop.step, loop.history, stop, best, loop.resumed
            )
        raise


def _print_waiting(loop: TrainLoop) -> None:
    """After a second signal, print that a save in progress delays the exit."""
    saving = loop.series and loop.series.saving
    if loop.signals.was_repeated and saving is not None:
        with suppress(OSError, ValueError):  # the other end of a pipe may be gone
            print(  # noqa: T201  a person interrupted twice, and sees nothing happen
                f"waiting for the checkpoint of step {saving}, which is being written",
                file=sys.stderr,
                flush=True,
            )


def _raise_signal(loop: TrainLoop, result: FitResult) -> None:
    """Raise the exception for a signal, with the result attached."""
    # One that came after the last vote is raised too, now that everything is saved.
    agreed = loop.consensus.requests.get(Kind.SIGNAL)
    number = loop.signals.received if agreed is None else agreed.reason
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
