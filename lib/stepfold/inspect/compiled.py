"""Compile a step ahead of time, and refuse calls that would compile it again.

A change of shape, dtype, weak type, sharding or structure makes jit compile another program without
a message. That takes minutes for a large model. A `CompiledStep` takes the fast path of jit. Only a
call that would trace again enters Python, where its arguments are compared with the compiled ones.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from stepfold import tree
from stepfold.core.state import strengthen
from stepfold.core.validation import check_flags
from stepfold.errors import ConfigError, RetraceError, ShardingError, refuse
from stepfold.inspect.flops import constrained_axes
from stepfold.inspect.memory import exhausted, is_exhausted
from stepfold.internals import texts
from stepfold.sharding.mesh import axes_of
from stepfold.sharding.place import committed_sharding, place_batch
from stepfold.sharding.plan import shardings_of, warn_of_unused_axes
from stepfold.sharding.topology import check_here


class _WouldTraceError(Exception):
    """Raised inside jax when a call is about to trace the step again."""


# Raised by jax before it runs a program, for arguments that do not fit.
_REFUSED = _WouldTraceError, AttributeError, TypeError, ValueError


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class CompiledStep:
    """A step compiled for given shapes and dtypes of state and batch, by `compile_step`.

    Attributes:
      step: the step itself, not compiled.
      compiled: the executable, a `jax.stages.Compiled`.
      jaxpr: the step as it was traced.
      state: the abstract state, with shardings.
      batch: the abstract batch, with shardings.
      trains: whether it returns a state, as a `StepFn` does and an `EvalFn` does not.
      digest: of the program before it is optimized, so that equal programs have equal ones.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones(3), optax.sgd(0.1), jax.random.key(0))
    >>> evaluate = sf.make_eval_step(lambda params, batch, key: sf.mean(params * batch))
    >>> evaluate = sf.compile_step(evaluate, state, jnp.ones(3))
    >>> evaluate.batch.shape, "HloModule" in evaluate.compiled.as_text()
    ((3,), True)
    """

    step: Callable[[Any, Any], Any]
    _jitted: Any
    compiled: jax.stages.Compiled
    jaxpr: Any
    state: Any
    batch: Any
    _: KW_ONLY
    trains: bool
    digest: str = ""
    _call: Any = field(init=False)

    def __post_init__(self) -> None:
        self._call = self._jitted

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run the step."""
        try:
            return self._call(state, batch)
        except (*_REFUSED, RuntimeError) as error:
            return self._call_otherwise(state, batch, error)

    def call_current(self, state: Any, batch: Any) -> Any:
        """Run the step; None if jit, under its present settings, would run another program."""
        try:
            return self._jitted(state, batch)
        except _REFUSED:
            return None
        except RuntimeError as error:
            return self._call_otherwise(state, batch, error)

    def _call_otherwise(self, state: Any, batch: Any, error: Exception) -> Any:
        """Run the step after a call that has failed, or raise an error that explains why."""
        if is_exhausted(error):
            raise exhausted(error, self.state, self.batch, self.compiled) from error
        if _runs_uncompiled(state, batch):
            return self.step(state, batch)
        check_here(jax.tree.leaves(self.state)[0].sharding.device_set)
        if any(map(is_weak, jax.tree.leaves(state))) and not tree.diff(self.state, state):
            # A hand-made state may have Python numbers. The state that a step returns has none.
            return self(strengthen(state), batch)
        self._check_arguments(state, batch, error)
        if not isinstance(error, _WouldTraceError):
            raise error
        # The arguments fit, but jit would trace again: a batch on the host instead of on the mesh,
        # other jax settings, or cleared caches. The executable accepts them. It does not compare
        # weak types, so these are checked in Python from now on.
        self._call = self._call_executable
        return self._call(state, batch)

    def is_current(self, state: Any, batch: Any) -> bool:
        """Whether jit would run this program for the arguments under its present settings."""
        try:
            self._jitted.trace(state, batch)
        except _WouldTraceError:
            return False
        return True

    def _call_executable(self, state: Any, batch: Any) -> Any:
        leaves, forms = jax.tree.leaves((state, batch)), jax.tree.leaves((self.state, self.batch))
        are_weak = [is_weak(leaf) for leaf in leaves]
        if are_weak != [form.weak_type for form in forms] or _runs_uncompiled(state, batch):
            raise _WouldTraceError
        return self.compiled(state, batch)

    def _check_arguments(self, state: Any, batch: Any, error: Exception) -> None:
        """Explain a failed call, if its arguments are the cause."""
        leaves = [*tree.named_leaves(state, "state"), *tree.named_leaves(batch, "batch")]
        arrays = [(name, leaf) for name, leaf in leaves if isinstance(leaf, jax.Array)]
        donated = [name for name, leaf in arrays if leaf.is_deleted()]
        if donated and texts.DELETED_ARRAY.search(str(error)):
            raise ConfigError(
                f"{_some(donated)}: the arrays were donated to an earlier call and are gone; "
                "continue with the state that it returned, or compile with donate=False"
            ) from None
        changes = argument_changes(self.state, state, "state")
        changes += argument_changes(self.batch, batch, "batch")
        if changes:
            sizes = [
                {name: np.shape(leaf) for name, leaf in tree.named_leaves(arrays)}
                for arrays in (self.batch, batch)
            ]
            if sizes[0].keys() == sizes[1].keys() and sizes[0] != sizes[1]:
                advice = '\nKeep the batch shape: give sf.batches remainder="drop" or "pad".'
            else:
                advice = ""
            raise RetraceError(
                "the step was compiled for other arguments, and would have to compile again:\n  "
                + "\n  ".join(changes)
                + advice
            ) from None


