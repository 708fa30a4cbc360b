"""Metrics as aligned lines on the console."""

import sys
from collections.abc import Mapping
from typing import TextIO

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.writers.base import ConvertingWriter, Histogram, Value


class console_writer(ConvertingWriter):  # noqa: N801
    """Write a line for each call, with numbers aligned in columns and rounded to five digits.

    Histograms are written as a count and a range, images as their shape. Without a `stream`, lines
    go to `sys.stdout` at the time of the call.

    >>> import stepfold as sf
    >>> writer = sf.console_writer()
    >>> writer.write_scalars(8, {"train/loss": 0.6931472, "train/accuracy": 0.5})
           8  train/loss 0.69315      train/accuracy 0.5
    >>> writer.write_scalars(16, {"train/loss": 0.0125, "train/accuracy": 0.984375})
          16  train/loss 0.0125       train/accuracy 0.98438
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise ConfigError(f"stream: expected an open text file or None, got {stream!r}")
        self._stream = stream

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        self._print(str(step), {name: _describe(value) for name, value in values.items()})

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._print("", settings)

    def _print(self, step: str, values: Mapping[str, float | str]) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        line = "  ".join(f"{name} {value}" for name, value in values.items())
        stream.write(f"{step:>8}  {line}".rstrip() + "\n")
        stream.flush()


def _describe(value: Value) -> str:
    if isinstance(value, Histogram):
        nonfinite = f", {value.nonfinite} not finite" if value.nonfinite else ""
        return f"{sum(value.counts)} from {value.edges[0]:.5g} to {value.edges[-1]:.5g}{nonfinite}"
    if isinstance(value, np.ndarray):
        return tree.spell(value)
    if isinstance(value, float):
        return f"{value:<11.5g}"
    return f"{value:<11}" if isinstance(value, int) else value
