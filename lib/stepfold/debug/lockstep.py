"""Run the steps of two runs in lockstep, and find the first that differs and the operation in it.

Both runs continue from a checkpoint that they share. Each step runs twice, once for either run,
until the bits of the new states differ. Then the inputs of that step say why: the batch, the key,
or the program. Of two programs, both are evaluated operation by operation with equal inputs, up to
the first operation that is another one or has another value.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import is_key
from stepfold.checkpoint.restore import restore
from stepfold.core.state import strengthen
from stepfold.debug.result import StepDiff
from stepfold.debug.run_files import RunFiles
from stepfold.errors import DataError, refuse
from stepfold.internals.jax import without_dead_code
from stepfold.loop.data import DataPosition, reread
from stepfold.loop.replay.capsule import copy_arrays
from stepfold.loop.replay.origin import inner_program, line_of, run_operations
from stepfold.loop.step_runner import StepRunner

Step = Callable[[Any, Any], tuple[Any, Any]]


def replay_steps(
    runs: Sequence[RunFiles],
    state: Any,
    programs: Sequence[tuple[Step, Any]],
    start: int,
    until: int,
) -> StepDiff:
    """Run the steps of both runs again, from the checkpoint that they share, or from the start.

    `programs` are the step and the batches of each run, and `until` is the last step to run.
    """
    positions, stores = [None, None], [run.checksums.location for run in runs if run.checksums]
    if start:
        restored = [restore(store, state, step=start, fall_back=False) for store in stores]
        positions, state = [each.data for each in restored], restored[0].state
    elif runs[0].key != runs[1].key:
        return StepDiff(1, ["key"], ["key"])
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
            batches = [copy_arrays(_pull(source, number)) for source in sources]
            batches *= 1 + is_shared
            before = copy_arrays(states[0])
            states = [
                run(one, [copy_arrays(batch)])[0]
                for run, one, batch in zip(runners, states, batches, strict=True)
            ]
            if leaves := different_leaves(*states):
                found = _explain(number, leaves, before, batches, steps)
                return found._replace(replays=found.replays + 2 * (number - start))
    faulty = []
    for run in runs:
        if run.checksums is not None and until in run.checksums.steps:
            saved = restore(run.checksums.location, states[0], step=until, fall_back=False).state
            faulty += [run.name] if different_leaves(states[0], saved) else []
    return StepDiff(None, replays=2 * (until - start), faulty=faulty)


def different_leaves(a: Any, b: Any) -> list[str]:
    """Return the paths of the leaves whose bits differ."""
    others = dict(tree.named_leaves(b))
    names = [name for name, leaf in tree.named_leaves(a) if not _is_same(leaf, others.get(name))]
    return names + [name for name in others if name not in dict(tree.named_leaves(a))]


def _is_same(a: Any, b: Any) -> bool:
    if b is None or is_key(a) != is_key(b):
        return False
    a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (a, b))
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _moved(batches: Any, run: RunFiles, position: Any, start: int) -> Any:
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


def _pull(source: Iterator[Any], number: int) -> Any:
    batch = next(source, None)
    if batch is None:
        refuse("batches", f"a batch for step {number}", "none", kind=DataError)
    return batch


def _explain(
    number: int, leaves: list[str], state: Any, batches: Sequence[Any], steps: Sequence[Step]
) -> StepDiff:
    """Say which inputs of a step differ, and where its programs do."""
    names = different_leaves(*batches)
    batch = [_describe_rows(name, *batches) for name in names]
    inputs = ["batch"] if names else []
    where, replays = "", 0
    if steps[0] is not steps[1]:
        first, second = (
            StepRunner(step)(copy_arrays(state), [copy_arrays(batches[0])])[0] for step in steps
        )
        replays = 2
        if different_leaves(first, second):
            inputs.append("program")
            where = find_operation(steps, state, batches[0])
    return StepDiff(number, leaves, inputs, batch, where, replays)


def _describe_rows(name: str, a: Any, b: Any) -> str:
    """Name an array of the batch and the first row that differs."""
    one, two = (dict(tree.named_leaves(batch)).get(name) for batch in (a, b))
    title = f"batch/{name}" if name else "batch"
    if one is None or two is None or np.shape(one) != np.shape(two) or not np.ndim(one):
        shown = [tree.describe_value(x) if x is not None else "nothing" for x in (one, two)]
        return f"{title}: {shown[0]} and {shown[1]}"
    rows = np.asarray(one) != np.asarray(two)
    (different,) = np.nonzero(rows.reshape(len(rows), -1).any(axis=1))
    return f"{title}: row {different[0]}" if different.size else f"{title}: another dtype"


# Operations


def find_operation(steps: Sequence[Step], state: Any, batch: Any) -> str:
    """Describe the first operation of two programs whose value differs for equal arguments."""
    try:
        programs = [_trace(each, state, batch) for each in steps]
        arguments = jax.tree.leaves((state, batch))
        found = _compare(
            [jaxpr for jaxpr, _ in programs], [c for _, c in programs], [arguments] * 2
        )
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        return f"the programs cannot be evaluated operation by operation: {reason}"
    return found or "no operation differs by itself, so the compiler fuses them differently"


def _trace(step: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the program that computes the new state, without what its metrics alone need."""
    step = getattr(step, "step", step)  # of a compiled one
    with jax.disable_jit():  # unrolls scans
        program = jax.make_jaxpr(lambda state, batch: step(state, batch)[0])(state, batch)
    return without_dead_code(program.jaxpr), program.consts


def _compare(jaxprs: Sequence[Any], consts: Sequence[Any], inputs: Sequence[Any]) -> str | None:
    """Evaluate two programs side by side, up to the first operation that differs."""
    runs = itertools.starmap(run_operations, zip(jaxprs, consts, inputs, strict=True))
    for pair in itertools.zip_longest(*runs):
        operations = [None if each is None else each[0] for each in pair]
        if None in operations or _form(operations[0]) != _form(operations[1]):
            return _describe(operations)
        (_, given, results), (_, other_given, other_results) = pair
        if all(itertools.starmap(_is_same, zip(results, other_results, strict=True))):
            continue
        inner = [inner_program(each) for each in operations]
        found = None
        if None not in inner:
            programs = [each.jaxpr for each in inner], [each.consts for each in inner]
            found = _compare(*programs, [given, other_given])
        return found or _describe(operations)
    return None


def _form(operation: Any) -> tuple[str, ...]:
    variables = (*operation.invars, *operation.outvars)
    return operation.primitive.name, *(str(variable.aval) for variable in variables)


def _describe(operations: Sequence[Any]) -> str:
    texts = [
        "the end of the program" if each is None else f"{each.primitive.name} at {line_of(each)}"
        for each in operations
    ]
    return " and ".join(dict.fromkeys(texts))
