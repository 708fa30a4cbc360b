"""Run a step: compile it once, dispatch one batch or several, and pack its metrics.

Returning and fetching an array has a fixed cost, so metrics leave the device concatenated into one
array for each dtype, bit for bit, and are unpacked on the host.
"""

import itertools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.state import strengthen
from stepfold.core.transfers import allow_transfers
from stepfold.core.validation import read_function, spell_call, takes
from stepfold.errors import OutOfMemoryError, RetraceError, refuse
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.memory import exhausted, is_exhausted
from stepfold.loop.evaluate import mesh_of
from stepfold.loop.metrics import as_metric, is_metric
from stepfold.sharding.place import committed_sharding, place_batch

_logger = logging.getLogger("stepfold")
Step = Callable[[Any, Any], tuple[Any, Any]]


class StepRunner:
    """Run a step on batches; one that is neither jitted nor compiled is compiled when first called.

    Programs are cached on the step function, so that another runner reuses them, as with `jit`.
    """

    def __init__(self, step: Step) -> None:
        read_function("step", step, "a step (state, batch) -> …")
        if not takes(step, 2):
            advice = "sf.make_train_step makes one of a loss function"
            refuse("step", "a step (state, batch) -> (state, metrics)", spell_call(step), advice)
        self._step = step
        self.is_compiled = isinstance(step, CompiledStep) or hasattr(step, "lower")
        self._programs: dict[tuple[int, int], Step] = {}  # by batch size and batches in a call
        # All programs of the step, from this run or earlier ones, by signature; and the last one by
        # the number of batches in a call. Only of functions, since other callables may change.
        is_function = isinstance(step, types.FunctionType)
        self._kept: dict[Any, CompiledStep] = (
            step.__dict__.setdefault("__stepfold_programs__", {}) if is_function else {}
        )
        self.batch_size, self._later = 0, list[int]()  # and those to compile ahead
        self._output: Any = None  # the structure of what the program of any size returns
        self._mesh: Any = None  # to place batches on, where jax does not
        self.on_compile: Callable[[CompiledStep, int], None] | None = None

    def __call__(self, state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Run the step on each batch; return the state, and the metrics for `unpack`."""
        count = len(batches)
        program = self._programs.get((self.batch_size, count))
        if program is None and jax.process_count() > 1:
            self._mesh = mesh_of(state)  # each has its own rows, which jax does not assemble
        if self._mesh is not None:
            batches = [place_batch(batch, self._mesh) for batch in batches]
        batch = batches[0] if count == 1 else tuple(batches)
        run = program or partial(self._run_first, count)
        settings: Any = jax.config
        if settings.jax_transfer_guard_host_to_device != "disallow":  # may change between steps
            return run(state, batch)
        with allow_transfers("host_to_device"):  # of a batch on the host
            return run(state, batch)

    def one(self) -> Step:
        """Return a function that runs the step on a batch: the program itself, if there is one."""
        program = self._programs.get((self.batch_size, 1))
        settings: Any = jax.config
        is_guarded = settings.jax_transfer_guard_host_to_device == "disallow"
        if program is None or self._mesh is not None or is_guarded:
            return lambda state, batch: self(state, [batch])
        return program

    def set_batch_size(self, size: int, later: Sequence[int]) -> None:
        """Set the batch size; the next call that compiles also compiles for the `later` sizes."""
        if later and isinstance(self._step, CompiledStep):
            sizes = f"{size} and later of {', '.join(map(str, later))}"
            expected = f"one that is not compiled, for batches of {sizes}"
            refuse("step", expected, self._step, "give the step itself")
        self.batch_size = size
        self._later = [] if self._programs else [n for n in dict.fromkeys(later) if n != size]

    def _run_first(self, count: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Make the first call with this number of batches, and keep its program."""
        if self.is_compiled:
            output = check_step_output(self._step(state, batch))
            self._programs[self.batch_size, count] = self._step
            return output
        settings: Any = jax.config
        if settings.jax_disable_jit:  # for eager debugging
            return _packed_step(self._step, count)(state, batch)
        last = self._kept.get(count)
        if last is not None and not self.batch_size:  # of several sizes, all are compiled first
            result: tuple[Any, Any] | None = last.call_current(state, batch)
            if result is not None:
                self._programs[self.batch_size, count] = last
                return result
        program = self._compile(count, state, batch)
        if self._later:
            for size in self._later:
                try:
                    self._compile(count, state, _resize(batch, self.batch_size, size))
                except Exception as error:
                    error.add_note(
                        f"compiling ahead for the batches of {size} that follow those of "
                        f"{self.batch_size}; to compile when the first comes, give jax.jit(step)"
                    )
                    raise
            sizes = ", ".join(map(str, [self.batch_size, *self._later]))
            _logger.info("compiled the step for batches of %s", sizes)
            self._later = []
        self._programs[self.batch_size, count] = program
        self._kept[count] = program
        return program(state, batch)  # type: ignore[no-any-return]

    def _compile(self, count: int, state: Any, batch: Any) -> CompiledStep:
        """Compile the step, or reuse the program of an earlier call with such arguments."""
        signature = count, *_signature(state, batch)
        program = self._kept.get(signature)
        if program is None or not program.is_current(state, batch):
            program = compile_step(_packed_step(self._step, count), state, batch)
            self._kept[signature] = program
            if self.on_compile is not None:
                self.on_compile(program, count)
        output: Any = program.compiled.out_tree
        if self.batch_size and self._output is not None and self._output != output:
            expected = "metrics of the same shapes for batches of every size"
            got = "other shapes for other sizes"
            refuse("step", expected, got, "return means, as sf.mean(values)")
        self._output = output
        return program

    def explain(self, error: BaseException) -> OutOfMemoryError | None:
        """Explain an out-of-memory error that appeared only when results were read."""
        step = next(iter(self._programs.values()), None)
        if is_exhausted(error) and isinstance(step, CompiledStep):
            return exhausted(error, step.state, step.batch, step.compiled)
        return None


def check_step_output(output: Any) -> tuple[Any, dict[str, Any]]:
    """Check that a step returned a state, and metrics or numbers by name."""
    if not isinstance(output, tuple) or len(output) != 2:
        refuse("step", "(state, metrics) from it", tree.describe_value(output))
    state, metrics = output
    has_names = isinstance(metrics, Mapping)
    others = [x for x in metrics.values() if not is_metric(x)] if has_names else [metrics]
    if not has_names or not all(tree.is_real(x) and np.ndim(x) == 0 for x in others):
        advice = "return a number for each name, or sf.mean(values), so that they merge exactly"
        refuse("step", "metrics by name from it", tree.describe_value(metrics), advice)
    return state, dict(metrics)


@dataclass(frozen=True)
class _Layout:
    """Where the leaves of the metrics are in the packed arrays."""

    structure: Any
    widths: tuple[int, ...]  # of the packed arrays
    slots: tuple[tuple[int, int, int, tuple[int, ...]], ...]  # array, first and last column, shape


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["layout"])
@dataclass(frozen=True)
class PackedMetrics:
    """The metrics of a call in one array for each dtype, with a leading axis for several steps.

    The layout is static: jax traces it as part of the structure, and keeps it with the program.
    """

    arrays: list[Any]
    layout: _Layout


