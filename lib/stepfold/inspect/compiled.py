"""A step compiled once, ahead of time, that refuses to be compiled again.

A change of shape, dtype, weak type, placement or structure makes jax compile another program
without a word, which on a large model is minutes, and on many devices a hang. Here the program is
made when asked for. A call takes jax's own fast path; only where that would trace again, Python is
entered, and then the arguments are compared leaf by leaf with those it was compiled for.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import jax

from stepfold import tree
from stepfold.errors import ConfigError, RetraceError
from stepfold.inspect.arguments import changes, in_guise_of, is_weak, placed
from stepfold.inspect.caching import check_cache, compile_cached
from stepfold.inspect.memory import exhausted, is_exhausted

_ALIKE = '\nGive batches of one form: remainder="drop" or "pad" of sf.batches leaves none shorter.'


class _WouldTraceError(Exception):
    """Say, from inside jax, that a call is about to be traced again."""


class CompiledStep:
    """A step compiled for one form of state and batch; `compile_step` makes it.

    Attributes:
      step: the step itself, not compiled.
      compiled: the program, as `jax.stages.Compiled`: its text, its memory, its costs.
      state: the abstract state it takes, with shardings, as `shape_of_state.params["w"].sharding`.
      batch: the abstract batch it takes.
      trains: whether it gives back a state, as a `StepFn` does and an `EvalFn` does not.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones(3), optax.sgd(0.1), jax.random.key(0))
    >>> evaluate = sf.make_eval_step(lambda params, batch, key: sf.mean(params * batch))
    >>> evaluate = sf.compile_step(evaluate, state, jnp.ones(3))
    >>> evaluate.batch.shape, "HloModule" in evaluate.compiled.as_text()
    ((3,), True)
    """

    __slots__ = ("__weakref__", "_jitted", "_run", "batch", "compiled", "state", "step", "trains")

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        jitted: Any,
        compiled: jax.stages.Compiled,
        state: Any,
        batch: Any,
        *,
        trains: bool,
    ) -> None:
        self.step, self.compiled, self.state, self.batch = step, compiled, state, batch
        self.trains, self._run, self._jitted = trains, jitted, jitted

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run the step."""
        try:
            return self._run(state, batch)
        except (_WouldTraceError, TypeError, ValueError, RuntimeError) as error:
            if is_exhausted(error):
                raise exhausted(error, self.state, self.batch, self.compiled) from error
            if _is_looked_into(state, batch):
                return self.step(state, batch)
            self._explain(state, batch, error)
            if not isinstance(error, _WouldTraceError):
                raise
        # The same arguments in another guise: on the host instead of on the mesh, under other
        # settings, or after jax has dropped its caches. What was compiled takes them all; only
        # weak types, which it would let pass, have to be looked for from here.
        self._run = self._looked_at
        return self._run(state, batch)

    def is_current(self, state: Any, batch: Any) -> bool:
        """Whether jax would run this program for the arguments under its present settings."""
        try:
            self._jitted.trace(state, batch)
        except _WouldTraceError:
            return False
        return True

    def _looked_at(self, state: Any, batch: Any) -> Any:
        forms, leaves = jax.tree.leaves((self.state, self.batch)), jax.tree.leaves((state, batch))
        pairs = zip(forms, leaves, strict=False)
        if _is_looked_into(state, batch) or any(
            is_weak(leaf) != form.weak_type for form, leaf in pairs
        ):
            raise _WouldTraceError
        return self.compiled(state, batch)

    def _explain(self, state: Any, batch: Any, error: Exception) -> None:
        """Say in words why a call cannot be, if it is for its arguments."""
        got = [*tree.named_leaves(state), *tree.named_leaves(batch, "batch")]
        gone = [name for name, leaf in got if _is_gone(leaf)]
        if gone and re.search(r"Array has been deleted|deleted or donated", str(error)):
            raise ConfigError(
                f"{', '.join(gone[:4])}{' …' if len(gone) > 4 else ''}: the arrays were donated to "
                "an earlier call and are gone; go on with the state that it returned, or compile "
                "with donate=False to keep what goes in"
            ) from None
        of_batch = changes(self.batch, batch, "batch")
        lines = changes(self.state, state, "") + of_batch
        if lines:
            raise RetraceError(
                "the step was compiled for other arguments, and would have to compile again:\n  "
                + "\n  ".join(lines)
                + _ALIKE * bool(of_batch)
            ) from None


