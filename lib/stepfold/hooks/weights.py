"""Statistics of the parameters, by path."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.core.state import params_of
from stepfold.core.validation import read_integer
from stepfold.errors import refuse
from stepfold.loop.events import Event


def weight_statistics(
    pattern: str = "", *, writer: Any = None, samples: int = 10_000, name: str = "weights"
) -> Callable[[Event], dict[str, float]]:
    """Measure the mean, standard deviation, minimum and maximum of parameters, by path.

    The numbers are called `weights/layers/0/kernel/mean` and so on, with `name` as their prefix.
    `pattern` is searched in the paths. It takes one program and one transfer, but waits for the
    running step, so do it now and then: `sf.hooks.every(500,
    sf.hooks.weight_statistics("kernel"))`. `event.state` may be a few steps ahead; to measure that
    of `event.step`, set the attribute `needs_exact_state = True` of the function. A `writer` with
    `write_histograms(step, arrays by name)` gets the values too, at most `samples` of each
    parameter, evenly spaced.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.arange(5.0), "b": 0.0}, optax.sgd(0.1), jax.random.key(0))
    >>> sf.hooks.weight_statistics("w")(sf.Event(10, None, {}, state))
    {'weights/w/mean': 2.0, 'weights/w/std': 1.41..., 'weights/w/min': 0.0, 'weights/w/max': 4.0}
    """
    try:
        regex = re.compile(pattern)
    except (TypeError, re.error) as error:
        refuse("pattern", "a regular expression", f"{pattern!r}: {error}")
    if writer is not None and not callable(getattr(writer, "write_histograms", None)):
        refuse("writer", "one with write_histograms", tree.describe_value(writer))
    most = read_integer("samples", samples)

    def weight_statistics(event: Event) -> dict[str, float]:
        leaves = _find_parameters(event.state, regex)
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves.values()]
        meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
        # On a mesh, every process gets the whole result.
        replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        compute = jax.jit(_compute_statistics, static_argnums=1, out_shardings=replicated)
        count = 0 if writer is None else most
        rows, values = jax.device_get(compute(list(leaves.values()), count))
        names = [f"{name}/{path}" for path in leaves]
        if writer is not None and jax.process_index() == 0:
            writer.write_histograms(event.step, dict(zip(names, values, strict=True)))
        return {
            f"{path}/{what}": float(number)
            for path, row in zip(names, rows, strict=True)
            for what, number in zip(("mean", "std", "min", "max"), row, strict=True)
        }

    weight_statistics.__qualname__ = "weight_statistics"
    weight_statistics.provides = (f"{name}/",)  # type: ignore[attr-defined]
    weight_statistics.can_stop = False  # type: ignore[attr-defined]
    return weight_statistics


def _find_parameters(state: Any, regex: re.Pattern[str]) -> dict[str, Any]:
    """Return the parameters of floats whose path matches, by path."""
    params = tree.named_leaves(params_of(state, state))
    floats = {path: leaf for path, leaf in params if tree.is_float(leaf) and leaf.size}
    leaves = {path: leaf for path, leaf in floats.items() if regex.search(path)}
    if not leaves:
        paths = ", ".join(list(floats)[:5]) + ", …" * (len(floats) > 5)
        expected = "a pattern in the path of a parameter of floats"
        got, advice = repr(regex.pattern), f"the paths are {paths or 'none'}"
        refuse("weight_statistics", expected, got, advice)
    return leaves


def _compute_statistics(leaves: list[Any], samples: int) -> tuple[jax.Array, list[jax.Array]]:
    wide = [leaf.astype(tree.widen(leaf.dtype)) for leaf in leaves]
    dtype = np.result_type(*(leaf.dtype for leaf in wide))
    rows = [[leaf.mean(), leaf.std(), leaf.min(), leaf.max()] for leaf in wide]
    table = jnp.array([[number.astype(dtype) for number in row] for row in rows])
    values = []
    for leaf in wide if samples else ():
        index = np.linspace(0, leaf.size - 1, min(samples, leaf.size)).round().astype(np.int64)
        axes = map(jnp.asarray, np.unravel_index(index, leaf.shape))
        values.append(leaf[tuple(axes)])
    return table, values
