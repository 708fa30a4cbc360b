"""Run the steps of two runs in lockstep, and find the first that differs and the operation in it.

Both runs continue from a checkpoint that they share. Each step runs twice, once for either run,
until the bits of the new states differ. Then the inputs of that step say why: the batch, the key,
or the program. Of two programs, both are evaluated operation by operation with equal inputs, up to
the first operation that is another one or has another value.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checksums import Checksums
from stepfold.checkpoint.leaves import is_key
from stepfold.checkpoint.restore import Restored, restore
from stepfold.core.state import strengthen
from stepfold.core.step import StepFn
from stepfold.debug.origin import inner_program, line_of, run_operations
from stepfold.debug.result import Cause, RunDiff
from stepfold.debug.run_record import RunRecord
from stepfold.errors import DataError, refuse
from stepfold.internals.jax import without_dead_code
from stepfold.loop.feed import DataPosition
from stepfold.loop.step_runner import StepRunner
from stepfold.runs.capsule import copy_arrays
from stepfold.runs.reread import reread


def replay_steps(
    difference: RunDiff,
    runs: Sequence[RunRecord],
    state: Any,
    programs: Sequence[tuple[StepFn, Any]],
    until: int,
) -> RunDiff:
    """Run the steps of both runs again up to one, to say more exactly what their files show.

    `programs` are the step and the batches of each run.
    """
    start, positions = difference.equal_until, [None, None]
    stores = {run.name: run.checksums for run in runs if run.checksums is not None}

    def load(series: Checksums, step: int) -> Restored:
        return restore(series.location, state, step=step, fall_back=False)

    if start:
        restored = [load(each, start) for each in stores.values()]
        positions, state = [each.data for each in restored], restored[0].state
    elif runs[0].key != runs[1].key:
        cause = Cause("key", "the keys of the states at the start")
        return difference._replace(step=1, leaves=["key"], causes=[cause, *difference.causes])
    elif any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        expected = "the state that both runs started with, since they share no checkpoint"
        refuse("state", expected, "an abstract one")
    states = [copy_arrays(strengthen(state)) for _ in runs]  # steps may donate them
    steps = [step for step, _ in programs]
    runners = [StepRunner(step) for step in steps]
    with ExitStack() as stack:
        moved = zip(programs, runs, positions, strict=True)
        moves = [_moved(each, run, at, start) for (_, each), run, at in moved]
        # One object cannot be at two positions, so it is read once for both runs.
        is_shared = programs[0][1] is programs[1][1]
        sources = [stack.enter_context(move) for move in moves[: 2 - is_shared]]
        for number in range(start + 1, until + 1):
            batches = [copy_arrays(next(source, None)) for source in sources] * (1 + is_shared)
            if any(batch is None for batch in batches):
                refuse("batches", f"a batch for step {number}", "none", kind=DataError)
            before = copy_arrays(states[0])
            calls = zip(runners, states, batches, strict=True)
            states = [run(own, [copy_arrays(batch)])[0] for run, own, batch in calls]
            if leaves := different_leaves(*states):
                causes = [*_causes(before, batches, steps)]
                # Measured causes replace the inferred ones.
                known = {"data", "hardware", "compiler", "code", "program"} if causes else set()
                causes += [each for each in difference.causes if each.kind not in known]
                difference = difference._replace(step=number, equal_until=number - 1, leaves=leaves)
                return difference._replace(causes=causes, replays=2 * (number - start))
    causes = [
        Cause("fault", f"{name} has not saved what its steps compute", start)
        for name, each in stores.items()
        if until in each.steps and different_leaves(states[0], load(each, until).state)
    ]
    return difference._replace(causes=[*causes, *difference.causes], replays=2 * (until - start))


def different_leaves(a: Any, b: Any) -> list[str]:
    """Return the paths of the leaves whose bits differ."""
    first, second = ({name: _bits(leaf) for name, leaf in tree.named_leaves(x)} for x in (a, b))
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def _bits(leaf: Any) -> tuple[Any, ...]:
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return is_key(leaf), array.shape, array.dtype, array.tobytes()


def _moved(batches: Any, run: RunRecord, position: Any, start: int) -> Any:
    """Move the batches of a run to the batch after step `start`; they return when it closes."""
    if not {*run.skipped} <= {*map(tuple, getattr(batches, "skipped", None) or ())}:
        if not hasattr(batches, "without"):
            expected = f"some that skip {run.skipped}, as the run did"
            refuse("batches", expected, batches, "give sf.batches(data, …)")
        batches = batches.without(run.skipped)
    if position is None and hasattr(batches, "get_state"):  # those of a run that begins
        position = batches.get_state()
        step = position.get("step") if isinstance(position, Mapping) else None
        if step not in (None, start):
            expected, got = f"those of a run at step {start}", f"some at step {step}"
            refuse("batches", expected, got, "make new ones")
    return reread(batches, DataPosition(start, position), 0)


def _causes(state: Any, batches: Sequence[Any], steps: Sequence[StepFn]) -> Iterator[Cause]:
    """Say which inputs of a step differ, and where its programs do."""
    a, b = (dict(tree.named_leaves(batch, "batch")) for batch in batches)
    if names := different_leaves(a, b):
        yield Cause("batch", "; ".join(_describe_rows(n, a.get(n), b.get(n)) for n in names[:4]))
    if steps[0] is not steps[1]:
        states = [
            StepRunner(each)(copy_arrays(state), [copy_arrays(batches[0])])[0] for each in steps
        ]
        if different_leaves(*states):
            yield Cause("program", find_operation(steps, state, batches[0]))


def _describe_rows(name: str, a: Any, b: Any) -> str:
    """Name an array of the batch and the first row that differs."""
    if np.shape(a) != np.shape(b) or not np.ndim(a):
        return f"{name}: {tree.describe_value(a)} and {tree.describe_value(b)}"
    rows = np.asarray(a) != np.asarray(b)
    (different,) = np.nonzero(rows.reshape(len(rows), -1).any(axis=1))
    return f"{name}: row {different[0]}" if different.size else f"{name}: another dtype"


# Operations


def find_operation(steps: Sequence[StepFn], state: Any, batch: Any) -> str:
    """Describe the first operation of two programs whose value differs for equal arguments."""
    try:
        runs = [_operations(*_trace(step, state, batch)) for step in steps]
        for (first, values), (second, others) in itertools.zip_longest(*runs, fillvalue=(None, ())):
            if _form(first) != _form(second) or different_leaves(values, others):
                texts = [
                    f"{each.primitive.name} at {line_of(each)}" for each in (first, second) if each
                ]
                return " and ".join(dict.fromkeys(texts))
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        return f"the programs cannot be evaluated operation by operation: {reason}"
    return "no operation differs by itself, so the compiler fuses them differently"


def _trace(step: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Return the program that computes the new state, its constants and its inputs."""
    step = getattr(step, "step", step)  # of a compiled one
    with jax.disable_jit():  # unrolls scans
        program = jax.make_jaxpr(lambda state, batch: step(state, batch)[0])(state, batch)
    # Without what the metrics alone need.
    return without_dead_code(program.jaxpr), program.consts, jax.tree.leaves((state, batch))


def _operations(jaxpr: Any, consts: Any, inputs: Any) -> Iterator[tuple[Any, Any]]:
    """Evaluate a program, and yield its operations and those of the programs that it calls."""
    for operation, arguments, results in run_operations(jaxpr, consts, inputs):
        if (inner := inner_program(operation)) is not None:
            yield from _operations(inner.jaxpr, inner.consts, arguments)
        yield operation, results


def _form(operation: Any) -> tuple[str, ...] | None:
    if operation is None:
        return None
    variables = (*operation.invars, *operation.outvars)
    return operation.primitive.name, *(str(variable.aval) for variable in variables)
