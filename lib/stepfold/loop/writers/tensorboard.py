"""TensorBoard's event files, without TensorFlow.

tensorboardX knows what is in an event. Its own `SummaryWriter` is left aside: it writes in a thread
whose errors nobody hears, its `flush` does not wait for that thread, and two that are begun within
one second write over one another.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.writers import values
from stepfold.loop.writers.lines import append, naming, see_writable
from stepfold.loop.writers.protocol import require


def tensorboard_writer(folder: str | os.PathLike[str]) -> "TensorboardWriter":
    """Write event files into a folder, for TensorBoard to show: `tensorboard --logdir folder`.

    Numbers are kept in single precision, as TensorBoard has them. Elements of arrays that are not
    finite are counted beside the histogram, as `name/nonfinite`. Every write is with the system
    when the call returns, and the folder is not touched before the first one.

    Event files only ever grow, and a run that goes on begins another: `resume(step)` notes in it
    that what was written of later steps is void, and TensorBoard does not show it.

    Args:
      folder: where the files go; it is made if need be.

    Raises:
      ConfigError: if tensorboardX is not installed, or there can be no such folder.

    >>> import pathlib, stepfold as sf, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> writer = sf.tensorboard_writer(folder)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.close()
    >>> len(list(folder.glob("events.out.tfevents.*")))
    1
    """
    require("tensorboardX", "tensorboard_writer", "tensorboard")
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(f"tensorboard_writer: expected a folder, got {tree.spell(folder)}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"tensorboard_writer: expected a folder, got the file {folder}")
    see_writable("tensorboard_writer", folder)
    return TensorboardWriter(folder)


class TensorboardWriter:
    """Write event files; `tensorboard_writer` makes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def _open(self) -> int:
        """Begin a file whose name sorts after those that are there, as TensorBoard reads them."""
        with naming(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self._folder.glob("events.out.tfevents.*")]
            begun = [int(one.split(".")[3]) for one in names if one.split(".")[3].isdecimal()]
            now = max([int(time.time()), *(one + 1 for one in begun)])  # though a clock went back
            name = f"events.out.tfevents.{now}.{socket.gethostname()}.{len(names):06}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            return os.open(self._folder / name, flags, 0o666)

    def _write(self, **content: Any) -> None:
        if self._file is None:
            self._file = self._open()
            self._write(file_version="brain.Event:2")
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), **content)
        with naming(self._folder):
            append(self._file, _record(event.SerializeToString()))

    def _write_summary(self, step: int, found: list[Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        step = values.number_of_step(step)
        if found:
            self._write(step=step, summary=Summary(value=found))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._write_summary(step, _scalars(values.numbers(scalars)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts, which TensorBoard takes for Markdown."""
        from tensorboardX.summary import text

        found = values.texts(texts)
        self._write_summary(step, [text(name, one).value[0] for name, one in found.items()])

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write how the elements of arrays are distributed."""
        found = values.histograms(arrays, num_buckets)
        nonfinite = {f"{name}/nonfinite": one.nonfinite for name, one in found.items()}
        self._write_summary(
            step,
            [_histogram(name, one) for name, one in found.items()]
            + _scalars({name: count for name, count in nonfinite.items() if count}),
        )

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images; several of one name are called `name/0`, `name/1` and so on."""
        self._write_summary(
            step,
            [
                _image(name if len(batch) == 1 else f"{name}/{index}", one)
                for name, batch in values.pixels(images).items()
                for index, one in enumerate(batch)
            ],
        )

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with, for TensorBoard to compare runs by."""
        from tensorboardX.summary import hparams as summaries

        # The start of the session alone, as clu has it: TensorBoard then offers all the metrics.
        _, start, _ = summaries(values.settings(hparams), {})
        self._write(summary=start)

    def resume(self, step: int) -> None:
        """Go on from a step: have TensorBoard show nothing that was written of later ones.

        Args:
          step: the last that is kept.
        """
        from tensorboardX.proto.event_pb2 import SessionLog

        session = SessionLog(status=SessionLog.START)
        self._write(step=values.number_of_step(step) + 1, session_log=session)

    def flush(self) -> None:
        """Return when all is on the disk, and would outlive a power cut."""
        if self._file is not None:
            with naming(self._folder):
                os.fsync(self._file)

    def close(self) -> None:
        """Flush, and close the file; to write again begins another."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = None


def _scalars(numbers: Mapping[str, int | float]) -> list[Any]:
    from tensorboardX.proto.summary_pb2 import Summary

    return [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]


def _histogram(name: str, found: values.Histogram) -> Any:
    from tensorboardX.summary import histogram_raw

    # A first and empty bucket says where the one after it begins.
    summary = histogram_raw(
        name,
        min=found.edges[0],
        max=found.edges[-1],
        num=sum(found.counts),
        sum=found.total,
        sum_squares=found.squares,
        bucket_limits=found.edges,
        bucket_counts=[0, *found.counts],
    )
    summary.value[0].tag = name  # as it is: tensorboardX would spell some names in another way
    return summary.value[0]


def _image(name: str, pixels: Any) -> Any:
    from tensorboardX.summary import image

    summary = image(name, pixels, dataformats="HWC")
    summary.value[0].tag = name
    return summary.value[0]


def _record(data: bytes) -> bytes:
    """Frame an event as a TFRecord: its length and itself, each with a checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checks[0] + data + checks[1]
