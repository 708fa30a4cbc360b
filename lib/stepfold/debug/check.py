"""Find silent data corruption: run a step twice, and compare the bits of both new states."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stepfold import tree
from stepfold.core.state import strengthen
from stepfold.core.validation import read_function, read_integer
from stepfold.errors import ConfigError, TreeMismatchError, refuse


def check_step(
    step: Callable[[Any, Any], tuple[Any, Any]], *, every: int = 100
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Run a step twice from time to time, to find errors of the hardware.

    A processor that sometimes computes a wrong number raises no error. The first step and every
    `every`-th after it run twice, and the bits of both new states are compared, leaf by leaf. The
    metric `corrupt` is the number of leaves that differ in any step; `metrics["corrupt"].paths`
    lists them, and the hook `stop_on_corruption` ends the run. State and metrics are those of the
    step itself, bit for bit.

    Both runs are iterations of one loop, so that they execute the same instructions, and only a
    hash of each leaf is kept of the first. The program is not larger than that of the step. The
    cost is one extra step per `every` steps, and reading the new state once per step.

    A step that is not deterministic, as with atomic additions on a GPU, is found corrupt in its
    first step. A device that is always wrong in the same way is not found; check it with another
    device, as in `examples/silent_corruption.py`. Of a replicated array, each process compares the
    copy of its first device. It sees an error in a gradient, which reaches all copies, but not an
    error in another copy.

    Args:
      step: a `StepFn`; with `shard_map` or `vmap`, the result of these. Its state has a scalar
        `step`, as an attribute or a key.
      every: the number of steps from one check to the next.

    Raises:
      ConfigError: if an argument is invalid; while tracing, if the state has no step, or the step
        already has a metric `corrupt`.
      TreeMismatchError: while tracing, if the step changes the form of its state.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> step = sf.make_train_step(lambda params, x, key: sf.mean(params * x), optax.sgd(0.1))
    >>> step = jax.jit(sf.debug.check_step(step, every=10), donate_argnums=0)
    >>> state = sf.init_state(jnp.ones(4), optax.sgd(0.1), jax.random.key(0))
    >>> state, metrics = step(state, jnp.ones(4))
    >>> int(metrics["corrupt"].compute()), metrics["corrupt"].paths(state)
    (0, [])
    """
    read_function("check_step", step, "a step (state, batch) -> …")
    read_integer("every", every)
    from stepfold.core.metrics import DifferentLeaves  # lazy: clu imports flax

    def checked_step(state: Any, batch: Any) -> tuple[Any, Any]:
        state = strengthen(state)
        runs = jnp.where(_step_of(state) % every == 0, jnp.int32(2), jnp.int32(1))
        shape, metrics_shape = jax.eval_shape(step, state, batch)
        if lines := tree.diff(state, shape, "state"):
            raise TreeMismatchError(
                "check_step: expected the same structure, shapes and dtypes from the step, got\n  "
                + "\n  ".join(lines)
            )
        if "corrupt" in metrics_shape:
            raise ConfigError("check_step: the step has a metric 'corrupt' already; rename it")
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics_shape)
        hashes = jnp.zeros(len(jax.tree.leaves(state)), jnp.uint32)

        def run(carry: Any) -> Any:
            done, state, _, _, last = carry
            # A barrier that depends on the iteration. Without it, XLA hoists out of the loop what
            # depends on the batch alone.
            done, state, same_batch = lax.optimization_barrier((done, state, batch))
            new, metrics = step(state, same_batch)
            new, done = strengthen(new), done + 1
            state = tree.select(done == runs, new, state)
            return done, state, metrics, last, jnp.stack([*map(_hash, jax.tree.leaves(new))])

        start = jnp.zeros_like(runs), state, zeros, hashes, hashes
        loop = lax.while_loop(lambda carry: carry[0] < runs, run, start)
        _, state, metrics, first, second = loop
        differ = (first != second) & (runs == 2)
        return state, {**metrics, "corrupt": DifferentLeaves.from_mask(differ)}

    return checked_step


def _step_of(state: Any) -> Any:
    step: Any = state.get("step") if isinstance(state, Mapping) else getattr(state, "step", None)
    if not tree.is_array(step) or step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
        advice = "map the checked step over stacked states with jax.vmap"
        refuse("state.step", "the integer step of one state", tree.describe_value(step), advice)
    return step


def _hash(leaf: jax.Array) -> jax.Array:
    """Hash the bits of an array to 32 bits, so that any change of one element changes the hash.

    A sum of the bits would miss signs that flip in pairs, and elements that change places.
    """
    words = _words(leaf)
    for axis, size in enumerate(words.shape):
        index = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1 + 2 * axis)
        words += jnp.expand_dims(index, [other for other in range(words.ndim) if other != axis])
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a bijection that mixes all bits
        words = (words ^ (words >> jnp.uint32(shift))) * jnp.uint32(factor)
    total: jax.Array = (words ^ (words >> jnp.uint32(16))).sum(dtype=jnp.uint32)
    return total


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as 32-bit words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)  # with an axis of two words
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        if jnp.finfo(leaf.dtype).bits < 8:
            leaf = leaf.astype(jnp.float32)
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        leaf = lax.bitcast_convert_type(leaf, unsigned)
    return leaf.astype(jnp.uint32)