def _runs_uncompiled(*arguments: Any) -> bool:
    """Whether jax needs the Python function: to trace it, to run it eagerly, or to locate a NaN."""
    settings: Any = jax.config
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
    return is_traced or bool(settings.jax_disable_jit) or bool(settings.jax_debug_nans)


def compile_step(
    step: Callable[[Any, Any], Any],
    state: Any,
    batch: Any,
    *,
    sharding: Any = None,
    donate: bool = True,
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> CompiledStep:
    """Compile a step ahead of time, for given shapes and dtypes of state and batch.

    The result is called like the step, costs what a jitted step costs, and never compiles again. A
    call that would need it raises a `RetraceError` that names what changed. The state is returned
    in the shardings in which it is passed.

    jax's persistent compilation cache applies, as it does to every jitted function:
    `jax.config.update("jax_compilation_cache_dir", path)` lets the next process load the program
    instead of compiling it. Programs that compile in less than
    `jax_persistent_cache_min_compile_time_secs`, by default 1, are not kept. jax warns of an entry
    that it cannot read, and compiles. It finds other damage only under
    `jax_compilation_cache_check_contents`, which compiles each program once per process to compare.
    Entries are executed: only trusted users should be able to write to the directory.

    Args:
      step: a `StepFn`, or an `EvalFn`, un-jitted.
      state: the state, or an abstract one. Python numbers in it, and other leaves of a weak type,
        get strong types, as in the states that the step returns.
      batch: a batch, or an abstract one.
      sharding: the state's plan, or one sharding for all of it; by default the shardings of its
        arrays. A batch that is not placed is split over the default axes of the mesh, as by
        `shard_batch`; for other axes, place it.
      donate: whether the state's memory is used for the new state. An `EvalFn`'s never is.
      compiler_options: options of XLA for this program, as `jax.jit` takes them, such as
        `{"xla_allow_excess_precision": False}`.

    Raises:
      LossError, TreeMismatchError, …: what tracing the step raises.
      ShardingError: if state and batch are on different devices or kinds of mesh.
      OutOfMemoryError: if the compiler finds that a device cannot hold it. A call raises it too.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(3)}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, x, key: sf.mean(x @ params["w"]), tx)
    >>> step = sf.compile_step(step, state, jnp.ones((8, 3)))
    >>> state, metrics = step(state, jnp.ones((8, 3)))
    >>> step(state, jnp.ones((4, 3)))
    Traceback (most recent call last):
    ...
    stepfold.errors.RetraceError: the step was compiled for other arguments, ...
      batch: expected float32[8,3], got float32[4,3]
    Keep the batch shape: ...
    """
    check_flags(donate=donate)
    if compiler_options is not None and not (
        isinstance(compiler_options, Mapping)
        and all(isinstance(name, str) for name in compiler_options)
        and all(isinstance(x, str | bool | int | float) for x in compiler_options.values())
    ):
        expected = "a dict of options of XLA by name"
        refuse("compiler_options", expected, tree.describe_value(compiler_options))
    if not callable(step) or hasattr(step, "lower") or isinstance(step, CompiledStep):
        expected = "a step (state, batch) -> ..., neither jitted nor compiled"
        advice = "pass the result of sf.make_train_step as it is"
        refuse("compile_step", expected, tree.describe_value(step), advice)
    example = batch
    state, batch = abstract_arguments(state, batch, sharding)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, batch))
    example = _as_traced(batch, example)
    is_compiled = False

    def step_once(state: Any, batch: Any) -> Any:
        if is_compiled:
            raise _WouldTraceError
        return step(state, batch)

    with jax.disable_jit(False):  # calls under disable_jit run eagerly, but this compiles
        # jax caches the trace of a function, so that jitted.trace reuses that of eval_shape.
        output = jax.eval_shape(step_once, state, example)
        trains = isinstance(output, tuple) and len(output) == 2 and _is_state(state, output[0])
        jitted = jax.jit(
            step_once,
            in_shardings=shardings,
            out_shardings=(shardings[0], None) if trains else None,
            donate_argnums=0 if trains and donate else (),
            compiler_options=dict(compiler_options) if compiler_options else None,
        )
        traced = jitted.trace(state, example)
        lowered = traced.lower()
    try:
        compiled = lowered.compile()
    except RuntimeError as error:
        if compiler_options and texts.COMPILER_OPTION.search(str(error)):
            refuse("compiler_options", "options of XLA", f"{compiler_options}: {error}")
        if not is_exhausted(error):
            raise
        raise exhausted(error, state, batch) from error
    is_compiled = True
    _warn_of_unused_axes((state, batch), traced.jaxpr)
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    return CompiledStep(
        step, jitted, compiled, traced.jaxpr, state, batch, trains=trains, digest=digest
    )


