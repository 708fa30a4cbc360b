"""Several writers at once."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from stepfold.loop.writers.protocol import Writer, read_writer, resume


def multi_writer(*writers: Writer) -> "MultiWriter":
    """Write to several writers, one after another.

    If one of them fails, the others are given all the same, and then its error is raised.

    Args:
      writers: stepfold's, clu's, or anything with the methods of a `Writer`.

    Raises:
      ConfigError: if one of them is no writer.

    >>> import pathlib, stepfold as sf, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> writer = sf.multi_writer(
    ...     sf.csv_writer(folder / "metrics.csv"), sf.jsonl_writer(folder / "metrics.jsonl")
    ... )
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.close()
    >>> print((folder / "metrics.csv").read_text() + (folder / "metrics.jsonl").read_text(), end="")
    step,train/loss
    10,0.5
    {"step": 10, "train/loss": 0.5}
    """
    return MultiWriter(
        [read_writer(f"writers[{index}]", writer) for index, writer in enumerate(writers)]
    )


class MultiWriter:
    """Write to several writers; `multi_writer` makes it."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def _each(self, method: str, *arguments: Any) -> None:
        # The stack calls all, whichever fails, and raises what went wrong, the one with the other.
        with ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(getattr(writer, method), *arguments)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._each("write_scalars", step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        self._each("write_texts", step, texts)

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write how the elements of arrays are distributed."""
        self._each("write_histograms", step, arrays, num_buckets)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images."""
        self._each("write_images", step, images)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with."""
        self._each("write_hparams", hparams)

    def resume(self, step: int) -> None:
        """Tell those that want to know that the run goes on from a step."""
        with ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(resume, writer, step)

    def flush(self) -> None:
        """Flush all of them."""
        self._each("flush")

    def close(self) -> None:
        """Close all of them."""
        self._each("close")
