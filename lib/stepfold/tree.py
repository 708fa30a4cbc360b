"""Pytree helpers: paths and descriptions of leaves, differences between trees, casts.

Paths are written as `params/layers/0/kernel`, not as jax's `['params'].layers[0]`, so that error
messages, sharding rules and checkpoints name a leaf in the same way.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Tree = Any


def path_name(path: tuple[Any, ...]) -> str:
    """Format a key path of jax as `a/0/b`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Tree, root: str = "") -> list[tuple[str, Any]]:
    """List the leaves with their paths below `root`, in jax's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(_join(root, path_name(path)), leaf) for path, leaf in leaves]


def nested(leaves: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Arrange leaves in nested dicts by the keys on their paths."""
    root: dict[Any, Any] = {}
    for (*keys, last), leaf in leaves.items():
        node = root
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root


def marked_paths(tree: Tree, words: Any) -> list[str]:
    """List the paths of the leaves whose bits are set in 32-bit words."""
    packed = np.asarray(words, "<u4").view(np.uint8)
    bits = np.unpackbits(packed, bitorder="little").tolist()
    return [path for (path, _), bit in zip(named_leaves(tree), bits, strict=False) if bit]


def _join(*names: str) -> str:
    return "/".join(name for name in names if name)


def describe_value(leaf: object) -> str:
    """Format an array as `float32[8,16]`, and anything else by its type and value."""
    if is_array(leaf):
        shape = ",".join(map(str, leaf.shape))  # type: ignore[attr-defined]
        return f"{leaf.dtype}[{shape}]"  # type: ignore[attr-defined]
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(leaf))  # an address says nothing
    return f"{type(leaf).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def summary(tree: Tree) -> str:
    """Summarize a tree: a single leaf by `describe_value`, others by counts of arrays and elements.

    >>> summary({"w": np.ones((2, 3)), "b": np.ones(3)}), summary(np.ones(3)), summary(())
    ('{2 arrays, 9 elements}', 'float64[3]', '{}')
    """
    if jax.tree_util.all_leaves([tree]):
        return describe_value(tree)
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    count = sum(math.prod(leaf.shape) for leaf in arrays)
    return f"{{{len(arrays)} arrays, {count:,} elements}}" if arrays else "{}"


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array, a tracer, or an abstract array."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_data(leaf: object, *, abstract: bool = False) -> bool:
    """Whether jax can convert a leaf to an array of numbers, unlike text or None.

    With `abstract`, a `jax.ShapeDtypeStruct` counts too.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return is_numeric(leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return abstract
    return isinstance(leaf, int | float | complex | jax.Array)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of numbers, unlike those of text, objects, times and structures."""
    return dtype.kind not in "OUSTMm" and dtype.type is not np.void


def is_float(leaf: object) -> bool:
    """Whether a leaf is an array of a real floating dtype."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)  # type: ignore[attr-defined]


def is_real(leaf: object) -> bool:
    """Whether a leaf is real data: floats of any kind, integers or booleans."""
    if not is_data(leaf):
        return False
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(jnp.result_type(leaf), kind) for kind in kinds)


def floating(dtype: Any) -> Any:
    """Return a real floating dtype, also given by its name; None for anything else."""
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)  # numpy reads None as float64
    except TypeError:
        return None
    return dtype if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else None


def diff(wanted: Tree, got: Tree, root: str = "") -> list[str]:
    """List where two trees differ in structure, shape or dtype, one line per path."""
    want, have = _by_path(wanted, root), _by_path(got, root)
    lines = [
        f"{key[0]}: missing, expected {describe_value(leaf)}"
        for key, leaf in want.items()
        if key not in have
    ]
    lines += [
        f"{key[0]}: unexpected {describe_value(leaf)}"
        for key, leaf in have.items()
        if key not in want
    ]
    lines += [
        f"{key[0]}: expected {describe_value(leaf)}, got {describe_value(have[key])}"
        for key, leaf in want.items()
        if key in have and _signature(leaf) != _signature(have[key])
    ]
    structures: list[Any] = [jax.tree.structure(wanted), jax.tree.structure(got)]
    if not lines and structures[0] != structures[1]:
        # The same leaves at the same paths in other containers, such as a list for a tuple.
        lines = [f"{root}: expected the containers {structures[0]}, got {structures[1]}"]
    return lines


def _by_path(tree: Tree, root: str) -> dict[tuple[str, int], Any]:
    """Map paths to leaves; a number tells the leaves of `{"a/b": 1, "a": {"b": 2}}` apart."""
    counts: Counter[str] = Counter()
    leaves = {}
    for path, leaf in named_leaves(tree, root):
        leaves[path, counts[path]] = leaf
        counts[path] += 1
    return leaves


def _signature(leaf: Any) -> tuple[Any, Any]:
    if is_array(leaf):
        return leaf.shape, leaf.dtype
    # A Python number has the dtype of the array that jax converts it to.
    return (), jnp.result_type(leaf) if isinstance(leaf, int | float | complex) else type(leaf)


def strong(leaf: Any) -> Any:
    """Make a weakly typed array strongly typed, with the same dtype."""
    return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def widen(dtype: DTypeLike) -> Any:
    """Return the dtype to accumulate in: float32 for narrower floats, otherwise the same."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32 if narrow else dtype)


def cast_floats(tree: Tree, dtype: DTypeLike, keep: str | None = None, root: str = "") -> Tree:
    """Cast floating arrays; leave integers, booleans, keys and non-arrays unchanged.

    Casting to float32 never narrows: float64 exists only if the user enabled it. `keep` is a
    regular expression, searched in the path of a leaf below `root`; leaves that match are not cast.
    """

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_float(leaf) or (keep and re.search(keep, _join(root, path_name(path)))):
            return leaf
        return leaf.astype(widen(leaf.dtype) if dtype == jnp.float32 else dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)


def select(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """Select each leaf, bit for bit, from `new` if the condition holds, otherwise from `old`."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
