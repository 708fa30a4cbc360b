"""Restore a checkpoint: the newest valid step, exactly, onto any devices."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint import steps
from stepfold.checkpoint.leaves import Leaf, Region, leaves_of, make_leaf, regions_of
from stepfold.checkpoint.manifest import DamageError, ForeignError, NoManifestError, StepMetadata
from stepfold.checkpoint.results import Result, find_results
from stepfold.checkpoint.store import (
    DirectoryStore,
    Store,
    complete_steps,
    has_own_step,
    metrics_of,
    open_store,
    open_together,
)
from stepfold.core.metric_modes import known_mode
from stepfold.core.processes import KeyValues, agreement, broadcast_from_first
from stepfold.core.validation import as_integer, check_flags, read_instance
from stepfold.errors import CheckpointError, TreeMismatchError, refuse, warn
from stepfold.table import table

Step = int | Literal["latest", "best"]
Rename = Mapping[str, str] | Callable[[str], str]


class MatchOptions(TypedDict, total=False):
    """Which leaves to restore, and what may differ; see `match`."""

    parts: Sequence[str] | None
    rename: Rename | None
    cast: bool
    partial: bool
    advice: str | Callable[[Sequence[str]], str]


class RestoreOptions(MatchOptions, total=False):
    """The options of `restore`, for the `restore` of a series."""

    step: Step
    best: tuple[str, str] | str | None
    fall_back: bool


class Restored(NamedTuple):
    """The result of `restore`.

    Attributes:
      state: a tree like `like`.
      step: the step at which it was saved.
      data: the data position, for `set_state` of the batches; None if none was saved. With `parts`
        it is also None if each process saved its own, and there were more or fewer processes.
      extra: the `extra` that was saved.
      metrics: the `metrics` that were saved.
      loaded: the paths that were loaded, with the path of each in the checkpoint.
      not_loaded: saved or wanted paths that were not loaded, with the reason; empty without `parts`
        or `partial`.
      damaged: the problems of steps that were skipped, by step.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2), "b": jnp.zeros(2)}, step=1)
    >>> restored = sf.restore(folder, {"w": jnp.zeros(2), "b": jnp.ones(2)}, parts=("w",))
    >>> restored.loaded, restored.not_loaded, restored.state
    ({'w': 'w'}, {'b': 'not among the parts'}, {'b': Array([1., 1.], ...), 'w': ...})
    """

    state: Any
    step: int
    data: Any
    extra: Any
    metrics: dict[str, float]
    loaded: dict[str, str]
    not_loaded: dict[str, str]
    damaged: dict[int, list[str]]


def restore(
    directory: str | os.PathLike[str],
    like: Any,
    *,
    step: Step = "latest",
    best: tuple[str, str] | str | None = None,
    parts: Sequence[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    partial: bool = False,
    fall_back: bool = True,
) -> Restored:
    """Restore a state, with every value verified against its checksum.

    A step that orbax saved without stepfold is read by orbax, and so not verified, with a warning.

    The saved state has to match `like`. Without one of the options below, no leaf is cast,
    truncated, padded or skipped.

    A damaged step is never returned. With "latest" the next older step is restored instead, and
    with "best" the next best one, with a warning. With a number as the `step`, or with
    `fall_back=False`, a damaged step raises an error.

    Nothing is written, since a step that seems damaged may be a copy in progress. A save of the
    same number, a resume by `fit` and `Checkpoints.clean` rename a damaged step to `12.damaged`.

    With several processes, all of them call this. They restore the same step.

    Args:
      directory: the directory or the URL of the series, or the run directory of `fit`.
      like: the wanted state, concrete or abstract (`jax.eval_shape`). Each leaf gets the sharding
        of its counterpart in `like`. The mesh may differ from the one at save time.
      step: "latest", "best", or a number.
      best: the metric that ranks steps for `step="best"`, or (metric, "min" or "max"). None uses
        the metric and the mode recorded at save time. A metric without a mode uses the recorded
        mode, or else takes it from its name, such as "min" for a loss.
      parts: regular expressions of paths, such as `("params",)`: restore only these paths, and keep
        the rest of `like`. Each has to match a path.
      rename: saved paths to new paths, of leaves or branches, such as
        `{"params/old": "params/new"}`; or a function of the saved path.
      cast: whether float dtypes may be converted to other float dtypes, and integer to integer
        dtypes. A float beyond the range of the wanted dtype becomes inf, with a warning; an integer
        is an error.
      partial: whether to restore the leaves that match and keep the rest of `like`.
      fall_back: whether to fall back to another step if one is damaged, instead of raising.

    Returns:
      The state, and the values saved next to it. `loaded` maps restored paths to saved ones, and
      `not_loaded` all others to the reason.

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
    restored, _ = restore_from(
        [open_together(directory)],
        like,
        step=step,
        best=best,
        fall_back=fall_back,
        reads_orbax=True,
        parts=parts,
        rename=rename,
        cast=cast,
        partial=partial,
    )
    return restored