def compile_step(
    step: Callable[[Any, Any], Any],
    state: Any,
    batch: Any,
    *,
    sharding: Any = None,
    donate: bool = True,
    compilation_cache: str | os.PathLike[str] | None = None,
) -> CompiledStep:
    """Compile a step ahead of time, for one form of state and batch.

    What it returns is called like the step, costs what a jitted one costs, and never compiles
    again: a call that would need it is refused with a `RetraceError` that names what changed. The
    state comes back in the shardings in which it goes in.

    Args:
      step: a `StepFn`, or an `EvalFn`, un-jitted.
      state: the state, or an abstract one.
      batch: a batch, or an abstract one.
      sharding: the state's plan; by default where its arrays are. A batch that has no place of its
        own is spread over the mesh's data axes, as by `shard_batch`.
      donate: whether the state's memory is used for the new state. An `EvalFn`'s never is.
      compilation_cache: a directory in which compiled programs are kept, so that the next process
        need not compile the same. Several may share it, and it can be deleted at any time; what
        is in it is run, so no one else should be able to write there. Without it, jax's own
        settings hold.

    Raises:
      LossError, TreeMismatchError, …: what tracing the step raises.
      OutOfMemoryError: if the compiler sees that a device cannot hold it. A call raises it too.

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
    Give batches of one form: ...
    """
    if not callable(step) or hasattr(step, "lower") or isinstance(step, CompiledStep):
        raise ConfigError(
            "compile_step: expected a step (state, batch) -> ..., neither jitted nor compiled, got "
            f"{tree.spell(step)}; give what sf.make_train_step made, as it is"
        )
    cache = None if compilation_cache is None else check_cache(compilation_cache)
    given, (state, batch) = batch, placed(state, batch, sharding)
    places = jax.tree.map(lambda leaf: leaf.sharding, (state, batch))
    example = in_guise_of(given, batch)
    open_for: list[None] = [None]

    def traced_once(state: Any, batch: Any) -> Any:
        if not open_for:
            raise _WouldTraceError
        return step(state, batch)

    with jax.disable_jit(False):  # calls under disable_jit are eager, but not this program
        # jax keeps what it traces of a function object for arguments of one form, so that lower
        # finds what eval_shape has traced.
        output = jax.eval_shape(traced_once, state, example)
        trains = isinstance(output, tuple) and len(output) == 2 and _is_alike(state, output[0])
        jitted = jax.jit(
            traced_once,
            in_shardings=places,
            out_shardings=(places[0], None) if trains else None,
            donate_argnums=0 if trains and donate else (),
        )
        lowered = jitted.lower(state, example)
    try:
        compiled = lowered.compile() if cache is None else compile_cached(lowered, cache)
    except RuntimeError as error:
        if not is_exhausted(error):
            raise
        raise exhausted(error, state, batch) from error
    open_for.clear()
    return CompiledStep(step, jitted, compiled, state, batch, trains=trains)


def _is_alike(state: Any, made: Any) -> bool:
    """Tell a state, in another dtype even, from the metrics that an evaluation gives."""
    structures: list[Any] = [jax.tree.structure(x) for x in (state, made)]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(x)] for x in (state, made)]
    return bool(structures[0] == structures[1] and shapes[0] == shapes[1])


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _is_looked_into(*arguments: Any) -> bool:
    """Whether jax needs the step itself: to trace it, to run it eagerly, or to locate a NaN."""
    settings: Any = jax.config
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
    return traced or bool(settings.jax_disable_jit) or bool(settings.jax_debug_nans)
