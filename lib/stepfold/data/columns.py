"""Convert examples to columns, lists of leaves by path, and back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepfold.errors import DataError
from stepfold.tree import spell

# The key of bare sequences in a batch.
TOKENS = "tokens"
Path = tuple[Any, ...]


def columns_of(
    examples: Iterable[Any], start: int = 0, reserved: Sequence[str] = ()
) -> dict[Path, list[Any]]:
    """Convert examples to lists of leaves by path; `start` is the index of the first example."""
    columns: dict[Path, list[Any]] = {}
    if isinstance(examples, Mapping):
        _split(examples, (), columns)
        sizes = {name_of(path): len(column) for path, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"examples: expected columns of one length, got {sizes}")
    else:
        rows = _listed(examples, "")
        if rows and isinstance(rows[0], Mapping):
            _transpose(rows, (), start, columns)
        elif rows:
            columns[TOKENS,] = rows
    if not columns or not all(columns.values()):
        raise DataError("examples: expected at least one with at least one key, got none")
    for name in reserved:
        if any(path[0] == name for path in columns):
            raise DataError(f"examples: the key {name!r} is for what is added; rename yours")
    return columns


def _split(columns: Mapping[Any, Any], path: Path, found: dict[Path, list[Any]]) -> None:
    for name, column in columns.items():
        if isinstance(column, Mapping):
            _split(column, (*path, name), found)
        else:  # a ragged tensor has `to_list`
            whole = column.to_list() if hasattr(column, "to_list") else column
            found[*path, name] = _listed(whole, f" under {name_of((*path, name))!r}")


def _listed(examples: Any, where: str) -> list[Any]:
    if not (hasattr(type(examples), "__iter__") or hasattr(type(examples), "__getitem__")):
        raise DataError(
            f"examples: expected a list of them, or a dict of columns, got {spell(examples)}{where}"
            "; put a single example into a list"
        )
    return list(examples)


def _transpose(rows: list[Any], path: Path, start: int, found: dict[Path, list[Any]]) -> None:
    first = rows[0]
    if not isinstance(first, Mapping):
        found[path] = rows
        return
    try:
        columns = {name: [row[name] for row in rows] for name in first}
        alike = sum(map(len, rows)) == len(rows) * len(first)
    except (KeyError, TypeError, IndexError):
        alike = False
    if not alike:
        raise _other_keys(rows, path, start)
    for name, column in columns.items():
        _transpose(column, (*path, name), start, found)


def _other_keys(rows: list[Any], path: Path, start: int) -> DataError:
    first = list(rows[0])
    for index, row in enumerate(rows, start):
        if not isinstance(row, Mapping):
            wrong = f"{at(index, path)}: expected a dict with the keys {first}, got {spell(row)}"
        elif missing := [name for name in first if name not in row]:
            wrong = f"{at(index, (*path, missing[0]))}: missing, but example {start} has it"
        elif extra := [name for name in row if name not in first]:
            wrong = f"{at(index, (*path, extra[0]))}: unexpected, for example {start} lacks it"
        else:
            continue
        break
    return DataError(f"{wrong}; give every example the same keys")


def is_sequence(leaf: Any) -> bool:
    """Return whether a leaf has an axis, without converting it to an array."""
    rank = getattr(leaf, "ndim", None)
    if rank is None:
        return hasattr(leaf, "__len__") and not isinstance(leaf, str | bytes | Mapping)
    return bool(rank)


def lengths_of(columns: Mapping[Path, list[Any]], start: int = 0) -> list[int]:
    """Return the length of every example, which all its sequences must share."""
    lengths: list[int] = []
    for path, leaves in columns.items():
        try:
            mine = [len(leaf) for leaf in leaves]
            real = {str, bytes, dict}.isdisjoint(map(type, leaves))  # these have a length too
        except TypeError:
            real = False
        if not real:
            index = next(i for i, leaf in enumerate(leaves) if not is_sequence(leaf))
            raise DataError(
                f"{at(index + start, path)}: expected a sequence, got {spell(leaves[index])}; "
                "give every example one, or (in collate) name in keys= the sequences alone"
            )
        lengths = lengths or mine
        if mine != lengths:
            index = next(i for i, n in enumerate(mine) if n != lengths[i])
            first = name_of(next(iter(columns)))
            raise DataError(
                f"{at(index + start, path)}: expected the length {lengths[index]} of {first}, got "
                f"{mine[index]}; all sequences of an example share one mask: make them as long, or "
                "(in collate) name in keys= the sequences alone"
            )
    return lengths


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Convert leaves by path to nested dicts."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def name_of(path: Path) -> str:
    """Format a path as `text/ids`."""
    return "/".join(map(str, path))


def at(index: int, path: Path) -> str:
    """Format the location of an error."""
    return f"example {index}, {name_of(path)}" if path else f"example {index}"


def names_of(columns: Iterable[Path]) -> list[str]:
    """Format paths."""
    return [name_of(path) for path in columns]
