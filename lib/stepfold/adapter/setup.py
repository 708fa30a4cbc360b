"""Set up a trainer: what its configure methods return, and its state."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import cast_params, checkpoints
from stepfold.adapter.optimizers import schedule_paths, with_schedule_at
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from stepfold.adapter.steps import as_eval_step
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.safetensors import load_params
from stepfold.checkpoint.steps import absolute_path, is_url, split_location
from stepfold.checkpoint.store import open_store
from stepfold.core.state import TrainState, init_state
from stepfold.core.transfers import allow_transfers
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError, refuse
from stepfold.sharding.place import place

if TYPE_CHECKING:
    from stepfold.adapter.trainer import Trainer

# Outputs of the configure methods


def use_dataloaders(trainer: "Trainer", output: TrainerConfigureDataloaderOutput) -> None:
    """Set the batches of a trainer, and the number of steps."""
    trainer.dataloader_train = output.dataloader_train
    trainer.dataloader_eval = output.dataloader_eval
    trainer.max_training_steps = output.max_training_steps or trainer.plan.steps
    trainer.max_evaluation_steps = output.max_evaluation_steps
    trainer.plan = trainer.plan._replace(steps=trainer.max_training_steps)


def use_model(trainer: "Trainer", output: TrainerConfigureModelOutput) -> None:
    """Set the optimizer and the state of a trainer."""
    trainer.model, trainer.scheduler = output.model, output.scheduler
    trainer.config = trainer.config if output.config is None else output.config
    state, trainer.tx = output.state, output.tx or getattr(output.state, "tx", None)
    if trainer.tx is None:
        trainer.tx, trainer.scheduler = trainer.make_optimizer(output.scheduler)
    if state is None:
        state = first_state(trainer, output.model, trainer.initial, trainer.tx)
    elif state is not trainer.own_state:  # a subclass's own, which must not be donated
        state = copy_to(state, trainer.shardings_of(state))
    trainer.own_state = None
    path = trainer.arguments.init_weights_from
    if path is not None:
        state, trainer.loaded, trainer.left = load_weights(trainer, path, state)
    trainer.set_state(state)


def use_functions(trainer: "Trainer", output: TrainerConfigureFunctionOutput) -> None:
    """Set the steps, the mesh and the checkpoints of a trainer."""
    arguments = trainer.arguments
    if output.mesh is not None and output.mesh != trainer.mesh:
        trainer.mesh, state = output.mesh, trainer.model_state
        trainer.set_state(copy_to(state, trainer.shardings_of(state)))
    trainer.sharded_training_step_function = output.train_step_fn
    trainer.sharded_evaluation_step_function = measure = output.eval_step_fn
    trainer.metrics_step = measure and jax.jit(as_eval_step(measure))
    trainer.eval_jaxpr = None
    manager = output.checkpoint_manager or checkpoints(arguments, trainer.plan)
    if manager is not None and manager.directory is None:
        if arguments.output_dir is None:
            raise ConfigError(
                "checkpoint_manager: expected one with a directory, got none; give output_dir, or "
                "sf.Checkpoints('path', …)"
            )
        directory = Path(arguments.output_dir) / arguments.checkpoints_dir
        manager = dataclasses.replace(manager, directory=directory)
    trainer.checkpoint_manager = manager


# The initial state


def is_state(value: Any) -> bool:
    """Whether a value is a state, of stepfold or another library, rather than parameters."""
    return isinstance(value, TrainState) or (hasattr(value, "params") and hasattr(value, "step"))


def _check_model(model: Any) -> None:
    """Check that a model makes parameters."""
    if model is None:
        raise ConfigError(
            "model, model_state: expected a function key -> params as model or, unless "
            "finetune=False initializes new parameters, parameters or a state as model_state, got "
            "neither"
        )
    if callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None)):
        raise ConfigError(
            f"model: {type(model).__name__} makes its parameters of an example, which is not known "
            "here; give model_state=model.init(key, example), or its params alone, or "
            "model=lambda key: model.init(key, example)"
        )


def first_state(
    trainer: "Trainer", model: Any, initial: Any, tx: optax.GradientTransformation
) -> Any:
    """Make the state of a run from an init function, parameters or a state. All arrays are copied.

    A state keeps its step, its key and, if it fits the optimizer, its optimizer state. A new state
    and its schedule start at `step_start_point`.
    """
    arguments, stateful = trainer.arguments, trainer.stateful
    if is_state(initial):
        if isinstance(initial, TrainState):
            initial = _fit_optimizer(arguments, initial, tx)
        state = jax.tree.map(jnp.asarray, initial)
        return copy_to(state, trainer.shardings_of(state))
    if initial is None:
        _check_model(model)
    source = model if initial is None else initial

    def cast(variables: Any) -> Any:
        if stateful and isinstance(variables, tuple):
            return cast_params(arguments, variables[0]), *variables[1:]
        return variables if stateful else cast_params(arguments, variables)

    is_function = callable(source) and jax.tree_util.all_leaves([source])
    variables = (lambda key: cast(source(key))) if is_function else cast(source)
    make = functools.partial(init_state, variables, tx, stateful=stateful)
    with allow_transfers("host_to_device"):
        key, step = jax.random.key(arguments.seed), arguments.step_start_point
    state = make(key, sharding=trainer.shardings_of(jax.eval_shape(make, key)))
    if step:
        opt_state = with_schedule_at(state.opt_state, step)
        state = state._replace(step=jnp.full_like(state.step, step), opt_state=opt_state)
    return state


def _fit_optimizer(arguments: TrainingArguments, state: TrainState, tx: Any) -> TrainState:
    """Cast the parameters, and initialize the optimizer state if it does not fit."""
    params = cast_params(arguments, state.params)
    differences = tree.diff(jax.eval_shape(tx.init, params), state.opt_state, "opt_state")
    if not differences:
        return state._replace(params=params)
    if not arguments.init_tx:
        raise TreeMismatchError(
            "init_tx=False: expected a model_state whose optimizer state fits the optimizer:\n  "
            + "\n  ".join(differences)
        )
    new = init_state(params, tx, jax.random.key(0))
    return state._replace(params=params, opt_state=new.opt_state)


def copy_to(state: Any, shardings: Any) -> Any:
    """Copy a state to shardings; None keeps those of the state."""
    if shardings is None:
        return jax.tree.map(lambda leaf: tree.strong(jnp.array(leaf, copy=True)), state)
    return place(state, shardings)


# Checkpoints


def load_weights(
    trainer: "Trainer", path: str | Path, state: Any
) -> tuple[Any, list[str], dict[str, str]]:
    """Load all parameters from safetensors, or those that fit from a checkpoint.

    Returns the state, the paths of the loaded parameters, and by path why others were not.
    """
    directory = None if is_url(path) else absolute_path("init_weights_from", path)
    if directory and (directory.suffix == ".safetensors" or [*directory.glob("*.safetensors*")]):
        params = load_params(directory, state.params)
        names = [name for name, _ in tree.named_leaves(params, "params")]
        replace = state._replace if hasattr(state, "_replace") else state.replace  # as of flax
        return replace(params=params), names, {}
    restored = restore_path(trainer, path, state, parts=("params",), partial=True)
    reasons = {n: why for n, why in restored.not_loaded.items() if n.split("/")[0] == "params"}
    return restored.state, list(restored.loaded), reasons


def find_checkpoint(trainer: "Trainer", path: str | Path) -> tuple[Path | str, int | None]:
    """Return the directory or URL of the steps, and the step if the path is that of one.

    The path is that of a run, of its checkpoints, or of one step.
    """
    folder = trainer.arguments.checkpoints_dir
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        refuse("checkpoint", "a path", repr(path), "give the folder of a step")
    if is_url(path):
        parent, number = split_location(path)
        is_step = number is not None and open_store(parent).has_step(number)
        return (parent, number) if is_step else (path, None)
    path = absolute_path("checkpoint", path)
    if path.name.isdecimal() and int(path.name) in open_store(path.parent).steps():
        return path.parent, int(path.name)
    for directory in (path, path / folder):
        if open_store(directory).steps():
            return directory, None
    raise CheckpointError(
        f"{path}: expected a checkpoint, a folder of them, or a run's folder with {folder}/ in it"
    )


def restore_path(trainer: "Trainer", path: str | Path, like: Any, **options: Any) -> Restored:
    """Restore the checkpoint at a path, or the newest one of a run."""
    directory, step = find_checkpoint(trainer, path)
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


def is_newest(trainer: "Trainer", path: str | Path) -> bool:
    """Whether a path is the newest of a run's own checkpoints.

    Refuse an older one of them, since the run would not write the later ones again.
    """
    own, (directory, step) = trainer.checkpoint_manager, find_checkpoint(trainer, path)
    # A link may be another name of the directory; URLs are compared as they are.
    if own is None or os.path.realpath(directory) != os.path.realpath(own.directory):
        return False
    newest = own.latest_step()
    if step is not None and step != newest:
        raise ConfigError(
            f"ckpt_path: {path} is an older checkpoint than step {newest} of the same run; delete "
            "the newer ones, or give another output_dir"
        )
    return True


def check_start(trainer: "Trainer", argument: str, state: Any) -> None:
    """Check that a state equals the newest checkpoint of its run, if there is one."""
    own = trainer.checkpoint_manager
    if own is None or (newest := own.latest_step()) is None:
        return
    if newest == int(getattr(state, "step", 0)):
        saved = own.restore(trainer.abstract_state).state
        are_equal = lambda leaf, other: bool((leaf == other).all())
        if not tree.diff(saved, state) and jax.tree.all(jax.tree.map(are_equal, saved, state)):
            return
    raise ConfigError(
        f"{argument}: expected an output_dir without checkpoints, or the state of the newest one, "
        f"got another state; the run in {own.directory} resumes from step {newest}: leave "
        f"{argument} out, or give another output_dir"
    )