def restore_from(
    stores: Sequence[Store],
    like: Any,
    *,
    step: Step = "latest",
    best: tuple[str, str] | str | None = None,
    fall_back: bool = True,
    set_aside: bool = False,
    reads_orbax: bool = False,
    **options: Unpack[MatchOptions],
) -> tuple[Restored, Store]:
    """Restore from one of several stores as `restore` does; return the store too.

    "latest" is the newest step of all stores, "best" the best of the first one. A step that several
    stores have is taken from the first of them. `set_aside` renames damaged steps that are skipped,
    once a good one was restored. `reads_orbax` also reads steps that orbax saved without stepfold.
    """
    check_flags(fall_back=fall_back)
    damaged: dict[int, list[str]] = {}
    skipped: list[tuple[Store, int, str]] = []
    tried: list[tuple[int, Store]] = []
    remaining = candidates(stores, step, best)
    while remaining:
        tried.append(remaining.pop(0))
        number, store = tried[-1]
        outcome, result, identity = _try_step(store, number, like, reads_orbax, **options)
        # All processes have to agree on the outcome before any of them continues.
        answers = KeyValues("agreement").gather([outcome, identity], "an answer")
        outcome = max(outcome for outcome, _ in answers)
        if outcome == _GOOD and len({identity for _, identity in answers}) > 1:
            outcome, result = _DAMAGED, DamageError("the processes have read different saves of it")
        if outcome == _GOOD and isinstance(result, Restored):
            for where, bad, problem in skipped:
                _warn_of_damage(where, bad, step, problem, set_aside=set_aside)
            return result._replace(damaged=damaged), store
        if outcome == _DELETED:
            listed = candidates(stores, step, best)
            remaining = [candidate for candidate in listed if candidate not in tried]
            continue
        error = result if isinstance(result, Exception) else None
        if outcome == _FAILED:
            raise error or CheckpointError(
                f"{store.path_of(number)}: another process could not restore it"
            )
        problem = str(error or "another process found it damaged")
        damaged.setdefault(number, []).append(problem)
        if not fall_back or not isinstance(step, str):
            break
        if not isinstance(error, ForeignError):
            skipped.append((store, number, problem))
    problems = "; ".join(f"step {number}: {lines[0]}" for number, lines in damaged.items())
    problems = problems or "each was deleted before it was read"
    raise CheckpointError(f"{stores[0].location}: no checkpoint can be restored: {problems}")


_GOOD, _DELETED, _DAMAGED, _FAILED = range(4)


def _try_step(
    store: Store,
    step: int,
    like: Any,
    reads_orbax: bool,
    **options: Unpack[MatchOptions],
) -> tuple[int, Restored | Exception, str]:
    """Restore a step; return the outcome, the result or the error, and what identifies the save."""
    try:
        try:
            return _GOOD, *_restore_step(store, step, like, reads_orbax, **options)
        except (DamageError, ForeignError) as error:
            # Another run may have deleted the step while it was read.
            return (_DAMAGED if store.has_step(step) else _DELETED), error, ""
    except Exception as error:  # noqa: BLE001  raised once all processes know of it
        return _FAILED, error, ""


