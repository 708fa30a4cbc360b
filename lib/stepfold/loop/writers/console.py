"""The console: one aligned line for every write."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.writers import values


def console_writer(stream: TextIO | None = None) -> "ConsoleWriter":
    """Write a line for every write, in which numbers stand below one another.

    Numbers are given to five digits. Of arrays and images it says what they are like.

    Args:
      stream: where to; None is what `sys.stdout` is when it is written.

    >>> import stepfold as sf
    >>> writer = sf.console_writer()
    >>> writer.write_scalars(8, {"train/loss": 0.6931472, "train/accuracy": 0.5})
           8  train/loss 0.69315      train/accuracy 0.5
    >>> writer.write_scalars(16, {"train/loss": 0.0125, "train/accuracy": 0.984375})
          16  train/loss 0.0125       train/accuracy 0.98438
    """
    if stream is not None and not callable(getattr(stream, "write", None)):
        raise ConfigError(f"stream: expected an open text file or None, got {stream!r}")
    return ConsoleWriter(stream)


class ConsoleWriter:
    """Write lines to a stream; `console_writer` makes it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def _write(self, step: int | str, parts: list[str]) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(f"{step:>8}  {'  '.join(parts)}".rstrip() + "\n")
        stream.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        found = values.numbers(scalars)
        self._write(
            values.number_of_step(step),
            [f"{name} {_short(number):<11}" for name, number in found.items()],
        )

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        found = values.texts(texts)
        self._write(values.number_of_step(step), [f"{name} {one}" for name, one in found.items()])

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write from where to where the elements of arrays are."""
        found = values.histograms(arrays, num_buckets)
        self._write(
            values.number_of_step(step),
            [
                f"{name} {sum(one.counts)} from {_short(one.edges[0])} to {_short(one.edges[-1])}"
                + (f", {one.nonfinite} not finite" if one.nonfinite else "")
                for name, one in found.items()
            ],
        )

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write that there were images, and their shapes [N, H, W, C]."""
        found = values.pixels(images)
        self._write(
            values.number_of_step(step),
            [f"{name} {tree.spell(one)}" for name, one in found.items()],
        )

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with."""
        found = values.settings(hparams)
        self._write("", [f"{name} {one}" for name, one in found.items()])

    def flush(self) -> None:
        """Do nothing: every line is flushed."""

    def close(self) -> None:
        """Do nothing: the stream is not the writer's to close."""


def _short(number: float) -> str:
    return f"{number:.5g}" if isinstance(number, float) else str(number)
