"""The result of `fit`."""

from typing import TYPE_CHECKING, Any, NamedTuple

from stepfold.loop.hooks.base import Stop
from stepfold.loop.metrics import History

if TYPE_CHECKING:
    from stepfold.loop.replay.capsule import Capsule


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the state after the last step.
      steps: the number of steps done, with those before a resume.
      history: the values of each metric; `history["train/loss"].steps` are their steps.
      stop_reason: why it stopped, a `Stop` with `kind` and `message`.
      best: the step of the best checkpoint, if `Checkpoints(best=…)` ranks them.
      resumed: the step of the checkpoint that it resumed from, or None.
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
    capsule: "Capsule | None" = None

    def __repr__(self) -> str:
        last = {name: curve[-1] for name, curve in self.history.items() if curve}
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in list(last.items())[:6])
        more = ", …" if len(last) > 6 else ""
        return (
            f"FitResult(steps={self.steps}, stop_reason={str(self.stop_reason)!r}, "
            f"history={{{metrics}{more}}}, best={self.best}, resumed={self.resumed})"
        )
