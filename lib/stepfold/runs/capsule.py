"""Capsules: the inputs of the step in which a metric became NaN or inf, to rerun it.

During a run only the data position is kept. `replay` reads the batches again from there, and
recomputes the state, which was donated to the step, from a checkpoint.
"""

import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checkpoints import save
from stepfold.checkpoint.leaves import from_json, is_key, to_json
from stepfold.checkpoint.manifest import DamageError, ForeignError, read_checked, write_checked
from stepfold.checkpoint.steps import sync
from stepfold.checkpoint.store import complete_steps, open_store
from stepfold.core.transfers import allow_transfers
from stepfold.core.validation import absolute_path, is_url, read_instance
from stepfold.errors import CheckpointError, ConfigError, refuse, warn
from stepfold.json_files import check_plain, has_form, is_count, is_range
from stepfold.loop.events import Nonfinite
from stepfold.loop.feed import BatchFeed, DataPosition
from stepfold.loop.run import Run
from stepfold.runs.reread import reread

_VERSION = 2
_JSON, _BATCH = "capsule.json", "batch"
# Fields that are written as they are.
_PLAIN = ("step", "metric", "metrics", "before", "began", "can_reread")


class CheckpointReference(NamedTuple):
    """The checkpoint from which a replay reaches the step."""

    directory: Path | str  # a URL is a str
    step: int


