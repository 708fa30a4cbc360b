"""Going back: the state of a checkpoint folded again, up to the step in which a run went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.restore import restore
from stepfold.errors import ConfigError, DataError
from stepfold.loop.metrics import PerStep, each_of, weights_of
from stepfold.loop.replaying.capsule import Capsule
from stepfold.loop.replaying.rereading import can_reread, reread
from stepfold.loop.stepper import Stepper


class Said(NamedTuple):
    """The metrics of one step, and their weights, by name."""

    values: dict[str, float]
    weights: dict[str, float]

    def is_bad(self, name: str) -> bool:
        """Tell whether a metric is what `stop_on_nonfinite` stops for."""
        return not np.isfinite(self.values[name]) and self.weights.get(name, 1) != 0


class Course(NamedTuple):
    """What happened from the checkpoint on.

    Attributes:
      origin: the first step after which the state was not finite where it had been before; the
        capsule's own, if it was finite up to there.
      state: the state before that step.
      batch: its batch.
      last: what the step before the capsule's said, if it was run.
      said: what the capsule's step said.
    """

    origin: int
    state: Any
    batch: Any
    last: Said | None
    said: Said


def go_back(capsule: Capsule, stepper: Stepper, state: Any, batches: Any) -> Course:
    """Fold from the checkpoint on, through the capsule's step.

    Raises:
      ConfigError, CheckpointError, DataError: if that cannot be.
    """
    state = _begin(capsule, state)
    usual, broken, last = set(not_finite(state)), False, None
    at: tuple[int, Any, Any] = capsule.step, state, None
    with _batches(capsule, batches) as given:
        for number in range(capsule.mark.step + 1, capsule.step + 1):
            batch = _next(capsule, given, number)
            if not broken:
                at = number, copied(state), batch
            state, said = run(stepper, state, batch)
            broken = broken or bool(set(not_finite(state)) - usual)
            last = said if number < capsule.step else last
    return Course(*at, last, said)


def run(stepper: Stepper, state: Any, batch: Any) -> tuple[Any, Said]:
    """Run a step, which takes the state, and read what it says."""
    state, said = stepper(state, [batch])
    stacked = stepper.metrics([said])
    rows, weights = PerStep(stacked, each_of), PerStep(stacked, weights_of)
    names = [name for name in rows if np.ndim(rows[name]) == 1]
    values = {name: float(rows[name][0]) for name in names}
    return state, Said(values, {name: float(weights[name][0]) for name in names if name in weights})


def copied(state: Any) -> Any:
    """Copy a state, so that it can be given to a step that takes what it is given."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)


def not_finite(state: Any) -> list[str]:
    """Name the leaves with a number that is not finite."""
    named = [(name, leaf) for name, leaf in tree.named_leaves(state) if _is_inexact(leaf)]
    fine = jax.device_get(_are_finite([leaf for _, leaf in named]))
    return [name for (name, _), finite in zip(named, fine, strict=True) if not finite]


def _is_inexact(leaf: Any) -> bool:
    return tree.is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


@jax.jit
def _are_finite(leaves: list[Any]) -> list[Any]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def _begin(capsule: Capsule, state: Any) -> Any:
    """Restore the state to begin with, or take the one that is given."""
    if capsule.distance < 0:
        raise ConfigError(
            f"capsule: expected a checkpoint of a state before step {capsule.step}, got none that "
            "is left; keep more of them, sf.Checkpoints(keep=…)"
        )
    if capsule.checkpoint is not None:
        like = capsule.like if state is None else state
        if like is None:
            raise ConfigError(
                "state: expected the form of the state for a capsule that was read from the disk, "
                "got None; give jax.eval_shape(lambda k: sf.init_state(…, k), key), or a new state"
            )
        where, number = capsule.checkpoint
        return restore(where, like, step=number, fall_back=False).state
    if state is None or any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        raise ConfigError(
            f"state: expected the state of step {capsule.mark.step} that the run began with, since "
            f"it had no checkpoint before step {capsule.step}, got "
            f"{'None' if state is None else 'an abstract one'}; make it as it was made"
        )
    found = int(getattr(state, "step", capsule.mark.step))
    if found != capsule.mark.step:
        raise ConfigError(
            f"state: expected the one that the run began with, of step {capsule.mark.step}, got "
            f"one of step {found}"
        )
    return copied(state)


@contextmanager
def _batches(capsule: Capsule, given: Any) -> Iterator[Iterator[Any]]:
    """Give the batches from the checkpoint on, as far as any are needed."""
    if not capsule.distance and not capsule.lost:
        yield iter(())
    elif given is None:
        raise ConfigError(
            f"batches: expected those of the run, for steps {capsule.mark.step + 1} to "
            f"{capsule.step}, got None; {'; '.join(capsule.lost) or 'the capsule has none'}"
        )
    elif given is capsule.batches or can_reread(given):
        with reread(given, capsule.mark, capsule.began) as course:
            yield course
    else:
        yield iter(given)


def _next(capsule: Capsule, given: Iterator[Any], number: int) -> Any:
    """Give the batch of a step: the kept one, where it is whole, or the next."""
    if number == capsule.step and not capsule.lost:
        return capsule.batch
    try:
        return next(given)
    except StopIteration:
        raise DataError(
            f"batches: expected those of steps {capsule.mark.step + 1} to {capsule.step}, but they "
            f"ended before step {number}"
        ) from None
