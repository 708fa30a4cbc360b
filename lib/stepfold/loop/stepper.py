"""The compiled form of a step: one at a time, or several in one dispatch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.signatures import spell_call, takes
from stepfold.errors import ConfigError, OutOfMemoryError, RetraceError
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.memory import exhausted, is_exhausted
from stepfold.loop.evaluate import is_placed, mesh_of
from stepfold.loop.rows import Rower
from stepfold.sharding.placement import shard_batch


class Stepper:
    """Run a step on batches, compiled when it first sees one.

    A step that is compiled already, or jitted, runs as it is.
    """

    def __init__(
        self, step: Callable[[Any, Any], tuple[Any, Any]], cache: Path | None = None
    ) -> None:
        if not callable(step):
            raise ConfigError(f"step: expected a step (state, batch) -> …, got {tree.spell(step)}")
        if not takes(step, 2):
            raise ConfigError(
                f"step: expected a step (state, batch) -> (state, metrics), got {spell_call(step)};"
                " of a loss function sf.make_train_step makes one"
            )
        self._step = step
        self._ready = isinstance(step, CompiledStep) or hasattr(step, "lower")
        self._rower = Rower(step)
        self._cache = cache
        self._compiled: dict[int, CompiledStep] = {}

    @property
    def scans(self) -> bool:
        """Tell whether several steps can go in one dispatch."""
        return not self._ready

    def __call__(self, state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Run a step for each batch; give the state, and what to give to `metrics`."""
        if jax.process_count() > 1:  # each has its own rows, which jax does not put together
            mesh = mesh_of(state)
            batches = [b if mesh is None or is_placed(b) else shard_batch(b, mesh) for b in batches]
        if self._ready:
            (batch,) = batches
            return self._step(state, batch)
        count = len(batches)
        given = batches[0] if count == 1 else tuple(batches)
        compiled = self._compiled.get(count)
        if compiled is None:
            run = self._rower if count == 1 else self._scanned
            compiled = compile_step(run, state, given, compilation_cache=self._cache)
            self._compiled[count] = compiled
        return compiled(state, given)  # type: ignore[no-any-return]

    def _scanned(self, state: Any, batches: tuple[Any, ...]) -> tuple[Any, Any]:
        for batch in batches[1:]:
            lines = tree.diff(batches[0], batch, "batch")
            if lines:
                raise RetraceError(
                    "steps_per_call: expected batches of one form in a call, got\n  "
                    + "\n  ".join(lines)
                )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return jax.lax.scan(self._rower, state, stacked)

    def metrics(self, said: Sequence[Any]) -> Any:
        """Give what several calls said as metrics, with a leading axis of steps, on the host."""
        if not self._ready:
            return self._rower.stacked(said)
        host: Any = jax.device_get(list(said))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *host)

    def explain(self, error: BaseException) -> OutOfMemoryError | None:
        """Say more of an error that was heard of only when what a step gave was read."""
        step = self._step if self._ready else next(iter(self._compiled.values()), None)
        if is_exhausted(error) and isinstance(step, CompiledStep):
            return exhausted(error, step.state, step.batch, step.compiled)
        return None
