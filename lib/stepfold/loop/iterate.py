"""The fold itself."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def iterate(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Fold batches into a state, and give state and metrics after each.

    Nothing is compiled, placed or waited for that the step does not itself: give it a compiled one.
    A step that is donated its state takes the one given last, so look at it before going on.

    Args:
      step: a `StepFn`, jitted or compiled for speed.
      state: the state to begin with.
      batches: any iterable of batches.

    >>> import itertools, jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = jax.jit(sf.make_train_step(lambda p, x, key: sf.mean((p["w"] - x) ** 2), tx))
    >>> for state, metrics in sf.iterate(step, state, itertools.repeat(jnp.zeros(4), 3)):
    ...     print(int(state.step), f"{metrics['loss'].compute():.2f}")
    1 1.00
    2 0.64
    3 0.41
    """
    for batch in batches:
        state, metrics = step(state, batch)
        yield state, metrics
