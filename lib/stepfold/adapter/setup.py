"""Make the parts of a trainer, those that its configure methods return, and its state."""

import functools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import (
    cast_params,
    checkpoints,
    logs_of,
    make_loss,
    make_mesh,
    optimizer_of,
    precision,
    sharding_rules,
    start_processes,
)
from stepfold.adapter.loading import TrainingLoader, length_of, offset_of
from stepfold.adapter.optimizers import learning_rate_of, schedule_paths, with_schedule_at
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.adapter.parts import RunParts
from stepfold.adapter.sizes import compute_sizes
from stepfold.adapter.steps import Step
from stepfold.adapter.validation import check_config, check_functions
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.names import NameMap
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.safetensors import load_params
from stepfold.checkpoint.steps import split_location
from stepfold.checkpoint.store import open_store
from stepfold.core.loss import without_padding
from stepfold.core.state import TrainState, init_state
from stepfold.core.step import make_eval_step, make_train_step, observe
from stepfold.core.transfers import allow_transfers
from stepfold.core.validation import absolute_path, check_flags, is_url, read_instance
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError, refuse
from stepfold.sharding.place import place
from stepfold.tree import describe_value


def make_parts(
    arguments: TrainingArguments, *, devices: Any, rules: Any = None, **options: Any
) -> RunParts:
    """Check the arguments of a trainer; make processes, mesh, sizes, dtypes and trackers."""
    functions = "loss_fn", "eval_loss_fn", "data_collator", "scheduler_argument"
    check_functions(**{name.removesuffix("_argument"): options.get(name) for name in functions})
    if options.get("names") is not None:
        read_instance("names", options["names"], NameMap, "a NameMap")
    flags = {"finetune", "stateful"} & options.keys()
    check_flags(**{name: options[name] for name in sorted(flags)})
    check_config(options.get("config"))
    if rules is not None and not arguments.auto_shard_states:
        expected = "None with auto_shard_states=False, which replicates the state"
        refuse("rules", expected, describe_value(rules), "leave out one of them")
    if not options.get("finetune", True):
        options["initial"] = None
    start_processes(arguments)
    mesh = make_mesh(arguments, devices)
    names = "dataset_train", "dataset_eval"
    train_examples, eval_examples = (length_of(options.get(name)) for name in names)
    return RunParts(
        arguments=arguments,
        sizes=compute_sizes(arguments, train_examples, eval_examples, mesh.size),
        mesh=mesh,
        rules=sharding_rules(arguments) if rules is None else rules,
        logs_path=logs_of(arguments),
        pruning_module=arguments.pruning_module,
        dtype=precision(arguments).compute,
        param_dtype=jnp.dtype(arguments.param_dtype or "float32"),
        **options,
    )


# Outputs of the configure methods


def with_dataloaders(parts: RunParts, output: TrainerConfigureDataloaderOutput) -> RunParts:
    """Set the batches, and the number of steps."""
    steps = output.max_training_steps or parts.sizes.steps
    return replace(
        parts,
        dataloader_train=output.dataloader_train,
        dataloader_eval=output.dataloader_eval,
        max_training_steps=steps,
        max_evaluation_steps=output.max_evaluation_steps,
        sizes=parts.sizes._replace(steps=steps),
    )


def with_model(parts: RunParts, output: TrainerConfigureModelOutput) -> tuple[RunParts, Any]:
    """Set the optimizer, and return the initial state with the parts."""
    state, tx = output.state, output.tx
    scheduler = output.scheduler or parts.scheduler  # that the method has assigned
    tx = parts.tx if tx is None else tx
    tx = getattr(state, "tx", None) if tx is None else tx
    if tx is None:
        tx, scheduler = optimizer_for(parts, scheduler)
    if state is None:
        state = first_state(parts, output.model, parts.initial, tx)
    elif state is not parts.own_state:  # a subclass's own, which must not be donated
        state = copy_to(state, parts.shardings_of(state))
    loader = parts.dataloader_train
    is_own = isinstance(loader, TrainingLoader) or not hasattr(loader, "get_state")
    parts = replace(
        parts,
        model=output.model,
        config=parts.config if output.config is None else output.config,
        tx=tx,
        scheduler=scheduler,
        own_state=None,
        data_offset=0 if is_own else offset_of(loader.get_state(), getattr(state, "step", 0)),
    )
    return parts.with_state(state), state


