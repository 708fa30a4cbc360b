"""Running the step again in which a run went wrong, and finding out what in it did."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.replaying.blame import name_inputs, name_line, name_rows
from stepfold.loop.replaying.capsule import Capsule
from stepfold.loop.replaying.files import read_capsule
from stepfold.loop.replaying.going_back import Course, copied, go_back, not_finite, run
from stepfold.loop.replaying.narrowing import Rows, only, rows_of
from stepfold.loop.stepper import Stepper


class Replay(NamedTuple):
    """What `replay` found; `print` it.

    Attributes:
      step: the step of the capsule.
      reproduced: whether it said the same as then, number for number.
      metrics: what it said this time.
      spoilt: the metrics that are not finite, and were in the step before where that was run.
      origin: the step in which it began: an earlier one, if that left a state that is not finite,
        and the loss told of it only later. What follows is of this step.
      examples: the rows of the batch that make it go wrong, each set of them alone.
      leaves: the leaves of the state that were finite before the step and are not after it.
      where: the operation that made the first number that is not finite, and its line.
      said: what else there is to know, in words.

    >>> import stepfold as sf
    >>> where = "log made inf at train.py:5 (loss_fn)"
    >>> print(sf.Replay(7, True, {}, ("train/loss",), 7, ((3,),), ("params/w",), where, ()))
    step 7: reproduced; not finite: train/loss
    examples: row 3
    where: log made inf at train.py:5 (loss_fn)
    leaves: params/w
    """

    step: int
    reproduced: bool
    metrics: dict[str, float]
    spoilt: tuple[str, ...]
    origin: int
    examples: tuple[Rows, ...]
    leaves: tuple[str, ...]
    where: str
    said: tuple[str, ...]

    def __str__(self) -> str:
        done = "reproduced" if self.reproduced else "not reproduced"
        lines = [f"step {self.step}: {done}; not finite: {', '.join(self.spoilt) or 'nothing'}"]
        if self.origin != self.step:
            lines.append(f"it began in step {self.origin}, which left a state that is not finite")
        sets = [_row_words(rows) for rows in self.examples]
        lines += [f"examples: {'; '.join(sets)}"] if sets else []
        lines += [f"where: {self.where}"] if self.where else []
        more = f", and {len(self.leaves) - 8} more" if len(self.leaves) > 8 else ""
        lines += [f"leaves: {', '.join(self.leaves[:8])}{more}"] if self.leaves else []
        return "\n".join([*lines, *self.said])


def _row_words(rows: Rows) -> str:
    if len(rows) == 1:
        return f"row {rows[0]}"
    return f"rows {', '.join(map(str, rows))}, only together"


def replay(
    capsule: Capsule | str | Path,
    step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    state: Any = None,
    batches: Any = None,
) -> Replay:
    """Run the step again in which a run went wrong, and narrow it to examples, leaves and a line.

    The newest checkpoint before the step is restored, and the batches since then are folded into
    it; these are the run's own bits, so that the step does what it did. Then the step is run on
    some of the batch's rows at a time, in their places, with copies of them in the other places,
    until as few are left as make it go wrong. Where rows act on each other, as through the
    statistics of a batch, copies may make wrong what was not. The step is gone through operation
    by operation for the first that makes of finite numbers one that is not. Where an earlier step
    left a state that is not finite, as one can whose loss is finite, that one is looked into.

    It takes the memory of two states besides what the step takes.

    Args:
      capsule: what is on the result of `fit`, or the path at which it was written.
      step: the step of the run. One that is jitted or compiled runs as it is.
      state: the form in which the checkpoint is restored, with shardings, as `restore` takes it;
        or, where there was no checkpoint, the state that the run began with, which is not used up.
        A capsule on a result knows the form.
      batches: the batches of the run, made anew, for one that was read from the disk. A list, and
        what has `get_state` and `set_state`, are put to the right place, and back again;
        anything else has to begin with the batch of the first step after the checkpoint.

    Raises:
      ConfigError: if something is missing, or there are several processes.
      CheckpointError, TreeMismatchError: if the checkpoint cannot be restored.
      DataError: if the batches are not those.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> new = lambda: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * jnp.log(x)), tx)
    >>> data = np.arange(24, dtype=np.float32)[::-1].copy()
    >>> result = sf.fit(step, new(), sf.batches(data, 8, epochs=1))
    >>> found = sf.replay(result.capsule, step, state=new())
    >>> found.step, found.reproduced, found.examples, found.leaves, found.where.split(" at ")[0]
    (3, True, ((7,),), ('params/w',), 'log made inf')
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"replay: expected one process, got {jax.process_count()}; call it from a script of "
            "its own, with the batches of all of them: sf.batches(…, process_count=1)"
        )
    capsule = capsule if isinstance(capsule, Capsule) else read_capsule(capsule)
    stepper = Stepper(step)
    course = go_back(capsule, stepper, state, capsule.batches if batches is None else batches)
    metrics = {f"train/{name}": value for name, value in course.said.values.items()}
    differing = [
        f"{name} was {value}, and is {metrics.get(name, 'not among the metrics')}"
        for name, value in capsule.metrics.items()
        if name not in metrics or not np.array_equal(value, metrics[name], equal_nan=True)
    ]
    name = capsule.metric.removeprefix("train/")
    if name not in course.said.values:
        raise ConfigError(
            f"step: expected the step of the run, whose metrics have {name}, got one with "
            f"{', '.join(course.said.values) or 'none'}"
        )
    blame = _blame(stepper, step, course, name if course.origin == capsule.step else None)
    before = {} if course.last is None else course.last.values
    return Replay(
        step=capsule.step,
        reproduced=not differing,
        metrics=metrics,
        spoilt=tuple(
            f"train/{name}"
            for name, value in course.said.values.items()
            if not np.isfinite(value) and np.isfinite(before.get(name, 0.0))
        ),
        origin=course.origin,
        examples=blame.examples,
        leaves=blame.leaves,
        where=blame.where,
        said=(*differing, *blame.said),
    )


class _Blame(NamedTuple):
    """What in a step makes it go wrong, as in a `Replay`."""

    examples: tuple[Rows, ...]
    leaves: tuple[str, ...]
    where: str
    said: tuple[str, ...]


def _blame(stepper: Stepper, step: Any, course: Course, name: str | None) -> _Blame:
    """Narrow a step down.

    Args:
      stepper: what runs it.
      step: the step as it was given.
      course: what led to it.
      name: the metric that goes wrong; None where it is the state that does.
    """
    usual = set(not_finite(course.state))

    def tried(batch: Any) -> tuple[tuple[str, ...], bool]:
        after, said = run(stepper, copied(course.state), batch)
        fresh = tuple(leaf for leaf in not_finite(after) if leaf not in usual)
        return fresh, bool(fresh) if name is None else said.is_bad(name)

    leaves, bad = tried(course.batch)
    if not bad:
        return _Blame((), leaves, "", ())
    examples, said = name_rows(course.batch, lambda rows: tried(only(course.batch, rows))[1])
    guilty = set(itertools.chain.from_iterable(examples))
    others = set(range(rows_of(course.batch))) - guilty if examples else set()
    good = only(course.batch, sorted(others)) if others else None
    if good is not None and tried(good)[1]:
        good = None
    inner = step.step if isinstance(step, CompiledStep) else step
    where, unknown = name_line(inner, course.state, course.batch, good)
    held = name_inputs(course.batch, guilty)
    return _Blame(examples, leaves, "; ".join([*held, *where]), (*said, *([] if held else unknown)))