def _as_traced(batch: Any, example: Any) -> Any:
    """Return the abstract batch as jit traces it for arrays that are where the example's are.

    jit traces committed arrays and arrays of the host separately, although both run the same
    program. Its fast path is for arguments like those that were traced.
    """
    meshes = [getattr(leaf.sharding, "mesh", None) for leaf in jax.tree.leaves(batch)]
    if any(mesh is not None and AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return batch  # shardings are part of the types that are traced
    free = lambda leaf, array: leaf if committed_sharding(array) else leaf.update(sharding=None)
    return jax.tree.map(free, batch, example)


def _warn_of_unused_axes(arguments: Any, jaxpr: Any) -> None:
    shardings = [leaf.sharding for leaf in jax.tree.leaves(arguments)]
    named = [each for each in shardings if isinstance(each, NamedSharding)]
    used = {name for each in named for entry in each.spec for name in axes_of(entry)}
    mesh = named[0].mesh if named else None
    if isinstance(mesh, Mesh) and used != set(mesh.axis_names):
        warn_of_unused_axes(mesh, used | constrained_axes(jaxpr))


def _is_state(state: Any, output: Any) -> bool:
    """Whether an output has the state's structure and shapes. Dtypes may differ."""
    structures: list[Any] = [jax.tree.structure(x) for x in (state, output)]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(x)] for x in (state, output)]
    return bool(structures[0] == structures[1] and shapes[0] == shapes[1])


# Abstract arguments