@dataclass(frozen=True)
class Capsule:
    """The step in which a metric was NaN or inf; `replay` takes it.

    `fit` returns one when `on_nonfinite` ends a run, and writes it to
    `run_dir/capsules/<step>`. A capsule that is read from there has neither `like` nor `batches`,
    and no `batch` if the batches of the run can be read again.

    Attributes:
      before: the metrics of the step before it, if they are known.
      key: the random key of its loss; None if the state has none.
      lost: why the batch or a part of it is missing; empty if it is complete.
      checkpoint: the newest checkpoint before the step, or None.
      mark: the data position at that checkpoint, or at the start of the run.
      began: the step after which the run started.
      like: the abstract state, with its shardings.
      notes: what else could not be written.
      rollbacks: why the run went back earlier, and which batches it skipped.
      skipped: the ranges of batch indices that the run skipped, as `sf.batches(…).without` takes.
      can_reread: whether the batches can be read again from `mark` on.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * x), tx)
    >>> print(sf.fit(step, state, [np.float32([1, 2]), np.float32([3, np.inf])]).capsule)
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
    rollbacks: tuple[str, ...] = ()
    before: dict[str, float] = field(default_factory=dict)
    skipped: tuple[tuple[int, int], ...] = ()
    can_reread: bool = False

    @property
    def has_batch(self) -> bool:
        """Whether it has the complete batch."""
        return not self.lost and not (self.can_reread and self.batch is None)

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
            + "".join(f"; before, {rollback}" for rollback in self.rollbacks)
        )


def take_capsule(
    nonfinite: Nonfinite,
    run: Run,
    feed: BatchFeed,
    *,
    directory: str | os.PathLike[str] | None,
    rollbacks: Sequence[Any] = (),
) -> Capsule:
    """Make a capsule after a run has ended and its checkpoints in `directory` are written."""
    batches, recent, began = feed.batches, feed.recent, run.marks[0].step
    step, start, checkpoint = nonfinite.step, run.marks[0], None
    if directory is not None:
        store = open_store(directory)
        location = store.location if is_url(store.location) else Path(store.location)
        for number in reversed([n for n in complete_steps(store) if n < step]):
            try:
                manifest = store.read_manifest(number)
                reader = store.open_arrays(number, manifest)
                position = reader.fill("data", manifest.position())
            except (DamageError, ForeignError):  # process 0 may be deleting old ones
                continue
            start = DataPosition(number, position)
            checkpoint = CheckpointReference(location, number)
            break
    start, *marks = (_with_changes(feed, each, run.batches_used) for each in [start, *run.marks])
    if recent is not None:
        batch, lost = _find_batch(recent, step)
    else:
        batch, lost = _read_batch(batches, step, [start, *marks], began)
    key: Any = getattr(run.state, "key", None)
    has_key = isinstance(key, jax.Array) and is_key(key)
    with allow_transfers("host_to_device"):  # of the step number
        # On one device, so that process 0 can write it alone. The first step folds in 0.
        key = jax.random.fold_in(key.addressable_data(0), step - 1) if has_key else None
    abstract: Any = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return Capsule(
        step=step,
        metric=nonfinite.metric,
        metrics=nonfinite.metrics,
        before=nonfinite.before,
        key=key,
        batch=batch,
        lost=lost,
        checkpoint=checkpoint,
        mark=start,
        began=began,
        like=jax.tree.map(lambda x: abstract(x) if isinstance(x, jax.Array) else x, run.state),
        batches=batches,
        notes=tuple(
            f"step {replaced}: the state was replaced ({why}), which a replay does not repeat"
            for replaced, why, *kind in run.notes
            if not kind and start.step < replaced < step
        ),
        rollbacks=tuple(map(str, rollbacks)),
        skipped=tuple(getattr(batches, "skipped", None) or ()),
        can_reread=not lost and recent is None,
    )


def _with_changes(feed: BatchFeed, mark: DataPosition, used: int) -> DataPosition:
    """Add later changes of weights to an earlier position, to read the batches again."""
    changes = feed.position(used).get("weights") if hasattr(feed.iterator, "reweight") else None
    if changes is None or mark.position is None:
        return mark
    return mark._replace(position={**mark.position, "weights": changes})


def _find_batch(recent: Mapping[int, Any], step: int) -> tuple[Any, tuple[str, ...]]:
    """Return the batch of a step from those that the run has kept, or why it is missing."""
    if step in recent:
        return copy_arrays(recent[step]), ()
    kept = "none were kept, since they are on devices or too large"
    if recent:
        kept = f"only those from step {min(recent)} on were kept"
    return None, (f"the batch: it cannot be read again, and {kept}",)


def _read_batch(
    batches: Any, step: int, positions: Sequence[DataPosition], began: int
) -> tuple[Any, tuple[str, ...]]:
    """Read the batch of a step again; return it, or why it is missing."""
    earlier = [position for position in positions if position.step < step]
    if jax.process_count() > 1:
        reason = "with several processes each has its own rows, and none has all of them"
    elif not earlier:
        reason = "its step is older than the checkpoint that the run resumed from"
    else:
        nearest = max(earlier, key=lambda position: position.step)
        try:
            with reread(batches, nearest, began) as iterator:
                for batch in itertools.islice(iterator, step - 1 - nearest.step, None):
                    return copy_arrays(batch), ()
            reason = "when read again, the batches ended before it"
        except Exception as error:  # noqa: BLE001  a source may raise anything
            reason = f"it cannot be read again: {error}"
    return None, (f"the batch: {reason}",)


def copy_arrays(arrays: Any) -> Any:
    """Copy the arrays of a pytree, which a step may donate and a source of batches may reuse."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, arrays)


