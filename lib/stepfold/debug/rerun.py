"""Rerun the step in which a metric became NaN or inf, and find the cause."""

import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.restore import restore
from stepfold.core.state import step_of, strengthen
from stepfold.debug.bisect import Rows, find_bad_rows, nonfinite_inputs, without_rows
from stepfold.errors import DataError, refuse
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.metrics import has_values, has_weights, per_step_values, per_step_weights
from stepfold.loop.step_runner import StepRunner, unpack
from stepfold.runs.capsule import Capsule, copy_arrays, read_capsule
from stepfold.runs.reread import reread

_RENAMED = {"said": "notes", "spoilt": "newly_nonfinite"}


class Replay(NamedTuple):
    """What `replay` finds; `print` shows it.

    Attributes:
      reproduced: whether the metrics of the step are the same as in the run, bit for bit; if all
        of them are NaN, those of the step before it. None if there is nothing to compare.
      newly_nonfinite: the metrics that are NaN or inf in this step, and were not in the replayed
        step before it.
      origin: the step to which `examples`, `leaves` and `where` belong. It is an earlier one if
        that step left NaN or inf in the state and the loss showed it only later.
      examples: the rows of the batch that cause it, each set sufficient by itself.
      leaves: the leaves of the state that were finite before the step and are not after it.
      where: the operation that produced the first NaN or inf, and its line.
      notes: further remarks, such as metrics that differ from those of the run.

    >>> import stepfold as sf
    >>> where = "log made inf at train.py:5 (loss_fn)"
    >>> print(sf.debug.Replay(7, True, {}, ("train/loss",), 7, ((3,),), ("params/w",), where, ()))
    step 7: reproduced; not finite: train/loss
    examples: row 3
    where: log made inf at train.py:5 (loss_fn)
    leaves: params/w
    """

    step: int
    reproduced: bool | None
    metrics: dict[str, float]
    newly_nonfinite: tuple[str, ...]
    origin: int
    examples: tuple[Rows, ...]
    leaves: tuple[str, ...]
    where: str
    notes: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name in _RENAMED:
            raise AttributeError(f"Replay.{name} is now Replay.{_RENAMED[name]}")
        raise AttributeError(f"Replay has no attribute {name!r}")

    def __str__(self) -> str:
        status = "reproduced" if self.reproduced else "not reproduced"
        if self.reproduced is None:
            status = "not compared, as all metrics are NaN"
        nonfinite = ", ".join(self.newly_nonfinite) or "nothing"
        lines = [f"step {self.step}: {status}; not finite: {nonfinite}"]
        if self.origin != self.step:
            lines.append(f"it began in step {self.origin}, which left a state that is not finite")
        if self.examples:
            sets = (
                f"rows {', '.join(map(str, rows))}, only together" if rows[1:] else f"row {rows[0]}"
                for rows in self.examples
            )
            lines.append(f"examples: {'; '.join(sets)}")
        if self.where:
            lines.append(f"where: {self.where}")
        if self.leaves:
            more = f", and {len(self.leaves) - 8} more" if len(self.leaves) > 8 else ""
            lines.append(f"leaves: {', '.join(self.leaves[:8])}{more}")
        return "\n".join([*lines, *self.notes])


