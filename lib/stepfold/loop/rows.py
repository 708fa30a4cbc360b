"""What a step says of itself, as one row of numbers a step.

Each array that a step returns costs a little to return, and a little more to fetch. So the metrics
leave the device side by side in one array for each dtype, bit for bit, and come apart on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.metrics import are_metrics

Rows = list[Any]


def read_step(made: Any) -> tuple[Any, Any]:
    """Read what a step gave: a state, and metrics by name.

    Raises:
      ConfigError: if it is anything else.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"step: expected (state, metrics) from it, got {tree.spell(made)}")
    state, metrics = made
    if not are_metrics(metrics):
        raise ConfigError(
            f"step: expected metrics by name from it, got {tree.spell(metrics)}; give each number "
            "as sf.mean(values), so that they merge exactly"
        )
    return state, dict(metrics)


class Rower:
    """Pack the metrics of a step into rows, and unpack them; one for each step function.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> rower = Rower(lambda state, batch: (state + 1, {"loss": sf.mean(batch)}))
    >>> state, row = rower(jnp.zeros(()), jnp.ones(4))
    >>> [leaf.shape for leaf in row], rower.stacked([row, row])["loss"].total.tolist()
    ([(2,)], [4.0, 4.0])
    """

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self._step = step
        self._structure: Any = None
        self._widths: list[int] = []
        self._places: list[tuple[int, slice, tuple[int, ...]]] = []  # in which array, and where

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Rows]:
        """Run the step, while jax traces, and pack what it says."""
        state, metrics = read_step(self._step(state, batch))
        leaves, self._structure = jax.tree.flatten(metrics)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        kinds = list(dict.fromkeys(leaf.dtype for leaf in leaves))
        self._widths, self._places = [0 for _ in kinds], []
        for leaf in leaves:
            kind = kinds.index(leaf.dtype)
            start = self._widths[kind]
            self._widths[kind] += leaf.size
            self._places.append((kind, slice(start, start + leaf.size), leaf.shape))
        packed = [
            jnp.concatenate([leaf.reshape(-1) for leaf in leaves if leaf.dtype == kind])
            for kind in kinds
        ]
        return state, packed

    def stacked(self, rows: Sequence[Rows]) -> Any:
        """Give the metrics of several steps, each leaf with a leading axis of steps.

        Args:
          rows: of one step each, or with a leading axis of steps, as a scan gives them.
        """
        columns = [
            np.concatenate(arrays, axis=None).reshape(-1, width)
            for arrays, width in zip(zip(*_fetched(rows), strict=True), self._widths, strict=True)
        ]
        leaves = [
            columns[kind][:, place].reshape(-1, *shape) for kind, place, shape in self._places
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _fetched(rows: Sequence[Rows]) -> list[list[np.ndarray]]:
    """Fetch rows; where that is a copy from a device, all of the copies begin together.

    A CPU's are there already, and to begin a copy would cost more than to look at the array.
    """
    if all(device.platform == "cpu" for array in rows[0] for device in array.devices()):
        return [[np.asarray(array) for array in row] for row in rows]
    return jax.device_get(list(rows))  # type: ignore[no-any-return]
