"""The dtypes of batches: one rule for `batches`, `mix`, `collate` and `pack`.

Arrays keep their dtypes, and Python numbers become int64, float64 and bool, as everywhere in numpy.
So a batch is the same in every process and thread, whatever their settings of jax. jax reads 64-bit
numbers as 32-bit ones unless x64 is enabled, and silently wraps integers that do not fit: `collate`
and `pack` refuse those, and `batches` warns of them once, since a step may not use them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.errors import DataError, refuse, warn


def dtype_in_jax(dtype: Any) -> Any:
    """Return the dtype that jax reads one of numpy as, by whether x64 is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype)


def find_wrapped(array: Any) -> int | None:
    """Return an integer that jax would wrap around, or None."""
    dtype = array.dtype
    if dtype.kind not in "iu" or dtype.itemsize < 8 or not array.size:
        return None
    limits = np.iinfo(dtype_in_jax(dtype))
    # Negative integers are large when viewed as unsigned: one pass is enough for most batches.
    if array.view(dtype.str.replace("i", "u")).max() <= limits.max:
        return None
    low, high = int(array.min()), int(array.max())
    return low if low < limits.min else high if high > limits.max else None


def warn_of_wrapped(batch: Any) -> None:
    """Warn of the integers in a batch that jax would wrap around."""
    for name, leaf in tree.named_leaves(batch, "batch"):
        wrapped = find_wrapped(leaf) if isinstance(leaf, np.ndarray) else None
        if wrapped is not None:
            warn(
                f"{name}: expected integers that fit {dtype_in_jax(leaf.dtype)}, which jax reads "
                f"them as, got {wrapped}, which it wraps around; make them smaller, or floats, or "
                "enable x64",
            )


def refuse_keys(name: str, values: Sequence[Any]) -> None:
    """Refuse PRNG keys, which numpy cannot hold."""
    for value in values:
        if tree.is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            advice = "give jax.random.key_data(keys), and call jax.random.wrap_key_data in the loss"
            got = tree.describe_value(value)
            refuse(name, "numbers, to make batches of", got, advice, kind=DataError)


def refuse_masked(name: str, types: Iterable[type]) -> None:
    """Refuse masked arrays, whose masked values would count as data."""
    if any(issubclass(each, np.ma.MaskedArray) for each in types):
        advice = "give its data and its mask as two arrays"
        refuse(name, "an array", "a masked array of numpy", advice, kind=DataError)
