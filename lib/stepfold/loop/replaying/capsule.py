"""What is kept of the step in which a run went wrong: enough to run that step again.

Nothing is set aside in the course of the run, except where the batches stood at the last few log
points. The batch is asked for again, and the state is folded again from a checkpoint, since the one
before the step was donated to it long before anybody read its loss.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.checkpoint.manifest import read_manifest
from stepfold.checkpoint.steps import path_of, whole_steps
from stepfold.loop.hooks.stopping import Nonfinite
from stepfold.loop.replaying.rereading import Mark, reread

_SEVERAL = "the batch: with several processes each has its own rows, and none has all of them"


class Reference(NamedTuple):
    """The checkpoint that the step is reached from."""

    directory: Path
    step: int


@dataclass(frozen=True)
class Capsule:
    """What it takes to go back to the step in which a metric was not finite; `replay` takes it.

    `fit` makes it where `stop_on_nonfinite` ends a run, and writes it to `run_dir/capsules/<step>`.
    Written, it is without what only memory can hold: the form of the state, and the batches.

    Attributes:
      step: the step, the first being 1.
      metric: the metric that was not finite.
      metrics: what the step said, by name.
      key: the random key that its loss was called with; None if the state has none.
      batch: its batch, on the host or where it was.
      lost: why the batch is not here, or what of it is not as it was; empty if all is well.
      checkpoint: the newest checkpoint of a state before the step, or None.
      mark: where the batches stood at that checkpoint, or where the run began.
      began: the step that the run began after.
      path: where it was written.
      like: the form of the state, with its shardings.
      batches: the batches of the run.
      notes: what else could not be written.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * x), tx)
    >>> batches = [np.float32([1, 2]), np.float32([3, np.inf])]
    >>> result = sf.fit(step, state, batches)
    >>> print(result.capsule)
    step 2: train/loss is inf; replay begins with a state of step 0, 1 step before it
    """

    step: int
    metric: str
    metrics: dict[str, float]
    key: jax.Array | None
    batch: Any = field(repr=False)
    lost: tuple[str, ...]
    checkpoint: Reference | None
    mark: Mark
    began: int
    path: Path | None = None
    like: Any = field(default=None, repr=False)
    batches: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def distance(self) -> int:
        """How many steps a replay folds before it is at the step."""
        return self.step - 1 - self.mark.step

    def __str__(self) -> str:
        if self.checkpoint is None:
            begins = f"a state of step {self.mark.step}"
        else:
            begins = f"the checkpoint of step {self.checkpoint.step}"
        value = self.metrics.get(self.metric, float("nan"))
        steps = "1 step" if self.distance == 1 else f"{self.distance} steps"
        far = f", {steps} before it" if self.distance > 0 else ""
        said = f"step {self.step}: {self.metric} is {value}; replay begins with {begins}{far}"
        return "; not kept: ".join([said, *self.lost[:1]])


def take_capsule(
    found: Nonfinite,
    *,
    state: Any,
    marks: Sequence[Mark],
    batches: Any,
    directory: Path | None,
) -> Capsule:
    """Gather what is known of a step after the run has ended, and ask for its batch again.

    Args:
      found: the step.
      state: the state that the run ended with.
      marks: where the batches stood, from the beginning of the run on.
      batches: the batches of the run.
      directory: where its checkpoints are, all of them written.
    """
    began = marks[0].step
    checkpoint, start = None, marks[0]
    if directory is not None:
        saved = [step for step in whole_steps(directory) if step < found.step]
        if saved:
            checkpoint = Reference(directory, saved[-1])
            start = Mark(saved[-1], read_manifest(path_of(directory, saved[-1])).position())
    near = max((start, *marks), key=lambda mark: (mark.step < found.step, mark.step))
    batch, lost = _batch(batches, found.step, near, began)
    return Capsule(
        step=found.step,
        metric=found.metric,
        metrics=found.metrics,
        key=_key(state, found.step),
        batch=batch,
        lost=lost,
        checkpoint=checkpoint,
        mark=start,
        began=began,
        like=jax.tree.map(_abstract, state),
        batches=batches,
    )


def _batch(batches: Any, step: int, mark: Mark, began: int) -> tuple[Any, tuple[str, ...]]:
    if jax.process_count() > 1:
        return None, (_SEVERAL,)
    if mark.step >= step:
        return None, ("the batch: it was folded in before the run went on from a checkpoint",)
    try:
        with reread(batches, mark, began) as given:
            found = list(itertools.islice(given, step - 1 - mark.step, step - mark.step))
    except Exception as error:  # noqa: BLE001  whatever a source raises, the run's result is not lost
        return None, (f"the batch: it cannot be had again: {error}",)
    if not found:
        return None, ("the batch: asked again, the batches ended before it",)
    return jax.tree.map(_own, found[0]), ()


def _own(leaf: Any) -> Any:
    """Copy what a source may still write into."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _key(state: Any, step: int) -> jax.Array | None:
    """Give the key of a step; of what is on several processes, from what is on this one."""
    key = getattr(state, "key", None)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None
    here = key.addressable_data(0)
    return jax.random.fold_in(here, step - 1)  # the state before it had folded in one less


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
