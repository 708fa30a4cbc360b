"""Run a step: compiled once, one batch or several in a dispatch, its metrics packed.

Returning and fetching an array has a fixed cost. So metrics leave the device concatenated into one
array for each dtype, bit for bit, and are unpacked on the host.
"""

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.state import strengthen
from stepfold.core.validation import spell_call, takes
from stepfold.errors import ConfigError, OutOfMemoryError, RetraceError
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.memory import exhausted, is_exhausted
from stepfold.loop.evaluate import mesh_of
from stepfold.loop.metrics import are_metrics
from stepfold.sharding.place import committed_sharding, place_batch

_logger = logging.getLogger("stepfold")


class StepRunner:
    """Run a step on batches; one that is neither jitted nor compiled is compiled when first called.

    Programs are kept on the step function, so that another runner of it reuses them, as in `jit`.
    """

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        if not callable(step):
            raise ConfigError(f"step: expected a step (state, batch) -> …, got {tree.spell(step)}")
        if not takes(step, 2):
            raise ConfigError(
                f"step: expected a step (state, batch) -> (state, metrics), got {spell_call(step)};"
                " sf.make_train_step makes one of a loss function"
            )
        self._step = step
        self.is_compiled = isinstance(step, CompiledStep) or hasattr(step, "lower")
        self._packed = _PackedStep(step)
        self._programs: dict[int, Callable[[Any, Any], Any]] = {}  # by the batches in a call
        self._by_size = {0: self._programs}  # by batch size, if that changes
        self._size, self._later = 0, list[int]()  # the batch size, and those to compile ahead
        self._ahead: dict[tuple[int, int], _Program] = {}  # by batch size and batches in a call
        self._mesh: Any = None  # to place batches on, where jax does not

    def __call__(self, state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Run the step on each batch; return the state, and metrics for `unpack`."""
        count = len(batches)
        program = self._programs.get(count)
        if program is None and jax.process_count() > 1:
            self._mesh = mesh_of(state)  # each has its own rows, which jax does not put together
        if self._mesh is not None:
            batches = [place_batch(batch, self._mesh) for batch in batches]
        batch = batches[0] if count == 1 else tuple(batches)
        return self._run_first(count, state, batch) if program is None else program(state, batch)

    def set_batch_size(self, size: int, later: Sequence[int]) -> None:
        """Expect batches of another size from now on, and compile for `later` sizes with them."""
        if later and isinstance(self._step, CompiledStep):
            raise ConfigError(
                f"step: expected one that is not compiled, for batches of {size} and later of "
                f"{', '.join(map(str, later))}, got {tree.spell(self._step)}; give the step itself"
            )
        self._size, self._programs = size, self._by_size.setdefault(size, {})
        is_first = not any(self._by_size.values())
        self._later = [n for n in dict.fromkeys(later) if n != size] if is_first else []

    def _run_first(self, count: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Make the first call with this number of batches, and keep its program."""
        if self.is_compiled:
            output = check_step_output(self._step(state, batch))
            self._programs[1] = self._step
            return output
        settings: Any = jax.config
        if settings.jax_disable_jit:  # for eager debugging
            return (self._packed if count == 1 else self._packed.scan)(state, batch)
        program = self._ahead.pop((self._size, count), None)
        if program is None or not program.compiled_step.is_current(state, batch):
            program = self._compile(count, state, batch)
        if self._later:
            self._compile_ahead(count, state, batch)
        self._packed.layout = program.layout
        self._programs[count] = program.compiled_step
        return program.compiled_step(state, batch)  # type: ignore[no-any-return]

    def _compile_ahead(self, count: int, state: Any, batch: Any) -> None:
        for size in self._later:
            try:
                program = self._compile(count, state, _resize(batch, self._size, size))
            except Exception as error:
                error.add_note(
                    f"compiling ahead for the batches of {size} that follow those of {self._size};"
                    " to compile when the first comes, give jax.jit(step)"
                )
                raise
            self._ahead[size, count] = program
        sizes = ", ".join(map(str, [self._size, *self._later]))
        _logger.info("compiled the step for batches of %s", sizes)
        self._later = []

    def _compile(self, count: int, state: Any, batch: Any) -> "_Program":
        """Compile the step, unless an earlier runner has."""
        step, layout = self._packed if count == 1 else self._packed.scan, self._packed.layout
        programs, signature = _programs_of(self._step), (count, *_signature(state, batch))
        program = programs.get(signature)
        if program is None or not program.compiled_step.is_current(state, batch):
            compiled = compile_step(step, state, batch)
            program = programs[signature] = _Program(compiled, self._packed.layout)
        if self._size and layout is not None and layout[1:] != program.layout[1:]:
            raise ConfigError(
                "step: expected metrics of the same shapes for batches of every size, got other "
                "shapes for other sizes; return means, as sf.mean(values)"
            )
        self._packed.layout = program.layout
        return program

    def unpack(self, packed: Sequence[Any]) -> Any:
        """Return the metrics of several calls on the host, with a leading axis of steps."""
        if not self.is_compiled:
            return self._packed.unpack(packed)
        host: Any = jax.device_get(list(packed))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *host)

    def explain(self, error: BaseException) -> OutOfMemoryError | None:
        """Explain an out-of-memory error that appeared only when results were read."""
        step = next(iter(self._programs.values()), None)
        if is_exhausted(error) and isinstance(step, CompiledStep):
            return exhausted(error, step.state, step.batch, step.compiled)
        return None


