"""Reading a checkpoint back: the newest that is good, exactly, onto any devices."""

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
    """What `restore` gives back.

    Attributes:
      state: a tree like the one asked for.
      step: the step that it was saved at.
      data: the position in the data, for `set_state` of the batches; None if none was saved.
      extra: what was given as `extra`.
      metrics: what was given as `metrics`.
      loaded: the paths that were loaded.
      left: why other paths were not, whether saved or wanted; empty unless that was asked for.
      damaged: what was wrong with newer steps, which were set aside, by step.

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
    """Read a state back, every value of it checked against what was saved.

    A step that is damaged is never returned. It is renamed (`12.damaged`), a warning says why, and
    the next older one is taken, or for "best" the next best. With several processes all of them
    call this, and all get the same step.

    Args:
      directory: what was saved into.
      like: the state that is wanted, or an abstract one (`jax.eval_shape`), with shardings where it
        shall be on a mesh: any mesh, whatever it was saved from. What was saved has to match it:
        no leaf is cast, cut, padded or left out unless that is asked for.
      step: "latest", "best", or a number.
      best: the metric that "best" goes by, or (metric, "min" or "max"); as the series said when it
        was saved, if None.
      parts: regular expressions of paths, such as `("params",)`: only what is there is loaded, and
        the rest is as in `like`.
      rename: new paths for old ones, of leaves or of branches, as `{"params/old": "params/new"}`;
        or a function of the saved path.
      cast: whether floats may become floats of another dtype, and integers integers.
      partial: whether what fits is loaded, and the rest left as in `like`.
      fall_back: whether to go on to another step where one is damaged, instead of raising.

    Returns:
      The state and what was saved beside it; `loaded` and `left` say which paths were loaded.

    Raises:
      CheckpointError: if there is no such step, or none that is good.
      TreeMismatchError: if the state is not like the one that was saved, with every path.

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
        # No process goes on before all have read, and none alone.
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
    """Read one step, or raise what is wrong with it or with what is wanted."""
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
    """Read the leaves that are wanted, and leave the others as they are."""
    from stepfold.checkpoint.arrays import Reader  # tensorstore, when first used

    reader = Reader(path, manifest.leaves, manifest.shards)
    structure: Any = jax.tree.structure(like)
    wanted = {name: leaf for name, leaf in tree.named_leaves(like) if name in sources}
    saved = {name: manifest.leaves[sources[name]] for name in wanted}
    regions = {name: regions_of(name, saved[name], leaf) for name, leaf in wanted.items()}
    # Read by threads, but placed by this one: jax's contexts, a default device say, are a thread's.
    parts = reader.map(lambda name: reader.parts(sources[name], regions[name]), list(wanted))
    loaded = {
        name: placed(name, saved[name], wanted[name], dict(zip(regions[name], read, strict=True)))
        for name, read in zip(wanted, parts, strict=True)
    }
    return structure.unflatten([loaded.get(name, leaf) for name, leaf in tree.named_leaves(like)])


def _pass_over(place: Path, number: int, problem: str) -> None:
    """Say of a step that it is not taken, and set it aside."""
    kept = steps.set_aside(place, number) if jax.process_index() == 0 else None
    where = f"kept as {kept.name}" if kept else "left where it is"
    warnings.warn(
        f"{place}: step {number} is damaged, {where}, and an older one is taken: {problem}",
        RuntimeWarning,
        stacklevel=3,
    )
