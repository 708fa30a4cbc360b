"""Statistics of the parameters, by path."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.core.state import params_of
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import BaseHook, Event


class weight_statistics(BaseHook):  # noqa: N801
    """Measure the mean, standard deviation, minimum and maximum of parameters, by path.

    They are called `weights/layers/0/kernel/mean` and so on. It is one program and one transfer,
    but it waits for the step that runs, so do it now and then:
    `sf.every(500, sf.weight_statistics("kernel"))`. `event.state` may be a few steps ahead; to
    measure the state of `event.step`, set `needs_exact_state = True` on the hook.

    Args:
      pattern: a regular expression; parameters in whose path it matches are measured.
      writer: a writer with `write_histograms(step, arrays by name)`, to write the values too.
      samples: how many values of each parameter to write at most, evenly spaced.
      name: the prefix of the metrics.

    Raises:
      ConfigError: when called, if the pattern matches no parameter.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.arange(5.0), "b": 0.0}, optax.sgd(0.1), jax.random.key(0))
    >>> for name, value in sf.weight_statistics("w")(sf.Event(10, None, {}, state)).items():
    ...     print(name, f"{value:.4f}")
    weights/w/mean 2.0000
    weights/w/std 1.4142
    weights/w/min 0.0000
    weights/w/max 4.0000
    """

    def __init__(
        self, pattern: str = "", *, writer: Any = None, samples: int = 10_000, name: str = "weights"
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except (TypeError, re.error) as error:
            raise ConfigError(
                f"pattern: expected a regular expression, got {pattern!r}: {error}"
            ) from None
        if writer is not None and not callable(getattr(writer, "write_histograms", None)):
            raise ConfigError(
                f"writer: expected one with write_histograms, got {tree.spell(writer)}"
            )
        check_count("samples", samples)
        self._writer, self._samples, self._name = writer, samples, name
        self.provides = (f"{name}/",)

    def __call__(self, event: Event) -> dict[str, float]:
        params = tree.named_leaves(params_of(event.state, event.state))
        floats = {path: leaf for path, leaf in params if tree.is_float(leaf) and leaf.size}
        leaves = {path: leaf for path, leaf in floats.items() if self._pattern.search(path)}
        if not leaves:
            paths = ", ".join(list(floats)[:5]) + ", …" * (len(floats) > 5)
            raise ConfigError(
                f"weight_statistics: expected a pattern in the path of a parameter of floats, got "
                f"{self._pattern.pattern!r}; the paths are {paths or 'none'}"
            )
        sharding = _replicated_sharding(leaves.values())
        compute = jax.jit(_compute_statistics, static_argnums=1, out_shardings=sharding)
        samples = 0 if self._writer is None else self._samples
        rows, values = jax.device_get(compute(list(leaves.values()), samples))
        if self._writer is not None and jax.process_index() == 0:
            names = [f"{self._name}/{path}" for path in leaves]
            self._writer.write_histograms(event.step, dict(zip(names, values, strict=True)))
        return {
            f"{self._name}/{path}/{what}": float(number)
            for path, row in zip(leaves, rows, strict=True)
            for what, number in zip(("mean", "std", "min", "max"), row, strict=True)
        }


def _replicated_sharding(leaves: Any) -> NamedSharding | None:
    """Return a sharding that gives every process the whole result, if parameters are on a mesh."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


def _compute_statistics(leaves: list[Any], samples: int) -> tuple[jax.Array, list[jax.Array]]:
    wide = [leaf.astype(tree.widen(leaf.dtype)) for leaf in leaves]
    rows = [[leaf.mean(), leaf.std(), leaf.min(), leaf.max()] for leaf in wide]
    dtype = np.result_type(*(leaf.dtype for leaf in wide))
    table = jnp.array([[number.astype(dtype) for number in row] for row in rows])
    return table, [_sample(leaf, samples) for leaf in wide] if samples else []


def _sample(leaf: jax.Array, samples: int) -> jax.Array:
    index = np.linspace(0, leaf.size - 1, min(samples, leaf.size)).round().astype(np.int64)
    return leaf[tuple(jnp.asarray(axis) for axis in np.unravel_index(index, leaf.shape))]
