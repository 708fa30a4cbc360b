"""How the parameters are distributed, by path."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.condition import params_of
from stepfold.loop.event import Event, Hook

_WHAT = ("mean", "std", "min", "max")


def weight_statistics(
    pattern: str = "", *, writer: Any = None, samples: int = 10_000, name: str = "weights"
) -> Hook:
    """Measure mean, standard deviation, least and greatest of parameters, by their path.

    All of it is one program and one transfer. It has to wait for the step under way, so have it
    done now and then: `sf.every(500, sf.weight_statistics("kernel"))`, before the hooks that are to
    show the numbers, `weights/layers/0/kernel/mean` and so on. They are of the state at hand, which
    may be that of the step after the one that is shown.

    Args:
      pattern: a regular expression; parameters whose path it finds are measured.
      writer: one with `write_histograms(step, arrays by name)`, to give it the values too.
      samples: how many values of each parameter, evenly spaced, the writer is given at most.
      name: what the metrics are called by.

    Raises:
      ConfigError: if an argument is not as described; when called, if no path is found.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.arange(5.0), "b": 0.0}, optax.sgd(0.1), jax.random.key(0))
    >>> for name, value in sf.weight_statistics("w")(sf.Event(10, None, {}, state)).items():
    ...     print(name, f"{value:.4f}")
    weights/w/mean 2.0000
    weights/w/std 1.4142
    weights/w/min 0.0000
    weights/w/max 4.0000
    """
    try:
        found = re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ConfigError(
            f"pattern: expected a regular expression, got {pattern!r}: {error}"
        ) from None
    if writer is not None and not callable(getattr(writer, "write_histograms", None)):
        raise ConfigError(f"writer: expected one with write_histograms, got {tree.spell(writer)}")
    if type(samples) is not int or samples < 1:
        raise ConfigError(f"samples: expected an integer of at least 1, got {samples!r}")
    compiled: dict[Any, Callable[..., Any]] = {}  # for each layout on devices; most runs have one

    def measure_weights(event: Event) -> dict[str, float]:
        leaves = _chosen(event.state, found)
        place = _replicated(leaves)
        if place not in compiled:
            compiled[place] = jax.jit(_statistics, static_argnums=1, out_shardings=place)
        count = 0 if writer is None else samples
        table, values = jax.device_get(compiled[place](list(leaves.values()), count))
        if writer is not None and jax.process_index() == 0:
            names = [f"{name}/{path}" for path in leaves]
            writer.write_histograms(event.step, dict(zip(names, values, strict=True)))
        return {
            f"{name}/{path}/{what}": float(number)
            for path, row in zip(leaves, table, strict=True)
            for what, number in zip(_WHAT, row, strict=True)
        }

    return measure_weights


def _chosen(state: Any, pattern: re.Pattern[str]) -> Mapping[str, Any]:
    params = params_of(state, state)
    paths = {
        path: leaf for path, leaf in tree.named_leaves(params) if tree.is_float(leaf) and leaf.size
    }
    chosen = {path: leaf for path, leaf in paths.items() if pattern.search(path)}
    if not chosen:
        there = ", ".join([*list(paths)[:5], *(["…"] if len(paths) > 5 else [])]) or "none"
        raise ConfigError(
            f"weight_statistics: expected {pattern.pattern!r} to be found in the path of a "
            f"parameter of floats, of which there are {there}"
        )
    return chosen


def _replicated(leaves: Mapping[str, Any]) -> NamedSharding | None:
    """Give every process all of what comes out, where parameters lie on a mesh."""
    places = [getattr(leaf, "sharding", None) for leaf in leaves.values()]
    meshes = [place.mesh for place in places if isinstance(place, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


def _statistics(leaves: list[Any], samples: int) -> tuple[jax.Array, list[jax.Array]]:
    wide = [leaf.astype(tree.widen(leaf.dtype)) for leaf in leaves]
    rows = [[leaf.mean(), leaf.std(), leaf.min(), leaf.max()] for leaf in wide]
    dtype = np.result_type(*(leaf.dtype for leaf in wide))
    table = jnp.array([[number.astype(dtype) for number in row] for row in rows])
    return table, [_spaced(leaf, samples) for leaf in wide] if samples else []


def _spaced(leaf: jax.Array, samples: int) -> jax.Array:
    where = np.linspace(0, leaf.size - 1, min(samples, leaf.size)).round().astype(np.int64)
    return leaf[tuple(jnp.asarray(axis) for axis in np.unravel_index(where, leaf.shape))]