def check_step_output(output: Any) -> tuple[Any, dict[str, Any]]:
    """Check that a step returned a state and metrics by name."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise ConfigError(f"step: expected (state, metrics) from it, got {tree.spell(output)}")
    state, metrics = output
    if not are_metrics(metrics):
        raise ConfigError(
            f"step: expected metrics by name from it, got {tree.spell(metrics)}; return each "
            "number as sf.mean(values), so that they merge exactly"
        )
    return state, dict(metrics)


class _Layout(NamedTuple):
    """Where the leaves of the metrics are in the packed arrays."""

    structure: Any
    widths: list[int]  # of the packed arrays
    slots: list[tuple[int, slice, tuple[int, ...]]]  # of the leaves: array, columns, shape


class _Program(NamedTuple):
    compiled_step: CompiledStep
    layout: _Layout


class _PackedStep:
    """A step that returns its metrics packed; the layout is known once it has been traced."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._step = step
        self.layout: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, list[Any]]:
        state, metrics = check_step_output(self._step(state, batch))
        leaves, structure = jax.tree.flatten(metrics)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
        widths, slots = [0 for _ in dtypes], []
        for leaf in leaves:
            array = dtypes.index(leaf.dtype)
            start = widths[array]
            widths[array] += leaf.size
            slots.append((array, slice(start, widths[array]), leaf.shape))
        self.layout = _Layout(structure, widths, slots)
        packed = [
            jnp.concatenate([leaf.reshape(-1) for leaf in leaves if leaf.dtype == dtype])
            for dtype in dtypes
        ]
        return strengthen(state), packed

    def scan(self, state: Any, batches: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run the step on several batches in one program, bit for bit as in single calls."""
        for batch in batches[1:]:
            lines = tree.diff(batches[0], batch, "batch")
            if lines:
                raise RetraceError(
                    "steps_per_call: expected batches of equal shapes and dtypes in a call, got\n  "
                    + "\n  ".join(lines)
                )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return jax.lax.scan(self, state, stacked)

    def unpack(self, packed: Sequence[list[Any]]) -> Any:
        structure, widths, slots = self.layout
        columns = [
            np.concatenate(arrays, axis=None).reshape(-1, width)
            for arrays, width in zip(zip(*_fetch(packed), strict=True), widths, strict=True)
        ]
        leaves = [columns[array][:, part].reshape(-1, *shape) for array, part, shape in slots]
        return jax.tree.unflatten(structure, leaves)


def _fetch(rows: Sequence[list[Any]]) -> list[list[np.ndarray]]:
    """Fetch arrays: all copies from an accelerator start together, a CPU's memory is viewed."""
    if all(device.platform == "cpu" for array in rows[0] for device in array.devices()):
        return [[np.asarray(array) for array in row] for row in rows]
    return jax.device_get(list(rows))  # type: ignore[no-any-return]


def _programs_of(step: Callable[[Any, Any], Any]) -> dict[Any, _Program]:
    """Return the programs kept on a function; other callables may change and keep none."""
    if not isinstance(step, types.FunctionType):
        return {}
    return step.__dict__.setdefault("__stepfold_programs__", {})  # type: ignore[no-any-return]


def _resize(batch: Any, size: int, other: int) -> Any:
    """Return an abstract batch of another size; arrays with as many rows as the batch have rows."""
    count = jax.process_count()
    rows = {size // count: other // count, size: other}  # of a process, or of all

    def resize(leaf: Any) -> Any:
        if np.ndim(leaf) == 0 or leaf.shape[0] not in rows:
            return leaf
        shape = rows[leaf.shape[0]], *leaf.shape[1:]
        dtype = jax.typeof(leaf).dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=committed_sharding(leaf))

    return jax.tree.map(resize, batch)


def _signature(state: Any, batch: Any) -> tuple[Any, ...]:
    """Return structure, types and shardings; arguments of an equal signature share a program."""
    leaves, structure = jax.tree.flatten((state, batch))
    if not all(tree.is_data(leaf, abstract=True) for leaf in leaves):
        return (object(),)  # equal to no other: compiling raises the error
    avals = [(jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves]
    return structure, *avals
