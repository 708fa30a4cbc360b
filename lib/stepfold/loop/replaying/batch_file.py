"""A batch on the disk: its arrays in numpy's own format, bit for bit, and its structure in JSON.

No pickle is written, so that none is ever run. What numpy's format has no dtype for, bfloat16 say,
is in it as bytes, and the structure names the dtype.
"""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree

Array = np.ndarray[Any, Any]


class Packed(NamedTuple):
    """A batch taken apart.

    Attributes:
      structure: dicts, lists, tuples and numbers, for JSON to hold.
      arrays: what the structure means by `array: 0` and so on.
      lost: what does not come back as it was, in words.
    """

    structure: Any
    arrays: list[Array]
    lost: list[str]


def pack(batch: Any) -> Packed:
    """Take a batch apart: dicts, lists, tuples, None, numbers, text, arrays and random keys.

    Another container is written as a dict of what is in it, and `lost` says so.

    >>> pack({"x": np.zeros(2), "n": 3}).structure
    {'dict': [['x', {'array': 0, 'dtype': 'float64'}], ['n', {'value': 3}]]}
    """
    packed = Packed(None, [], [])
    return packed._replace(structure=_structure(batch, "batch", packed))


def _structure(node: Any, path: str, packed: Packed) -> Any:
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        inner = [[k, _structure(v, f"{path}/{k}", packed)] for k, v in node.items()]
        return {"dict": inner}
    if type(node) in (list, tuple):
        inner = [_structure(v, f"{path}/{i}", packed) for i, v in enumerate(node)]
        return {type(node).__name__: inner}
    if node is None or type(node) in (bool, int, float, str):
        return {"value": node}
    if isinstance(node, jax.Array | np.ndarray | np.generic):
        return _array(node, path, packed)
    return _foreign(node, path, packed)


def _array(leaf: Any, path: str, packed: Packed) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        packed.lost.append(f"{path}: {tree.spell(leaf)} is spread over several processes")
        return {"value": None}
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    host = np.asarray(jax.random.key_data(leaf) if key else leaf)
    if host.dtype.hasobject or host.dtype.names:
        packed.lost.append(f"{path}: {tree.spell(leaf)} holds no numbers")
        return {"value": None}
    packed.arrays.append(host)
    said = {"array": len(packed.arrays) - 1, "dtype": host.dtype.name}
    return said | ({"key": str(jax.random.key_impl(leaf))} if key else {})


def _foreign(node: Any, path: str, packed: Packed) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda inner: inner is not node)
    if len(leaves) == 1 and leaves[0][1] is node:
        packed.lost.append(f"{path}: {tree.spell(node)} is no array")
        return {"value": None}
    packed.lost.append(f"{path}: a {type(node).__name__}, written as a dict")
    names = [(tree.path_name(way), inner) for way, inner in leaves]
    return {"dict": [[name, _structure(v, f"{path}/{name}", packed)] for name, v in names]}


def unpack(structure: Any, arrays: Sequence[Array]) -> Any:
    """Put a batch together again.

    >>> batch = {"x": [np.arange(2), None], "n": (3, "text")}
    >>> packed = pack(batch)
    >>> unpack(packed.structure, packed.arrays)
    {'x': [array([0, 1]), None], 'n': (3, 'text')}
    """
    ((kind, content), *_) = structure.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: unpack(inner, arrays) for key, inner in content}
    if kind in ("list", "tuple"):
        inner = [unpack(one, arrays) for one in content]
        return inner if kind == "list" else tuple(inner)
    found = arrays[content]
    if found.dtype.kind == "V":
        found = found.view(jnp.dtype(structure["dtype"]))
    if "key" in structure:
        return jax.random.wrap_key_data(jnp.asarray(found), impl=structure["key"])
    return found


def written(arrays: Sequence[Array]) -> bytes:
    """Write arrays as the bytes of an `.npz` file."""
    file = io.BytesIO()
    np.savez(file, *(np.ascontiguousarray(array).reshape(array.shape) for array in arrays))
    return file.getvalue()


def read(content: bytes) -> list[Array]:
    """Read what `written` gave."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return [found[f"arr_{i}"] for i in range(len(found.files))]
