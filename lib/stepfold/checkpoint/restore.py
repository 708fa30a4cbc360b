"""Restore a checkpoint: the newest valid step, exactly, onto any devices."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from stepfold import tree
from stepfold.checkpoint import steps
from stepfold.checkpoint.agreement import worst_of
from stepfold.checkpoint.choosing import candidates
from stepfold.checkpoint.manifest import ForeignError, Manifest, read_manifest
from stepfold.checkpoint.matching import Rename, match
from stepfold.checkpoint.placing import placed, regions_of
from stepfold.checkpoint.sealed import DamageError, opened
from stepfold.errors import CheckpointError, StepfoldError


class Restored(NamedTuple):
    """The result of `restore`.

    Attributes:
      state: a tree like `like`.
      step: the step at which it was saved.
      data: the data position, for `set_state` of the batches; None if none was saved.
      extra: the `extra` that was saved.
      metrics: the `metrics` that were saved.
      loaded: the paths that were loaded.
      left: saved or wanted paths that were not loaded, with the reason; empty without `parts` or
        `partial`.
      damaged: the problems of steps that were skipped, by step.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2), "b": jnp.zeros(2)}, step=1)
    >>> restored = sf.restore(folder, {"w": jnp.zeros(2), "b": jnp.ones(2)}, parts=("w",))
    >>> restored.loaded, restored.left, restored.state
    (['w'], {'b': 'not among the parts'}, {'b': Array([1., 1.], ...), 'w': Array([1., 1.], ...)})
    """

    state: Any
    step: int
    data: Any
    extra: Any
    metrics: dict[str, float]
    loaded: list[str]
    left: dict[str, str]
    damaged: dict[int, list[str]]


def restore(
    directory: str | Path,
    like: Any,
    *,
    step: int | Literal["latest", "best"] = "latest",
    best: tuple[str, str] | str | None = None,
    parts: Sequence[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    partial: bool = False,
    fall_back: bool = True,
) -> Restored:
    """Restore a state, with every value verified against its checksum.

    A damaged step is never returned. With "latest" and "best", a damaged step is renamed
    (`12.damaged`) with a warning, and the next older or the next best step is restored instead.
    With several processes, all of them call this and restore the same step.

    Args:
      directory: the directory of the series.
      like: the wanted state, concrete or abstract (`jax.eval_shape`), with shardings for leaves
        that belong on a mesh. The mesh may differ from the one at save time. The saved state has to
        match: no leaf is cast, truncated, padded or skipped without an option below.
      step: "latest", "best", or a number.
      best: the metric that ranks steps for "best", or (metric, "min" or "max"). None uses the
        metric recorded at save time.
      parts: regular expressions of paths, such as `("params",)`: restore only these paths, and keep
        the rest of `like`.
      rename: saved paths to new paths, of leaves or branches, such as
        `{"params/old": "params/new"}`; or a function of the saved path.
      cast: whether float dtypes may be converted to other float dtypes, and integer to integer
        dtypes.
      partial: whether to restore the leaves that match and keep the rest of `like`.
      fall_back: whether to fall back to another step if one is damaged, instead of raising.

    Returns:
      The state and the metadata saved with it; `loaded` and `left` list which paths were loaded.

    Raises:
      CheckpointError: if there is no such step, or no valid one.
      TreeMismatchError: if the saved state does not match `like`; lists every path that differs.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf, tempfile
    >>> folder, tx = tempfile.mkdtemp(), optax.adam(1e-3)
    >>> init = lambda key: sf.init_state({"w": jnp.ones((4, 2))}, tx, key)
    >>> sf.save(folder, init(jax.random.key(0)), data={"step": 0}, extra={"lr": 1e-3})
    >>> restored = sf.restore(folder, jax.eval_shape(init, jax.random.key(1)))
    >>> restored.step, restored.data, restored.extra, restored.state.params["w"].shape
    (0, {'step': 0}, {'lr': 0.001}, (4, 2))
    """
    place = steps.read_directory(directory)
    go_on = fall_back and isinstance(step, str)
    damaged: dict[int, list[str]] = {}
    for number in candidates(place, step, best):
        path = steps.path_of(place, number)
        error: StepfoldError | None = None
        try:
            found = _read(path, like, parts=parts, rename=rename, cast=cast, partial=partial)
        except StepfoldError as caught:
            error = caught
        # All processes have to agree on the outcome before any of them continues.
        worst = worst_of(_severity(error))
        if worst == _GOOD:
            return found._replace(damaged=damaged)
        if worst == _WRONG:
            raise error or CheckpointError(f"{path}: another process could not restore it")
        problem = str(error or "another process found it damaged")
        damaged[number] = [problem]
        if not go_on:
            break
        if not isinstance(error, ForeignError):
            _pass_over(place, number, problem)
    told = "; ".join(f"step {number}: {lines[0]}" for number, lines in damaged.items())
    raise CheckpointError(f"{place}: expected a good checkpoint, got none: {told}")


_GOOD, _DAMAGED, _WRONG = range(3)


def _severity(error: StepfoldError | None) -> int:
    if error is None:
        return _GOOD
    return _DAMAGED if isinstance(error, DamageError | ForeignError) else _WRONG


def _read(path: Path, like: Any, **options: Any) -> Restored:
    """Read one step."""
    manifest = read_manifest(path)
    words = manifest.words
    chosen = match(manifest.leaves, like, where=str(path), **options)
    return Restored(
        state=_load(path, manifest, chosen.sources, like),
        step=words.step,
        data=manifest.position(),
        extra=opened(words.extra),
        metrics=dict(words.metrics or {}),
        loaded=list(chosen.sources),
        left=chosen.left,
        damaged={},
    )


def _load(path: Path, manifest: Manifest, sources: dict[str, str], like: Any) -> Any:
    """Read the matched leaves; keep the others from `like`."""
    from stepfold.checkpoint.arrays import Reader  # lazy: imports tensorstore

    reader = Reader(path, manifest.leaves, manifest.shards)
    structure: Any = jax.tree.structure(like)
    wanted = {name: leaf for name, leaf in tree.named_leaves(like) if name in sources}
    saved = {name: manifest.leaves[sources[name]] for name in wanted}
    regions = {name: regions_of(name, saved[name], leaf) for name, leaf in wanted.items()}
    # Read in threads, placed in this one: jax contexts, such as a default device, are thread-local.
    parts = reader.map(lambda name: reader.parts(sources[name], regions[name]), list(wanted))
    loaded = {
        name: placed(name, saved[name], wanted[name], dict(zip(regions[name], read, strict=True)))
        for name, read in zip(wanted, parts, strict=True)
    }
    return structure.unflatten([loaded.get(name, leaf) for name, leaf in tree.named_leaves(like)])


def _pass_over(place: Path, number: int, problem: str) -> None:
    """Warn about a damaged step, and set it aside."""
    kept = steps.set_aside(place, number) if jax.process_index() == 0 else None
    where = f"kept as {kept.name}" if kept else "left where it is"
    warnings.warn(
        f"{place}: step {number} is damaged, {where}, and an older one is taken: {problem}",
        RuntimeWarning,
        stacklevel=3,
    )
