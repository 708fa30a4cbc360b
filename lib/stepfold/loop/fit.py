"""`fit`: the default training loop, built from the parts that custom loops use too."""

import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.retention import metrics_in, order_by, read_best
from stepfold.checkpoint.sealed import plain
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import read_directory, steps_in
from stepfold.checkpoint.verify import latest_step
from stepfold.core.state import check_not_donated, is_available, strengthen
from stepfold.core.validation import check_count, check_positive, spell_call, takes
from stepfold.errors import ConfigError
from stepfold.loop.data import BatchFeed
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import Hook, HookDispatcher, Stop, may_stop
from stepfold.loop.hooks.stop import Nonfinite, stop_after, stop_on_nonfinite
from stepfold.loop.replay.capsule import Capsule, save_capsule, take_capsule
from stepfold.loop.report.report_writer import ReportWriter
from stepfold.loop.result import FitResult
from stepfold.loop.run_info import move_previous_run, run_metadata
from stepfold.loop.step_runner import StepRunner
from stepfold.loop.train_loop import TrainLoop
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
    run_dir: str | Path | None = None,
    evaluation: Evaluation | Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    hooks: Hook | Sequence[Hook] = (),
    log_every: int = 10,
    resume: bool = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
) -> FitResult:
    """Train: fold batches into a state, log, evaluate, and save checkpoints.

    The order of operations: a step is dispatched. Where it is due, metrics are logged, then the
    state is evaluated, then it is saved, and then the next batch is pulled, so a saved data
    position is that of the next batch. The metrics of a log point at which nothing else is due are
    read up to four steps later, to keep the device busy.

    With `checkpoints`, a run resumes from the newest good one, with the same state, data order,
    metrics and hooks as if it had not been interrupted. SIGINT and SIGTERM let the current step
    finish, save, and then raise `KeyboardInterrupt` or `SystemExit(143)`; a second signal leaves at
    once, except for a save that is being written. An exception reaches the caller after a save
    (with several processes, without one). Each of these has the result so far as its `.result`.

    Args:
      step: a `StepFn`. It is compiled once; a jitted or compiled one is used as it is.
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
        not resumed are moved to `run_dir/previous-1` and so on, with a warning.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions of an `Event`. Unless one of them is `stop_on_nonfinite`, a NaN or inf in
        the loss stops the run; the result then has a `capsule` for `replay`.
      log_every: the steps between log points.
      resume: whether to resume from a checkpoint; if False, an existing one is an error.
      steps_per_call: how many steps are dispatched in one call at most, with the same bits. No call
        goes past a log point, an evaluation or a save.
      time_limit: the number of seconds after which to stop.

    Returns:
      The state, the history of metrics, and why the run stopped.

    Raises:
      ConfigError: if an argument is not as described.
      DataError: if there is no batch, or the batches cannot be resumed.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    >>> batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    >>> result = sf.fit(step, state, batches, steps=20)
    >>> result.steps, str(result.stop_reason), result.history["train/loss"].steps
    (20, 'all 20 steps were done', [10, 20])
    """
    lengths = {"steps": steps, "epochs": epochs, "more_steps": more_steps}
    set_lengths = {name: check_count(name, n) for name, n in lengths.items() if n is not None}
    if len(set_lengths) > 1:
        given = " and ".join(map(str, set_lengths.values()))
        raise ConfigError(f"{', '.join(set_lengths)}: expected one of them, got {given}")
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
    all_hooks = _default_hooks(user_hooks, time_limit)
    feed = BatchFeed(batches, epochs)
    _check_epochs(feed, [*evaluations, checkpoints], all_hooks)
    may_end = set_lengths or time_limit is not None or any(map(may_stop, user_hooks))
    if feed.endless and not may_end:
        raise ConfigError(
            "steps, epochs: expected one of them for batches without an end, got neither; give "
            f"steps=…, or epochs=… of {feed.epoch_steps or 'so many'} steps each"
        )
    watched = _check_metric_names(user_hooks, checkpoints, evaluations)
    check_not_donated(state)
    state = strengthen(state)
    _check_resumable(checkpoints, feed, all_hooks)

    directory = None if run_dir is None else read_directory(run_dir, make=True)
    series = _open_checkpoints(checkpoints, directory)
    metrics_path = None
    if directory is not None and not any(getattr(h, "writes_metrics", False) for h in user_hooks):
        metrics_path = directory / "metrics.jsonl"
        metrics_writer = jsonl_writer(metrics_path, csv=directory / "metrics.csv")
        all_hooks.append(log_to(async_writer(metrics_writer)))
    report = None
    if directory is not None:
        arguments = {**lengths, "log_every": log_every, "steps_per_call": steps_per_call}
        metadata = run_metadata(
            state,
            batches,
            arguments={**arguments, "time_limit": time_limit},
            evaluations=evaluations,
            checkpoints=checkpoints,
            hooks=all_hooks,
        )
        report = ReportWriter(directory, metadata)
        all_hooks.append(report)
    loop = TrainLoop(
        runner,
        state,
        feed,
        steps=steps,
        more_steps=more_steps,
        evaluations=evaluations,
        series=series,
        hooks=HookDispatcher(all_hooks),
        watched=watched,
        log_every=log_every,
        steps_per_call=steps_per_call,
        save_history=metrics_path is None,
    )
    del state  # so that a restored one can take its memory
    with _attach_result(loop), ExitStack() as stack:
        if report is not None:  # first in, last out: its last page shows everything
            stack.enter_context(report)
        for hook in all_hooks:
            if hasattr(hook, "close"):
                stack.callback(hook.close)
        if report is not None:
            stack.callback(lambda: report.finish(loop.step, _stop_reason(loop, all_hooks)))
        stack.enter_context(loop.preemption.handle_signals())  # until the last save is on disk
        if series is not None:
            stack.enter_context(series)
            stack.callback(_print_waiting, loop)
            if latest_step(series.directory) is not None:
                _check_resume(resume, series)
                loop.restore()
        if loop.resumed is not None and metrics_path is not None:
            _continue_metrics(loop, metrics_path)
        elif loop.resumed is None and directory is not None and jax.process_index() == 0:
            move_previous_run(directory, loop.step)
        loop.run()
    capsule = _make_capsule(all_hooks, loop, batches, directory)
    result = _result(loop, _stop_reason(loop, all_hooks), capsule)
    _raise_signal(loop, result)
    if result.stop_reason.kind == "already_completed" and result.resumed is not None:
        warnings.warn(
            f"nothing was trained: {result.stop_reason}; give more_steps=…, a larger steps=…, or "
            "another directory",
            stacklevel=2,
        )
    return result


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


