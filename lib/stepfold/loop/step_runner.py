"""Run a step: compiled once, one batch or several in a dispatch, its metrics packed.

Returning and fetching an array has a fixed cost. So metrics leave the device concatenated into one
array for each dtype, bit for bit, and are unpacked on the host.
"""

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
from stepfold.loop.evaluate import is_placed, mesh_of
from stepfold.loop.metrics import are_metrics
from stepfold.sharding.placement import shard_batch

StepFn = Callable[[Any, Any], tuple[Any, Any]]


class StepRunner:
    """Run a step on batches; one that is neither jitted nor compiled is compiled when first called.

    Programs are kept on the step function, so that another runner of it reuses them, as in `jit`.
    """

    def __init__(self, step: StepFn) -> None:
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
        self._mesh: Any = None  # to place batches on, where jax does not

    def __call__(self, state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Run the step on each batch; return the state, and metrics for `unpack`."""
        program = self._programs.get(len(batches)) or self._first(state, batches)
        if self._mesh is not None:
            batches = [b if is_placed(b) else shard_batch(b, self._mesh) for b in batches]
        return program(state, batches[0] if len(batches) == 1 else tuple(batches))  # type: ignore[no-any-return]

    def _first(self, state: Any, batches: Sequence[Any]) -> Callable[[Any, Any], Any]:
        """Return the first call for this number of batches, which keeps its program."""
        if jax.process_count() > 1:  # each has its own rows, which jax does not put together
            self._mesh = mesh_of(state)
        count = len(batches)
        run = self._packed if count == 1 else self._packed.scan

        def run_first(state: Any, batch: Any) -> tuple[Any, Any]:
            if self.is_compiled:
                output = check_step_output(self._step(state, batch))
                self._programs[1] = self._step
                return output
            settings: Any = jax.config
            if settings.jax_disable_jit:  # for eager debugging
                return run(state, batch)
            self._programs[count] = self._program(run, count, state, batch)
            return self._programs[count](state, batch)  # type: ignore[no-any-return]

        return run_first

    def _program(self, run: StepFn, count: int, state: Any, batch: Any) -> CompiledStep:
        """Compile the step, or take the program of an earlier runner."""
        kept = _programs_of(self._step)
        form = (count, *_form(state, batch))
        program = kept.get(form)
        if program is not None and program.compiled_step.is_current(state, batch):
            self._packed.layout = program.layout
            return program.compiled_step
        compiled = compile_step(run, state, batch)
        kept[form] = _Program(compiled, self._packed.layout)
        return compiled

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
    places: list[tuple[int, slice, tuple[int, ...]]]  # of the leaves: array, columns, shape


class _Program(NamedTuple):
    compiled_step: CompiledStep
    layout: _Layout


class _PackedStep:
    """A step that returns its metrics packed; the layout is known once it has been traced."""

    def __init__(self, step: StepFn) -> None:
        self._step = step
        self.layout: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, list[Any]]:
        state, metrics = check_step_output(self._step(state, batch))
        leaves, structure = jax.tree.flatten(metrics)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
        widths, places = [0 for _ in dtypes], []
        for leaf in leaves:
            array = dtypes.index(leaf.dtype)
            start = widths[array]
            widths[array] += leaf.size
            places.append((array, slice(start, widths[array]), leaf.shape))
        self.layout = _Layout(structure, widths, places)
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
                    "steps_per_call: expected batches of the same form in a call, got\n  "
                    + "\n  ".join(lines)
                )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return jax.lax.scan(self, state, stacked)

    def unpack(self, packed: Sequence[list[Any]]) -> Any:
        structure, widths, places = self.layout
        columns = [
            np.concatenate(arrays, axis=None).reshape(-1, width)
            for arrays, width in zip(zip(*_fetch(packed), strict=True), widths, strict=True)
        ]
        leaves = [columns[array][:, place].reshape(-1, *shape) for array, place, shape in places]
        return jax.tree.unflatten(structure, leaves)


def _fetch(rows: Sequence[list[Any]]) -> list[list[np.ndarray]]:
    """Fetch arrays: all copies from an accelerator start together, a CPU's memory is viewed."""
    if all(device.platform == "cpu" for array in rows[0] for device in array.devices()):
        return [[np.asarray(array) for array in row] for row in rows]
    return jax.device_get(list(rows))  # type: ignore[no-any-return]


def _programs_of(step: StepFn) -> dict[Any, _Program]:
    """Return the programs kept on a function; other callables may change and keep none."""
    if not isinstance(step, types.FunctionType):
        return {}
    return step.__dict__.setdefault("__stepfold_programs__", {})  # type: ignore[no-any-return]


def _form(state: Any, batch: Any) -> tuple[Any, ...]:
    """Describe arguments by structure, type and sharding; equal forms share a program."""
    leaves, structure = jax.tree.flatten((state, batch))
    if not all(map(tree.is_data, leaves)):
        return (object(),)  # equal to no other: compiling raises the error
    forms = [(jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves]
    return structure, *forms
