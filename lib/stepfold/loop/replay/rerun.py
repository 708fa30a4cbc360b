"""Run the step again in which a run went wrong, and find the cause in it."""

from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.restore import restore
from stepfold.core.state import step_of, strengthen
from stepfold.errors import ConfigError, DataError
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.data import reread
from stepfold.loop.metrics import PerStepMetrics, per_step_values, per_step_weights
from stepfold.loop.replay.bisect import Rows, find_bad_rows, nonfinite_inputs, without_rows
from stepfold.loop.replay.capsule import Capsule, read_capsule
from stepfold.loop.step_runner import StepRunner


class Replay(NamedTuple):
    """What `replay` finds; `print` shows it.

    Attributes:
      step: the step of the capsule.
      reproduced: whether its metrics are the same as in the run, bit for bit.
      metrics: its metrics in the replay.
      spoilt: the metrics that are NaN or inf here, and were not in the replayed step before it.
      origin: the step in which it began. It is an earlier one if that left NaN or inf in the state
        and the loss showed it only later; what follows is then about that step.
      examples: the rows of the batch that cause it, each set sufficient by itself.
      leaves: the leaves of the state that were finite before the step and are not after it.
      where: the operation that made the first NaN or inf, and its line.
      said: further notes, in words.

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
        status = "reproduced" if self.reproduced else "not reproduced"
        lines = [f"step {self.step}: {status}; not finite: {', '.join(self.spoilt) or 'nothing'}"]
        if self.origin != self.step:
            lines.append(f"it began in step {self.origin}, which left a state that is not finite")
        if self.examples:
            sets = [
                f"row {rows[0]}"
                if len(rows) == 1
                else f"rows {', '.join(map(str, rows))}, only together"
                for rows in self.examples
            ]
            lines.append(f"examples: {'; '.join(sets)}")
        if self.where:
            lines.append(f"where: {self.where}")
        if self.leaves:
            more = f", and {len(self.leaves) - 8} more" if len(self.leaves) > 8 else ""
            lines.append(f"leaves: {', '.join(self.leaves[:8])}{more}")
        return "\n".join([*lines, *self.said])


def replay(
    capsule: Capsule | str | Path,
    step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    state: Any = None,
    batches: Any = None,
) -> Replay:
    """Run the step again in which a metric became NaN or inf, and find the cause.

    The newest checkpoint before the step is restored and the batches since then are folded into it,
    which gives the bits of the run. Then the step is bisected by the rows of its batch: it runs
    with some of the rows in their places and copies of them in the others, until no set of rows
    that fails can be made smaller. Where rows influence each other, as in batch normalization,
    copies may fail where the batch did not. Last, the step is evaluated operation by operation, up
    to the first that makes NaN or inf out of finite numbers. If an earlier step left NaN or inf in
    the state, although its loss was finite, that step is searched instead.

    It takes the memory of two states besides that of the step.

    Args:
      capsule: the `capsule` of the result of `fit`, or the path where it was written.
      step: the step of the run. A jitted or compiled one is called as it is.
      state: the state to restore the checkpoint into, with shardings, as `restore` takes it; a
        capsule on a result knows it. Without a checkpoint, the state that the run started with; it
        is copied and stays valid.
      batches: the batches of the run, for a capsule that was read from a file. A list, or batches
        with `get_state` and `set_state`, are moved to the right position and back; any other
        iterable has to start with the batch of the first step after the checkpoint.

    Raises:
      ConfigError: if something is missing, or there are several processes.
      CheckpointError, TreeMismatchError: if the checkpoint cannot be restored.
      DataError: if the batches are not those of the run.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> new = lambda: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * jnp.log(x)), tx)
    >>> data = np.arange(24, dtype=np.float32)[::-1].copy()
    >>> result = sf.fit(step, new(), sf.batches(data, 8, epochs=1))
    >>> replayed = sf.replay(result.capsule, step, state=new())
    >>> replayed.step, replayed.reproduced, replayed.examples, replayed.leaves
    (3, True, ((7,),), ('params/w',))
    >>> replayed.where.split(" at ")[0]
    'log made inf'
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"replay: expected one process, got {jax.process_count()}; call it in a script of its "
            "own, with the batches of all of them: sf.batches(…, process_count=1)"
        )
    capsule = capsule if isinstance(capsule, Capsule) else read_capsule(capsule)
    runner = StepRunner(step)
    trace = _refold(capsule, runner, state, capsule.batches if batches is None else batches)
    values, previous = trace.metrics.values, trace.previous.values
    name = capsule.metric.removeprefix("train/")
    if name not in values:
        raise ConfigError(
            f"step: expected the step of the run, whose metrics have {name}, got one with "
            f"{', '.join(values) or 'none'}"
        )
    metrics = {f"train/{name}": value for name, value in values.items()}
    differences = [
        f"{name} was {value}, and is {metrics.get(name, 'not among the metrics')}"
        for name, value in capsule.metrics.items()
        if name not in metrics or not np.array_equal(value, metrics[name], equal_nan=True)
    ]
    examples, leaves, where, notes = _find_cause(
        trace, runner, step, name if trace.origin == capsule.step else None
    )
    return Replay(
        step=capsule.step,
        reproduced=not differences,
        metrics=metrics,
        spoilt=tuple(
            f"train/{name}"
            for name, value in values.items()
            if not np.isfinite(value) and np.isfinite(previous.get(name, 0.0))
        ),
        origin=trace.origin,
        examples=examples,
        leaves=leaves,
        where=where,
        said=(*differences, *notes),
    )