def _packed_step(step: Step, count: int) -> Step:
    """Wrap a step to take `count` batches in a call, and to return its metrics packed."""

    def run(state: Any, batch: Any) -> tuple[Any, PackedMetrics]:
        state, metrics = check_step_output(step(state, batch))
        return strengthen(state), _pack(metrics)

    def run_several(state: Any, batches: tuple[Any, ...]) -> tuple[Any, PackedMetrics]:
        """Scan over batches of equal shapes and dtypes."""
        for batch in batches[1:]:
            lines = tree.diff(batches[0], batch, "batch")
            if lines:
                raise RetraceError(
                    "steps_per_call: expected batches of equal shapes and dtypes in a call, got\n  "
                    + "\n  ".join(lines)
                )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return jax.lax.scan(run, state, stacked)

    return run if count == 1 else run_several


def _pack(metrics: dict[str, Any]) -> PackedMetrics:
    leaves, structure = jax.tree.flatten(metrics)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
    widths, slots = [0 for _ in dtypes], []
    for leaf in leaves:
        array = dtypes.index(leaf.dtype)
        start = widths[array]
        widths[array] += leaf.size
        slots.append((array, start, widths[array], leaf.shape))
    arrays = [
        jnp.concatenate([leaf.reshape(-1) for leaf in leaves if leaf.dtype == dtype])
        for dtype in dtypes
    ]
    return PackedMetrics(arrays, _Layout(structure, tuple(widths), tuple(slots)))


def unpack(calls: Sequence[Any]) -> list[Any]:
    """Return the metrics of calls on the host, in chunks of steps with equal shapes."""
    layout_of = attrgetter("layout") if isinstance(calls[0], PackedMetrics) else _form_of
    chunks = [_unpack(list(group)) for _, group in itertools.groupby(calls, layout_of)]
    return [{name: as_metric(x) for name, x in chunk.items()} for chunk in chunks]


def _form_of(call: Any) -> Any:
    """Return what must be equal for metrics of calls to be stacked."""
    leaves, structure = jax.tree.flatten(call)
    return structure, [np.shape(leaf) for leaf in leaves]


def _unpack(calls: Sequence[Any]) -> Any:
    """Return the metrics of calls of one layout, with a leading axis of steps."""
    if not isinstance(calls[0], PackedMetrics):
        host: Any = jax.device_get(list(calls))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *host)
    layout = calls[0].layout
    columns = [
        np.concatenate(arrays, axis=None).reshape(-1, width)
        for arrays, width in zip(zip(*_fetch(calls), strict=True), layout.widths, strict=True)
    ]
    leaves = [
        columns[array][:, start:stop].reshape(-1, *shape)
        for array, start, stop, shape in layout.slots
    ]
    return jax.tree.unflatten(layout.structure, leaves)


def _fetch(calls: Sequence[PackedMetrics]) -> list[list[np.ndarray]]:
    """Fetch arrays: copies from an accelerator all start together, and CPU arrays are views."""
    rows = [call.arrays for call in calls]
    if all(device.platform == "cpu" for array in rows[0] for device in array.devices()):
        return [[np.asarray(array) for array in row] for row in rows]
    return jax.device_get(rows)  # type: ignore[no-any-return]


def _signature(state: Any, batch: Any) -> tuple[Any, ...]:
    """Return a key that tells most programs apart; `is_current` compares the rest."""
    leaves, structure = jax.tree.flatten((state, batch))
    if not all(tree.is_data(leaf, abstract=True) for leaf in leaves):
        return (object(),)  # equal to no other: compiling raises the error
    shapes = [(form.shape, form.dtype) for form in map(jax.typeof, leaves)]
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    return structure, *shapes, *shardings


def _resize(batch: Any, size: int, other: int) -> Any:
    """Return an abstract batch of another size; arrays without a batch axis stay as they are."""
    count = jax.process_count()
    rows = {size // count: other // count, size: other}  # of a process, or of all

    def resize(leaf: Any) -> Any:
        if np.ndim(leaf) == 0 or leaf.shape[0] not in rows:
            return leaf
        shape = rows[leaf.shape[0]], *leaf.shape[1:]
        dtype = jax.typeof(leaf).dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=committed_sharding(leaf))

    return jax.tree.map(resize, batch)
