"""Run the steps of two runs in lockstep, and find the first that differs and the operation in it.

Both runs continue from a checkpoint that they share. Each step runs twice, once for either run,
until the bits of the new states differ. Then the inputs of that step say why: the batch, the key,
or the program. Of two programs, both are evaluated operation by operation with equal inputs, up to
the first operation that is another one or has another value.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import is_key
from stepfold.core.state import strengthen
from stepfold.errors import DataError, refuse
from stepfold.internals.jax import without_dead_code
from stepfold.loop.data import DataPosition, reread
from stepfold.loop.replay.capsule import copy_arrays
from stepfold.loop.replay.origin import inner_program, line_of, run_operations
from stepfold.loop.step_runner import StepRunner


class Program(NamedTuple):
    """What a run executes: its step, its batches, and where these were at the checkpoint."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: Any
    position: Any = None
    skipped: Sequence[tuple[int, int]] = ()  # ranges of batches that the run went back from


class StepDiff(NamedTuple):
    """The first step after which the states of two programs differ.

    Attributes:
      step: its number, or None if no step differed.
      leaves: the paths of the leaves that differ after it.
      inputs: which of its inputs differ: `"batch"`, `"key"`, `"program"`.
      batch: the arrays of the batch that differ, with the first row that does.
      where: the first operation that differs, and its line; empty if the programs are equal.
      replays: how often a step was run.
      faulty: if no step differs, the runs whose checkpoint is not what their program computes, for
        another reason than the program: other contents of the data then, or a fault of the
        hardware.
    """

    step: int | None
    leaves: Sequence[str] = ()
    inputs: Sequence[str] = ()
    batch: Sequence[str] = ()
    where: str = ""
    replays: int = 0
    faulty: Sequence[str] = ()

    def __str__(self) -> str:
        if self.step is None:
            text = f"no step differs in {self.replays} replays"
            faulty = " and ".join(self.faulty)
            return f"{text}; {faulty} has not saved what its steps compute" if faulty else text
        parts = [f"step {self.step:,}: {' and '.join(self.inputs) or 'no input'} differs"]
        parts += [*self.batch[:4], *([self.where] if self.where else [])]
        return "; ".join(parts)


def find_first_difference(
    state: Any, start: int, until: int, first: Program, second: Program
) -> tuple[StepDiff, Any]:
    """Run two programs from the state after step `start`, at most to step `until`.

    Also return the last state of the first program.

    Raises:
      DataError: if the batches end, or cannot be moved to their position at `start`.
    """
    states = [copy_arrays(strengthen(state)) for _ in range(2)]  # steps may donate them
    runners = [StepRunner(program.step) for program in (first, second)]
    with ExitStack() as stack:
        # One object cannot be at two positions, so it is read once for both runs.
        is_shared = first.batches is second.batches
        sources = [stack.enter_context(_moved(first, start))]
        sources += [] if is_shared else [stack.enter_context(_moved(second, start))]
        for number in range(start + 1, until + 1):
            pulled = [copy_arrays(_pull(source, number)) for source in sources]
            batches = pulled * 2 if is_shared else pulled
            before = copy_arrays(states[0])
            states = [
                runner(one, [copy_arrays(batch)])[0]
                for runner, one, batch in zip(runners, states, batches, strict=True)
            ]
            if leaves := different_leaves(*states):
                found = _explain(number, leaves, before, batches, first.step, second.step)
                return found._replace(replays=found.replays + 2 * (number - start)), states[0]
    return StepDiff(None, replays=2 * (until - start)), states[0]


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


def _moved(program: Program, start: int) -> Any:
    """Move the batches of a run to the batch after step `start`; they return when it closes."""
    batches = program.batches
    done = {*(getattr(batches, "skipped", None) or ())}
    if not {*map(tuple, program.skipped)} <= done:
        if not hasattr(batches, "without"):
            expected = f"some that skip {[*program.skipped]}, as the run did"
            refuse("batches", expected, batches, "give sf.batches(data, …)")
        batches = batches.without(program.skipped)
    if program.position is None and not isinstance(batches, list | tuple):
        return _read_from_start(batches, start)
    return reread(batches, DataPosition(start, program.position), 0)


@contextmanager
def _read_from_start(batches: Any, start: int) -> Iterator[Iterator[Any]]:
    """Read new batches, whose position at the start of the run no checkpoint has."""
    before = batches.get_state() if hasattr(batches, "get_state") else None
    step = before.get("step") if isinstance(before, Mapping) else None
    if step not in (None, start):
        refuse(
            "batches", f"those of a run at step {start}", f"some at step {step}", "make new ones"
        )
    try:
        yield iter(batches)
    finally:
        if before is not None:
            batches.set_state(before)


def _pull(source: Iterator[Any], number: int) -> Any:
    batch = next(source, None)
    if batch is None:
        refuse("batches", f"a batch for step {number}", "none", kind=DataError)
    return batch


def _explain(
    number: int, leaves: list[str], state: Any, batches: Sequence[Any], step: Any, other: Any
) -> StepDiff:
    """Say which inputs of a step differ, and where its programs do."""
    names = different_leaves(*batches)
    batch = [_describe_rows(name, *batches) for name in names]
    inputs = ["batch"] if names else []
    where, replays = "", 0
    if step is not other:
        first, second = (
            StepRunner(each)(copy_arrays(state), [copy_arrays(batches[0])])[0]
            for each in (step, other)
        )
        replays = 2
        if different_leaves(first, second):
            inputs.append("program")
            where = find_operation(step, other, state, batches[0])
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


def find_operation(step: Any, other: Any, state: Any, batch: Any) -> str:
    """Describe the first operation of two programs whose value differs for equal arguments."""
    try:
        programs = [_trace(each, state, batch) for each in (step, other)]
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
