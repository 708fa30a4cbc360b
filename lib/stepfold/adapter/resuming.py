"""Going on from a checkpoint: one's own, another run's, or parts of one."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.adapter.positions import go_to_step
from stepfold.adapter.saving import find_checkpoint
from stepfold.adapter.schedules import schedule_paths
from stepfold.adapter.starting import is_state
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.verify import latest_step
from stepfold.errors import ConfigError


def restored_from(path: str | Path, like: Any, folder: str) -> Restored:
    """Restore what a path means: a step, or the newest of a run.

    Raises:
      CheckpointError: if there is none.
    """
    directory, step = find_checkpoint(path, folder)
    return restore(directory, like, step="latest" if step is None else step)


def is_own(path: str | Path, own: Path | None, folder: str) -> bool:
    """Tell whether a path means the newest of a run's own checkpoints.

    Raises:
      ConfigError: if it means an older one, beside which those after it cannot be written anew.
    """
    directory, step = find_checkpoint(path, folder)
    if own is None or directory.absolute() != own.absolute():
        return False
    newest = latest_step(directory)
    if step is not None and step != newest:
        raise ConfigError(
            f"ckpt_path: {path} is an older checkpoint than step {newest} of the same run; delete "
            "the newer ones, or give another output_dir"
        )
    return True


def check_begins(own: Path | None, step: int, what: str) -> None:
    """Refuse to begin with something else than the checkpoints that are there.

    Raises:
      ConfigError: if there are some, of another step.
    """
    newest = latest_step(own) if own is not None and own.is_dir() else None
    if newest is not None and newest != step:
        raise ConfigError(
            f"{what}: expected an output_dir without checkpoints to begin at step {step} in, and "
            f"{own} goes on from step {newest}; leave {what} out, or give another output_dir"
        )


def check_same(trainer: Any, state: Any, what: str) -> None:
    """Refuse to begin with another state than that which the trainer's checkpoints go on from.

    Raises:
      ConfigError: if there are some, and the newest holds something else.
    """
    own = own_place(trainer)
    check_begins(own, int(state.step), what)
    if not has_steps(own):
        return
    kept = restore(str(own), abstract(trainer)).state
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True)
    if not all(_are_equal(*pair) for pair in pairs):
        raise ConfigError(
            f"{what}: expected the state of the newest checkpoint, from which the run in {own} "
            f"goes on, got another of the same step; leave {what} out, or give another output_dir"
        )


def _are_equal(one: Any, other: Any) -> bool:
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return one.shape == jnp.shape(other) and bool(jnp.array_equal(one, other, equal_nan=False))


def own_place(trainer: Any) -> Path | None:
    """Give the directory of a trainer's own checkpoints, if it has any."""
    manager = trainer.checkpoint_manager
    return None if manager is None else Path(manager.directory)


def has_steps(directory: Path | None) -> bool:
    """Tell whether there is a checkpoint to go on from."""
    return directory is not None and directory.is_dir() and latest_step(directory) is not None


def abstract(trainer: Any) -> Any:
    """Give a trainer's state without its arrays, to restore into."""
    if trainer.mesh.size == 1:
        return trainer.state_shape
    make = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return jax.tree.map(make, trainer.state_shape, trainer.state_shardings)


def last_good(trainer: Any) -> Any:
    """Give the state after an exception: its own, or if that was donated, the last saved one."""
    leaves = jax.tree.leaves(trainer.model_state)
    gone = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)
    own = own_place(trainer)
    if (leaves and not gone) or not has_steps(own):
        return trainer.model_state
    return restore(str(own), abstract(trainer)).state


def begin(trainer: Any, params: Any, state: Any, path: Any) -> None:
    """Give a trainer the state to begin with, and send its batches to where that stands.

    Raises:
      ConfigError: if more than one of them is given, or its own checkpoints say otherwise.
    """
    if sum(what is not None for what in (params, state, path)) > 1:
        raise ConfigError("train: expected one of model_parameters, state and ckpt_path, got more")
    own, folder = own_place(trainer), trainer.arguments.checkpoints_dir
    asked = trainer.arguments.resume_from_checkpoint
    if params is None and state is None and path is None and isinstance(asked, str):
        # With steps of its own a run goes on from these; a path is still to mean something.
        path = asked if is_own(asked, own, folder) or not has_steps(own) else None
    data, what = None, trainer.asked
    trainer.asked = None
    if params is not None:
        check_begins(own, 0, "model_parameters")
        trainer.hold(trainer.make_state(None, trainer.tx, params))
    elif state is not None:
        if not is_state(state):
            raise ConfigError(
                f"state: expected a state, with params and step, got {tree.spell(state)}; give "
                "parameters alone as model_parameters"
            )
        check_same(trainer, state, "state")
        trainer.hold(trainer.make_state(None, trainer.tx, state))
    elif path is not None and not is_own(path, own, folder):
        found = restored_from(path, abstract(trainer), folder)
        check_begins(own, found.step, "ckpt_path")
        trainer.model_state, data = found.state, found.data
    elif what is not None:
        check_same(trainer, trainer.model_state, what)
    go_to_step(trainer.dataloader_train, data, int(getattr(trainer.model_state, "step", 0)))


def paths_of(state: Any, *, optimizer: bool, scheduler: bool) -> Sequence[str]:
    """List the paths of what is to be loaded, as regular expressions.

    Parameters and model state always; the optimizer's state, the step and the key with the
    optimizer; and the counts of schedules with the scheduler.
    """
    schedule = schedule_paths(getattr(state, "opt_state", ()))
    rest = [name for name, _ in tree.named_leaves(state) if name.startswith("opt_state")]
    rest = [name for name in rest if name not in schedule] + ["step", "key"]
    wanted = [*(rest if optimizer else ()), *(schedule if scheduler else ())]
    return ["params", "model_state", *map(re.escape, wanted)]


def load_parts(
    path: str | Path, state: Any, folder: str, *, optimizer: bool, scheduler: bool
) -> Restored:
    """Restore parts of a checkpoint; the others stay as they are in the state."""
    directory, step = find_checkpoint(path, folder)
    parts = paths_of(state, optimizer=optimizer, scheduler=scheduler)
    return restore(directory, state, step="latest" if step is None else step, parts=parts)
