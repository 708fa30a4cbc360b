"""Several writers as one, a writer in a background thread, and the hook that feeds a writer."""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import BaseHook, Event
from stepfold.loop.writers.base import Buckets, Values, Writer


class _ForwardingWriter(Writer):
    """Forward all that is written to one method."""

    def _forward(self, method: str, *arguments: Any) -> None:
        raise NotImplementedError

    def write_scalars(self, step: int, scalars: Values) -> None:
        self._forward("write_scalars", step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._forward("write_texts", step, texts)

    def write_histograms(self, step: int, arrays: Values, num_buckets: Buckets = None) -> None:
        self._forward("write_histograms", step, arrays, num_buckets)

    def write_images(self, step: int, images: Values) -> None:
        self._forward("write_images", step, images)

    def write_hparams(self, hparams: Values) -> None:
        self._forward("write_hparams", hparams)


def _check_writer(argument: str, writer: Any) -> Writer:
    methods = [name for name in vars(Writer) if not name.startswith("_") and name != "resume"]
    missing = [name for name in methods if not callable(getattr(writer, name, None))]
    if missing or isinstance(writer, type):
        raise ConfigError(
            f"{argument}: expected a writer, such as jsonl_writer(path), got {tree.spell(writer)}"
            + (f", which has no {', '.join(missing)}" if missing else ", a class; call it")
        )
    return writer  # type: ignore[no-any-return]


def _resume(writer: Any, step: int) -> None:
    if hasattr(writer, "resume"):  # clu's have not
        writer.resume(step)


def multi_writer(*writers: Any) -> "MultiWriter":
    r"""Write to several writers, in order.

    If one of them raises, the others are still called before the error is raised.

    Args:
      writers: stepfold's, clu's, or any objects with the methods of a `Writer`.

    Raises:
      ConfigError: if one of them is not a writer.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.multi_writer(sf.jsonl_writer(path), sf.console_writer())
    >>> writer.write_scalars(10, {"train/loss": 0.5})
          10  train/loss 0.5
    >>> writer.close()
    >>> path.read_text()
    '{"step": 10, "train/loss": 0.5}\n'
    """
    return MultiWriter([_check_writer(f"writers[{i}]", each) for i, each in enumerate(writers)])


class MultiWriter(_ForwardingWriter):
    """Write to several writers; made by `multi_writer`."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def _forward(self, method: str, *arguments: Any) -> None:
        self._call_all(lambda writer: getattr(writer, method)(*arguments))

    def resume(self, step: int) -> None:
        self._call_all(lambda writer: _resume(writer, step))

    def flush(self) -> None:
        self._forward("flush")

    def close(self) -> None:
        self._forward("close")

    def _call_all(self, function: Callable[[Writer], None]) -> None:
        with ExitStack() as stack:  # calls all in reverse order, even if some raise
            for writer in reversed(self._writers):
                stack.callback(function, writer)


# Seconds between two looks at the queue. Waking the thread at every call would cost the loop tens
# of microseconds and, on a busy machine, sometimes milliseconds.
_POLL_SECONDS = 0.02


def async_writer(writer: Any, *, depth: int = 256) -> "AsyncWriter":
    """Write in a background thread, in the order of the calls, so that the loop does not wait.

    The thread also waits for values that are still on a device. An error is raised by the next
    call. `flush` returns when all calls made before it, in any thread, are done and the writer is
    flushed. A process that ends without `close` first writes all that is queued. A kill loses
    calls that are queued, usually those of the last hundredths of a second.

    To let several writers share a thread, use `async_writer(multi_writer(…))`.

    Args:
      writer: the writer to call.
      depth: how many calls may be queued; further calls wait until there is room.

    Raises:
      ConfigError: if `writer` is not a writer, or `depth` not a positive integer.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.async_writer(sf.jsonl_writer(path))
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.flush()
    >>> print(path.read_text(), end="")
    {"step": 10, "train/loss": 0.5}
    >>> writer.close()
    """
    return AsyncWriter(_check_writer("writer", writer), check_count("depth", depth))


class AsyncWriter(_ForwardingWriter):
    """Write in a background thread; made by `async_writer`."""

    def __init__(self, writer: Writer, depth: int) -> None:
        self._writer, self._depth = writer, depth
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()  # guards all of the above
        self._wake = threading.Event()

    def _forward(self, method: str, *arguments: Any) -> None:
        while len(self._calls) >= self._depth:
            self._wake.set()
            time.sleep(_POLL_SECONDS / 10)
        self._enqueue(getattr(self._writer, method), *map(_snapshot, arguments))
        self._raise_errors()

    def resume(self, step: int) -> None:
        self._wait_for(_resume, self._writer, step)

    def flush(self) -> None:
        """Wait until all calls made before are done, and the writer is flushed.

        Raises:
          Exception: the first background error that was not raised yet.
        """
        self._wait_for(self._writer.flush)

    def close(self) -> None:
        """Finish all queued calls, close the writer, and end the thread. Idempotent.

        Raises:
          Exception: the first background error that was not raised yet.
        """
        with self._lock:
            thread = self._thread
            if thread is not None:
                self._calls.append((self._writer.close, ()))
                self._closing = True
        if thread is None:
            self._writer.close()
        else:
            self._wake.set()
            thread.join()
        self._raise_errors()

    def _enqueue(self, function: Callable[..., object], *arguments: Any) -> None:
        with self._lock:
            self._calls.append((function, arguments))
            if self._thread is None:
                # Not a daemon, so the interpreter waits for the thread before it exits.
                self._thread = threading.Thread(target=self._run, name="stepfold-write")
                self._thread.start()

    def _wait_for(self, function: Callable[..., object], *arguments: Any) -> None:
        done = threading.Event()
        self._enqueue(function, *arguments)
        self._enqueue(done.set)
        self._wake.set()
        done.wait()
        self._raise_errors()

    def _run(self) -> None:
        main_thread = threading.main_thread()
        while True:
            while self._calls:
                self._call(*self._calls[0])
                self._calls.popleft()  # only now, since a call in progress counts for the depth
            with self._lock:
                if not self._calls and (self._closing or not main_thread.is_alive()):
                    is_closed, self._closing, self._thread = self._closing, False, None
                    break
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
        if not is_closed:  # the main thread ended without `close`, so there is no caller
            try:
                self.close()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                sys.stderr.flush()

    def _call(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  raised by the next call
            name = getattr(function, "__name__", "a call")
            has_step = name.startswith("write_") and len(arguments) > 1
            step = f" of step {arguments[0]}" if has_step else ""
            error.add_note(f"in the background, in {name}{step}: not in the call that raises it")
            with self._lock:
                self._errors.append(error)

    def _raise_errors(self) -> None:
        if self._errors:
            with self._lock:
                errors, self._errors = self._errors, []
            _raise_first(errors)


def _snapshot(argument: Any) -> Any:
    """Copy a mapping and its numpy arrays, which the caller may change before they are written."""
    if not isinstance(argument, Mapping):
        return argument
    return {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in argument.items()}


def _raise_first(errors: list[BaseException]) -> None:
    for error in errors[1:]:
        errors[0].add_note(f"and after it {type(error).__name__}: {error}")
    if errors:
        raise errors[0]


class log_to(BaseHook):  # noqa: N801  it is used like a function
    """Write metrics with a writer of stepfold, of clu, or your own.

    When a run starts or resumes, the writer's `resume(step)` drops rows of later steps, so that
    each step is written once. `flush()` is called in another thread before a checkpoint commits,
    so that the rows up to its step are durable; its errors are raised at the next event. At the
    end the writer is closed. With several processes only the first one writes.

    >>> import stepfold as sf
    >>> class Printer(sf.Writer):
    ...     def write_scalars(self, step, scalars):
    ...         print(step, scalars)
    >>> hook = sf.log_to(Printer(), every=20)
    >>> for step in (10, 20, 30):
    ...     hook(sf.Event(step, None, {"train/loss": step / 10}, None))
    20 {'train/loss': 2.0}
    """

    def __init__(self, writer: Any, every: int | None = None, *, everywhere: bool = False) -> None:
        """Check the arguments.

        Args:
          writer: an object with a method `write_scalars(step, numbers by name)`. Its methods
            `resume(step)`, `flush()` and `close()` are called if there are any.
          every: write train metrics only at the first event at or after each multiple of this
            many steps, and at the last step. Evaluations are always written.
          everywhere: whether every process writes, each with its own writer.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if not callable(getattr(writer, "write_scalars", None)) or isinstance(writer, type):
            raise ConfigError(
                "log_to: expected a writer, with write_scalars(step, metrics), got "
                f"{tree.spell(writer)}; sf.jsonl_writer(path) is one"
            )
        if every is not None:
            check_count("log_to: every", every)
        self._writer, self._every, self._everywhere = writer, every, everywhere
        self._multiple, self._is_restored = 0, False
        self._errors: list[BaseException] = []
        # An AsyncWriter is thread-safe, and a lock would stall the loop while it is flushed.
        self._lock: AbstractContextManager[Any] = (
            nullcontext() if isinstance(writer, AsyncWriter) else threading.Lock()
        )

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        if self._every and not self._is_restored:
            self._multiple = step // self._every
        if self._is_writing():
            _resume(self._writer, step)

    def __call__(self, event: Event) -> None:
        if self._is_due(event) and self._is_writing():
            with self._lock:
                self._writer.write_scalars(event.step, event.metrics)
        self._raise_errors()

    def flush(self) -> None:
        """Flush the writer. An error is raised by the next event or by `close`, not here."""
        if self._is_writing() and hasattr(self._writer, "flush"):
            try:
                with self._lock:
                    self._writer.flush()
            except Exception as error:  # noqa: BLE001
                self._errors.append(error)

    def close(self) -> None:
        with ExitStack() as stack:  # flush, close and raise errors; each even if another raises
            stack.callback(self._raise_errors)
            if self._is_writing() and hasattr(self._writer, "close"):
                stack.callback(self._writer.close)
            stack.callback(self.flush)

    def get_state(self) -> dict[str, Any]:
        return {"multiple": self._multiple, "every": self._every}

    def set_state(self, state: dict[str, Any]) -> None:
        if state.get("every", self._every) == self._every:
            self._multiple, self._is_restored = state["multiple"], True

    def _is_writing(self) -> bool:
        return self._everywhere or jax.process_index() == 0

    def _is_due(self, event: Event) -> bool:
        if self._every is None or not event.is_train:
            return True
        previous, self._multiple = self._multiple, event.step // self._every
        return self._multiple > previous or event.step == event.total

    def _raise_errors(self) -> None:
        errors, self._errors = self._errors, []
        _raise_first(errors)