class _StepMetrics(NamedTuple):
    values: dict[str, float]
    weights: dict[str, float]  # 0 where a skipped step has no value


class ReplayTrace(NamedTuple):
    """The steps from the checkpoint to that of the capsule."""

    origin: int  # the first step that left NaN or inf in the state, or else that of the capsule
    state: Any  # before the step `origin`
    batch: Any  # of the step `origin`
    previous: _StepMetrics  # of the step before that of the capsule, empty if it was not run
    metrics: _StepMetrics  # of the step of the capsule


def _refold(capsule: Capsule, runner: StepRunner, state: Any, batches: Any) -> ReplayTrace:
    """Run the steps from the checkpoint to that of the capsule."""
    state = _initial_state(capsule, state)
    nonfinite_before, is_broken = set(_nonfinite_leaves(state)), False
    no_metrics = _StepMetrics({}, {})
    trace = ReplayTrace(capsule.step, state, None, no_metrics, no_metrics)
    with closing(_batches_since_checkpoint(capsule, batches)) as iterator:
        for number, batch in enumerate(iterator, capsule.mark.step + 1):
            if not is_broken:
                # The step may donate the state, and the source may reuse the arrays of the batch.
                trace = trace._replace(origin=number, state=_copy(state), batch=_copy(batch))
            state, metrics = _run_step(runner, state, batch)
            trace = trace._replace(previous=trace.metrics, metrics=metrics)
            is_broken = is_broken or not nonfinite_before.issuperset(_nonfinite_leaves(state))
    return trace


def _initial_state(capsule: Capsule, state: Any) -> Any:
    """Restore the checkpoint, or copy the state that the run started with."""
    if capsule.distance < 0:
        raise ConfigError(
            f"capsule: expected a checkpoint of a state before step {capsule.step}, got none that "
            "is left; keep more of them, sf.Checkpoints(keep=…)"
        )
    if capsule.checkpoint is not None:
        like = capsule.like if state is None else state
        if like is None:
            raise ConfigError(
                "state: expected an abstract state for a capsule that was read from a file, got "
                "None; give jax.eval_shape(lambda k: sf.init_state(…, k), key), or a new state"
            )
        directory, step = capsule.checkpoint
        return strengthen(restore(directory, like, step=step, fall_back=False).state)
    if state is None or any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        raise ConfigError(
            f"state: expected the state of step {capsule.mark.step} that the run started with, "
            f"since it had no checkpoint before step {capsule.step}, got "
            f"{'None' if state is None else 'an abstract one'}; make it as for the run"
        )
    if hasattr(state, "step") and step_of(state) != capsule.mark.step:
        raise ConfigError(
            f"state: expected the state of step {capsule.mark.step} that the run started with, got "
            f"one of step {step_of(state)}; make it as for the run"
        )
    return _copy(strengthen(state))