def save_capsule(capsule: Capsule, run_dir: str | os.PathLike[str]) -> Capsule:
    """Write a capsule to `run_dir/capsules/<step>`, from process 0; return it with its path.

    A failure is only a warning: it must not cost the result of the run.
    """
    if jax.process_index() > 0:
        return capsule
    try:
        return replace(capsule, path=_write(capsule, absolute_path("run_dir", run_dir)))
    except (OSError, ConfigError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        warn(
            f"{run_dir}: the capsule of step {capsule.step} cannot be written, and is only in the "
            f"result: {reason}; free disk space, or change the permission",
            RuntimeWarning,
        )
        return capsule


def _write(capsule: Capsule, run_dir: Path) -> Path:
    """Write a capsule to a temporary directory, then rename it to its path."""
    lost, notes, arrays = list(capsule.lost), list(capsule.notes), dict[str, np.ndarray]()
    key = checkpoint = position = structure = None
    if capsule.key is not None:
        data = jax.device_get(jax.random.key_data(capsule.key)).tolist()
        key = str(jax.random.key_impl(capsule.key)), data
    if capsule.checkpoint is not None:
        directory, step = capsule.checkpoint
        checkpoint = str(directory), step, _relative(directory, run_dir)
    try:
        position = to_json(capsule.mark.position, "position")
    except ConfigError as error:
        notes.append(f"the position in the data: {error}")
        capsule = replace(capsule, can_reread=False)
    if not capsule.can_reread:
        structure = _describe(capsule.batch, "batch", arrays, lost)
    content = {name: getattr(capsule, name) for name in _PLAIN} | {
        "version": _VERSION,
        "key": key,
        "checkpoint": checkpoint,
        "mark": (capsule.mark.step, position),
        "batch": structure,
        "arrays": len(arrays),
        "lost": lost,
        "notes": notes,
        "rollbacks": capsule.rollbacks,
        "skipped": capsule.skipped,
    }
    path = run_dir / "capsules" / str(capsule.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        if arrays:
            # With the step, since all arrays may be empty, and a checkpoint must hold an element.
            save(new / _BATCH, {"step": capsule.step, "batch": arrays}, step=capsule.step)
        write_checked(new / _JSON, content)
        sync(new / _JSON)
        sync(new)
        if path.exists():
            os.rename(path, Path(temporary, "old"))
        os.rename(new, path)
    sync(path.parent)
    return path


def _relative(directory: Path | str, run_dir: Path) -> str | None:
    """Return the path from the run to its checkpoints, since both can be moved; None for a URL."""
    if isinstance(directory, str):
        return None
    return os.path.relpath(os.path.realpath(directory), os.path.realpath(run_dir))


def _find_checkpoints(path: Path, directory: str, relative: str | None) -> Path | str:
    """Return the directory of a capsule's checkpoints, even if the run was moved."""
    if relative is None:
        return directory
    runs = path.parent.parent, Path(os.path.realpath(path)).parent.parent  # `path` may be a link
    moved = [Path(os.path.normpath(run / relative)) for run in runs]
    is_inside = not relative.startswith(os.pardir)
    # If the run was moved, another run may have its old path now. Checkpoints elsewhere stayed.
    candidates = [*moved, Path(directory)] if is_inside else [Path(directory), *moved]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def _describe(node: Any, path: str, arrays: dict[str, np.ndarray], lost: list[str]) -> Any:
    """Describe a batch as JSON that refers to its arrays by number; `_rebuild` is the inverse."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, jax.Array | np.ndarray | np.generic):
        key: Any = node if is_key(node) else None
        impl = None if key is None else str(jax.random.key_impl(key))
        array = np.asarray(jax.device_get(node if key is None else jax.random.key_data(key)))
        # Orbax stores only some of the dtypes of ml_dtypes, which are not builtin: store the bits.
        is_builtin = array.dtype.isbuiltin != 2
        if not is_builtin or array.dtype.kind in "biufc":
            number = str(len(arrays))
            arrays[number] = array if is_builtin else array.view(f"u{array.dtype.itemsize}")
            return {"array": [number, array.dtype.name, impl]}
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda child: child is not node)
    if len(children) == 1 and children[0][1] is node:
        lost.append(f"{path}: {tree.describe_value(node)} is not an array of numbers")
        return None
    items = []
    for (entry,), child in children:
        name = getattr(entry, "key", None)
        name = name if type(name) in (str, int) else tree.path_name((entry,))
        items.append((name, _describe(child, f"{path}/{name}", arrays, lost)))
    if type(node) in (list, tuple):
        return {type(node).__name__: [child for _, child in items]}
    if type(node) is not dict:
        lost.append(f"{path}: a {type(node).__name__}, written as a dict")
    return {"dict": items}


def read_capsule(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule that `fit` has written, from `run_dir/capsules/<step>`.

    Raises:
      CheckpointError: if there is no capsule, or it is damaged.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf, tempfile
    >>> tx, folder = optax.sgd(0.1), tempfile.mkdtemp()
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p["w"] * x), tx)
    >>> _ = sf.fit(step, state, [np.float32([3, np.inf])], run_dir=folder)
    >>> sf.debug.read_capsule(f"{folder}/capsules/1").metrics["train/loss"]
    inf
    """
    read_instance("capsule", path, (str, os.PathLike), "a Capsule or the path of one")
    path = absolute_path("capsule", path)
    if not os.path.isfile(path / _JSON):  # also False for a name that is too long
        expected = f"the directory of a capsule, such as run_dir/capsules/120, with {_JSON} in it"
        refuse(path, expected, "none", "check the path", kind=CheckpointError)
    advice = "copy it again from the run_dir, or run to the step again"
    try:
        return _parse(path, read_checked(path / _JSON))
    except DamageError as error:
        raise DamageError(f"{error}; {advice}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DamageError(f"{path}: the capsule is damaged: {error!r}; {advice}") from error


_is_number = lambda value: type(value) in (int, float)
_is_word = lambda value: is_count(value) and value < 1 << 32
_is_path = lambda value: isinstance(value, str) and "\0" not in value
_is_path_or_none = lambda value: "\0" not in value if isinstance(value, str) else value is None
_is_metrics = lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))
_FORM = {
    "step": is_count,
    "metric": str,
    **dict.fromkeys(("metrics", "before"), _is_metrics),
    **dict.fromkeys(("began", "arrays"), is_count),
    "can_reread": lambda value: type(value) is bool,
    "key?": (str, [_is_word]),
    "checkpoint?": (_is_path, is_count, _is_path_or_none),
    "mark": (is_count, lambda _: True),
    "lost": [str],
    "notes": [str],
    "rollbacks": [str],
    "skipped": [is_range],
}


def _parse(path: Path, content: Any) -> Capsule:
    """Make a capsule from JSON, which may hold anything even if its checksum is right."""
    check_plain(content)
    if is_count(content["version"]) and content["version"] != _VERSION:
        expected, got = f"a capsule of version {_VERSION}", f"{content['version']}"
        refuse(path, expected, got, "read it with the stepfold that wrote it", kind=CheckpointError)
    if not is_count(content["version"]) or not has_form(content, _FORM):
        raise ValueError("other JSON")
    key, checkpoint, (mark, position) = content["key"], content["checkpoint"], content["mark"]
    if key is not None:
        key = jax.random.wrap_key_data(jax.device_put(np.array(key[1], np.uint32)), impl=key[0])
    if checkpoint is not None:
        directory, saved, relative = checkpoint
        checkpoint = CheckpointReference(_find_checkpoints(path, directory, relative), saved)
    reader = None
    if content["arrays"]:
        # Without `restore`, which waits for all processes and needs dtypes and shapes.
        store, step = open_store(path / _BATCH), content["step"]
        if step not in store.steps():
            raise DamageError(f"{store.path_of(step)}: missing; the capsule was copied in part")
        reader = store.open_arrays(step, store.read_manifest(step))
    return Capsule(
        **{name: content[name] for name in _PLAIN},
        key=key,
        batch=_rebuild(content["batch"], reader),
        lost=tuple(content["lost"]),
        checkpoint=checkpoint,
        mark=DataPosition(mark, from_json(position)),
        path=path,
        notes=tuple(content["notes"]),
        rollbacks=tuple(content["rollbacks"]),
        skipped=tuple((first, stop) for first, stop in content["skipped"]),
    )


def _rebuild(node: Any, reader: Any) -> Any:
    match node:
        case {"dict": items}:
            return {name: _rebuild(child, reader) for name, child in items}
        case {"list": children}:
            return [_rebuild(child, reader) for child in children]
        case {"tuple": children}:
            return tuple(_rebuild(child, reader) for child in children)
        case {"array": [number, dtype, impl]}:
            array = reader.read_leaf(f"batch/{number}")
            if impl is not None:
                return jax.random.wrap_key_data(jax.device_put(array), impl=impl)
            return array.view(jnp.dtype(dtype))
    return node
