"""The base class of metric writers, and the checks and conversions that stepfold's own share."""

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError

PathLike = str | os.PathLike[str]
Values = Mapping[str, Any]
Buckets = Mapping[str, int] | None


class Writer:
    """Base class of metric writers. Every method is a no-op; override those you need.

    The methods are those of clu's `MetricWriter`. Any object that has them can be used as a
    writer, so clu's writers can; only `resume` is optional.

    Steps never decrease. Several calls with the same step belong together. If a metric is written
    twice for a step, the later value counts.

    >>> import stepfold as sf
    >>> class Printer(sf.Writer):
    ...     def write_scalars(self, step, scalars):
    ...         print(step, scalars)
    >>> writer = sf.multi_writer(Printer(), sf.console_writer())
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    10 {'train/loss': 0.5}
          10  train/loss 0.5
    >>> writer.close()
    """

    def write_scalars(self, step: int, scalars: Values) -> None:
        """Write real numbers: Python, numpy or jax scalars."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""

    def write_histograms(self, step: int, arrays: Values, num_buckets: Buckets = None) -> None:
        """Write the distribution of the elements of arrays."""

    def write_images(self, step: int, images: Values) -> None:
        """Write images [H, W, C] or [N, H, W, C]: uint8, or floats from 0 to 1."""

    def write_hparams(self, hparams: Values) -> None:
        """Write the hyper-parameters of the run."""

    def resume(self, step: int) -> None:
        """Drop everything written for steps after `step`; the run continues there."""

    def flush(self) -> None:
        """Return when everything written so far is durable."""

    def close(self) -> None:
        """Flush and release resources."""


class Histogram(NamedTuple):
    """Counts of the finite elements between edges, and what TensorBoard wants besides."""

    counts: list[int]
    edges: list[float]
    nonfinite: int
    total: float
    squares: float


Value = float | str | Histogram | np.ndarray


class ConvertingWriter(Writer):
    """Base of stepfold's backends: check and convert values, then pass them on to one method."""

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        """Write numbers, texts, histograms or batches of uint8 images [N, H, W, C]."""
        raise NotImplementedError

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        """Write hyper-parameters: numbers as they are, anything else as text."""
        raise NotImplementedError

    def write_scalars(self, step: int, scalars: Values) -> None:
        self._write(check_step(step), _convert("scalars", scalars, _number))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(check_step(step), _convert("texts", texts, _text))

    def write_histograms(self, step: int, arrays: Values, num_buckets: Buckets = None) -> None:
        def convert(name: str, array: Any) -> Histogram:
            return _histogram(name, array, (num_buckets or {}).get(name))

        self._write(check_step(step), _convert("arrays", arrays, convert))

    def write_images(self, step: int, images: Values) -> None:
        self._write(check_step(step), _convert("images", images, _pixels))

    def write_hparams(self, hparams: Values) -> None:
        self._write_settings(_convert("hparams", hparams, _setting))


def check_step(step: Any) -> int:
    """Convert a step, an integer of any library, to Python's."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step: expected an integer of at least 0, got {tree.spell(step)}")
    return number


def _convert(kind: str, values: Values, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"{kind}: expected names that are strings, got {tree.spell(name)}")
    return {name: convert(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> float:
    """Convert a number of any library to Python's, exactly."""
    if type(value) in (float, int):
        return value  # type: ignore[no-any-return]
    if tree.is_data(value) and np.size(value) == 1:
        array = np.asarray(value).reshape(())
        if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
            return int(array)
        if jnp.issubdtype(array.dtype, jnp.floating):
            return float(array)
    raise TypeError(f"{name}: expected one real number, got {tree.spell(value)}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected text, got {tree.spell(value)}")
    return value


def _histogram(name: str, array: Any, buckets: int | None) -> Histogram:
    elements = _real_array(name, array).astype(np.float64).ravel()
    finite = elements[np.isfinite(elements)]
    if len(finite) and np.ptp(finite) > 0:
        counts, edges = np.histogram(
            finite, buckets or 30
        )  # 30 is TensorBoard's default, and clu's
    else:  # one bucket around the only value, as in clu
        middle = finite[0] if len(finite) else 0.0
        counts, edges = np.array([len(finite)]), np.array([middle - 0.5, middle + 0.5])
    nonfinite = len(elements) - len(finite)
    total, squares = float(finite.sum()), float(finite @ finite)
    return Histogram(counts.tolist(), edges.tolist(), nonfinite, total, squares)


def _pixels(name: str, image: Any) -> np.ndarray:
    array = _real_array(name, image)
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
    return np.round(np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)


def _real_array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value if tree.is_data(value) else None)
    if array.dtype == object or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: expected an array of real numbers, got {tree.spell(value)}")
    return array


def _setting(name: str, value: Any) -> float | str:
    if isinstance(value, bool | str):
        return value
    return _number(name, value) if tree.is_data(value) and np.size(value) == 1 else repr(value)


def check_path(argument: str, path: Any, kind: str = "file") -> Path:
    """Check that a file or a folder can be written to, without touching it."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{argument}: expected the path of a {kind}, got {tree.spell(path)}")
    target = Path(path).absolute()
    existing = next(each for each in (target, *target.parents) if each.exists())
    actual = "folder" if existing.is_dir() else "file"
    if actual != (kind if existing == target else "folder"):
        problem = f"{existing} is a {actual}"
    elif not os.access(existing, os.W_OK):
        problem = f"there is no permission to write to {existing}"
    else:
        return target
    raise ConfigError(
        f"{argument}: expected the path of a {kind} to write to, got {path}, but {problem}; give "
        "another path"
    )


def require(package: str, argument: str, extra: str) -> None:
    """Check that an optional package is installed, without importing it."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{argument}: expected {package}, which is not installed; "
            f"install it with pip install 'stepfold[{extra}]'"
        )


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Add the path of a file to errors while it is written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        error.add_note(
            f"while writing {path}: rows written before are intact; check disk space and "
            "permissions, then continue, or write to another path"
        )
        raise


def append(file: int, data: bytes) -> None:
    """Append all of the data to an open file or, if that fails, nothing."""
    size = os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, size)
        raise
