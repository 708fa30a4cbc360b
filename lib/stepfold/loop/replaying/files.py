"""Capsules on the disk: `capsule.json` under a checksum, and the batch's arrays in `batch.npz`."""

import os
import tempfile
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.checkpoint.sealed import DamageError, opened, plain, seal, unreadable, unseal
from stepfold.errors import CheckpointError, ConfigError
from stepfold.loop.replaying.batch_file import pack, read, unpack, written
from stepfold.loop.replaying.capsule import Capsule, Reference
from stepfold.loop.replaying.rereading import Mark

_VERSION = 1
_WORDS, _ARRAYS = "capsule.json", "batch.npz"


def write_capsule(capsule: Capsule, run_dir: Path) -> Path:
    """Write a capsule to `run_dir/capsules/<step>`, wholly or not at all, and say where.

    One that is there already, of the same step of a run before, is replaced.

    Raises:
      OSError: if the disk does not take it.
    """
    packed = pack(capsule.batch)
    arrays = written(packed.arrays)
    position, unplain = _position(capsule.mark.position)
    content = {
        "version": _VERSION,
        "step": capsule.step,
        "metric": capsule.metric,
        "metrics": capsule.metrics,
        "key": _key_words(capsule.key),
        "began": capsule.began,
        "checkpoint": _reference_words(capsule.checkpoint, run_dir),
        "mark": {"step": capsule.mark.step, "position": position},
        "batch": packed.structure,
        "crc32": zlib.crc32(arrays),
        "lost": [*capsule.lost, *packed.lost],
        "notes": unplain,
    }
    place = run_dir / "capsules" / str(capsule.step)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as aside:
        new = Path(aside, "new")
        new.mkdir()
        _write(new / _ARRAYS, arrays)
        _write(new / _WORDS, seal(content))
        if place.exists():
            os.rename(place, Path(aside, "old"))
        os.rename(new, place)
    return place


def write_or_warn(capsule: Capsule, run_dir: str | Path) -> Capsule:
    """Write a capsule into a run's folder; a disk that does not take it must not cost the result.

    Warns:
      RuntimeWarning: if it cannot be written.
    """
    try:
        return replace(capsule, path=write_capsule(capsule, Path(run_dir).absolute()))
    except OSError as error:
        warnings.warn(
            f"{run_dir}: the capsule of step {capsule.step} cannot be written, and is only on the "
            f"result: {error.strerror or error}; free the disk, or change the permission",
            RuntimeWarning,
            stacklevel=4,
        )
        return capsule


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _position(position: Any) -> tuple[Any, list[str]]:
    try:
        return plain(position, "position"), []
    except ConfigError as error:
        return None, [f"the position in the data: {error}"]


def _key_words(key: jax.Array | None) -> Any:
    if key is None:
        return None
    data = np.asarray(jax.random.key_data(key)).tolist()
    return {"impl": str(jax.random.key_impl(key)), "data": data}


def _reference_words(checkpoint: Reference | None, run_dir: Path) -> Any:
    """Name the checkpoint from the run's folder on, where it is inside, so that it can be moved."""
    if checkpoint is None:
        return None
    directory = checkpoint.directory
    inside = directory.is_relative_to(run_dir)
    named = directory.relative_to(run_dir) if inside else directory
    return {"directory": str(named), "step": checkpoint.step}


def read_capsule(path: str | Path) -> Capsule:
    """Read a capsule that `fit` has written.

    Args:
      path: its folder, `run_dir/capsules/<step>`.

    Raises:
      CheckpointError: if it is none, or damaged.

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
    place = Path(path).absolute()
    if not (place / _WORDS).is_file():
        raise CheckpointError(
            f"{place}: expected the folder of a capsule, such as run_dir/capsules/120, with "
            f"{_WORDS} in it, got none"
        )
    content = unseal(place / _WORDS)
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{place}: expected a capsule of version {_VERSION}, got {content['version']}; read it "
            "with the stepfold that wrote it"
        )
    arrays = _arrays(place / _ARRAYS, content["crc32"])
    mark, checkpoint, key = content["mark"], content["checkpoint"], content["key"]
    directory = checkpoint and place.parent.parent / checkpoint["directory"]
    return Capsule(
        step=content["step"],
        metric=content["metric"],
        metrics=content["metrics"],
        key=key and jax.random.wrap_key_data(jnp.array(key["data"], jnp.uint32), impl=key["impl"]),
        batch=unpack(content["batch"], arrays),
        lost=tuple(content["lost"]),
        checkpoint=checkpoint and Reference(directory, checkpoint["step"]),
        mark=Mark(mark["step"], opened(mark["position"])),
        began=content["began"],
        path=place,
        notes=tuple(content["notes"]),
    )


def _arrays(file: Path, checksum: int) -> Any:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise DamageError(f"{file}: missing; the capsule was copied in part") from None
    except OSError as error:
        raise unreadable(file, error) from error
    if zlib.crc32(content) != checksum:
        raise DamageError(f"{file}: its checksum is not the one in {_WORDS}; copy it again")
    return read(content)
