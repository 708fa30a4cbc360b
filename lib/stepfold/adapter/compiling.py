"""Compiling a trainer's steps before they run."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep, compile_step


class ForOneForm:
    """An evaluation step that was compiled for one form of batch, and is jitted for others.

    >>> state = jnp.float32(1.0)
    >>> step = ForOneForm(lambda state, batch: state + batch.sum(), state, jnp.ones(3))
    >>> float(step(state, jnp.ones(3))), float(step(state, jnp.ones(2)))
    (4.0, 3.0)
    """

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, batch: Any) -> None:
        self._jitted = step if hasattr(step, "lower") else jax.jit(step)
        self._shapes = _shapes(batch)
        self.made: CompiledStep = compile_step(lambda *given: self._jitted(*given), state, batch)

    @property
    def compiled(self) -> Any:
        """The program."""
        return self.made.compiled

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the step, as a jitted function does."""
        return self._jitted.lower(state, batch)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run the step."""
        return (self.made if _shapes(batch) == self._shapes else self._jitted)(state, batch)


def _shapes(batch: Any) -> list[Any]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]


def first_batch(batches: Any, what: str) -> tuple[Any, Any]:
    """Look at the first batch; give it, and batches from which it is not gone.

    Raises:
      ConfigError: if there is none.

    >>> batch, batches = first_batch(iter([1, 2]), "dataloader_train")
    >>> batch, list(batches)
    (1, [1, 2])
    """
    position = batches.get_state() if hasattr(batches, "set_state") else None
    iterator = iter(batches)
    batch = next(iterator, None)
    if batch is None:
        raise ConfigError(f"{what}: expected a batch to compile for, got none")
    if position is not None:
        batches.set_state(position)
        return batch, batches
    return batch, batches if iterator is not batches else itertools.chain([batch], iterator)