def with_functions(
    parts: RunParts, state: Any, output: TrainerConfigureFunctionOutput
) -> tuple[RunParts, Any]:
    """Set the steps, the mesh and the checkpoints, and return the state on the mesh."""
    arguments = parts.arguments
    is_own_step = parts.own_step is not None and output.train_step_fn is parts.own_step
    if is_own_step and parts.dataloader_train is not None and not isinstance(state, TrainState):
        kind = f"{type(state).__module__}.{type(state).__name__}"
        advice = "give its params, or override configure_functions"
        refuse("model_state", "a TrainState for the step made of loss_fn", kind, advice)
    if output.mesh is not None and output.mesh != parts.mesh:
        parts = replace(parts, mesh=output.mesh)
        state = copy_to(state, parts.shardings_of(state))
        parts = parts.with_state(state)
    manager = output.checkpoint_manager or checkpoints(arguments, parts.sizes)
    if manager is not None and manager.directory is None:
        if arguments.output_dir is None:
            advice = "give output_dir, or sf.Checkpoints('path', …)"
            refuse("checkpoint_manager", "one with a directory", "none", advice)
        directory = Path(arguments.output_dir) / arguments.checkpoints_dir
        manager = replace(manager, directory=directory)
    parts = replace(parts, checkpoint_manager=manager)
    return parts.with_train_step(output.train_step_fn).with_eval_step(output.eval_step_fn), state