def _restore_step(
    store: Store,
    step: int,
    like: Any,
    reads_orbax: bool,
    **options: Unpack[MatchOptions],
) -> tuple[Restored, str]:
    """Read the leaves that match, and keep the others from `like`; return the identity too."""
    try:
        manifest = store.read_manifest(step)
    except NoManifestError as error:
        # Next to steps of stepfold, it is one of them that is being deleted.
        if not reads_orbax or not isinstance(store, DirectoryStore) or has_own_step(store):
            raise
        return _restore_from_orbax(store, step, like, error, **options), ""
    sources, not_loaded = match(manifest.leaves, like, where=store.path_of(step), **options)
    # Parts, such as the parameters for evaluation, can be restored on any number of processes.
    needs_data = options.get("parts") is None or manifest.has_position
    data = manifest.position() if needs_data else None
    wanted = {name: leaf for name, leaf in tree.named_leaves(like) if name in sources}
    saved = {name: manifest.leaves[sources[name]] for name in wanted}
    reader = store.open_arrays(step, manifest)

    def read(name: str) -> dict[Region, np.ndarray]:
        return reader.read_regions(sources[name], regions_of(name, saved[name], wanted[name]))

    # Threads read, but this one makes the leaves: jax's contexts, such as a default device, are
    # thread-local.
    loaded = {
        name: make_leaf(name, saved[name], wanted[name], arrays)
        for name, arrays in zip(wanted, reader.map(read, list(wanted)), strict=True)
    }
    restored = Restored(
        state=_with_leaves(like, loaded),
        step=manifest.metadata.step,
        data=reader.fill("data", data),
        extra=reader.fill("extra", manifest.metadata.extra),
        metrics=dict(manifest.metadata.metrics or {}),
        loaded=sources,
        not_loaded=not_loaded,
        damaged={},
    )
    return restored, manifest.metadata.identity


def _with_leaves(like: Any, loaded: Mapping[str, Any]) -> Any:
    """Replace leaves by path."""
    structure: Any = jax.tree.structure(like)
    return structure.unflatten([loaded.get(name, leaf) for name, leaf in tree.named_leaves(like)])


def _restore_from_orbax(
    store: DirectoryStore,
    step: int,
    like: Any,
    error: NoManifestError,
    **options: Unpack[MatchOptions],
) -> Restored:
    """Read a step that orbax saved without stepfold; raise the error if it did not."""
    from stepfold.checkpoint.orbax_reader import OrbaxReader  # lazy: imports orbax

    path = Path(store.path_of(step))
    reader = OrbaxReader(path)
    if not reader.leaves:
        raise error
    sources, not_loaded = match(reader.leaves, like, where=str(path), **options)
    wanted = dict(tree.named_leaves(like))
    arrays = reader.read({old: wanted[name] for name, old in sources.items()})
    text = f"{path}: orbax saved it without stepfold, so that its values are not verified"
    warn(text, RuntimeWarning)  # of the call of `restore`
    state = _with_leaves(like, {name: arrays[old] for name, old in sources.items()})
    return Restored(state, step, None, None, {}, sources, not_loaded, {})


def _warn_of_damage(
    store: Store, number: int, step: Step, problem: str, *, set_aside: bool
) -> None:
    """Warn of a damaged step, and rename it if asked; only process 0 knows its new name."""
    where = ""
    if set_aside and jax.process_index() == 0:
        kept = store.set_aside(number)
        where = f", kept as {kept}" if kept else ", left where it is"
    other = "the next best" if step == "best" else "an older one"
    warn(
        f"{store.location}: step {number} is damaged{where}, and {other} is taken: {problem}",
        RuntimeWarning,
    )


# Which step


def candidates(stores: Sequence[Store], step: Step, best: Any = None) -> list[tuple[int, Store]]:
    """List the steps to try, the preferred one first, as process 0 sees them."""
    number = as_integer(step)
    if number is None and not (isinstance(step, str) and step in ("latest", "best")):
        refuse("step", "'latest', 'best' or a number", repr(step))
    is_best = number is None and step == "best"
    if best is not None and not is_best:
        got = f"step={step!r}"
        refuse("best", "step='best' to go with it", got, "give that, or leave best out")
    listed: list[tuple[int, Store]] = []
    for store in stores[:1] if is_best else stores:
        with agreement(f"{store.location}: cannot be listed"):
            numbers = rank_steps(store, best) if is_best else store.steps()
        listed += [(each, store) for each in broadcast_from_first(numbers)]
    if number is not None:
        listed = [(each, store) for each, store in listed if each == number]
    if not is_best:
        listed.sort(key=lambda candidate: -candidate[0])  # stable: the first store comes first
    if listed:
        return listed
    location, present = stores[0].location, stores[0].steps()
    wanted = "a checkpoint" if number is None else f"step {number}"
    got = f"steps {', '.join(map(str, present))}" if present else "none"
    advice = "look at the path, or save first"
    parent, inner = steps.split_location(location)
    if inner is not None and open_store(parent).has_step(inner):
        advice = f"this is one of the steps in {parent}: give that, with step={inner}"
    refuse(location, f"{wanted} to restore", got, advice, kind=CheckpointError)


