"""What a run comes to, and how the process ends that was asked to stop."""

import signal
from typing import Any, NamedTuple

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