def abstract_arguments(state: Any, batch: Any, sharding: Any = None) -> tuple[Any, Any]:
    """Return the arguments of `compile_step` as abstract arrays with shardings."""
    state = _abstract(
        state, "state", "pass the state of sf.init_state, or one that a step returned"
    )
    batch = _abstract(batch, "batch", "pass a tree of arrays and numbers, such as next(batches)")
    leaves, structure = jax.tree.flatten(state)
    shardings: list[Any] = [leaf.sharding for leaf in leaves]
    if sharding is not None:
        shardings = [*shardings_of(state, sharding)]
    default = _default_sharding(shardings)
    placed = [  # with strong types, as steps return it
        leaf.update(sharding=own or default, weak_type=False)
        for leaf, own in zip(leaves, shardings, strict=True)
    ]
    state = jax.tree.unflatten(structure, placed)
    _check_devices(state, "state", default, "")
    mesh = default.mesh if isinstance(default, NamedSharding) else None
    if isinstance(mesh, Mesh) and mesh.size > 1:
        return state, place_batch(batch, mesh)
    batch = jax.tree.map(lambda leaf: leaf.update(sharding=leaf.sharding or default), batch)
    advice = "place the batch with jax.device_put (on a mesh with sf.shard_batch), or "
    _check_devices(batch, "batch", default, advice)
    return state, batch


def _abstract(arrays: Any, root: str, advice: str) -> Any:
    """Return abstract arrays; those that are not committed to devices have no sharding."""
    for name, leaf in tree.named_leaves(arrays, root):
        if not tree.is_data(leaf, abstract=True):
            refuse(name, "an array", tree.describe_value(leaf), advice)

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        aval, sharding = jax.typeof(leaf), committed_sharding(leaf)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
        )

    return jax.tree.map(abstract, arrays)


def _default_sharding(shardings: list[Any]) -> Sharding:
    """Choose the sharding of uncommitted leaves: replicated, if others are on a mesh."""
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    if len(meshes) > 1:
        got, advice = f"{sorted(map(str, meshes))}", "move it with sf.sharding.place(state, plan)"
        refuse("state", "all of it on one mesh", got, advice, kind=ShardingError)
    if meshes:
        return NamedSharding(meshes.pop(), PartitionSpec())
    return next(filter(None, shardings), SingleDeviceSharding(jax.local_devices()[0]))


def _check_devices(arrays: Any, root: str, default: Sharding, advice: str) -> None:
    named, devices = tree.named_leaves(arrays, root), default.device_set
    elsewhere = [name for name, leaf in named if leaf.sharding.device_set != devices]
    if elsewhere:
        raise ShardingError(
            f"{root}: expected all arrays on the devices of {_spell(default)}, got "
            f"{_some(elsewhere)} elsewhere; {advice}move the state with "
            "sf.sharding.place(state, plan)"
        )


def _some(names: list[str]) -> str:
    return ", ".join([*names[:4], "…"] if len(names) > 4 else names)


# Arguments of calls


def argument_changes(wanted: Any, got: Any, root: str) -> list[str]:
    """List how an argument differs from the abstract one, a line for each path."""

    def as_jax(leaf: Any) -> Any:  # takes numpy's int64: without x64 as int32
        is_numpy = isinstance(leaf, np.ndarray | np.generic) and tree.is_data(leaf)
        return jax.typeof(leaf) if is_numpy else leaf

    if lines := tree.diff(wanted, jax.tree.map(as_jax, got), root):
        return lines
    named = tree.named_leaves(wanted, root)
    for (name, form), leaf in zip(named, jax.tree.leaves(got), strict=True):
        sharding = leaf.sharding if getattr(leaf, "committed", False) else form.sharding
        if not tree.is_array(leaf) and is_weak(leaf) and not form.weak_type:
            expected, seen = (
                tree.describe_value(form),
                f"the Python number {leaf!r}, which is weakly typed",
            )
        elif is_weak(leaf) != form.weak_type:
            kinds = {True: "a weak type, as Python numbers have", False: "a strong type"}
            expected = f"{tree.describe_value(form)} with {kinds[form.weak_type]}"
            seen = kinds[not form.weak_type]
        elif not sharding.is_equivalent_to(form.sharding, len(form.shape)):
            expected, seen = f"it on {_spell(form.sharding)}", f"it on {_spell(sharding)}"
        else:
            continue
        lines.append(f"{name}: expected {expected}, got {seen}")
    return lines


def is_weak(leaf: Any) -> bool:
    """Whether a leaf's dtype is weak, as that of a Python number is."""
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)
    return bool(getattr(leaf, "weak_type", is_number))


def _spell(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} of the mesh {dict(sharding.mesh.shape)}"
    return ", ".join(str(device) for device in sorted(sharding.device_set, key=lambda d: d.id))
