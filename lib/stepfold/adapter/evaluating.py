"""Evaluations as trainers are asked for them: whole, batch by batch, or by a function besides."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter.stepping import as_metrics, rows_of
from stepfold.errors import ConfigError
from stepfold.loop.evaluate import evaluate
from stepfold.loop.metrics import metric_values
from stepfold.sharding.mesh import DATA_AXES

Step = Callable[[Any, Any], Any]


def measure(
    step: Step, state: Any, batches: Iterable[Any], calculator: Callable[..., Any] | None = None
) -> dict[str, float]:
    """Measure a state, and what a function adds; metrics are called `eval_loss` and so on.

    Args:
      step: an evaluation step.
      state: the state.
      batches: the batches.
      calculator: a function `(state, batch) -> metrics`, which are merged as the step's are; or of
        what was measured, by name, which gives more numbers by name.

    Raises:
      ConfigError: if the function is neither.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> step = lambda state, batch: {"loss": sf.mean(batch)}
    >>> twice = lambda found: {"twice": 2 * found["eval_loss"]}
    >>> measure(step, (), [jnp.ones(2), 4 * jnp.ones(1)], twice)
    {'eval_loss': 2.0, 'twice': 4.0}
    """
    if calculator is None:
        return _named(evaluate(step, state, batches))
    if _takes_batches(calculator):
        both = lambda state, batch: {**step(state, batch), **_calculated(calculator, state, batch)}
        return _named(evaluate(both, state, batches))
    found = _named(evaluate(step, state, batches))
    said = calculator(dict(found))
    if not isinstance(said, Mapping):
        raise ConfigError(
            f"metric_calculator: expected numbers by name from it, got {tree.spell(said)}"
        )
    return found | metric_values(said)


def measure_each(step: Step, state: Any, batches: Iterable[Any]) -> Iterator[dict[str, float]]:
    """Give what is measured on each batch.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> list(measure_each(lambda state, batch: {"loss": sf.mean(batch)}, (), [jnp.ones(2)]))
    [{'eval_loss': 1.0}]
    """
    for batch in batches:
        yield _named(evaluate(step, state, [batch]))


def _named(found: Mapping[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in found.items()}


def _takes_batches(calculator: Any) -> bool:
    try:
        parameters = inspect.signature(calculator).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            "metric_calculator: expected a function (state, batch) -> metrics, or of what was "
            f"measured, got {tree.spell(calculator)}"
        ) from None
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD,)]
    return len(needed) >= 2


def _calculated(calculator: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    return as_metrics(calculator(state, batch), "metric_calculator", weight=rows_of(batch))


def whole_if_uneven(batch: Any, mesh: Mesh | None) -> Any:
    """Put a batch whole on every device, if its rows do not divide by those of the mesh.

    Of several processes each has rows of its own, filled up to the same number: they are left.

    >>> whole_if_uneven({"x": np.ones(3)}, None)["x"].shape
    (3,)
    """
    if mesh is None or jax.process_count() > 1:
        return batch
    parts = int(np.prod([mesh.shape[axis] for axis in DATA_AXES if axis in mesh.shape]))
    if rows_of(batch) % parts == 0:
        return batch
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
