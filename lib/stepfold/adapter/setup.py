"""Initial state of the trainer: new, from parameters, or from a checkpoint."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.adapter.optimizers import schedule_paths, with_schedule_at
from stepfold.adapter.saving import find_checkpoint
from stepfold.checkpoint.load import load_params
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.verify import latest_step
from stepfold.core.state import TrainState, init_state
from stepfold.errors import ConfigError, TreeMismatchError
from stepfold.sharding.placement import place


def is_state(value: Any) -> bool:
    """Whether a value is a state, of stepfold or another library, rather than parameters."""
    return isinstance(value, TrainState) or (hasattr(value, "params") and hasattr(value, "step"))


def check_model(model: Any, model_state: Any, *, finetune: bool) -> None:
    """Check that a state can be made."""
    if model_state is not None and finetune:
        return
    if model is None:
        raise ConfigError(
            "model, model_state: expected a function key -> params as model, or parameters or a "
            f"state as model_state, got model={tree.spell(model)}"
            + ("" if finetune else ", and finetune=False initializes new parameters")
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
    plan: Callable[[Any], Any],
    cast: Callable[[Any], Any],
    stateful: bool = False,
    init_tx: bool = True,
    step: int = 0,
) -> Any:
    """Make the state of a run from an init function, parameters or a state. All arrays are copied.

    A state keeps its step, its key and, if it fits the optimizer, its optimizer state. If it does
    not fit, `init_tx` initializes a new one. A new state and its schedule start at `step`. `plan`
    returns the shardings of an abstract state, or None.
    """
    if is_state(model_state):
        if isinstance(model_state, TrainState):
            model_state = _fit_optimizer(model_state, tx, cast, init_tx=init_tx)
        state = jax.tree.map(jnp.asarray, model_state)
        return copy_to(state, plan(jax.eval_shape(lambda: state)))
    source = _cast_params(model if model_state is None else model_state, cast, stateful=stateful)
    key = jax.random.key(seed)
    make = functools.partial(init_state, source, tx, stateful=stateful)
    state = make(key, sharding=plan(jax.eval_shape(make, key)))
    if step:
        opt_state = with_schedule_at(state.opt_state, step)
        state = state._replace(step=jnp.full_like(state.step, step), opt_state=opt_state)
    return state


def _fit_optimizer(state: TrainState, tx: Any, cast: Any, *, init_tx: bool) -> TrainState:
    params = cast(state.params)
    differences = tree.diff(jax.eval_shape(tx.init, params), state.opt_state, "opt_state")
    if not differences:
        return state._replace(params=params)
    if not init_tx:
        raise TreeMismatchError(
            "init_tx=False: expected a model_state whose optimizer state fits the optimizer:\n  "
            + "\n  ".join(differences)
        )
    new = init_state(params, tx, jax.random.key(0))
    return state._replace(params=params, opt_state=new.opt_state)


def _cast_params(source: Any, cast: Callable[[Any], Any], *, stateful: bool) -> Any:
    def convert(variables: Any) -> Any:
        if stateful and isinstance(variables, tuple):
            return (cast(variables[0]), *variables[1:])
        return variables if stateful else cast(variables)

    is_function = callable(source) and jax.tree_util.all_leaves([source])
    return (lambda key: convert(source(key))) if is_function else convert(source)


def copy_to(state: Any, shardings: Any) -> Any:
    """Copy a state to shardings; None keeps those of the state."""
    if shardings is None:
        return jax.tree.map(lambda leaf: tree.strong(jnp.array(leaf, copy=True)), state)
    return place(state, shardings)


class LoadedWeights(NamedTuple):
    """A state with loaded parameters, their paths, and by path why others were not loaded."""

    state: Any
    loaded: list[str]
    not_loaded: dict[str, str]


def load_weights(path: str | Path, state: Any, folder: str = "checkpoints") -> LoadedWeights:
    """Load all parameters from safetensors, or those that fit from a checkpoint.

    >>> import stepfold as sf, tempfile
    >>> folder, start = tempfile.mkdtemp(), {"w": jnp.zeros(2), "head": jnp.zeros(3)}
    >>> new = lambda params: sf.init_state(params, optax.sgd(0.1), jax.random.key(0))
    >>> sf.save(folder, new({"w": jnp.ones(2), "old": jnp.ones(3)}))
    >>> weights = load_weights(folder, new(start))
    >>> weights.loaded, sorted(weights.not_loaded), weights.state.params["w"].tolist()
    (['params/w'], ['params/head', 'params/old'], [1.0, 1.0])
    """
    location = Path(path)
    if location.suffix == ".safetensors" or any(location.glob("*.safetensors*")):
        params = load_params(location, state.params)
        names = [name for name, _ in tree.named_leaves(params, "params")]
        return LoadedWeights(state._replace(params=params), names, {})
    restored = restore_path(location, state, folder, parts=("params",), partial=True)
    reasons = {n: why for n, why in restored.left.items() if n.split("/")[0] == "params"}
    return LoadedWeights(restored.state, restored.loaded, reasons)


# Checkpoints


def restore_path(path: str | Path, like: Any, folder: str, **options: Any) -> Restored:
    """Restore the checkpoint at a path, or the newest one of a run."""
    directory, step = find_checkpoint(path, folder)
    return restore(directory, like, step="latest" if step is None else step, **options)


def parts_of(state: Any, *, optimizer: bool, scheduler: bool) -> Sequence[str]:
    """Return regular expressions for the paths to restore.

    They always include the parameters and the model state. `optimizer` adds the optimizer state,
    the step and the key; `scheduler` adds the step counts of schedules.
    """
    schedule = schedule_paths(getattr(state, "opt_state", ()))
    names = [name for name, _ in tree.named_leaves(state) if name.startswith("opt_state")]
    rest = [*(name for name in names if name not in schedule), "step", "key"]
    wanted = [*(rest if optimizer else ()), *(schedule if scheduler else ())]
    return ["params", "model_state", *map(re.escape, wanted)]


def newest_step(directory: Path | None) -> int | None:
    """Return the newest step in a directory of checkpoints."""
    return latest_step(directory) if directory is not None and directory.is_dir() else None


def is_newest(path: str | Path, own: Path | None, folder: str) -> bool:
    """Whether a path is the newest checkpoint in a run's own directory.

    Refuse an older one there, since the run would not write the later ones again.
    """
    directory, step = find_checkpoint(path, folder)
    if own is None or directory.absolute() != own.absolute():
        return False
    newest = newest_step(directory)
    if step is not None and step != newest:
        raise ConfigError(
            f"ckpt_path: {path} is an older checkpoint than step {newest} of the same run; delete "
            "the newer ones, or give another output_dir"
        )
    return True


def check_start(argument: str, own: Path | None, like: Any, state: Any) -> None:
    """Check that a state equals the newest checkpoint of its run, if there is one."""
    newest = newest_step(own)
    if own is None or newest is None:
        return
    if newest == int(getattr(state, "step", 0)):
        saved = restore(own, like).state
        same_tree = not tree.diff(saved, state)
        if same_tree and all(map(_are_equal, jax.tree.leaves(saved), jax.tree.leaves(state))):
            return
    raise ConfigError(
        f"{argument}: expected an output_dir without checkpoints, or the state of the newest one, "
        f"got another state; the run in {own} resumes from step {newest}: leave {argument} out, or "
        "give another output_dir"
    )


def _are_equal(saved: Any, leaf: Any) -> bool:
    if jnp.issubdtype(saved.dtype, jax.dtypes.prng_key):
        saved, leaf = jax.random.key_data(saved), jax.random.key_data(leaf)
    return saved.shape == jnp.shape(leaf) and bool(jnp.array_equal(saved, leaf))
