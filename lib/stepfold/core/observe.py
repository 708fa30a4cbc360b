"""Metrics of the state, added to those of a step."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from stepfold import tree
from stepfold.core.loss import mean
from stepfold.errors import ConfigError


def observe(
    step: Callable[[Any, Any], tuple[Any, Any]], /, **functions: Callable[[Any], Any]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Add metrics of the new state to a step, such as the learning rate or the weight norm.

    The metrics are computed within the step: they belong to exactly that step, and the host does
    not wait for them. A schedule counts from zero, so the learning rate that led to a state is
    `schedule(state.step - 1)`, unless steps were skipped, which optimizers do not count.
    `optax.inject_hyperparams` stores the rate that it used:
    `optax.tree.get(state.opt_state, "hyperparams")["learning_rate"]`.

    Args:
      step: a `StepFn`.
      **functions: functions of the state that return a number, by metric name.

    Raises:
      ConfigError: if an argument is not callable; while tracing, if a function does not return a
        number, or the step already has a metric of that name.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> schedule = optax.linear_schedule(1.0, 0.0, 10)
    >>> tx = optax.sgd(schedule)
    >>> step = sf.make_train_step(lambda params, batch, key: (params * batch).mean(), tx)
    >>> step = sf.observe(
    ...     step,
    ...     learning_rate=lambda state: schedule(state.step - 1),
    ...     weight_norm=lambda state: optax.tree.norm(state.params),
    ... )
    >>> state = sf.init_state(jnp.ones(4), tx, jax.random.key(0))
    >>> state, metrics = step(state, jnp.ones(4))
    >>> {name: float(metric.compute()) for name, metric in metrics.items()}
    {'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1.0, 'weight_norm': 1.5}
    """
    if not callable(step):
        raise ConfigError(f"observe: expected a step (state, batch) -> …, got {tree.spell(step)}")
    for name, function in functions.items():
        if not callable(function):
            raise ConfigError(
                f"{name}: expected a function of the state, got {tree.spell(function)}"
            )

    def observed(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        taken = sorted(functions.keys() & metrics.keys())
        if taken:
            raise ConfigError(
                f"observe: expected other names than the step's own metrics, got {', '.join(taken)}"
            )
        return state, {**metrics, **{name: _read(name, f(state)) for name, f in functions.items()}}

    return observed


def _read(name: str, value: Any) -> Any:
    if not tree.is_real(value) or jnp.shape(value) != ():
        raise ConfigError(f"{name}: expected one number of the state, got {tree.spell(value)}")
    return mean(value)
