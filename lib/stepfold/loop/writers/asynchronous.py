"""Writing in the background: the loop hands over, and a thread writes."""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.writers.protocol import Writer, read_writer, resume

# Seconds from one look at what waits to the next. To wake the thread with every call would be
# simpler, but that costs the loop tens of µs and, on a busy machine, now and then milliseconds.
_PAUSE = 0.02


def async_writer(writer: Writer, *, depth: int = 256) -> "AsyncWriter":
    """Write in a thread, in the order of the calls, so that the loop does not wait.

    Numbers still on a device are waited for there as well. What goes wrong is raised by a later
    call: the next one, or `flush` or `close`. Not to be left without `close`; if it is all the
    same, the interpreter waits before it ends until all is written. A kill loses what waits, which
    is what was given in the last hundredths of a second, if the writer keeps up.

    Several writers share a thread if they are joined first: `async_writer(multi_writer(…))`.

    Args:
      writer: what writes.
      depth: how many calls may wait to be written; the next one waits until there is room.

    Raises:
      ConfigError: if that is no writer, or the depth no integer of at least 1.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.async_writer(sf.jsonl_writer(path))
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.flush()
    >>> print(path.read_text(), end="")
    {"step": 10, "train/loss": 0.5}
    >>> writer.close()
    """
    if type(depth) is not int or depth < 1:
        raise ConfigError(f"depth: expected an integer of at least 1, got {tree.spell(depth)}")
    return AsyncWriter(read_writer("writer", writer), depth)


class AsyncWriter:
    """Write in a thread; `async_writer` makes it."""

    def __init__(self, writer: Writer, depth: int) -> None:
        self._writer = writer
        self._depth = depth
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._look, self._ending = threading.Event(), False
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._open: list[AsyncWriter] = []

    def _hand_over(self, function: Callable[..., object], *arguments: Any) -> None:
        if self._thread is None:
            self._start()
        while len(self._calls) >= self._depth:
            self._look.set()
            time.sleep(_PAUSE / 10)
        self._calls.append((function, arguments))
        if self._failures:
            self._raise()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._open = [self]
                # `atexit` comes too late: by then a writer can start no thread of its own.
                threading._register_atexit(_leave, self._open)  # type: ignore[attr-defined]
                self._thread = threading.Thread(target=self._work, name="stepfold-write")
                self._thread.start()

    def _work(self) -> None:
        while self._calls or not self._ending:
            if not self._calls:
                self._look.wait(_PAUSE)
                self._look.clear()
                continue
            function, arguments = self._calls[0]  # it waits until it is done with
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001  raised by the next call
                error.add_note(_told(function, arguments))
                self._failures.append(error)
            self._calls.popleft()

    def _raise(self) -> None:
        failures = []
        while self._failures:  # taken one by one, since the thread may add to them
            failures.append(self._failures.pop(0))
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"and after it {type(other).__name__}: {other}")
            raise failures[0]

    def _wait_for(self, function: Callable[..., object], *arguments: Any) -> None:
        done = threading.Event()
        try:
            self._hand_over(function, *arguments)
        finally:
            self._calls.append((done.set, ()))
            self._look.set()
            done.wait()
        self._raise()

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._hand_over(self._writer.write_scalars, step, _as_they_are(scalars))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        self._hand_over(self._writer.write_texts, step, dict(texts))

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write how the elements of arrays are distributed; numpy's arrays are copied."""
        buckets = None if num_buckets is None else dict(num_buckets)
        self._hand_over(self._writer.write_histograms, step, _as_they_are(arrays), buckets)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images; numpy's arrays are copied."""
        self._hand_over(self._writer.write_images, step, _as_they_are(images))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with."""
        self._hand_over(self._writer.write_hparams, _as_they_are(hparams))

    def resume(self, step: int) -> None:
        """Tell the writer that the run goes on from a step, and wait until it has heard."""
        self._wait_for(resume, self._writer, step)

    def flush(self) -> None:
        """Return when all is written and flushed.

        Raises:
          Exception: whatever went wrong in the background, since it was last raised.
        """
        self._wait_for(self._writer.flush)

    def close(self) -> None:
        """Wait until all is written, end the thread, and close the writer.

        To write again begins anew. To call it twice is well.

        Raises:
          Exception: whatever went wrong in the background, since it was last raised.
        """
        if self._thread is not None:
            self._ending = True
            self._look.set()
            self._thread.join()
            self._thread, self._ending = None, False
            self._open.clear()
        try:
            self._raise()
        finally:
            self._writer.close()


def _as_they_are(values: Mapping[str, Any]) -> dict[str, Any]:
    """Take values as they are now: numpy's arrays may be changed before they are written."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _told(function: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    name = getattr(function, "__name__", "a call")
    step = f" of step {arguments[0]}" if len(arguments) > 1 and name.startswith("write") else ""
    return f"in the background, in {name}{step}: another call than the one that raises it"


def _leave(opened: list[AsyncWriter]) -> None:
    """Wait for a writer that nobody closed; what went wrong can only be shown.

    It neither raises nor ends the process, since checkpoints may still have to be waited for.
    """
    for writer in opened[:]:
        try:
            writer.close()
        except BaseException:  # noqa: BLE001  nobody is left to raise it to
            traceback.print_exc()
            sys.stderr.flush()
