"""The fold with the lights on: `fit`, from the parts that a loop of one's own has too."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import read_directory, steps_in
from stepfold.checkpoint.verify import latest_step
from stepfold.core.donated import check_there
from stepfold.errors import ConfigError
from stepfold.loop.asked import read_arguments
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.event import Hook
from stepfold.loop.facts import facts_of
from stepfold.loop.fold import Fold
from stepfold.loop.hooks.log_to import log_to
from stepfold.loop.hooks.stopping import stop_on_nonfinite
from stepfold.loop.refresh import Refresh
from stepfold.loop.replaying.capsule import Capsule, take_capsule
from stepfold.loop.replaying.files import write_or_warn
from stepfold.loop.result import FitResult, giving_result, leave, result_of, tell_waiting
from stepfold.loop.writers.asynchronous import async_writer
from stepfold.loop.writers.csv import csv_writer
from stepfold.loop.writers.jsonl import jsonl_writer
from stepfold.loop.writers.multi import multi_writer


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    run_dir: str | Path | None = None,
    evaluation: Evaluation | Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    hooks: Sequence[Hook] = (),
    log_every: int = 10,
    resume: bool = True,
    steps_per_call: int = 1,
    time_limit: float | None = None,
    compilation_cache: str | PathLike[str] | None = None,
) -> FitResult:
    """Fold batches into a state, show what happens, and keep what is worth keeping.

    The order is this. A step is dispatched; where it is due, the state is evaluated, and then
    saved; the metrics of a log point are read a few steps after it, one with `log_every=1` and
    four at most, so that the device has work meanwhile; and only then is the next batch pulled. So
    a saved position is that of the next batch.

    With checkpoints a run goes on where it was: from the newest good one, with the same state, the
    same batches and the same history. SIGINT and SIGTERM let the step under way finish and save;
    then `KeyboardInterrupt` or `SystemExit(143)` is raised. A second one leaves at once, but for a
    save that is being written. Whatever else ends the run, an exception of a hook or of the data,
    reaches the caller after a save; with several processes without one, since the others, which
    know nothing of it, would have to take part. All but a second signal have what there is so far
    as their `result`, unless a step that failed took the state with it.

    Args:
      step: a `StepFn`, which is compiled once and refuses to be compiled again; one that is
        compiled or jitted already is taken as it is.
      state: the state to begin with. It is given to the step, so do not use it again.
      batches: any iterable of batches. It can be resumed if it has `get_state` and `set_state`, as
        `sf.batches` has.
      steps: how many steps there are to be, with those before a resume.
      epochs: how many epochs, instead; without either, all of the batches, which have to end,
        unless a hook or `time_limit` may stop the run.
      run_dir: where what belongs to the run goes: `metrics.jsonl`, `metrics.csv`, the checkpoints,
        unless they say where, and the `Capsule` of a step that went wrong. A run that goes on
        appends. `run.json` says what it was begun with and how it ended, and `report.html` shows
        it, while it goes on too.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions that are shown what happens, and stop the run by returning why. A loss that
        is not finite stops it in any case, unless a `stop_on_nonfinite` is among them, in an
        `only_warn` too; the result then has a `capsule`, from which `replay` says what it was.
      log_every: the steps from one log point to the next.
      resume: whether to go on from a checkpoint where there is one.
      steps_per_call: how many steps go in one dispatch at most, with the same bits: none goes
        past a log point, an evaluation or a save.
      time_limit: after how many seconds to stop.
      compilation_cache: a directory in which the compiled step is kept for the next process, as
        by `compile_step`, which does the same for an evaluation's step.

    Returns:
      The state, the history, and why it stopped.

    Raises:
      ConfigError: if an argument is not as described.
      DataError: if there is no batch at all, or the batches cannot be resumed.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    >>> batches = sf.batches({"x": np.zeros(8, np.float32)}, 4, seed=0)
    >>> result = sf.fit(step, state, batches, steps=20)
    >>> result.steps, result.stopped, result.history["train/loss"].steps
    (20, 'all 20 steps were done', [10, 20])
    """
    asked = read_arguments(
        step,
        batches,
        steps=steps,
        epochs=epochs,
        evaluation=evaluation,
        checkpoints=checkpoints,
        hooks=hooks,
        log_every=log_every,
        steps_per_call=steps_per_call,
        time_limit=time_limit,
        compilation_cache=compilation_cache,
    )
    check_there(state)
    report = None
    if run_dir is not None:
        place = read_directory(run_dir, make=True)
        if not any(getattr(hook, "writes_metrics", False) for hook in asked.hooks):
            asked.hooks.append(_files(place))
        facts = facts_of(state, batches, asked, checkpoints, epochs, time_limit)
        report = Refresh(place, facts, goes_on=checkpoints is not None)
        asked.hooks.append(report)
    series = _open(checkpoints, run_dir)
    fold = Fold(asked, state, series)
    del state  # so that it can be freed when it is restored
    with giving_result(fold), ExitStack() as stack:
        if report is not None:  # before all else, so that its last page is of all there is
            stack.enter_context(report)
        for hook in asked.hooks:
            if hasattr(hook, "close"):
                stack.callback(hook.close)
        if report is not None:
            stack.callback(lambda: report.tell(fold.done, fold.stopped))
        stack.enter_context(fold.signals.watched())  # until the last save is on the disk
        if series is not None:
            stack.enter_context(series)
            stack.callback(tell_waiting, fold)
            if latest_step(series.directory) is not None:
                if not resume:
                    raise _not_anew(series)
                fold.resume()
        fold.run()
    capsule = _capsule(asked.hooks, fold, batches, run_dir)
    result = result_of(fold, capsule)
    leave(fold.signals, result)
    return result


def _files(place: Path) -> Hook:
    """Make the hook that writes a run's files; it comes last, to hear all."""
    files = jsonl_writer(place / "metrics.jsonl"), csv_writer(place / "metrics.csv")
    return log_to(async_writer(multi_writer(*files)))


def _not_anew(series: Series) -> ConfigError:
    return ConfigError(
        "resume=False: expected a directory without checkpoints to begin anew in, got steps "
        f"{', '.join(map(str, steps_in(series.directory)))} in {series.directory}; delete them, "
        "or give another"
    )


def _capsule(hooks: Sequence[Hook], fold: Fold, batches: Any, run_dir: Any) -> Capsule | None:
    """Keep what `replay` needs of the step that ended the run, if a number that is none did."""
    watching = [hook for hook in hooks if isinstance(hook, stop_on_nonfinite)]
    found = next((hook.found for hook in watching if hook.found), None)
    if found is None:
        return None
    directory = None if fold.series is None else fold.series.directory
    capsule = take_capsule(
        found, state=fold.state, marks=fold.marks, batches=batches, directory=directory
    )
    if run_dir is None or jax.process_index() > 0:
        return capsule
    return write_or_warn(capsule, run_dir)


def _open(checkpoints: Checkpoints | None, run_dir: str | Path | None) -> Series | None:
    if checkpoints is None:
        return None
    if checkpoints.directory is None and run_dir is None:
        raise ConfigError(
            "checkpoints: expected to know where they go; give run_dir=…, or a directory to "
            "sf.Checkpoints"
        )
    return checkpoints.open(None if run_dir is None else Path(run_dir) / "checkpoints")
