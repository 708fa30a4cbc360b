"""Capsules: what is kept of the step in which a metric became NaN or inf, to run it again.

A run pays nothing for it but the data position at log points. When it has ended, the batch is read
again from there, and `replay` recomputes the state from a checkpoint: the state before the step was
donated to it long before its loss was read.
"""

import itertools
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import is_key
from stepfold.checkpoint.manifest import read_manifest
from stepfold.checkpoint.save import save
from stepfold.checkpoint.sealed import DamageError, opened, plain, seal, unseal
from stepfold.checkpoint.steps import path_of, whole_steps
from stepfold.checkpoint.syncing import sync
from stepfold.errors import CheckpointError, ConfigError
from stepfold.loop.data import DataPosition, reread
from stepfold.loop.hooks.stop import Nonfinite

_VERSION = 2
_JSON, _BATCH = "capsule.json", "batch"
_PLAIN = ("step", "metric", "metrics", "began")  # fields that are written as they are


class CheckpointReference(NamedTuple):
    """The checkpoint from which a replay reaches the step."""

    directory: Path
    step: int


@dataclass(frozen=True)
class Capsule:
    """The step in which a metric was NaN or inf; `replay` takes it.

    `fit` makes it when `stop_on_nonfinite` ends a run, and writes it to `run_dir/capsules/<step>`.
    One that is read from there has neither `like` nor `batches`.

    Attributes:
      step: the step, counted from 1.
      metric: the metric that was not finite.
      metrics: the metrics of the step, by name.
      key: the random key of its loss; None if the state has none.
      batch: its batch.
      lost: why the batch or a part of it is missing; empty if it is complete.
      checkpoint: the newest checkpoint before the step, or None.
      mark: the data position at that checkpoint, or at the start of the run.
      began: the step after which the run started.
      path: where it was written.
      like: the abstract state, with its shardings.
      batches: the batches of the run.
      notes: what else could not be written.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * x), tx)
    >>> batches = [np.float32([1, 2]), np.float32([3, np.inf])]
    >>> result = sf.fit(step, state, batches)
    >>> print(result.capsule)
    step 2: train/loss is inf; replay begins with a state of step 0, 1 step before it
    """

    step: int
    metric: str
    metrics: dict[str, float]
    key: jax.Array | None
    batch: Any = field(repr=False)
    lost: tuple[str, ...]
    checkpoint: CheckpointReference | None
    mark: DataPosition
    began: int
    path: Path | None = None
    like: Any = field(default=None, repr=False)
    batches: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def distance(self) -> int:
        """The number of steps that a replay runs before this one."""
        return self.step - 1 - self.mark.step

    def __str__(self) -> str:
        start = "a state" if self.checkpoint is None else "the checkpoint"
        value = self.metrics.get(self.metric, float("nan"))
        steps = f", {self.distance} step{'s' * (self.distance > 1)} before it"
        return (
            f"step {self.step}: {self.metric} is {value}; replay begins with {start} of step "
            f"{self.mark.step}{steps if self.distance > 0 else ''}"
            + "".join(f"; not kept: {reason}" for reason in self.lost[:1])
        )


def take_capsule(
    nonfinite: Nonfinite,
    *,
    state: Any,
    positions: Sequence[DataPosition],
    batches: Any,
    directory: Path | None,
) -> Capsule:
    """Make a capsule after a run has ended, and read the batch of its step again.

    Args:
      nonfinite: the step.
      state: the state at the end of the run.
      positions: the data positions that are known; the first is that at the start of the run.
      batches: the batches of the run.
      directory: the directory of its checkpoints, all of them written.
    """
    step, start, checkpoint = nonfinite.step, positions[0], None
    saved = [] if directory is None else [n for n in whole_steps(directory) if n < step]
    if directory is not None and saved:
        checkpoint = CheckpointReference(directory, saved[-1])
        start = DataPosition(saved[-1], read_manifest(path_of(directory, saved[-1])).position())
    batch, lost = _read_batch(batches, step, [start, *positions], began=positions[0].step)
    return Capsule(
        step=step,
        metric=nonfinite.metric,
        metrics=nonfinite.metrics,
        key=_key_of_step(state, step),
        batch=batch,
        lost=lost,
        checkpoint=checkpoint,
        mark=start,
        began=positions[0].step,
        like=jax.tree.map(_abstract, state),
        batches=batches,
    )


