"""TensorBoard event files, without TensorFlow, by the protobufs of tensorboardX.

Its `SummaryWriter` is not used: it loses errors, its `flush` does not wait, and two that start
within one second overwrite each other's file.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stepfold.core.validation import read_integer
from stepfold.writers import base


def tensorboard(folder: base.PathLike) -> base.Writer:
    """Write event files into a folder, to be shown by `tensorboard --logdir folder`.

    TensorBoard keeps numbers in single precision. Elements of arrays that are not finite are
    counted in `name/nonfinite`. Several images of one name are called `name/0`, `name/1`, …

    The first write creates the folder and a file. The file is up to date after each write, even if
    the process is killed, and durable after `flush`. `resume(step)` makes TensorBoard hide what
    earlier files hold for later steps.

    >>> import pathlib, stepfold as sf, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> writer = sf.writers.tensorboard(folder)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.close()
    >>> len(list(folder.glob("events.out.tfevents.*")))
    1
    """
    base.require("tensorboardX", "tensorboard", "tensorboard")
    return TensorboardWriter(base.check_path("tensorboard", folder, "folder"))


class TensorboardWriter(base.FileWriter):
    """The writer of `tensorboard`."""

    def _write(self, step: int, values: Mapping[str, base.Value]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        summaries = [each for name, value in values.items() for each in _summaries(name, value)]
        if summaries:
            self._write_event(step=step, summary=Summary(value=summaries))

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        from tensorboardX.summary import hparams

        # Only the start of the session, as in clu: TensorBoard then offers all metrics.
        self._write_event(summary=hparams(settings, {})[1])

    def resume(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        self._write_event(step=read_integer("step", step, 0) + 1, session_log=start)

    def _write_event(self, **content: Any) -> None:
        with base.explain_os_errors(self._path):
            if self._file is None:
                self._file = self._open()
            base.append(self._file, _record(**content))

    def _open(self) -> int:
        """Start a file that sorts after all others, since TensorBoard reads files in that order."""
        self._path.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in self._path.glob("events.out.tfevents.*")]
        times = [name.split(".")[3] for name in names]
        # The clock may have gone back.
        now = max([int(time.time()), *(int(each) + 1 for each in times if each.isdecimal())])
        name = f"events.out.tfevents.{now}.{socket.gethostname()}.{len(names):06}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = os.open(self._path / name, flags, 0o666)
        base.append(file, _record(file_version="brain.Event:2"))
        return file


def _summaries(name: str, value: base.Value) -> Iterator[Any]:
    from tensorboardX import summary
    from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

    if isinstance(value, str):
        yield summary.text(name, value).value[0]
    elif isinstance(value, base.Histogram):
        histogram = HistogramProto(
            min=value.edges[0],
            max=value.edges[-1],
            num=sum(value.counts),
            sum=value.total,
            sum_squares=value.squares,
            bucket_limit=value.edges,
            bucket=[0, *value.counts],  # an empty bucket that ends at the first edge
        )
        yield Summary.Value(tag=name, histo=histogram)
        if value.nonfinite:
            yield Summary.Value(tag=f"{name}/nonfinite", simple_value=value.nonfinite)
    elif isinstance(value, np.ndarray):
        for index, pixels in enumerate(value):
            image = summary.image(name, pixels, dataformats="HWC").value[0]
            image.tag = name if len(value) == 1 else f"{name}/{index}"
            yield image
    else:
        yield Summary.Value(tag=name, simple_value=value)


def _record(**content: Any) -> bytes:
    """Frame an event as a TFRecord: its length and itself, each with a checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data: bytes = Event(wall_time=time.time(), **content).SerializeToString()
    length = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checks[0] + data + checks[1]
