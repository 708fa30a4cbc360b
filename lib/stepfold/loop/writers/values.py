"""What may be written: numbers, distributions, images and settings, made plain or refused."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stepfold import tree

_BUCKETS = 30  # TensorBoard's own, and clu's


def number_of_step(step: Any) -> int:
    """Read a step: an integer of any library, from 0 on."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step: expected an integer of at least 0, got {tree.spell(step)}")
    return number


def named(kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """See that what is to be written has names."""
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"{kind}: expected names of text, got {tree.spell(name)}")
    return values


def numbers(scalars: Mapping[str, Any]) -> dict[str, int | float]:
    """Make Python's numbers of anyone's, the same to the last bit.

    >>> numbers({"loss": np.float32(0.1), "count": jnp.int32(3)})
    {'loss': 0.10000000149011612, 'count': 3}
    """
    return {name: _number(name, value) for name, value in named("scalars", scalars).items()}


def _number(name: str, value: Any) -> int | float:
    if type(value) in (float, int):
        return value  # type: ignore[no-any-return]
    if tree.is_data(value):
        array = np.asarray(value)
        if array.size == 1:
            if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
                return int(array.reshape(()))
            if jnp.issubdtype(array.dtype, jnp.floating):
                return float(array.reshape(()))
    raise TypeError(f"{name}: expected one real number, got {tree.spell(value)}")


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """See that texts are texts."""
    for name, value in named("texts", values).items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected text, got {tree.spell(value)}")
    return dict(values)


class Histogram(NamedTuple):
    """How many elements lie from one edge to the next; what is not finite is counted apart."""

    counts: list[int]
    edges: list[float]
    nonfinite: int
    total: float
    squares: float


def histograms(
    arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None
) -> dict[str, Histogram]:
    """Count the elements of arrays in buckets of equal width from the least to the greatest.

    >>> histograms({"w": np.array([0.0, 1.0, 2.0, np.inf])}, {"w": 2})["w"][:3]
    ([1, 2], [0.0, 1.0, 2.0], 1)
    """
    wanted = num_buckets or {}
    return {
        name: _histogram(name, array, wanted.get(name) or _BUCKETS)
        for name, array in named("arrays", arrays).items()
    }


def _histogram(name: str, array: Any, buckets: int) -> Histogram:
    elements = _real(name, array).astype(np.float64).ravel()
    finite = elements[np.isfinite(elements)]
    if len(finite) and np.ptp(finite) > 0:
        counts, edges = np.histogram(finite, buckets)
    else:  # one bucket around the one value there is, as clu has it
        middle = finite[0] if len(finite) else 0.0
        counts, edges = np.array([len(finite)]), np.array([middle - 0.5, middle + 0.5])
    return Histogram(
        counts.tolist(),
        edges.tolist(),
        len(elements) - len(finite),
        float(finite.sum()),
        float(finite @ finite),
    )


def pixels(images: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Make bytes of images, [N, H, W, C]; floats are taken to be from 0 to 1, and cut to that."""
    return {name: _pixels(name, image) for name, image in named("images", images).items()}


def _pixels(name: str, image: Any) -> np.ndarray:
    array = _real(name, image)
    array = array[None] if array.ndim == 3 else array
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    fits = array.ndim == 4 and array.shape[-1] in (1, 3, 4) and array.size > 0
    if not fits or not (floating or array.dtype == np.uint8):
        raise ValueError(
            f"{name}: expected images [H, W, C] or [N, H, W, C] of 1, 3 or 4 channels, uint8 or "
            f"floats from 0 to 1, got {tree.spell(image)}"
        )
    if not floating:
        return array
    bright = np.nan_to_num(array.astype(np.float32), nan=0.0).clip(0, 1)
    return np.round(bright * 255).astype(np.uint8)


def _real(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value) if tree.is_data(value) else np.asarray(None)
    if array.dtype == object or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: expected an array of real numbers, got {tree.spell(value)}")
    return array


def settings(hparams: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Make of hyper-parameters what every writer can keep: numbers and texts as they are.

    Anything else is spelled as Python does.

    >>> settings({"lr": np.float32(0.5), "nesterov": True, "widths": (8, 8), "name": None})
    {'lr': 0.5, 'nesterov': True, 'widths': '(8, 8)', 'name': 'None'}
    """
    return {name: _setting(name, value) for name, value in named("hparams", hparams).items()}


def _setting(name: str, value: Any) -> str | int | float | bool:
    if isinstance(value, bool | str):
        return value
    if tree.is_data(value) and np.size(value) == 1:
        return _number(name, value)
    return repr(value)