def _read_batch(
    batches: Any, step: int, positions: Sequence[DataPosition], began: int
) -> tuple[Any, tuple[str, ...]]:
    """Read the batch of a step again; return it, or why it is missing."""
    if jax.process_count() > 1:
        return None, (
            "the batch: with several processes each has its own rows, and none has all of them",
        )
    earlier = [position for position in positions if position.step < step]
    if not earlier:
        return None, ("the batch: its step is older than the checkpoint that the run resumed",)
    nearest = max(earlier, key=lambda position: position.step)
    try:
        with reread(batches, nearest, began) as iterator:
            skipped = step - 1 - nearest.step
            read = list(itertools.islice(iterator, skipped, skipped + 1))
    except Exception as error:  # noqa: BLE001  a source may raise anything; the result is not lost
        return None, (f"the batch: it cannot be read again: {error}",)
    if not read:
        return None, ("the batch: when read again, the batches ended before it",)
    copy = lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    return jax.tree.map(copy, read[0]), ()  # a source may reuse its arrays


def _key_of_step(state: Any, step: int) -> jax.Array | None:
    key = getattr(state, "key", None)
    if not isinstance(key, jax.Array) or not is_key(key):
        return None
    # On one device, so that process 0 can write it alone. The first step folds in 0.
    return jax.random.fold_in(key.addressable_data(0), step - 1)


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def save_capsule(capsule: Capsule, run_dir: str | Path) -> Capsule:
    """Write a capsule to `run_dir/capsules/<step>`, from process 0; return it with its path.

    Warns:
      RuntimeWarning: if it cannot be written, which must not cost the result of the run.
    """
    if jax.process_index() > 0:
        return capsule
    try:
        return replace(capsule, path=_write(capsule, Path(run_dir).absolute()))
    except (OSError, ConfigError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        warnings.warn(
            f"{run_dir}: the capsule of step {capsule.step} cannot be written, and is only on the "
            f"result: {reason or error}; free disk space, or change the permission",
            RuntimeWarning,
            stacklevel=4,
        )
        return capsule


def _write(capsule: Capsule, run_dir: Path) -> Path:
    """Write a directory with all of a capsule, and rename it to its place."""
    arrays: list[np.ndarray] = []
    lost, notes = list(capsule.lost), list(capsule.notes)
    structure = _describe(capsule.batch, "batch", arrays, lost)
    try:
        position = plain(capsule.mark.position, "position")
    except ConfigError as error:
        position = None
        notes.append(f"the position in the data: {error}")
    content = {name: getattr(capsule, name) for name in _PLAIN} | {
        "version": _VERSION,
        "key": None,
        "checkpoint": None,
        "mark": (capsule.mark.step, position),
        "batch": structure,
        "arrays": len(arrays),
        "lost": lost,
        "notes": notes,
    }
    if capsule.key is not None:
        data = np.asarray(jax.random.key_data(capsule.key)).tolist()
        content["key"] = (str(jax.random.key_impl(capsule.key)), data)
    if capsule.checkpoint is not None:
        directory, step = capsule.checkpoint
        inside = directory.is_relative_to(run_dir)  # a run can be moved
        directory = directory.relative_to(run_dir) if inside else directory
        content["checkpoint"] = (str(directory), step)
    path = run_dir / "capsules" / str(capsule.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        if arrays:
            leaves = {str(i): array for i, array in enumerate(arrays)}
            # The step, since a checkpoint has to have an element, and arrays may be empty.
            save(new / _BATCH, {"step": capsule.step, "batch": leaves}, step=capsule.step)
        (new / _JSON).write_bytes(seal(content))
        sync(new / _JSON)
        sync(new)
        if path.exists():
            os.rename(path, Path(temporary, "old"))
        os.rename(new, path)
    sync(path.parent)
    return path


def _describe(node: Any, path: str, arrays: list[np.ndarray], lost: list[str]) -> list[Any]:
    """Describe a batch as JSON that refers to its arrays by number; `_rebuild` is the inverse."""
    if node is None or type(node) in (bool, int, float, str):
        return ["value", node]
    if isinstance(node, jax.Array | np.ndarray | np.generic):
        key: Any = node if is_key(node) else None
        impl = None if key is None else str(jax.random.key_impl(key))
        array = np.asarray(node if key is None else jax.random.key_data(key))
        # Orbax stores only some of the dtypes of ml_dtypes, which are not builtin: store the bits.
        is_builtin = array.dtype.isbuiltin != 2
        if not is_builtin or array.dtype.kind in "biufc":
            arrays.append(array if is_builtin else array.view(f"u{array.dtype.itemsize}"))
            return ["array", len(arrays) - 1, array.dtype.name, impl]
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda child: child is not node)
    if len(children) == 1 and children[0][1] is node:
        lost.append(f"{path}: {tree.spell(node)} is not an array of numbers")
        return ["value", None]
    described = []
    for (entry,), child in children:
        name = getattr(entry, "key", None)
        name = name if type(name) in (str, int) else tree.path_name((entry,))
        described.append([name, _describe(child, f"{path}/{name}", arrays, lost)])
    if type(node) in (list, tuple):
        return [type(node).__name__, [child for _, child in described]]
    if type(node) is not dict:
        lost.append(f"{path}: a {type(node).__name__}, written as a dict")
    return ["dict", described]


def read_capsule(path: str | Path) -> Capsule:
    """Read a capsule that `fit` has written.

    Args:
      path: its directory, `run_dir/capsules/<step>`.

    Raises:
      CheckpointError: if there is no capsule, or it is damaged.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf, tempfile
    >>> tx, folder = optax.sgd(0.1), tempfile.mkdtemp()
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * x), tx)
    >>> result = sf.fit(step, state, [np.float32([3, np.inf])], run_dir=folder)
    >>> sf.read_capsule(f"{folder}/capsules/1").batch
    array([ 3., inf], dtype=float32)
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"capsule: expected a Capsule or the path of one, got {path!r}")
    path = Path(path).absolute()
    if not (path / _JSON).is_file():
        raise CheckpointError(
            f"{path}: expected the directory of a capsule, such as run_dir/capsules/120, with "
            f"{_JSON} in it, got none"
        )
    content = unseal(path / _JSON)
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{path}: expected a capsule of version {_VERSION}, got {content['version']}; read it "
            "with the stepfold that wrote it"
        )
    key, checkpoint, (mark, position) = content["key"], content["checkpoint"], content["mark"]
    if key is not None:
        key = jax.random.wrap_key_data(jnp.array(key[1], jnp.uint32), impl=key[0])
    if checkpoint is not None:
        directory = path.parent.parent / checkpoint[0]
        checkpoint = CheckpointReference(directory, checkpoint[1])
    return Capsule(
        **{name: content[name] for name in _PLAIN},
        key=key,
        batch=_rebuild(content["batch"], _read_arrays(path, content["step"], content["arrays"])),
        lost=tuple(content["lost"]),
        checkpoint=checkpoint,
        mark=DataPosition(mark, opened(position)),
        path=path,
        notes=tuple(content["notes"]),
    )


def _read_arrays(capsule: Path, step: int, count: int) -> list[np.ndarray]:
    if not count:
        return []
    # Without `restore`, which waits for all processes and has to be given dtypes and shapes.
    from stepfold.checkpoint.arrays import Reader  # imported when first used, for tensorstore

    path = path_of(capsule / _BATCH, step)
    if not path.is_dir():
        raise DamageError(f"{path}: missing; the capsule was copied in part")
    manifest = read_manifest(path)
    reader = Reader(path, manifest.leaves, manifest.shards)
    return [reader.whole(f"batch/{i}") for i in range(count)]


def _rebuild(structure: list[Any], arrays: Sequence[np.ndarray]) -> Any:
    match structure:
        case ["value", value]:
            return value
        case ["dict", items]:
            return {key: _rebuild(child, arrays) for key, child in items}
        case ["list", children]:
            return [_rebuild(child, arrays) for child in children]
        case ["tuple", children]:
            return tuple(_rebuild(child, arrays) for child in children)
    _, number, dtype, impl = structure
    if impl is not None:
        return jax.random.wrap_key_data(jnp.asarray(arrays[number]), impl=impl)
    return arrays[number].view(jnp.dtype(dtype))
