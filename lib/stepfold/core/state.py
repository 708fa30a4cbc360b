"""The train state: its initialization, and checks of states of any type."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import Params as ArrayTree  # by the name that its type hints refer to

from stepfold import tree
from stepfold.core.optimizer import as_optimizer, check_lookahead
from stepfold.core.transfers import allow_transfers
from stepfold.core.validation import check_flags, spell_call, takes
from stepfold.errors import ConfigError, refuse
from stepfold.internals.jax import compilation_key

if TYPE_CHECKING:  # importing chex takes half as long as importing stepfold
    from chex import PRNGKey

# Steps use another branch of the key than init, since `split(key)[i]` equals `fold_in(key, i)`.
# Otherwise step i would draw the same bits that initialized the i-th layer.
_STEP_BRANCH = 0x57E9F01D


class TrainState(NamedTuple):
    """The state that a step updates: arrays only, no functions.

    Attributes:
      step: the number of batches processed, including skipped ones, so that it is also the position
        in the data. The optimizer keeps its own count in `opt_state`.
      params: the trained parameters, any pytree of floating arrays.
      opt_state: the state of the optimizer, including EMA, loss scale and other wrappers.
      model_state: state of the model that is not trained, such as batch statistics; `()` if there
        is none.
      key: the root PRNG key of the run. The key of a step is `fold_in(key, step)`.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0))
    >>> int(state.step), state.params["w"].shape
    (0, (2,))
    """

    step: jax.Array
    params: ArrayTree
    opt_state: optax.OptState
    model_state: ArrayTree
    key: jax.Array

    def __repr__(self) -> str:
        fields = zip(self._fields, map(tree.summary, self), strict=True)
        return f"TrainState({', '.join(f'{name}={text}' for name, text in fields)})"


def init_state(
    init: Callable[[jax.Array], Any] | Any,
    tx: optax.GradientTransformation,
    key: jax.Array,
    *,
    stateful: bool = False,
    sharding: Any = None,
) -> TrainState:
    """Initialize the state of step 0.

    Arrays are copied, so that donating the state to a step never deletes the arrays of a model. No
    leaf has a weak type or an accidental placement, so that the second step does not compile again.
    Works under `jax.eval_shape`, `jit` and `vmap`. `init` is traced at each call, but compiled only
    if no recent call in this process had an equal program.

    Args:
      init: a function `key -> params`, or `key -> (params, model_state)` if stateful, called under
        `jax.jit`; or such a tree itself.
      tx: the optimizer.
      key: a PRNG key. `init` gets it unchanged. The key of the state is folded from it, so that no
        step draws the same bits as `init`.
      stateful: whether `init` also returns a model state.
      sharding: a tree of shardings like the state (or a prefix of it). The state is then created
        sharded, never in full on one device. A jitted step may shard leaves that are replicated
        here, and then compiles again; `jax.jit(step, out_shardings=(sharding, None))` prevents it.
        In a process without any of its devices, the state is abstract.

    Raises:
      ConfigError: if the parameters are not floating arrays, `init` is not a function of a key,
        `key` is not a PRNG key, `tx` is not an optimizer, or `sharding` is not for a state.

    >>> import jax, optax, stepfold as sf
    >>> def init(key):
    ...     return {"w": jax.random.normal(key, (4, 2)), "b": jax.numpy.zeros(2)}
    >>> state = sf.init_state(init, optax.adam(1e-3), jax.random.key(0))
    >>> jax.eval_shape(lambda key: sf.init_state(init, optax.adam(1e-3), key), state.key).params
    {'b': ShapeDtypeStruct(shape=(2,), dtype=float32), 'w': ShapeDtypeStruct(shape=(4, 2), ...)}
    """
    check_flags(stateful=stateful)
    _check_key(key)
    tx = as_optimizer(tx)
    has_plan = isinstance(sharding, TrainState)
    is_single = sharding is None or jax.tree_util.all_leaves([sharding])
    if isinstance(sharding, Mesh) or not (is_single or has_plan):
        advice = (
            "give sf.make_sharding(jax.eval_shape(lambda k: sf.init_state(init, tx, k), key), mesh)"
        )
        refuse("sharding", "one for the whole state", tree.describe_value(sharding), advice)
    if _is_function(init):
        _check_init(init)
        with allow_transfers("device_to_device"):  # of the key to the mesh
            return _call(lambda key: _finish(_parts(init(key), stateful), tx, key), sharding, key)
    parts = _parts(init, stateful)

    def build(parts: Any, key: Any) -> TrainState:
        return _finish(parts, tx, key)

    if not _is_here(sharding):
        return _call(build, sharding, parts, key)
    if sharding is not None:
        # Shard before jit, which would first put a host array on one device.
        shardings = (sharding.params, sharding.model_state) if has_plan else sharding
        parts = jax.device_put(parts, shardings)
    elif any(map(_is_committed, jax.tree.leaves((parts, key)))):
        # Not jitted: `zeros_like` inherits the sharding of the parameters only outside of jit. In
        # jit, the optimizer state would be replicated on every device.
        return _commit_like(build(parts, key), (parts, key))
    else:
        # Copied, since `jit` would pass the buffers through to the state.
        own = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, parts)
        parts = jax.device_put(own, may_alias=False)
    with allow_transfers("device_to_device"):
        return _call(build, sharding, parts, key)


def _check_key(key: Any) -> None:
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = tree.is_array(key) and key.dtype == jnp.uint32 and jnp.ndim(key) == 1
    if not (typed and key.shape == ()) and not raw:
        refuse("key", "one PRNG key", tree.describe_value(key), "try jax.random.key(0)")


def _is_function(init: Any) -> bool:
    # A callable that is a pytree (an equinox module) is a tree of parameters, not a function.
    is_leaf = jax.tree_util.all_leaves([init]) and not _library(init)
    return callable(init) and (is_leaf or isinstance(init, partial))


def _check_init(init: Any) -> None:
    if callable(getattr(init, "init", None)) and callable(getattr(init, "apply", None)):
        raise ConfigError(
            f"init: {type(init).__name__} makes its parameters from an example; give "
            "model.init(key, example), or lambda key: model.init(key, example)"
        )
    if not takes(init, 1):
        advice = "give what else it takes by hand, as in lambda key: model.init(key, example)"
        refuse("init", "a function init(key) -> params", spell_call(init), advice)


def _parts(initial: Any, stateful: bool) -> tuple[Any, Any]:
    """Split what `init` is or returned into parameters and model state, and check them."""
    if stateful and not (isinstance(initial, tuple) and len(initial) == 2):
        count = f" of {len(initial)}" if isinstance(initial, tuple) else ""
        refuse("stateful=True", "(params, model_state)", f"{type(initial).__name__}{count}")
    params, model_state = initial if stateful else (initial, ())
    check_not_donated(params, "params")
    if not jax.tree.leaves(params):
        refuse(
            "params", "at least one array", tree.describe_value(params), "does init return them?"
        )
    _check_modules(params)
    check_params(params)
    for name, leaf in tree.named_leaves(model_state, "model_state"):
        if not tree.is_data(leaf):
            refuse(name, "an array", tree.describe_value(leaf), _PARTITION)
    return params, model_state


def _check_modules(params: Any) -> None:
    """Refuse whole modules of equinox with leaves that are not trained, and of flax.nnx."""
    is_module = lambda node: bool(_library(node))
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_module):
        library = _library(node)
        if library == "flax.nnx":
            advice = (
                "split it, as graphdef, params, rest = nnx.split(model, nnx.Param, ...), give "
                "(params, rest) with stateful=True, and use nnx.merge(graphdef, params, rest, "
                "copy=True) in the loss function"
            )
        elif library and not all(map(tree.is_float, jax.tree.leaves(node))):
            advice = (
                "partition it, as params, static = eqx.partition(model, eqx.is_inexact_array), "
                "give params, and use eqx.combine(params, static) in the loss function"
            )
        else:
            continue
        name = "/".join(filter(None, ("params", tree.path_name(path))))
        kind = type(node).__name__
        refuse(name, "a pytree of arrays to train", f"{kind}, a whole module of {library}", advice)


def _library(node: Any) -> str:
    """Return the library of a module, which need not be installed; empty for anything else."""
    for base in type(node).__mro__:
        for library in ("equinox", "flax.nnx"):
            if base.__name__ == "Module" and base.__module__.startswith(library):
                return library
    return ""


_PARTITION = "keep functions and settings out of the state (equinox.partition, nnx.split do it)"


def check_params(params: Any) -> None:
    """Refuse parameters that are not floating arrays, with the path of the leaf."""
    for name, leaf in tree.named_leaves(params, "params"):
        if not tree.is_data(leaf):
            refuse(name, "an array", tree.describe_value(leaf), _PARTITION)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            advice = (
                "arrays that are not trained by gradients belong in model_state (stateful=True) "
                "or in the loss function"
            )
            refuse(name, "floating numbers", tree.describe_value(leaf), advice)


# Constants above this size make the text of a program too long to be worth hashing.
_MAX_CONSTANT_BYTES = 1 << 24


@dataclass(frozen=True)
class _Program:
    """A lowered program, equal to others that compile to the same executable."""

    key: Hashable
    lowered: list[jax.stages.Lowered] = field(compare=False)  # empty once compiled


@lru_cache(maxsize=32)
def _compile(program: _Program) -> jax.stages.Compiled:
    return program.lowered.pop().compile()


def _call(build: Callable[..., TrainState], sharding: Any, *args: Any) -> TrainState:
    """Call a function under jit, but compile equal programs once per process.

    jit compiles for every new function object, such as a new lambda, a new optimizer, or `build`
    here. Tracing and lowering take a small part of the time, so every call does both, and only the
    executable is cached. It therefore never misses a change of what `init` reads, and keeps neither
    `init` nor its arrays alive.
    """
    leaves, structure = jax.tree.flatten(args)
    flat = lambda *leaves: build(*jax.tree.unflatten(structure, leaves))
    if not _is_here(sharding):
        return _abstract(flat, leaves, sharding)
    jitted = jax.jit(flat, **({} if sharding is None else {"out_shardings": sharding}))
    lowered = _lower(jitted, leaves)
    key = None if lowered is None else compilation_key(lowered)
    if lowered is None or key is None:
        state: TrainState = jitted(*leaves)
        return state
    new = jax.tree.leaves(_compile(_Program(key, [lowered]))(*leaves))
    # An equal program may have had other containers.
    return jax.tree.unflatten(lowered.out_tree, new)  # type: ignore[no-any-return]


def _is_here(sharding: Any) -> bool:
    """Whether this process has some of the devices of a plan, or there is none."""
    shardings: list[Any] = jax.tree.leaves(sharding)
    return not shardings or any(each.addressable_devices for each in shardings)


def _abstract(build: Callable[..., TrainState], leaves: list[Any], sharding: Any) -> TrainState:
    """Describe the state that `build` makes, on devices that this process does not have."""

    def describe(on: Any, part: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), part)

    state: TrainState = jax.tree.map(describe, sharding, jax.eval_shape(build, *leaves))
    return state


def _lower(jitted: Any, leaves: list[Any]) -> jax.stages.Lowered | None:
    """Lower a call; return None if only the call itself does what the user expects."""
    config: Any = jax.config
    if config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs:
        return None
    # Under an outer jit or eval_shape, any operation returns a tracer.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, jax.device_put(leaves[-1]))):
        return None
    traced = jitted.trace(*leaves)
    if len(traced.jaxpr.in_avals) != len(leaves):  # `build` closes over tracers
        return None
    num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in traced.jaxpr.consts)
    return None if num_bytes > _MAX_CONSTANT_BYTES else traced.lower()


def _finish(
    parts: tuple[ArrayTree, ArrayTree], tx: optax.GradientTransformation, key: "PRNGKey"
) -> TrainState:
    # Copies, with strong dtypes: an optimizer may keep the parameters that it is given.
    fresh = lambda leaf: tree.strong(jnp.array(leaf, copy=True))
    params, model_state = jax.tree.map(fresh, parts)
    opt_state = tx.init(params)
    check_lookahead(params, opt_state)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=jax.tree.map(fresh, opt_state),
        model_state=model_state,
        key=jax.random.fold_in(key, _STEP_BRANCH),
    )


def _is_committed(leaf: Any) -> bool:
    """Whether a leaf is committed to devices, or traced, so that it may be."""
    return isinstance(leaf, jax.core.Tracer) or bool(getattr(leaf, "committed", False))


def _commit_like(state: TrainState, inputs: Any) -> TrainState:
    """Commit uncommitted leaves (counts, for example) to the devices of the committed inputs.

    A scalar on one device, with parameters on a mesh, would come back from the first step
    replicated over the mesh, and the second step would compile again.
    """
    concrete = [leaf for leaf in jax.tree.leaves(inputs) if not isinstance(leaf, jax.core.Tracer)]
    shardings = {
        NamedSharding(leaf.sharding.mesh, PartitionSpec())
        if isinstance(leaf.sharding, NamedSharding)
        else leaf.sharding
        for leaf in concrete
        if _is_committed(leaf)
    }
    if len(shardings) != 1:
        return state
    (sharding,) = shardings
    commit = lambda leaf: leaf if _is_committed(leaf) else jax.device_put(leaf, sharding)
    return TrainState(*jax.tree.map(commit, state))


def step_of(state: Any) -> int:
    """Return the number of steps of a state, which must be a scalar; 0 if it has no `step`."""
    step = getattr(state, "step", 0)
    if jnp.shape(step) != ():
        advice = "train stacked states in your own loop, as examples/ensemble.py does"
        refuse("step", "the state of one run, with a scalar step", step, advice)
    return int(jax.device_get(step))


def params_of(state: Any, default: Any) -> Any:
    """Return the parameters of a state, or of each `TrainState` in a tree of several.

    Other leaves of such a tree become None. A state without parameters returns `default`.
    """
    if hasattr(state, "params"):
        return state.params
    is_state = lambda node: isinstance(node, TrainState)
    if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
        return default
    params = lambda node: node.params if isinstance(node, TrainState) else None
    return jax.tree.map(params, state, is_leaf=is_state)


def strengthen(state: Any) -> Any:
    """Convert Python numbers and weakly typed leaves to strong dtypes, as a step returns them."""

    def strong(leaf: Any) -> Any:
        return tree.strong(jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf)

    return jax.tree.map(strong, state)


def is_available(state: Any) -> bool:
    """Wait for a state, and return whether it exists: not donated, and its step succeeded."""
    leaves: list[Any] = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return False
    try:
        jax.block_until_ready(state)
    except RuntimeError:
        return False
    return True


def has_nan(state: Any) -> bool:
    """Whether a parameter is NaN. Infinities are allowed: some models mask with them."""
    leaves = [leaf for leaf in jax.tree.leaves(params_of(state, ())) if tree.is_float(leaf)]
    return bool(jax.device_get(_any_nan(leaves)))


@jax.jit
def _any_nan(leaves: list[Any]) -> jax.Array:
    return jnp.array([jnp.isnan(leaf).any() for leaf in leaves] or [False]).any()


def check_not_donated(state: Any, root: str = "state") -> None:
    """Refuse a state with donated arrays, with the path of the first one."""
    leaves: list[Any] = jax.tree.leaves(state)
    for index, leaf in enumerate(leaves):
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if is_concrete and leaf.is_deleted():
            name, _ = tree.named_leaves(state, root)[index]
            raise ConfigError(
                f"{name}, …: the arrays were donated to an earlier call and are gone; continue "
                "with the state that it returned"
            )
