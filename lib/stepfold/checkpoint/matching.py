"""Match saved leaves to wanted leaves: all of them exactly, unless the caller opts out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, leaf_of
from stepfold.errors import ConfigError, TreeMismatchError
from stepfold.table import table

Rename = Mapping[str, str] | Callable[[str], str]

_ADVICE = "; rename=, cast=, parts= or partial= load what is not the same, and say what was left"


class Match(NamedTuple):
    """The saved path for each wanted path, and the reason why other paths are not loaded."""

    sources: dict[str, str]
    left: dict[str, str]


def match(
    saved: Mapping[str, Leaf],
    like: Any,
    *,
    where: str = "restore",
    advice: str = _ADVICE,
    parts: Sequence[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    partial: bool = False,
) -> Match:
    """Find the saved leaf for each wanted leaf.

    Args:
      saved: the stored leaves, by path.
      like: the wanted tree.
      where: prefix of error messages: the location of the checkpoint.
      advice: suffix of error messages, if there is no more specific advice.
      parts: regular expressions of paths; only matching paths and the paths below them are
        compared.
      rename: saved paths to new paths, of leaves or branches, or a function of the saved path.
      cast: whether float dtypes may be converted to other float dtypes, and integer to integer
        dtypes.
      partial: whether to load matching leaves and skip the others, instead of raising.

    Raises:
      TreeMismatchError: with every path that does not match, or if no path matches.
      ConfigError: if an argument is invalid.
    """
    inside = _inside(parts)
    wanted = {name: leaf_of(leaf) for name, leaf in tree.named_leaves(like)}
    old_names = _renamed(saved, rename)
    paths = dict.fromkeys((*wanted, *old_names))
    rows, sources, left = [], {}, {}
    for name in paths:
        have, want = saved.get(old_names.get(name, "\0")), wanted.get(name)
        if not inside(name):
            left[name] = "not among the parts"
        elif have is not None and want is not None and _fits(have, want, cast):
            sources[name] = old_names[name]
        else:
            rows.append((name, have, want))
            left[name] = f"saved {have or 'nothing'}, wanted {want or 'nothing'}"
    if rows and not partial:
        raise TreeMismatchError(f"{where}: {_told(rows, _nones(like), advice)}")
    if not sources and paths:
        raise TreeMismatchError(
            f"{where}: expected paths to load, got none that fits; saved are {_some(saved)}, "
            f"wanted {_some(wanted)}, parts {parts}"
        )
    return Match(sources, left)


def _inside(parts: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a predicate for paths that match one of `parts`, or lie below a match."""
    if parts is None:
        return lambda _: True
    if isinstance(parts, str) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"parts: expected a tuple of paths such as ('params',), got {parts!r}")
    try:
        patterns = [re.compile(f"(?:{part})(?:/.*)?", re.DOTALL) for part in parts]
    except re.error as error:
        raise ConfigError(
            f"parts: expected regular expressions, got {error.pattern!r}: {error}"
        ) from error
    return lambda name: any(pattern.fullmatch(name) for pattern in patterns)


def _renamed(saved: Mapping[str, Leaf], rename: Rename | None) -> dict[str, str]:
    """Map each new path to its saved path."""
    old_names: dict[str, str] = {}
    if isinstance(rename, Mapping) and not all(isinstance(new, str) for new in rename.values()):
        old, new = next(pair for pair in rename.items() if not isinstance(pair[1], str))
        raise ConfigError(f"rename: expected a path for {old!r}, got {new!r}")
    new_name = rename if callable(rename) else lambda name: _by_branch(name, rename or {})
    for name in saved:
        new = new_name(name)
        if not isinstance(new, str):
            raise ConfigError(f"rename: expected a path for {name!r}, got {new!r}")
        other = old_names.setdefault(new, name)
        if other is not name:
            raise ConfigError(
                f"rename: expected one path each, got {new!r} for {other!r} and {name!r}"
            )
    if isinstance(rename, Mapping):
        for old in rename:
            if not any(name == old or name.startswith(f"{old}/") for name in saved):
                raise ConfigError(
                    f"rename: expected a saved path, got {old!r}; saved are {_some(saved)}"
                )
    return old_names


def _by_branch(name: str, rename: Mapping[str, str]) -> str:
    """Rename by the longest matching branch."""
    parts = name.split("/")
    for length in range(len(parts), 0, -1):
        branch = "/".join(parts[:length])
        if branch in rename:
            return "/".join([rename[branch], *parts[length:]])
    return name


def _fits(have: Leaf, want: Leaf, cast: bool) -> bool:
    if have == want:
        return True
    alike = have.shape == want.shape and have.key is None and want.key is None
    return (
        cast
        and alike
        and any(
            jnp.issubdtype(jnp.dtype(have.dtype), kind)
            and jnp.issubdtype(jnp.dtype(want.dtype), kind)
            for kind in (jnp.floating, jnp.integer)
        )
    )


def _nones(like: Any) -> set[str]:
    leaves = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda leaf: leaf is None)[0]
    return {tree.path_name(path) for path, leaf in leaves if leaf is None}


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _told(
    rows: Sequence[tuple[str, Leaf | None, Leaf | None]], nones: set[str], advice: str
) -> str:
    """Format one message that lists every difference, with advice."""
    cells = [
        (name, have or "nothing", want or ("None" if name in nones else "nothing"))
        for name, have, want in rows
    ]
    paths = f"{len(rows)} path{'s' * (len(rows) > 1)}"
    return (
        f"expected the tree that was saved, got one that differs at {paths}"
        f"{_advice(rows) or advice}\n{table(('path', 'saved', 'wanted'), cells)}"
    )


def _advice(rows: Sequence[tuple[str, Leaf | None, Leaf | None]]) -> str | None:
    gone = {name: have for name, have, want in rows if want is None}
    new = {name: want for name, have, want in rows if have is None}
    if all(name.startswith("opt_state") for name, _, _ in rows):
        return (
            ": it was saved with another optimizer; make the state with the same, or leave its "
            "own state new with parts=('params', 'model_state', 'step', 'key')"
        )
    if all(have and want and _fits(have, want, cast=True) for _, have, want in rows):
        return "; only dtypes differ: cast=True converts them"
    pairs = {
        name: [other for other, want in new.items() if want == have] for name, have in gone.items()
    }
    if gone and len(gone) == len(new) == len(rows) / 2 and all(len(o) == 1 for o in pairs.values()):
        names = {name: others[0] for name, others in pairs.items()}
        return f"; if they were renamed, give rename={names}"
    return None