def optimizer_for(
    parts: RunParts, scheduler: optax.Schedule | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return the optimizer and the schedule of the trainer, by default made from its arguments."""
    scheduler = parts.scheduler_argument if scheduler is None else scheduler
    return optimizer_of(parts.arguments, parts.max_training_steps, parts.tx_argument, scheduler)


def jit_steps(parts: RunParts) -> tuple[Step, Step]:
    """Jit the steps that `make_steps` makes; the trackers count how often each is compiled."""
    train_step, eval_step = make_steps(parts)
    shardings = (parts.state_shardings, None) if parts.sharded_mesh else None
    train_step = parts.train_tracker.track(train_step)
    train_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
    return train_step, jax.jit(parts.evalu_tracker.track(eval_step))


def make_steps(parts: RunParts) -> tuple[Step, Step]:
    """Make the training step and the evaluation step, neither of them jitted.

    A NaN or inf in the loss or the gradients leaves the state unchanged, so that it can be saved.
    With a schedule, the learning rate is a metric.
    """
    arguments, loss_fn = parts.arguments, parts.loss_fn
    policy = arguments.gradient_checkpointing
    if loss_fn is None:
        expected = "a loss function (params, batch, key) -> loss"
        advice = "give one, or override configure_functions in a subclass"
        refuse("loss_fn", expected, "None", advice)
    # Alone, the trainer pads no batch: the masks that its loaders add are all True.
    unpadded = without_padding if jax.process_count() == 1 else lambda loss_fn: loss_fn
    options: dict[str, Any] = {"precision": precision(arguments), "stateful": parts.stateful}
    train_step = make_train_step(
        unpadded(make_loss(arguments, loss_fn, parts.sharded_mesh)),
        parts.tx,
        accumulate=parts.sizes.accumulate,
        remat=None if policy == "none" else policy,
        skip_nonfinite=True,
        **options,
    )
    if parts.scheduler is not None:
        train_step = observe(train_step, learning_rate=learning_rate_of(parts.scheduler))
    # Without the mesh, since the last batch of an evaluation may not divide by its devices.
    eval_loss = make_loss(arguments, parts.eval_loss_fn or loss_fn)
    return train_step, make_eval_step(unpadded(eval_loss), **options)


# The initial state


def is_state(value: Any) -> bool:
    """Whether a value is a state, of stepfold or another library, rather than parameters."""
    return isinstance(value, TrainState) or (hasattr(value, "params") and hasattr(value, "step"))


def state_of(value: Any) -> Any:
    """Return the state of what `train` returned; any other value is returned unchanged."""
    return value.state if isinstance(value, TrainerOutput) else value


def _check_model(model: Any) -> None:
    """Check that a model makes parameters."""
    if model is None:
        expected = (
            "a function key -> params as model or, unless finetune=False initializes new "
            "parameters, parameters or a state as model_state"
        )
        refuse("model, model_state", expected, "neither")
    if isinstance(model, type):
        advice = (
            "give the init function of an instance, such as lambda key: "
            f"{model.__name__}(…).init(key, example), or its parameters as model_state"
        )
        refuse("model", "a function key -> params", f"the class {model.__name__}", advice)
    if callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None)):
        raise ConfigError(
            f"model: {type(model).__name__} makes its parameters of an example, which is not known "
            "here; give model_state=model.init(key, example), or its params alone, or "
            "model=lambda key: model.init(key, example)"
        )


def first_state(
    parts: RunParts, model: Any, initial: Any, tx: optax.GradientTransformation | None
) -> Any:
    """Make the state of a run from an init function, parameters or a state. All arrays are copied.

    A state keeps its step, its key and, if it fits the optimizer, its optimizer state. A new state
    and its schedule start at `step_start_point`.
    """
    arguments, stateful = parts.arguments, parts.stateful
    if is_state(initial):
        if isinstance(initial, TrainState):
            initial = _fit_optimizer(arguments, initial, tx)
        state = jax.tree.map(jnp.asarray, initial)
        return copy_to(state, parts.shardings_of(state))
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
    state = make(key, sharding=parts.shardings_of(jax.eval_shape(make, key)))
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
    path: str | Path | None, state: Any, folder: str, names: NameMap | None = None
) -> tuple[Any, list[str], dict[str, str]]:
    """Load all parameters from safetensors, or those that fit from a checkpoint.

    Without a path, nothing is loaded. `folder` has the checkpoints of a run. `names` maps paths to
    names in safetensors. Returns the state, the paths of the loaded parameters, and the reason for
    each other path.
    """
    if path is None:
        return state, [], {}
    directory = None if is_url(path) else absolute_path("init_weights_from", path)
    if directory and (directory.suffix == ".safetensors" or [*directory.glob("*.safetensors*")]):
        params = load_params(directory, state.params, names=names, cast=names is not None)
        loaded = [name for name, _ in tree.named_leaves(params, "params")]
        method = getattr(state, "_replace", None) or getattr(state, "replace", None)  # as of flax
        change = method or functools.partial(replace, state)
        return change(params=params), loaded, {}
    restored = restore_path(path, folder, state, parts=("params",), partial=True)
    reasons = {n: why for n, why in restored.not_loaded.items() if n.split("/")[0] == "params"}
    return restored.state, list(restored.loaded), reasons


def find_checkpoint(path: str | Path, folder: str) -> tuple[str, int | None]:
    """Return the directory or URL of the steps, and the step if the path is that of one.

    The path is a run with checkpoints in `folder`, a directory of checkpoints, or one step.
    """
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        refuse("checkpoint", "a path", repr(path), "give the folder of a step")
    location = path if is_url(path) else os.fspath(absolute_path("checkpoint", path))
    parent, number = split_location(location)
    if number is not None and open_store(parent).has_step(number):
        return parent, number
    if is_url(path):
        return location, None
    for directory in (location, os.path.join(location, folder)):
        if open_store(directory).steps():
            return directory, None
    is_missing = not os.path.exists(location)
    advice = "; there is no such folder, and nothing is downloaded" if is_missing else ""
    expected = f"a checkpoint, a folder of them, or a run's folder with {folder}/ in it"
    raise CheckpointError(f"{location}: expected {expected}{advice}")


def restore_path(path: str | Path, folder: str, like: Any, **options: Any) -> Restored:
    """Restore the checkpoint at a path, or the newest one of a run."""
    directory, step = find_checkpoint(path, folder)
    return restore(directory, like, step="latest" if step is None else step, **options)


def restore_parts(
    path: str | Path, folder: str, state: Any, *, optimizer: bool, scheduler: bool
) -> Restored:
    """Restore the parameters and the model state.

    `optimizer` adds the optimizer state, the step and the key; `scheduler` adds the step counts of
    schedules.
    """
    schedule = schedule_paths(getattr(state, "opt_state", ()))
    names = [name for name, _ in tree.named_leaves(state) if name.startswith("opt_state")]
    rest = [*(name for name in names if name not in schedule), "step", "key"]
    wanted = [*(rest if optimizer else ()), *(schedule if scheduler else ())]
    # One pattern, since not every state has all of them.
    pattern = "|".join(["params", "model_state", *map(re.escape, wanted)])
    return restore_path(path, folder, state, parts=(pattern,))


def is_newest(own: Checkpoints | None, path: str | Path, folder: str) -> bool:
    """Whether a path is the newest of a run's own checkpoints.

    Refuse an older one of them, since the run would not write the later ones again.
    """
    directory, step = find_checkpoint(path, folder)
    # A link may be another name of the directory; URLs are compared as they are.
    if own is None or os.path.realpath(directory) != os.path.realpath(own.directory or ""):
        return False
    newest = own.latest_step()
    if step is not None and step != newest:
        raise ConfigError(
            f"ckpt_path: {path} is an older checkpoint than step {newest} of the same run; delete "
            "the newer ones, or give another output_dir"
        )
    return True


def check_start(own: Checkpoints | None, argument: str, state: Any, like: Any) -> None:
    """Check that a state equals the newest checkpoint of its run, if there is one."""
    if own is None or (newest := own.latest_step()) is None:
        return
    if newest == int(getattr(state, "step", 0)):
        saved = own.restore(like).state
        are_equal = lambda leaf, other: bool((leaf == other).all())
        if not tree.diff(saved, state) and jax.tree.all(jax.tree.map(are_equal, saved, state)):
            return
    expected = "an output_dir without checkpoints, or the state of the newest one"
    resumes = f"the run in {own.directory} resumes from step {newest}"
    advice = f"{resumes}: leave {argument} out, or give another output_dir"
    refuse(argument, expected, "another state", advice)