def rank_steps(store: Store, best: Any) -> list[int]:
    """List the steps from best to worst, by `best` or by the metric recorded in the newest step.

    Incomplete and unreadable steps come first: one of them may be the best, and is not skipped
    silently.
    """
    complete = complete_steps(store)
    broken = [step for step in store.steps() if step not in complete]
    newest_first = reversed(complete.values())
    recorded = next((metadata.best for metadata in newest_first if metadata.best), None)
    if best is None or (recorded and best == recorded[0]):
        best = recorded
    elif isinstance(best, tuple | list) and len(best) == 2:
        best = steps.read_best(*best)
    elif isinstance(best, str) and best and known_mode(best) is None:
        expected = "a metric whose name or save says which value is better"
        refuse("best", expected, repr(best), f"give best=({best!r}, 'min') or ({best!r}, 'max')")
    else:
        best = steps.read_best(best)
    ranked = steps.order_by(best, metrics_of(store, complete)) if best else []
    if ranked or broken or not complete:
        return broken + ranked
    if best is None:
        expected, got = "a metric that ranks the steps", "none, and none was given to the save"
        advice = "give restore(step='best', best='eval/loss'), or the number of a step"
    else:
        expected, got = f"a step with a finite number as the metric {best[0]!r}", "none"
        advice = f"save with metrics={{{best[0]!r}: …}}, or give the step"
        if missing := _find_missing(store, complete, best[0]):
            advice = (
                f"the remote evaluations of steps {', '.join(map(str, missing))} are missing: "
                "make them with sf.evaluate_run, or give the step"
            )
    refuse(store.location, expected, got, advice, kind=CheckpointError)


def _find_missing(store: Store, complete: Mapping[int, StepMetadata], metric: str) -> list[int]:
    """List the steps that await the evaluation of a metric by another process."""
    results = find_results(store)
    return [
        step
        for step, metadata in complete.items()
        for name in metadata.awaits
        if metric.startswith(f"{name}/") and Result(name, step, metadata.identity) not in results
    ]


# Which leaves

# For a difference that `_specific_advice` does not explain.
_ADVICE = (
    "; rename=, cast=, parts= or partial= load what differs; Restored.not_loaded lists the rest"
)


class Match(NamedTuple):
    """The saved path for each wanted path, and the reason why other paths are not loaded."""

    sources: dict[str, str]
    not_loaded: dict[str, str]


