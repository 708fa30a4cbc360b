"""Measuring a state on all of a dataset, exactly, whatever the batches are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding

from stepfold import tree
from stepfold.core.donated import check_there
from stepfold.core.signatures import spell_call, takes
from stepfold.errors import ConfigError, DataError
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.feed import see_iterable
from stepfold.loop.metrics import are_metrics, merged, values_of
from stepfold.sharding.placement import shard_batch

if TYPE_CHECKING:
    from clu.metrics import Metric

_AT_ONCE = 64  # results that wait on the device before they are fetched together


def evaluate(
    eval_step: Callable[[Any, Any], Mapping[str, "Metric"]], state: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """Measure a state on batches, as one number a metric.

    Totals and weights are merged, never means of batches, and added up in float64. So it makes no
    difference how the examples are batched, padded under a mask, or shared out over devices.

    Args:
      eval_step: what `make_eval_step` makes, jitted or not. It compiles once for each form of
        batch: once, where the last is padded.
      state: the state. Where it is on a mesh, batches of the host are spread over it.
      batches: the batches, to the end of which it goes.

    Raises:
      ConfigError: if the batches are none, or are known to have no end, if the state was donated,
        or if what the step gives is no metrics.
      DataError: if there is no batch.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    >>> measure = sf.make_eval_step(lambda p, b, key: sf.mean(p["w"] * b["x"], b["mask"]))
    >>> data = {"x": np.arange(10.0)}
    >>> sf.evaluate(measure, state, sf.batches(data, 4, epochs=1, remainder="pad"))
    {'loss': 4.5}
    """
    see_iterable(batches)
    ready = isinstance(eval_step, CompiledStep) or hasattr(eval_step, "lower")
    step = eval_step if ready else jax.jit(eval_step)
    check_there(state)
    if getattr(batches, "endless", False):
        raise ConfigError(
            f"evaluate: expected batches that end, got {tree.spell(batches)} for ever; give "
            "sf.batches(…, epochs=1)"
        )
    mesh = mesh_of(state)
    seen: list[Any] = []
    for batch in batches:
        if mesh is not None and not is_placed(batch):
            batch = shard_batch(batch, mesh)
        seen.append(_checked(step(state, batch)))
        if len(seen) == _AT_ONCE:
            seen = [merged(seen)]
    if not seen:
        raise DataError(
            "evaluate: expected at least one batch, got none; batches that were gone through once "
            "are made anew for each evaluation"
        )
    return values_of(merged(seen))


def mesh_of(state: Any) -> Mesh | None:
    """Give the mesh of several devices that a state is on, if there is one."""
    places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    meshes = {place.mesh for place in places if isinstance(place, NamedSharding)}
    large = [mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size > 1]
    return large[0] if large else None


def is_placed(batch: Any) -> bool:
    """Tell whether a batch was put where it belongs already."""
    return any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(batch))


def _checked(metrics: Any) -> Any:
    if not are_metrics(metrics):
        raise ConfigError(
            f"evaluate: expected metrics by name from the step, got {tree.spell(metrics)}; make it "
            "with make_eval_step, or return {name: sf.mean(values, mask)}"
        )
    return metrics


@dataclass(frozen=True)
class Evaluation:
    """Say what is measured in the course of a run, on what, and when.

    Attributes:
      measure: an `EvalFn`; or, without batches, any function of the state that gives numbers by
        name: one that generates text and counts what is right, say.
      batches: a function that makes the batches anew for each evaluation.
      every: the steps from one evaluation to the next; None is at the end of the run alone.
      every_epochs: the epochs from one to the next.
      name: what the metrics are called by, as in `eval/loss`.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    >>> measure = sf.make_eval_step(lambda p, b, key: sf.mean(p["w"] * b["x"]))
    >>> batches = lambda: sf.batches({"x": np.arange(10.0)}, 5, epochs=1)
    >>> sf.Evaluation(measure, batches, every=100)(state)
    {'eval/loss': 4.5}
    >>> sf.Evaluation(lambda state: {"norm": optax.tree.norm(state.params)})(state)
    {'eval/norm': 1.0}
    """

    measure: Callable[..., Any]
    batches: Callable[[], Iterable[Any]] | None = None
    _: KW_ONLY
    every: int | None = None
    every_epochs: int | None = None
    name: str = "eval"

    def __post_init__(self) -> None:
        if not callable(self.measure):
            raise ConfigError(f"measure: expected a function, got {tree.spell(self.measure)}")
        if self.batches is not None and not callable(self.batches):
            raise ConfigError(
                "batches: expected a function that makes the batches anew for each evaluation, got "
                f"{tree.spell(self.batches)}; give lambda: sf.batches(…, epochs=1, "
                'remainder="pad")'
            )
        for field in ("every", "every_epochs"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{field}: expected an integer of at least 1, got {value!r}")
        if not isinstance(self.name, str) or self.name.splitlines() != [self.name]:
            raise ConfigError(f"name: expected a text of one line, got {self.name!r}")
        wanted = "state" if self.batches is None else "state, batch"
        if not takes(self.measure, 1 + (self.batches is not None)):
            raise ConfigError(
                f"measure: expected a function ({wanted}) -> metrics, got "
                f"{spell_call(self.measure)}; give sf.make_eval_step(loss_fn), and batches, "
                "as lambda: sf.batches(…, epochs=1)"
            )

    def __call__(self, state: Any) -> dict[str, float]:
        """Measure a state."""
        if self.batches is None:
            said = self.measure(state)
            if not isinstance(said, Mapping):
                raise ConfigError(f"{self.name}: expected numbers by name, got {tree.spell(said)}")
            return values_of(said, f"{self.name}/")
        found = evaluate(self.measure, state, self.batches())
        return {f"{self.name}/{name}": value for name, value in found.items()}