def _batches_since_checkpoint(capsule: Capsule, batches: Any) -> Generator[Any, None, None]:
    """Yield the batches from the checkpoint on; the capsule may have the last one."""
    first, last = capsule.mark.step + 1, capsule.step
    count = last - first + bool(capsule.lost)
    if count and batches is None:
        raise ConfigError(
            f"batches: expected those of the run, for steps {first} to {last}, got None; "
            f"{'; '.join(capsule.lost) or 'the capsule has none'}"
        )
    if count:
        iterator = iter(batches)
        can_move = isinstance(batches, list | tuple) or hasattr(iterator, "set_state")
        is_ready = not can_move and batches is not capsule.batches
        reader: Any = reread(batches, capsule.mark, capsule.began)
        with nullcontext(iterator) if is_ready else reader as iterator:
            for number in range(first, first + count):
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise DataError(
                        f"batches: expected those of steps {first} to {last}, but they ended "
                        f"before step {number}; give the batches of the run"
                    ) from None
                yield batch
    if not capsule.lost:
        yield capsule.batch


def _run_step(runner: StepRunner, state: Any, batch: Any) -> tuple[Any, _StepMetrics]:
    """Run the step, which may donate the state, and read its scalar metrics."""
    state, packed = runner(state, [batch])
    stacked = runner.unpack([packed])
    values = PerStepMetrics(stacked, per_step_values)
    weights = PerStepMetrics(stacked, per_step_weights)
    scalars = [name for name in values if np.ndim(values[name]) == 1]
    return state, _StepMetrics(
        {name: float(values[name][0]) for name in scalars},
        {name: float(weights[name][0]) for name in scalars if name in weights},
    )


def _copy(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, arrays)


def _nonfinite_leaves(state: Any) -> list[str]:
    floats = {
        name: leaf
        for name, leaf in tree.named_leaves(state)
        if tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = jax.device_get(_are_finite(floats))
    return [name for name in floats if not finite[name]]


@jax.jit
def _are_finite(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}


def _find_cause(
    trace: ReplayTrace, runner: StepRunner, step: Any, name: str | None
) -> tuple[tuple[Rows, ...], tuple[str, ...], str, list[str]]:
    """Return examples, leaves, where and notes of `trace.origin`; without a name, of the state."""
    nonfinite_before = set(_nonfinite_leaves(trace.state))

    def run(batch: Any) -> tuple[tuple[str, ...], bool]:
        after, metrics = _run_step(runner, _copy(trace.state), batch)
        leaves = tuple(leaf for leaf in _nonfinite_leaves(after) if leaf not in nonfinite_before)
        if name is None:
            return leaves, bool(leaves)
        return leaves, not np.isfinite(metrics.values[name]) and metrics.weights.get(name, 1) != 0

    leaves, fails = run(trace.batch)
    if not fails:
        return (), leaves, "", []
    examples, notes = find_bad_rows(trace.batch, lambda batch: run(batch)[1])
    bad = {row for rows in examples for row in rows}
    good = without_rows(trace.batch, bad) if bad else None
    if good is not None and run(good)[1]:
        good = None
    causes = nonfinite_inputs(trace.batch, bad)
    # Imported when first used, since it imports jax.extend and with it Pallas.
    from stepfold.loop.replay.origin import find_origin

    function = step.step if isinstance(step, CompiledStep) else step
    arguments = (trace.state, trace.batch), None if good is None else (trace.state, good)
    note = "no single operation makes NaN or inf out of finite numbers"
    try:
        origin = find_origin(function, *arguments)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        origin = None
        reason = str(error).partition("\n")[0]
        note = f"the step cannot be evaluated operation by operation: {reason}"
    if origin is not None:
        causes.append(str(origin))
    elif not causes:
        notes.append(f"where: {note}")
    return examples, leaves, "; ".join(causes), notes
