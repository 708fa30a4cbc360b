"""Running the step again in which a run went wrong, and finding out what in it did."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError, DataError
from stepfold.loop.capsule import Capsule
from stepfold.loop.capsule_files import read_capsule
from stepfold.loop.going_back import Course, copied, go_back, not_finite, run
from stepfold.loop.narrowing import Rows, culprits, only, rows_of, spelled
from stepfold.loop.origin import first_site
from stepfold.loop.stepper import Stepper

_MOST = 16  # sets of rows: where there are more, the rows are hardly what is wrong


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
    bad = course.origin < capsule.step or course.said.is_bad(name)
    blame = _Blame(stepper, course, name if course.origin == capsule.step else None)
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
        examples=blame.examples() if bad else (),
        leaves=blame.leaves(),
        where=blame.where(step) if bad else "",
        said=(*differing, *blame.said),
    )


class _Blame:
    """Find out what in a step makes it go wrong.

    Attributes:
      said: what could not be found out and why, and what is in the rows.
    """

    def __init__(self, stepper: Stepper, course: Course, name: str | None) -> None:
        self._stepper, self._state, self._batch = stepper, course.state, course.batch
        self._name = name  # of the metric that goes wrong; None where it is the state that does
        self._usual = set(not_finite(self._state))
        self._rows: Rows = ()
        self._examples: tuple[Rows, ...] = ()
        self.said: list[str] = []

    def leaves(self) -> tuple[str, ...]:
        """Name the leaves that the step leaves not finite."""
        after, _ = run(self._stepper, copied(self._state), self._batch)
        return self._fresh(after)

    def _fresh(self, state: Any) -> tuple[str, ...]:
        return tuple(name for name in not_finite(state) if name not in self._usual)

    def _is_bad(self, rows: Rows) -> bool:
        after, said = run(self._stepper, copied(self._state), only(self._batch, rows))
        return bool(self._fresh(after)) if self._name is None else said.is_bad(self._name)

    def examples(self) -> tuple[Rows, ...]:
        """Narrow the batch to the rows that go wrong."""
        try:
            self._rows = tuple(range(rows_of(self._batch)))
        except DataError as error:
            self.said.append(f"examples: cannot be told apart: {error}")
            return ()
        found = list(itertools.islice(culprits(self._rows, self._is_bad), _MOST + 1))
        self._examples = tuple(found[:_MOST])
        if len(found) > _MOST or len(set(sum(found, ()))) == len(self._rows) > 1:
            self.said.append(
                f"{'more than ' * (len(found) > _MOST)}{len(self._examples)} of {len(self._rows)} "
                "rows make it go wrong: look at what they share, the parameters, the key, the "
                "statistics of a batch"
            )
        else:
            shown = dict.fromkeys(sum(self._examples, ()))
            self.said += [f"row {row}: {spelled(self._batch, row)}" for row in [*shown][:4]]
        return self._examples

    def where(self, step: Any) -> str:
        """Say which operation makes the first number that is not finite."""
        inputs = self._inputs()
        if hasattr(step, "call") and not hasattr(step, "lower"):
            return "; ".join([*inputs, "the line: the step is compiled already; give the function"])
        try:
            bad = self._state, self._batch
            site = first_site(getattr(step, "step", step), bad, self._good())
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            line = str(error).partition("\n")[0]
            self.said.append(f"where: the step cannot be gone through by operations: {line}")
            return "; ".join(inputs)
        if site is None and not inputs:
            self.said.append("where: operation by operation, every number was finite")
        return "; ".join([*inputs, *([str(site)] if site else [])])

    def _good(self) -> Any:
        """Give arguments with which all is well, if there are any: the other rows."""
        others = tuple(set(self._rows) - set(sum(self._examples, ())))
        if not others or not self._examples or self._is_bad(others):
            return None
        return self._state, only(self._batch, others)

    def _inputs(self) -> list[str]:
        """Name what in the batch is not finite as it came."""
        guilty = set(sum(self._examples, ()))
        lines = []
        for name in not_finite(self._batch):
            (leaf,) = [leaf for path, leaf in tree.named_leaves(self._batch) if path == name]
            rows = {int(row) for row in np.argwhere(~np.isfinite(np.asarray(leaf)))[:, :1].ravel()}
            if not guilty or guilty & rows:
                lines.append(f"{'batch/' + name if name else 'the batch'} is not finite as it came")
        return lines
