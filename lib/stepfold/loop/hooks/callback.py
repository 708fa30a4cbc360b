"""Callbacks as trainers have them, called after each epoch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Event


class callback:  # noqa: N801  it is called as the functions beside it are
    """Call a function `(trainer, epoch, metrics)` after each epoch, the one it stops at too.

    The epochs count from 0. The metrics are called `train_loss`, `eval_loss` and so on: those of
    train steps as the mean over the steps of the epoch, any others as they were measured last. An
    exception in the function ends the run, after a save.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, x, key: sf.mean((params - x) ** 2), tx)
    >>> show = sf.callback(lambda trainer, epoch, found: print(epoch, f"{found['train_loss']:.3f}"))
    >>> batches = [np.zeros(4, np.float32)] * 2
    >>> result = sf.fit(step, state, batches, epochs=3, hooks=[show])
    0 0.820
    1 0.336
    2 0.138
    """

    def __init__(
        self,
        function: Callable[[Any, int, dict[str, float]], Any],
        trainer: Any = None,
    ) -> None:
        """Say what to call.

        Args:
          function: what is called.
          trainer: its first argument.

        Raises:
          ConfigError: if it is no function.
        """
        if not callable(function):
            raise ConfigError(
                "callback: expected a function (trainer, epoch, metrics), got "
                f"{tree.spell(function)}"
            )
        self._function, self._trainer = function, trainer
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Gather what was measured."""
        for name, values in event.each.items():
            if np.ndim(values) == 1:
                self._sums[name] = self._sums.get(name, 0.0) + float(np.sum(values))
                self._counts[name] = self._counts.get(name, 0) + len(values)
        self._last |= event.metrics

    def end_epoch(self, epoch: int) -> None:
        """Call the function."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        found = {name.replace("/", "_"): value for name, value in {**self._last, **means}.items()}
        self._sums, self._counts, self._last = {}, {}, {}
        self._function(self._trainer, epoch, found)

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {"sums": {**self._sums}, "counts": {**self._counts}, "last": {**self._last}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        self._last = dict(state["last"])