def _default_hooks(hooks: Sequence[Hook], time_limit: Any) -> list[Hook]:
    """Add `stop_on_nonfinite` and `stop_after` where they apply."""
    guarded = any(getattr(hook, "replaces_nonfinite_stop", False) for hook in hooks)
    default: list[Hook] = [] if guarded else [stop_on_nonfinite()]
    all_hooks = [*default, *hooks]
    if time_limit is not None:
        check_positive("time_limit", time_limit, allow_zero=True, unit="seconds")
        all_hooks.append(stop_after(time_limit))
    return all_hooks


def _check_epochs(feed: BatchFeed, recurring: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse schedules by epoch if the batches do not know the length of an epoch."""
    if feed.epoch_steps:
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


def _check_metric_names(
    hooks: Sequence[Hook], checkpoints: Checkpoints | None, evaluations: Sequence[Evaluation]
) -> dict[str, str]:
    """Map each metric that an argument depends on to it; refuse one that nothing measures."""
    watched = {hook.metric: "hooks" for hook in hooks if getattr(hook, "metric", None)}  # type: ignore[attr-defined]
    best = None if checkpoints is None else read_best(checkpoints.best, checkpoints.mode)
    if best is not None:
        watched[best[0]] = "Checkpoints(best=…)"
    provided = [getattr(hook, "provides", None) for hook in hooks]
    kinds = ["train", *(item.name for item in evaluations)]
    prefixes = [*(f"{kind}/" for kind in kinds), *(p for names in provided for p in names or ())]
    for metric in watched:
        if None not in provided and not metric.startswith(tuple(prefixes)):
            raise ConfigError(
                f"{metric}: expected a metric that is measured; they are called "
                f"{', '.join(f'{prefix}…' for prefix in prefixes)}"
                + "; evaluation=sf.Evaluation(…) measures eval/…"
                * (not evaluations)
            )
    return watched


def _check_resumable(
    checkpoints: Checkpoints | None, feed: BatchFeed, hooks: Sequence[Hook]
) -> None:
    """Check before the first step that a checkpoint can hold the data position and hook state."""
    if checkpoints is None:
        return
    if not feed.is_resumable:
        warnings.warn(
            f"batches: expected get_state and set_state, to resume from a checkpoint, got "
            f"{tree.spell(feed.batches)}; the state is saved, but a resume will be refused: give "
            "sf.batches(data, …)",
            stacklevel=3,
        )
    plain(feed.position(), "batches: get_state()")
    for name, value in HookDispatcher(hooks).get_state():
        plain(value, f"hooks: {name}: get_state()")


def _open_checkpoints(checkpoints: Checkpoints | None, run_dir: Path | None) -> Series | None:
    if checkpoints is None:
        return None
    if checkpoints.directory is None and run_dir is None:
        raise ConfigError(
            "checkpoints: expected a directory, got none; give run_dir=…, or sf.Checkpoints('path')"
        )
    return checkpoints.open(None if run_dir is None else run_dir / "checkpoints")


def _check_resume(resume: bool, series: Series) -> None:
    if not resume:
        raise ConfigError(
            "resume=False: expected a directory without checkpoints to start in, got steps "
            f"{', '.join(map(str, steps_in(series.directory)))} in {series.directory}; delete "
            "them, or give another directory"
        )


def _continue_metrics(loop: TrainLoop, path: Path) -> None:
    """Load the history of the resumed run; drop later rows, which will be logged again."""
    before = loop.logged_step - bool(loop.logged_metrics)
    for step, metrics in read_rows(path, until=before):
        loop.history.add(step, metrics)
    loop.history.add(loop.logged_step, loop.logged_metrics)
    if path.exists() and jax.process_index() == 0:
        writer = jsonl_writer(path)
        writer.resume(before)
        writer.write_scalars(loop.logged_step, loop.logged_metrics)
        writer.close()


def _make_capsule(
    hooks: Sequence[Hook], loop: TrainLoop, batches: Any, run_dir: Path | None
) -> Capsule | None:
    """Capture the inputs of the step for `replay`, if a NaN or inf ended the run."""
    nonfinite = _find_nonfinite(hooks)
    if nonfinite is None:
        return None
    capsule = take_capsule(
        nonfinite,
        state=loop.state,
        positions=loop.positions,
        batches=batches,
        directory=None if loop.series is None else loop.series.directory,
    )
    return capsule if run_dir is None else save_capsule(capsule, run_dir)


def _find_nonfinite(hooks: Sequence[Hook]) -> Nonfinite | None:
    found = [getattr(hook, "found", None) for hook in hooks if may_stop(hook)]
    return next((item for item in found if isinstance(item, Nonfinite)), None)


def _stop_reason(loop: TrainLoop, hooks: Sequence[Hook]) -> Stop | None:
    """Return why the run stopped; a NaN or inf takes precedence over other reasons."""
    nonfinite = _find_nonfinite(hooks)
    if nonfinite is None or loop.stop is None:
        return loop.stop
    why = f"{nonfinite.metric} is {nonfinite.metrics[nonfinite.metric]} in step {nonfinite.step}"
    message = loop.stop.message
    return Stop("nonfinite", message if why in message else f"{why}; {message}")


def _result(loop: TrainLoop, stop: Stop | None, capsule: Capsule | None = None) -> FitResult:
    best, series = None, loop.series
    if series is not None and series.best is not None:
        best = next(iter(order_by(series.best, metrics_in(series.directory))), None)
    stop = stop or Stop("error", "")
    if capsule is not None and capsule.path is not None:
        stop = stop._replace(message=f"{stop.message}; see {capsule.path}")
    return FitResult(
        state=loop.state,
        steps=loop.step,
        history=loop.history,
        stop_reason=stop,
        best=best,
        resumed=loop.resumed,
        capsule=capsule,
    )


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
    """Raise the exception for the signal, with the result attached."""
    error: Any
    if loop.preemption.signal == signal.SIGINT:
        error = KeyboardInterrupt(
            f"{result.stop_reason}; the trained state is in this exception: in a notebook or "
            "console, type: import sys; result = sys.last_value.result"
        )
    elif loop.preemption.signal == signal.SIGTERM:
        error = SystemExit(128 + signal.SIGTERM)
    else:
        return
    error.result = result
    raise error