def replay(
    capsule: Capsule | str | os.PathLike[str],
    step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    state: Any = None,
    batches: Any = None,
) -> Replay:
    """Rerun the step in which a metric became NaN or inf, and find the cause.

    The newest checkpoint before the step is restored and the steps since then are run again, which
    gives the bits of the run. Then the step runs with some rows of its batch and copies of them in
    place of the others, until each failing set of rows is minimal. Where rows influence each other,
    as in batch normalization, copies may fail where the batch did not. Last, the step is evaluated
    operation by operation, up to the first that makes NaN or inf out of finite numbers. If an
    earlier step left NaN or inf in the state, that step is searched instead.

    It needs memory for two states in addition to that of the step.

    Args:
      capsule: the `capsule` of the result of `fit`, or the path where it was written.
      step: the step of the run. A jitted or compiled one is called as it is.
      state: the state to restore the checkpoint into, as `restore` takes it; not needed for the
        capsule of a result. Without a checkpoint, the state that the run started with, which is
        not donated.
      batches: the batches of the run, for a capsule that was read from a file. A list, or batches
        with `get_state` and `set_state`, are moved to the right position and back; any other
        iterable has to start with the batch of the first step after the checkpoint. Batches with
        `without` skip what the run skipped.

    Raises:
      ConfigError: if something is missing, or there are several processes.
      CheckpointError, TreeMismatchError: if the checkpoint cannot be restored.
      DataError: if the batches are not those of the run.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> new = lambda: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * jnp.log(x)), tx)
    >>> result = sf.fit(step, new(), [np.float32([2, 3]), np.float32([1, 0])])
    >>> replayed = sf.debug.replay(result.capsule, step, state=new())
    >>> replayed.step, replayed.examples, replayed.where.split(" at ")[0]
    (2, ((1,),), 'log made inf')
    """
    if jax.process_count() > 1:
        advice = (
            "call it in its own script, with the batches of all: sf.batches(…, process_count=1)"
        )
        refuse("replay", "one process", f"{jax.process_count()}", advice)
    capsule = capsule if isinstance(capsule, Capsule) else read_capsule(capsule)
    batches = capsule.batches if batches is None else batches
    runner, state = StepRunner(step), _initial_state(capsule, state)
    nonfinite, is_broken = set(_nonfinite_leaves(state)), False
    previous, values = dict[str, float](), dict[str, float]()
    with closing(_batches_since_checkpoint(capsule, batches)) as iterator:
        for number, batch in enumerate(iterator, capsule.mark.step + 1):
            if not is_broken:
                # The step may donate the state, and the source may reuse the arrays of the batch.
                origin, bad_batch, state_before = number, copy_arrays(batch), copy_arrays(state)
            previous = values
            state, values, _ = _run_step(runner, state, batch)
            is_broken = is_broken or not nonfinite.issuperset(_nonfinite_leaves(state))
    metric = capsule.metric.removeprefix("train/")
    if metric not in values:
        got = f"one with {', '.join(values) or 'none'}"
        refuse("step", f"the step of the run, whose metrics have {metric}", got)
    metrics = {f"train/{name}": value for name, value in values.items()}
    differences = _differences(capsule.metrics, metrics)
    is_compared = not all(map(math.isnan, capsule.metrics.values())) or bool(differences)
    if not is_compared and capsule.distance > 0:
        known = {name: x for name, x in capsule.before.items() if not math.isnan(x)}
        replayed_before = {f"train/{name}": value for name, value in previous.items()}
        differences = _differences(known, replayed_before, f" of step {capsule.step - 1}")
        is_compared = bool(known)
    examples, leaves, where, notes = _find_cause(
        state_before, bad_batch, runner, step, metric if origin == capsule.step else None
    )
    return Replay(
        step=capsule.step,
        reproduced=not differences if is_compared else None,
        metrics=metrics,
        newly_nonfinite=tuple(
            f"train/{name}"
            for name, value in values.items()
            if not np.isfinite(value) and np.isfinite(previous.get(name, 0.0))
        ),
        origin=origin,
        examples=examples,
        leaves=leaves,
        where=where,
        notes=(*differences, *capsule.notes, *notes),
    )


def _differences(
    expected: Mapping[str, float], metrics: Mapping[str, float], where: str = ""
) -> list[str]:
    """Describe the metrics that differ from those of the run."""
    return [
        f"{name}{where} was {value}, and is {metrics.get(name, 'not among the metrics')}"
        for name, value in expected.items()
        if name not in metrics or not np.array_equal(value, metrics[name], equal_nan=True)
    ]


def _initial_state(capsule: Capsule, state: Any) -> Any:
    """Restore the checkpoint, or copy the state that the run started with."""
    if capsule.distance < 0:
        expected = f"a checkpoint of a state before step {capsule.step}"
        refuse("capsule", expected, "none", "keep more of them, sf.Checkpoints(keep=…)")
    if capsule.checkpoint is not None:
        like = capsule.like if state is None else state
        if like is None:
            expected = "an abstract state for a capsule that was read from a file"
            advice = "give jax.eval_shape(lambda k: sf.init_state(…, k), key), or a new state"
            refuse("state", expected, "None", advice)
        directory, step = capsule.checkpoint
        return strengthen(restore(directory, like, step=step, fall_back=False).state)
    got = None
    if state is None:
        got = "None"
    elif any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        got = "an abstract one"
    elif hasattr(state, "step") and step_of(state) != capsule.mark.step:
        got = f"one of step {step_of(state)}"
    if got is not None:
        expected = f"the state of step {capsule.mark.step} that the run started with"
        advice = f"there is no checkpoint before step {capsule.step}, so make it as for the run"
        refuse("state", expected, got, advice)
    return copy_arrays(strengthen(state))


