"""The state that a run begins with, from whatever there is: a state, parameters, or a function."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.adapter.saving import find_checkpoint
from stepfold.adapter.schedules import with_schedule_at
from stepfold.checkpoint.load import load_params
from stepfold.checkpoint.restore import restore
from stepfold.core.state import TrainState, init_state
from stepfold.errors import ConfigError, TreeMismatchError
from stepfold.sharding.placement import place

Cast = Callable[[Any], Any]
Plan = Callable[[Any], Any]


def is_state(value: Any) -> bool:
    """Tell a state, stepfold's or another library's, from parameters."""
    return isinstance(value, TrainState) or (hasattr(value, "params") and hasattr(value, "step"))


def check_model(model: Any, model_state: Any, *, finetune: bool) -> None:
    """Refuse what no state can be made of.

    Raises:
      ConfigError: with what to give.
    """
    if model_state is not None and finetune:
        return
    if model is None:
        raise ConfigError(
            "model, model_state: expected a function key -> params as model, or parameters or a "
            f"state as model_state, got model={tree.spell(model)}"
            + ("" if finetune else ", and finetune=False draws parameters anew")
        )
    if callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None)):
        raise ConfigError(
            f"model: {type(model).__name__} makes its parameters of an example, which is not known "
            "here; give model_state=model.init(key, example), or its params alone, or "
            "model=lambda key: model.init(key, example)"
        )


def first_state(
    model: Any,
    model_state: Any,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    plan: Plan,
    cast: Cast,
    stateful: bool = False,
    init_tx: bool = True,
    step: int = 0,
) -> Any:
    """Make the state of a run; nothing of what is given is kept or donated.

    A state keeps its step, its key, and its optimizer's state, if that fits the optimizer.

    Args:
      model: an init function, or a tree, if there is no state.
      model_state: a state, parameters, or None.
      tx: the optimizer.
      seed: what parameters are drawn from.
      plan: a function from an abstract state to its shardings, or to None.
      cast: what is done to parameters first.
      stateful: whether there is a model state besides the parameters.
      init_tx: whether to make a new state of the optimizer where the given one does not fit.
      step: where a new state, and its schedule, begin.

    Raises:
      TreeMismatchError: if it does not fit, and no new one is to be made.

    >>> state = first_state(lambda key: jnp.ones(2), None, optax.sgd(0.1), seed=0,
    ...                     plan=lambda shape: None, cast=lambda params: params)
    >>> state.params.tolist(), int(state.step)
    ([1.0, 1.0], 0)
    """
    if is_state(model_state):
        if isinstance(model_state, TrainState):
            model_state = _with_optimizer(model_state, tx, cast, init_tx=init_tx)
        state = jax.tree.map(jnp.asarray, model_state)
        shardings = plan(jax.eval_shape(lambda: state))
        return placed(state, shardings)
    source = model if model_state is None else model_state
    given = _casting(source, cast, stateful=stateful)
    key = jax.random.key(seed)
    make = functools.partial(init_state, given, tx, stateful=stateful)
    state = make(key, sharding=plan(jax.eval_shape(make, key)))
    return _at_step(state, step) if step else state


def _at_step(state: TrainState, step: int) -> TrainState:
    count = jnp.full_like(state.step, step)
    return state._replace(step=count, opt_state=with_schedule_at(state.opt_state, step))


def _casting(source: Any, cast: Cast, *, stateful: bool) -> Any:
    def of(made: Any) -> Any:
        if not stateful:
            return cast(made)
        return (cast(made[0]), *made[1:]) if isinstance(made, tuple) else made

    is_leaf = jax.tree_util.all_leaves([source])
    return (lambda key: of(source(key))) if callable(source) and is_leaf else of(source)


def _with_optimizer(state: TrainState, tx: Any, cast: Cast, *, init_tx: bool) -> TrainState:
    params = cast(state.params)
    lines = tree.diff(jax.eval_shape(tx.init, params), state.opt_state, "opt_state")
    if lines and not init_tx:
        raise TreeMismatchError(
            "init_tx=False: expected a model_state whose optimizer's state fits the optimizer:\n  "
            + "\n  ".join(lines)
        )
    if lines:
        fresh = init_state(params, tx, jax.random.key(0))
        return state._replace(params=params, opt_state=fresh.opt_state)
    return state._replace(params=params)


def placed(state: Any, shardings: Any) -> Any:
    """Copy a state to where it belongs."""
    if shardings is None:
        return jax.tree.map(lambda leaf: tree.strong(jnp.array(leaf, copy=True)), state)
    return place(state, shardings)


class Loaded(NamedTuple):
    """A state with weights from elsewhere, the paths of those, and why others were not loaded."""

    state: Any
    loaded: list[str]
    left: dict[str, str]


def weights_from(path: str | Path, state: Any, folder: str = "checkpoints") -> Loaded:
    """Read parameters alone: of safetensors all, and of a checkpoint those that fit.

    Args:
      path: a `.safetensors` file or a folder with such, or a checkpoint.
      state: the state to read them into.
      folder: what the checkpoints' folder is called in a run's.

    Raises:
      TreeMismatchError: if none of the parameters fits.

    >>> import stepfold as sf, tempfile
    >>> folder, start = tempfile.mkdtemp(), {"w": jnp.zeros(2), "head": jnp.zeros(3)}
    >>> made = lambda params: sf.init_state(params, optax.sgd(0.1), jax.random.key(0))
    >>> sf.save(folder, made({"w": jnp.ones(2), "old": jnp.ones(3)}))
    >>> found = weights_from(folder, made(start))
    >>> found.loaded, sorted(found.left), found.state.params["w"].tolist()
    (['params/w'], ['params/head', 'params/old'], [1.0, 1.0])
    """
    place = Path(path)
    if place.suffix == ".safetensors" or any(place.glob("*.safetensors*")):
        params = load_params(place, state.params)
        names = [name for name, _ in tree.named_leaves(params, "params")]
        return Loaded(state._replace(params=params), names, {})
    directory, step = find_checkpoint(place, folder)
    which: Any = "latest" if step is None else step
    found = restore(directory, state, step=which, parts=("params",), partial=True)
    left = {name: why for name, why in found.left.items() if name.split("/")[0] == "params"}
    return Loaded(found.state, found.loaded, left)
