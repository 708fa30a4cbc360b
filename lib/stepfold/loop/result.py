"""What a run comes to, and how the process ends that was asked to stop."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from stepfold.checkpoint.retention import metrics_in, order_by
from stepfold.checkpoint.series import Series
from stepfold.loop.condition import is_whole
from stepfold.loop.fold import Fold
from stepfold.loop.history import History
from stepfold.loop.replaying.capsule import Capsule
from stepfold.loop.signals import Signals


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
      capsule: what `replay` takes to run the step again in which a metric was not finite; None if
        that did not end the run.

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
    capsule: Capsule | None = None


def result_of(fold: Fold, capsule: Capsule | None = None, stopped: str | None = None) -> FitResult:
    """Say what a run comes to; why it stopped, where that is not the fold's own reason."""
    return FitResult(
        state=fold.state,
        steps=fold.done,
        history=fold.telling.history,
        stopped=_stopped(fold.stopped or "", capsule) if stopped is None else stopped,
        best=_best(fold.series),
        resumed=fold.resumed,
        capsule=capsule,
    )


def _stopped(said: str, capsule: Capsule | None) -> str:
    """Say why a run stopped; of its last step it is heard after it is over that it went wrong."""
    if capsule is None:
        return said
    why = f"{capsule.metric} is {capsule.metrics.get(capsule.metric)} in step {capsule.step}"
    said = said if why in said else f"{why}; {said}"
    return f"{said}; see {capsule.path}" if capsule.path else said


def _best(series: Series | None) -> int | None:
    if series is None or series.best is None:
        return None
    return next(iter(order_by(series.best, metrics_in(series.directory))), None)


@contextmanager
def giving_result(fold: Fold) -> Iterator[None]:
    """Give whatever ends a run what there is so far; a second signal waits for no device."""
    try:
        yield
    except BaseException as error:
        if not fold.signals.twice and is_whole(fold.state):
            said = f"{type(error).__name__}: {error}"
            error.result = result_of(fold, stopped=said)  # type: ignore[attr-defined]
        raise


def tell_waiting(fold: Fold) -> None:
    """Say what a second signal waits for all the same: to leave a save would break it off."""
    saving = fold.series and fold.series.saving
    if fold.signals.twice and saving is not None:
        with suppress(OSError, ValueError):  # the other end of a pipe may have got the signal too
            print(  # noqa: T201  a person asked twice, and sees nothing happen
                f"waiting for the checkpoint of step {saving}, which is being written",
                file=sys.stderr,
                flush=True,
            )


def leave(signals: Signals, result: FitResult) -> None:
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
