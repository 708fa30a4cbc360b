"""The base classes of metric writers, with their checks and conversions, and the console."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.steps import sync
from stepfold.core.validation import absolute_path, read_instance, read_integer
from stepfold.errors import ConfigError, refuse

PathLike = str | os.PathLike[str]
Values = Mapping[str, Any]
Buckets = Mapping[str, int] | None


class Writer:
    """Base class of metric writers. Every method is a no-op; override those you need.

    The methods are those of clu's `MetricWriter`. Any object that has them is a writer, so clu's
    writers are; only `resume` is optional. Steps never decrease. If a metric is written twice for
    a step, the later value counts.

    >>> import stepfold as sf
    >>> class Printer(sf.writers.Writer):
    ...     def write_scalars(self, step, scalars):
    ...         print(step, scalars)
    >>> writer = sf.writers.multi_writer(Printer(), sf.writers.console())
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    10 {'train/loss': 0.5}
          10  train/loss 0.5
    """

    @property
    def _files(self) -> Sequence[Path]:
        """The files that it writes, of which each needs to have one writer."""
        return ()

    def _forward(self, method: str, *arguments: Any) -> None:
        """Handle the call of a method that is not overridden."""

    def write_scalars(self, step: int, scalars: Values) -> None:
        """Write real numbers: Python, numpy or jax scalars."""
        self._forward("write_scalars", step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._forward("write_texts", step, texts)

    def write_histograms(self, step: int, arrays: Values, num_buckets: Buckets = None) -> None:
        """Write the distribution of the elements of arrays."""
        self._forward("write_histograms", step, arrays, num_buckets)

    def write_images(self, step: int, images: Values) -> None:
        """Write images [H, W, C] or [N, H, W, C]: uint8, or floats from 0 to 1."""
        self._forward("write_images", step, images)

    def write_hparams(self, hparams: Values) -> None:
        self._forward("write_hparams", hparams)

    def resume(self, step: int) -> None:
        """Drop everything written for steps after `step`; the run continues there."""
        self._forward("resume", step)

    def flush(self) -> None:
        """Return when everything written so far is durable."""
        self._forward("flush")

    def close(self) -> None:
        """Flush and release resources."""
        self._forward("close")


def files_of(writer: Any) -> Sequence[Path]:
    """Return the files that a writer of stepfold writes."""
    return writer._files if isinstance(writer, Writer) else ()


class Histogram(NamedTuple):
    """Counts of the finite elements between edges, and the statistics that TensorBoard shows."""

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

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        """Write hyper-parameters: numbers as they are, anything else as text."""

    def write_scalars(self, step: int, scalars: Values) -> None:
        self._write(read_integer("step", step, 0), _convert("scalars", scalars, _number))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(read_integer("step", step, 0), _convert("texts", texts, _text))

    def write_histograms(self, step: int, arrays: Values, num_buckets: Buckets = None) -> None:
        convert = partial(_histogram, num_buckets or {})
        self._write(read_integer("step", step, 0), _convert("arrays", arrays, convert))

    def write_images(self, step: int, images: Values) -> None:
        self._write(read_integer("step", step, 0), _convert("images", images, _pixels))

    def write_hparams(self, hparams: Values) -> None:
        self._write_settings(_convert("hparams", hparams, _setting))


def _convert(kind: str, values: Values, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    for name in values:
        read_instance(kind, name, str, "names that are strings", kind=TypeError)
    return {name: convert(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> float:
    """Convert a number of any library to a Python number, exactly."""
    if type(value) in (float, int):
        return value  # type: ignore[no-any-return]
    array = _real_array(name, value, "one real number", size=1).reshape(())
    return float(array) if jnp.issubdtype(array.dtype, jnp.floating) else int(array)


def _real_array(
    name: str, value: Any, expected: str = "an array of real numbers", size: int | None = None
) -> np.ndarray:
    if not tree.is_real(value) or size not in (None, np.size(value)):
        refuse(name, expected, tree.describe_value(value), kind=TypeError)
    return np.asarray(value)


def _text(name: str, value: Any) -> str:
    return read_instance(name, value, str, "text", kind=TypeError)


def _histogram(num_buckets: Mapping[str, int], name: str, value: Any) -> Histogram:
    elements = _real_array(name, value).astype(np.float64).ravel()
    finite = elements[np.isfinite(elements)]
    if finite.size and np.ptp(finite) > 0:
        counts, edges = np.histogram(finite, num_buckets.get(name) or 30)  # TensorBoard's default
    else:  # one bucket around the only value, as in clu
        counts, edges = np.array([finite.size]), finite[:1].sum() + np.array([-0.5, 0.5])
    nonfinite, squares = elements.size - finite.size, float(finite @ finite)
    return Histogram(counts.tolist(), edges.tolist(), nonfinite, float(finite.sum()), squares)


def _pixels(name: str, value: Any) -> np.ndarray:
    array = _real_array(name, value)
    array = array[None] if array.ndim == 3 else array
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    is_batch = array.ndim == 4 and array.shape[-1] in (1, 3, 4) and array.size > 0
    if not is_batch or not (is_float or array.dtype == np.uint8):
        kind = "[H, W, C] or [N, H, W, C] of 1, 3 or 4 channels, uint8 or floats from 0 to 1"
        refuse(name, f"images {kind}", tree.describe_value(value), kind=ValueError)
    if is_float:
        array = np.round(np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
    return array


def _setting(name: str, value: Any) -> float | str:
    if isinstance(value, bool | str):
        return value
    return _number(name, value) if tree.is_data(value) and np.size(value) == 1 else repr(value)


def console(stream: TextIO | None = None) -> Writer:
    """Write a line for each call, with numbers aligned in columns and rounded to five digits.

    Histograms are written as a count and a range, images as their shape. Without a `stream`, lines
    go to `sys.stdout` at the time of the call.

    >>> import stepfold as sf
    >>> writer = sf.writers.console()
    >>> writer.write_scalars(8, {"train/loss": 0.6931472, "train/accuracy": 0.5})
           8  train/loss 0.69315      train/accuracy 0.5
    >>> writer.write_scalars(16, {"train/loss": 0.0125, "train/accuracy": 0.984375})
          16  train/loss 0.0125       train/accuracy 0.98438
    """
    if stream is not None and not callable(getattr(stream, "write", None)):
        refuse("stream", "an open text file or None", tree.describe_value(stream))
    return ConsoleWriter(stream)


class ConsoleWriter(ConvertingWriter):
    """The writer of `console`."""

    shows_progress = True

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        self._print(step, {name: _describe(value) for name, value in values.items()})

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._print("", settings)

    def _print(self, step: int | str, values: Mapping[str, float | str]) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        line = "  ".join(f"{name} {value}" for name, value in values.items())
        stream.write(f"{step:>8}  {line}".rstrip() + "\n")
        stream.flush()


def _describe(value: Value) -> str:
    if isinstance(value, Histogram):
        nonfinite = f", {value.nonfinite} not finite" if value.nonfinite else ""
        return f"{sum(value.counts)} from {value.edges[0]:.5g} to {value.edges[-1]:.5g}{nonfinite}"
    if isinstance(value, np.ndarray):
        return tree.describe_value(value)
    if isinstance(value, float):
        return f"{value:<11.5g}"
    return f"{value:<11}" if isinstance(value, int) else value


class FileWriter(ConvertingWriter):
    """Base of the backends that append to a file, at a path or in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def flush(self) -> None:
        if self._file is not None:
            with explain_os_errors(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        """Flush and close the file. A later write opens one again."""
        try:
            self.flush()
        finally:
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def check_path(argument: str, path: Any, kind: str = "file") -> Path:
    """Check that a file or a folder can be written to, without touching it."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in f"{path}":
        refuse(argument, f"the path of a {kind}", tree.describe_value(path))
    target = absolute_path(argument, path)
    try:
        existing = next(each for each in (target, *target.parents) if each.exists())
        if existing.is_dir() != (kind == "folder" or existing != target):
            problem = f"{existing} is a {'folder' if existing.is_dir() else 'file'}"
        elif not os.access(existing, os.W_OK):
            problem = f"there is no permission to write to {existing}"
        else:
            return target
    except OSError as error:  # such as a name that is too long
        problem = f"the path is invalid: {error.strerror}"
    expected = f"the path of a {kind} to write to"
    refuse(argument, expected, f"{path}, but {problem}", "give another path")


def require(package: str, argument: str, extra: str) -> None:
    """Check that an optional package is installed, without importing it."""
    if find_spec(package) is None:
        advice = f"run pip install 'stepfold[{extra}]'"
        raise ConfigError(f"{argument}: {package} is not installed; {advice}")


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


def append(file: int, data: bytes, *, replaced: bytes = b"") -> None:
    """Append all of the data in place of the last bytes; if that fails, restore those."""
    size = os.fstat(file).st_size - len(replaced)
    try:
        if replaced:
            os.ftruncate(file, size)
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, size)
        if replaced:
            append(file, replaced)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically; if it cannot be written, the old content stays."""
    path = path.resolve()
    new = path.with_name(path.name + ".new")
    with explain_os_errors(path):
        try:
            new.write_bytes(data)
            sync(new)
            if path.exists():
                shutil.copymode(path, new)
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