def _batches_since_checkpoint(capsule: Capsule, batches: Any) -> Generator[Any, None, None]:
    """Yield the batches from the checkpoint on; the capsule may have the last one."""
    first, last = capsule.mark.step + 1, capsule.step
    count = capsule.distance + (not capsule.has_batch)
    expected = f"those of the run, for steps {first} to {last}"
    if count and batches is None:
        advice = "; ".join(capsule.lost) or "the capsule has none"
        refuse("batches", expected, "None", advice)
    if count:
        can_move = isinstance(batches, list | tuple) or hasattr(iter(batches), "set_state")
        is_at_start = not can_move and batches is not capsule.batches
        reader: Any = nullcontext(batches) if is_at_start else _read_again(capsule, batches)
        number = first
        with reader as iterator:
            for batch in itertools.islice(iterator, count):
                yield batch
                number += 1
        if number < first + count:
            refuse("batches", expected, f"an end before step {number}", kind=DataError)
    if capsule.has_batch:
        yield capsule.batch


@contextmanager
def _read_again(capsule: Capsule, batches: Any) -> Iterator[Iterator[Any]]:
    """Iterate batches from the checkpoint on, without those that the run skipped."""
    iterator, position = batches, None
    if not {*capsule.skipped} <= {*(getattr(batches, "skipped", None) or ())}:
        if not hasattr(batches, "without"):
            expected = f"some that skip {[*capsule.skipped]}, as the run did"
            start = f"an iterator that starts with the batch of step {capsule.mark.step + 1}"
            refuse("batches", expected, batches, f"give sf.batches(data, …), or {start}")
        # Both may read one stream, so the position is restored.
        position = batches.get_state()
        iterator = batches.without(capsule.skipped)
    try:
        with reread(iterator, capsule.mark, capsule.began) as batch_iterator:
            yield batch_iterator
    finally:
        if position is not None:
            batches.set_state(position)


def _run_step(runner: StepRunner, state: Any, batch: Any) -> tuple[Any, dict[str, float], set[str]]:
    """Run a step; return the state, its scalar metrics, and the names of those it skipped."""
    state, packed = runner(state, [batch])
    [stacked] = unpack([packed])
    values = {name: per_step_values(each) for name, each in stacked.items() if has_values(each)}
    scalars = {name: float(x[0]) for name, x in values.items() if x.ndim == 1}
    weighted = [name for name in scalars if has_weights(stacked[name])]
    skipped = {name for name in weighted if per_step_weights(stacked[name])[0] == 0}
    return state, scalars, skipped


_are_finite = jax.jit(lambda leaves: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), leaves))


def _nonfinite_leaves(state: Any) -> list[str]:
    arrays = {name: leaf for name, leaf in tree.named_leaves(state) if tree.is_array(leaf)}
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    finite = jax.device_get(_are_finite(floats))
    return [name for name in floats if not finite[name]]


def _find_cause(
    state: Any, batch: Any, runner: StepRunner, step: Any, metric: str | None
) -> tuple[tuple[Rows, ...], tuple[str, ...], str, list[str]]:
    """Return examples, leaves, where and notes for a metric; without one, for the state."""
    nonfinite_before = set(_nonfinite_leaves(state))

    def run(batch: Any) -> tuple[tuple[str, ...], bool]:
        after, values, skipped = _run_step(runner, copy_arrays(state), batch)
        leaves = tuple(leaf for leaf in _nonfinite_leaves(after) if leaf not in nonfinite_before)
        if metric is None:
            return leaves, bool(leaves)
        return leaves, not np.isfinite(values[metric]) and metric not in skipped

    leaves, fails = run(batch)
    if not fails:
        return (), leaves, "", []
    examples, notes = find_bad_rows(batch, lambda batch: run(batch)[1])
    bad = {row for rows in examples for row in rows}
    good = without_rows(batch, bad) if bad else None
    if good is not None and run(good)[1]:
        good = None
    causes = nonfinite_inputs(batch, bad)
    # Imported when first used, since it imports jax.extend and with it Pallas.
    from stepfold.debug.origin import find_origin

    function = step.step if isinstance(step, CompiledStep) else step

    def results(state: Any, batch: Any) -> Any:
        """Return the metric alone if possible, since the gradient may have an earlier origin."""
        after, metrics = function(state, batch)
        has_metric = isinstance(metrics, dict) and metric in metrics
        return metrics[metric] if has_metric else (after, metrics)

    note = "no single operation makes NaN or inf out of finite numbers"
    try:
        cause = find_origin(results, (state, batch), None if good is None else (state, good))
        causes += [] if cause is None else [str(cause)]
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        note = f"the step cannot be evaluated operation by operation: {reason}"
    if not causes:
        notes.append(f"where: {note}")
    return examples, leaves, "; ".join(causes), notes
