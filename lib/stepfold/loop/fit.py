"""The fold with the lights on: `fit`, from the parts that a loop of one's own has too."""

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.retention import metrics_in, order_by
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import read_directory, steps_in
from stepfold.checkpoint.verify import latest_step
from stepfold.errors import ConfigError
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.event import Hook
from stepfold.loop.facts import facts_of
from stepfold.loop.feed import Feed
from stepfold.loop.fold import Fold
from stepfold.loop.history import History
from stepfold.loop.hooks.log_to import log_to
from stepfold.loop.hooks.stopping import stop_after, stop_on_nonfinite
from stepfold.loop.refresh import Refresh
from stepfold.loop.signals import Signals
from stepfold.loop.stepper import Stepper
from stepfold.loop.writers.asynchronous import async_writer
from stepfold.loop.writers.csv import csv_writer
from stepfold.loop.writers.jsonl import jsonl_writer
from stepfold.loop.writers.multi import multi_writer


class FitResult(NamedTuple):
    """What `fit` gives back.

    Attributes:
      state: the state after the last step.
      steps: how many steps were done, those before a resume too.
      history: the values of each metric, in the order of steps; `history["train/loss"].steps` are
        the steps that they are of.
      stopped: why it stopped, in words.
      best: the step of the best checkpoint, or None where none is told apart.
      resumed: the step that it went on from, or None if it began anew.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), tx)
    >>> sf.fit(step, state, [np.ones(4, np.float32)] * 3).stopped
    'the batches ended at step 3'
    """

    state: Any
    steps: int
    history: History
    stopped: str
    best: int | None
    resumed: int | None


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
) -> FitResult:
    """Fold batches into a state, show what happens, and keep what is worth keeping.

    The order is this. A step is dispatched; the metrics of the interval before are read, so that
    nothing waits for the device that need not; where it is due, the state is evaluated, and then
    saved; and only then is the next batch pulled. So a saved position is that of the next batch.

    With checkpoints a run goes on where it was: from the newest good one, with the same state, the
    same batches and the same history. SIGINT and SIGTERM let the step under way finish and save;
    then `KeyboardInterrupt` or `SystemExit(143)` is raised. A second one leaves at once. Whatever
    else ends the run, an exception of a hook or of the data, reaches the caller after a save.

    Args:
      step: a `StepFn`, which is compiled once and refuses to be compiled again; one that is
        compiled or jitted already is taken as it is.
      state: the state to begin with. It is given to the step, so do not use it again.
      batches: any iterable of batches. It can be resumed if it has `get_state` and `set_state`, as
        `sf.batches` has.
      steps: how many steps there are to be, with those before a resume.
      epochs: how many epochs, instead; without either, all of the batches.
      run_dir: where what belongs to the run goes: `metrics.jsonl`, `metrics.csv`, and the
        checkpoints, unless they say where. A run that goes on appends. `run.json` says what it was
        begun with and how it ended, and `report.html` shows it, while it goes on too.
      evaluation: an `Evaluation`, or several.
      checkpoints: a `Checkpoints`.
      hooks: functions that are shown what happens, and stop the run by returning why. A loss that
        is not finite stops it in any case, unless a `stop_on_nonfinite` is among them.
      log_every: the steps from one log point to the next.
      resume: whether to go on from a checkpoint where there is one.
      steps_per_call: how many steps go in one dispatch, with the same bits.
      time_limit: after how many seconds to stop.

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
    steps = _positive("steps", steps)
    if steps is not None and epochs is not None:
        raise ConfigError(f"steps, epochs: expected one of them, got {steps} and {epochs}")
    evaluations = _evaluations(evaluation)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise ConfigError(
            f"checkpoints: expected sf.Checkpoints(every=…), got {tree.spell(checkpoints)}"
        )
    stepper = Stepper(step)
    at_once = _positive("steps_per_call", steps_per_call, needed=True) or 1
    if at_once > 1 and not stepper.scans:
        raise ConfigError(
            f"steps_per_call={at_once}: expected a step that is neither jitted nor compiled, to "
            f"compile several of them as one, got {tree.spell(step)}"
        )
    _check_there(state)
    log_at = _positive("log_every", log_every, needed=True) or 1
    feed = Feed(batches, _positive("epochs", epochs))
    for what in (*evaluations, checkpoints):
        if what is not None and what.every_epochs and not feed.epoch_steps:
            raise ConfigError(
                "every_epochs: expected batches that know how many steps an epoch has, got "
                f"{tree.spell(batches)}; give every=…, or sf.batches(data, …)"
            )
    if time_limit is not None and (not isinstance(time_limit, int | float) or time_limit < 0):
        raise ConfigError(
            f"time_limit: expected seconds, a number of at least 0, got {time_limit!r}"
        )
    shown = [*_hooks(hooks), *_usual(run_dir, time_limit)]
    if not any(getattr(hook, "watches_nonfinite", False) for hook in shown):
        shown.insert(0, stop_on_nonfinite())
    if not feed.epoch_steps and any(hasattr(hook, "end_epoch") for hook in shown):
        raise ConfigError(
            "hooks: expected batches that know how many steps an epoch has, for one that is called "
            f"after epochs, got {tree.spell(batches)}; give sf.batches(data, …)"
        )
    with ExitStack() as stack:
        series = _open(checkpoints, run_dir)
        report = None
        if run_dir is not None:  # entered first, so that its last page is of all there is
            facts = facts_of(
                state,
                batches,
                evaluations=evaluations,
                checkpoints=checkpoints,
                hooks=shown,
                steps=steps,
                epochs=epochs,
                log_every=log_at,
                steps_per_call=at_once,
                time_limit=time_limit,
            )
            report = stack.enter_context(Refresh(Path(run_dir), facts, goes_on=series is not None))
            shown.append(report)
        for hook in shown:
            if hasattr(hook, "close"):
                stack.callback(hook.close)
        fold = Fold(
            stepper,
            state,
            feed,
            steps=steps,
            evaluations=evaluations,
            series=series,
            hooks=shown,
            log_every=log_at,
            steps_per_call=at_once,
        )
        del state  # so that it can be freed when it is restored
        if report is not None:
            stack.callback(lambda: report.tell(fold.done, fold.stopped))
        stack.enter_context(fold.signals.watched())  # until the last save is on the disk
        if series is not None:
            stack.enter_context(series)
        if series is not None and latest_step(series.directory) is not None:
            if not resume:
                raise ConfigError(
                    f"resume=False: expected a directory without checkpoints to begin anew in, got "
                    f"steps {', '.join(map(str, steps_in(series.directory)))} in "
                    f"{series.directory}; delete them, or give another"
                )
            fold.resume()
        fold.run()
    result = FitResult(
        state=fold.state,
        steps=fold.done,
        history=fold.history,
        stopped=fold.stopped or "",
        best=_best(series),
        resumed=fold.resumed,
    )
    _leave(fold.signals, result)
    return result


def _leave(signals: Signals, result: FitResult) -> None:
    """End as a process that was asked to stop ends, with the result at hand."""
    error: Any
    if signals.got == signal.SIGINT:
        error = KeyboardInterrupt(result.stopped)
    elif signals.got == signal.SIGTERM:
        error = SystemExit(128 + signal.SIGTERM)
    else:
        return
    error.result = result
    raise error


def _usual(run_dir: str | Path | None, time_limit: float | None) -> list[Hook]:
    """Make the hooks that the other arguments stand for; what writes comes last, to hear all."""
    hooks: list[Hook] = [] if time_limit is None else [stop_after(time_limit)]
    if run_dir is not None:
        place = read_directory(run_dir, make=True)
        files = jsonl_writer(place / "metrics.jsonl"), csv_writer(place / "metrics.csv")
        hooks.append(log_to(async_writer(multi_writer(*files))))
    return hooks


def _open(checkpoints: Checkpoints | None, run_dir: str | Path | None) -> Series | None:
    if checkpoints is None:
        return None
    if checkpoints.directory is None and run_dir is None:
        raise ConfigError(
            "checkpoints: expected to know where they go; give run_dir=…, or a directory to "
            "sf.Checkpoints"
        )
    return checkpoints.open(None if run_dir is None else Path(run_dir) / "checkpoints")


def _best(series: Series | None) -> int | None:
    if series is None or series.best is None:
        return None
    return next(iter(order_by(series.best, metrics_in(series.directory))), None)


def _check_there(state: Any) -> None:
    for name, leaf in tree.named_leaves(state):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ConfigError(
                f"{name}, …: the arrays were donated to an earlier call and are gone; go on with "
                "the state that it returned"
            )


def _evaluations(given: Any) -> list[Evaluation]:
    evaluations = list(given) if isinstance(given, list | tuple) else [given]
    for one in evaluations:
        if not isinstance(one, Evaluation):
            raise ConfigError(f"evaluation: expected sf.Evaluation(…), got {tree.spell(one)}")
    names = [one.name for one in evaluations]
    if len(set(names)) < len(names) or "train" in names:
        raise ConfigError(
            f"evaluation: expected a name of its own for each, other than train, got {names}"
        )
    return evaluations


def _hooks(given: Any) -> list[Hook]:
    hooks = list(given) if isinstance(given, list | tuple) else [given]
    for hook in hooks:
        if not callable(hook):
            raise ConfigError(f"hooks: expected functions of an event, got {tree.spell(hook)}")
    return hooks


def _positive(name: str, value: Any, *, needed: bool = False) -> int | None:
    if (needed or value is not None) and (type(value) is not int or value < 1):
        raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value