def match(
    saved: Mapping[str, Leaf],
    like: Any,
    *,
    where: str = "restore",
    advice: str | Callable[[Sequence[str]], str] = _ADVICE,
    parts: Sequence[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    partial: bool = False,
) -> Match:
    """Find the saved leaf for each wanted leaf: all of them exactly, unless the caller opts out.

    `where` begins the error messages. `advice` ends them, unless all differences have one likely
    cause. If it is a function of the paths that differ, what it returns always ends them. The other
    options are those of `restore`.

    Raises:
      TreeMismatchError: with every path that does not match, or if no path matches.
      ConfigError: if an argument is invalid.
    """
    check_flags(cast=cast, partial=partial)
    patterns = _compile_parts((".*",) if parts is None else parts)
    wanted, old_names = leaves_of(like), _old_names(saved, rename)
    differences, sources, not_loaded = [], {}, {}
    for name in dict.fromkeys((*wanted, *old_names)):
        have = saved[old_names[name]] if name in old_names else None
        want = wanted.get(name)
        if not any(pattern.fullmatch(name) for pattern in patterns.values()):
            not_loaded[name] = "not among the parts"
        elif have and want and _fits(have, want, cast):
            sources[name] = old_names[name]
        else:
            differences.append((name, have, want))
            not_loaded[name] = f"saved {have or 'nothing'}, wanted {want or 'nothing'}"
    if differences and not partial:
        if callable(advice):
            text = advice([name for name, _, _ in differences])
        else:
            text = _specific_advice(differences, may_rename=not callable(rename)) or advice
        raise TreeMismatchError(f"{where}: {_describe(differences, like, text)}")
    if not sources and (wanted or old_names):
        advice = f"saved are {_some(saved)}, wanted {_some(wanted)}, parts {parts}"
        refuse(where, "paths to load", "none that fits", advice, kind=TreeMismatchError)
    # A part may be a branch without leaves, such as the model state of a stateless model.
    branches = jax.tree_util.tree_leaves_with_path(like, is_leaf=lambda x: not jax.tree.leaves(x))
    names = [*old_names, *(tree.path_name(path) for path, _ in branches)]
    for part, pattern in patterns.items():
        if not any(map(pattern.fullmatch, names)):
            got = f"{part!r}, which matches none of {_some(dict.fromkeys(names))}"
            refuse("parts", "patterns of paths", got, "correct it, or leave it out")
    return Match(sources, not_loaded)


def _compile_parts(parts: Sequence[str]) -> dict[str, re.Pattern[str]]:
    """Compile patterns that match a path, and the paths below it."""
    is_sequence = isinstance(parts, list | tuple | set)
    if not is_sequence or not all(isinstance(part, str) for part in parts):
        refuse("parts", "a tuple of paths such as ('params',)", repr(parts))
    try:
        return {part: re.compile(f"(?:{part})(?:/.*)?", re.DOTALL) for part in parts}
    except re.error as error:
        refuse("parts", "regular expressions", f"{error.pattern!r}: {error}", cause=error)


def _old_names(saved: Mapping[str, Leaf], rename: Rename | None) -> dict[str, str]:
    """Map each new path to its saved path."""
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        refuse("rename", "a dict or a function of a path", f"{rename!r:.80}")
    if isinstance(rename, Mapping):
        for old in rename:
            if not any(f"{name}/".startswith(f"{old}/") for name in saved):
                refuse("rename", "a saved path", repr(old), f"saved are {_some(saved)}")
    old_names: dict[str, str] = {}
    for name in saved:
        new = rename(name) if callable(rename) else _rename_branch(name, rename or {})
        read_instance("rename", new, str, f"a path for {name!r}")
        other = old_names.setdefault(new, name)
        if other is not name:
            refuse("rename", "one path each", f"{new!r} for {other!r} and {name!r}")
    return old_names


def _rename_branch(name: str, rename: Mapping[str, str]) -> Any:
    """Rename by the longest matching branch."""
    branches = [old for old in rename if f"{name}/".startswith(f"{old}/")]
    if not branches:
        return name
    old = max(branches, key=len)
    return f"{rename[old]}{name[len(old) :]}" if isinstance(rename[old], str) else rename[old]


def _fits(have: Leaf, want: Leaf, cast: bool) -> bool:
    if have == want:
        return True
    if not cast or have.key or want.key or have.shape != want.shape:
        return False
    dtypes = jnp.dtype(have.dtype), jnp.dtype(want.dtype)
    kinds = jnp.floating, jnp.integer
    return any(all(jnp.issubdtype(dtype, kind) for dtype in dtypes) for kind in kinds)


_Differences = Sequence[tuple[str, Leaf | None, Leaf | None]]


def _describe(differences: _Differences, like: Any, advice: str) -> str:
    """Format one message that lists every difference, with advice."""
    leaves = jax.tree_util.tree_leaves_with_path(like, is_leaf=lambda leaf: leaf is None)
    nones = {tree.path_name(path) for path, leaf in leaves if leaf is None}
    rows = [
        (name, have or "nothing", want or ("None" if name in nones else "nothing"))
        for name, have, want in differences
    ]
    return (
        f"expected the tree that was saved, got one that differs at {len(rows)} path"
        f"{'s' if len(rows) > 1 else ''}{advice}\n"
        f"{table(('path', 'saved', 'wanted'), rows)}"
    )


def _specific_advice(differences: _Differences, *, may_rename: bool) -> str | None:
    """Return advice if all differences have one likely cause."""
    if all(name.startswith("opt_state") for name, _, _ in differences):
        return (
            ": it was saved with another optimizer; make the state with the same, or leave its "
            "own state new with parts=('params', 'model_state', 'step', 'key')"
        )
    if all(have and want and _fits(have, want, cast=True) for _, have, want in differences):
        return "; only dtypes differ: cast=True converts them"
    old = {have: name for name, have, want in differences if have and not want}
    new = {want: name for name, have, want in differences if want and not have}
    # If no two of the leaves have the same description, each has one counterpart.
    if may_rename and old.keys() == new.keys() and len(old) + len(new) == len(differences):
        rename = {name: new[leaf] for leaf, name in old.items()}
        return f"; if they were renamed, give rename={rename}"
    return None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
