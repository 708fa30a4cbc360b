"""Several writers as one, a writer in a background thread, and the sink that feeds a writer."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.core.validation import check_flags, read_integer
from stepfold.errors import refuse
from stepfold.loop.events import Event
from stepfold.loop.hook import Sink, call_optional
from stepfold.writers.base import Writer, files_of


def multi_writer(*writers: Any) -> Writer:
    """Write to several writers of stepfold, of clu, or your own, in order.

    If one of them raises, the others are still called before the error is raised.

    >>> import stepfold as sf, tempfile
    >>> files = sf.writers.jsonl(f"{tempfile.mkdtemp()}/metrics.jsonl")
    >>> writer = sf.writers.multi_writer(files, sf.writers.console())
    >>> writer.write_scalars(10, {"train/loss": 0.5})
          10  train/loss 0.5
    """
    for i, writer in enumerate(writers):
        _check_writer(f"writers[{i}]", writer)
    return MultiWriter(writers)


class MultiWriter(Writer):
    """The writer of `multi_writer`."""

    def __init__(self, writers: Sequence[Any]) -> None:
        self._writers = writers
        self.shows_progress = any(getattr(writer, "shows_progress", False) for writer in writers)

    @property
    def _files(self) -> Sequence[Path]:
        return [file for writer in self._writers for file in files_of(writer)]

    def _forward(self, method: str, *arguments: Any) -> None:
        with ExitStack() as stack:  # calls all in reverse order, even if some raise
            for writer in reversed(self._writers):
                if method != "resume" or hasattr(writer, "resume"):  # clu's have none
                    stack.callback(getattr(writer, method), *arguments)


def _check_writer(argument: str, writer: Any) -> None:
    methods = [name for name in vars(Writer) if not name.startswith("_") and name != "resume"]
    missing = [name for name in methods if not callable(getattr(writer, name, None))]
    if missing or isinstance(writer, type):
        problem = f"which has no {', '.join(missing)}" if missing else "a class; call it"
        got = f"{tree.describe_value(writer)}, {problem}"
        refuse(argument, "a writer, such as sf.writers.jsonl(path)", got)


def async_writer(writer: Any, *, depth: int = 256) -> Writer:
    r"""Write in a background thread, in the order of the calls.

    The thread also waits for values that are still on a device. An error is raised by the next
    call. `flush` returns when all earlier calls, of any thread, are done and the writer is
    flushed. A process that ends without `close` first writes all that is queued. A kill loses
    calls that are queued, usually those of the last hundredths of a second.

    `depth` calls may be queued; further ones wait. To let several writers share a thread, use
    `async_writer(multi_writer(…))`.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.writers.async_writer(sf.writers.jsonl(path))
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.close()
    >>> path.read_text()
    '{"step": 10, "train/loss": 0.5}\n'
    """
    _check_writer("writer", writer)
    return AsyncWriter(writer, read_integer("depth", depth))


# Seconds between two polls of the queue. Waking the thread at every call would cost the loop tens
# of microseconds and, on a busy machine, sometimes milliseconds.
_POLL_SECONDS = 0.02


class AsyncWriter(Writer):
    """The writer of `async_writer`."""

    def __init__(self, writer: Any, depth: int) -> None:
        self._writer, self._depth = writer, depth
        self.shows_progress = bool(getattr(writer, "shows_progress", False))
        self.takes_earlier_steps = bool(getattr(writer, "takes_earlier_steps", False))
        self._calls: deque[tuple[str, tuple[Any, ...], threading.Event]] = deque()
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # so that no call is added for a thread that ends
        self._wake = threading.Event()

    @property
    def _files(self) -> Sequence[Path]:
        return files_of(self._writer)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._forward("write_scalars", step, scalars)

    def _forward(self, method: str, *arguments: Any) -> None:
        while len(self._calls) >= self._depth:
            self._wake.set()
            time.sleep(_POLL_SECONDS / 10)
        done = threading.Event()
        call = method, tuple(map(_snapshot, arguments)), done
        with self._lock:
            if self._thread is None:
                # Not a daemon, so the interpreter waits for the thread before it exits.
                self._thread = threading.Thread(target=self._run, name="stepfold-write")
                self._thread.start()
            thread = self._thread
            self._calls.append(call)
        if not method.startswith("write_"):
            self._wake.set()
            done.wait()
        if method == "close":
            thread.join()
        with self._lock:
            _raise_first(self._errors)

    def close(self) -> None:
        """Finish all queued calls, close the writer, and end the thread. Idempotent."""
        if self._thread is not None:
            self._forward("close")
        else:  # not in a new thread, which cannot start while the interpreter exits
            self._writer.close()
            _raise_first(self._errors)

    def _run(self) -> None:
        main_thread, is_closed = threading.main_thread(), False
        while True:
            while self._calls:
                method, arguments, done = self._calls[0]
                try:
                    call_optional(self._writer, method, *arguments)
                except BaseException as error:  # noqa: BLE001  raised by the next call
                    step = f" of step {arguments[0]}" if len(arguments) > 1 else ""
                    error.add_note(f"in the background, in {method}{step}: raised by a later call")
                    self._errors.append(error)
                self._calls.popleft()  # only now, since a call in progress counts for the depth
                is_closed = is_closed or method == "close"
                done.set()
            with self._lock:
                if is_closed and not self._calls:
                    self._thread = None
                    break
                if not (self._calls or main_thread.is_alive()):  # the process ends without `close`
                    self._calls.append(("close", (), threading.Event()))
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
        if not main_thread.is_alive():
            _raise_first(self._errors)  # for the interpreter to print


def _snapshot(argument: Any) -> Any:
    """Copy a mapping and its numpy arrays, which the caller may change before they are written."""
    if not isinstance(argument, Mapping):
        return argument
    return {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in argument.items()}


def _raise_first(errors: list[BaseException]) -> None:
    """Remove all errors, and raise the first with notes about the others."""
    raised = errors[:]
    del errors[: len(raised)]  # another thread may have added more
    for error in raised[1:]:
        raised[0].add_note(f"and after it {type(error).__name__}: {error}")
    if raised:
        raise raised[0]


def log_to(
    writer: Any, every: int | None = None, *, everywhere: bool = False, name: str | None = None
) -> Sink:
    """Write metrics with a writer of stepfold, of clu, or your own.

    When a run starts or resumes, the writer's `resume(step)` drops rows after the last event that
    the checkpoint has seen, so that each step is written once. `flush()` is called in another
    thread before a checkpoint commits, so that the rows up to its step are durable; its errors are
    raised at the next event. The numbers of an evaluation that another process made are written at
    the step at which they arrive, but in the `metrics.jsonl` of a run in the row of the step that
    was evaluated. At the end the writer is closed. With several processes only the first one
    writes. The config of `RunDirectory` is written as hyper-parameters. For images, texts and
    histograms, call `write_images`, `write_texts` and `write_histograms` of the same writer in a
    hook.

    A run that does not resume moves the files of `sf.writers.jsonl` to a folder `previous-1` and so
    on next to them, with a warning, if they have rows of later steps.

    Args:
      writer: an object with a method `write_scalars(step, numbers by name)`. `resume`, `flush` and
        `close` are optional.
      every: write train metrics only at the first event at or after each multiple of this many
        steps, and at the end of a run that is not interrupted. Evaluations are always written.
      everywhere: whether every process writes, each with its own writer.
      name: the key of its state in a checkpoint, for two sinks of this kind.

    >>> import stepfold as sf
    >>> sink = sf.log_to(sf.writers.console(), every=20)
    >>> state = sink.init
    >>> for step in (10, 20, 30):
    ...     state = sink.write(state, sf.Event(step, None, {"train/loss": step / 10}, None))
          20  train/loss 2
    """
    check_flags(everywhere=everywhere)
    if not callable(getattr(writer, "write_scalars", None)) or isinstance(writer, type):
        got, advice = tree.describe_value(writer), "sf.writers.jsonl(path) is one"
        refuse("log_to", "a writer with write_scalars(step, metrics)", got, advice)
    steps = None if every is None else read_integer("log_to: every", every)
    return WriterSink(writer, steps, everywhere=everywhere, name=name)


class WriterSink(Sink):
    """What `log_to` returns; its state says which multiple of `every` was reached."""

    def __init__(
        self, writer: Any, every: int | None, *, everywhere: bool, name: str | None
    ) -> None:
        self._writer, self._every, self._everywhere = writer, every, everywhere
        self.name = "log_to" if name is None else name
        self.init = None if every is None else {"every": every, "multiple": None}
        self.shows_progress = bool(getattr(writer, "shows_progress", False))
        self._opened_at = self._last = 0
        self._has_events = False  # since it was opened
        self._errors: list[BaseException] = []
        # An `async_writer` is thread-safe, and a lock would stall the loop while it is flushed.
        self._lock: AbstractContextManager[Any] = (
            nullcontext() if isinstance(writer, AsyncWriter) else threading.Lock()
        )

    @property
    def written_files(self) -> Sequence[Path]:
        return files_of(self._writer)

    @property
    def writes_here(self) -> bool:
        """Whether this process writes."""
        return self._everywhere or jax.process_index() == 0

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        self._opened_at, self._last, self._has_events = step, seen, False
        call_optional(self._active_writer(), "resume", seen)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Pass the config of a run to the writer, as hyper-parameters."""
        with self._lock:
            call_optional(self._active_writer(), "write_hparams", config)

    def write(self, state: Any, event: Event) -> Any:
        is_due = self._has_events = True
        if self._every is not None and event.is_train:
            multiple, reached = self._multiple(state), event.step // self._every
            is_due = reached > multiple or event.step == event.total
            state = {"every": self._every, "multiple": reached}
        if self._every is not None:
            skipped = None if is_due else event._replace(state=None, batch=None)
            state = {**state, "_skipped": skipped}
        if is_due:
            is_early = event.is_late and not getattr(self._writer, "takes_earlier_steps", False)
            self._last = max(self._last, event.step)
            self._write(self._last if is_early else event.step, event.metrics)
        _raise_first(self._errors)
        return state

    def _multiple(self, state: Mapping[str, Any]) -> int:
        """Return the last multiple before an event: that of the state, or of the first step."""
        every: Any = self._every
        is_known = state["multiple"] is not None and state["every"] == every
        return state["multiple"] if is_known else self._opened_at // every  # type: ignore[no-any-return]

    def end(self, state: Any) -> Any:
        """Write the last interval of train metrics."""
        skipped = None if self._every is None else state.get("_skipped")
        if skipped is None or not self._has_events:  # or the run went back before it
            return state
        self._write(skipped.step, skipped.metrics)
        return {**state, "_skipped": None}

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._active_writer().write_scalars(step, dict(metrics))

    def flush(self) -> None:
        """Flush the writer. An error is raised by the next event or by `close`, not here."""
        try:
            with self._lock:
                call_optional(self._active_writer(), "flush")
        except Exception as error:  # noqa: BLE001
            self._errors.append(error)

    def close(self) -> None:
        self.flush()
        try:
            call_optional(self._active_writer(), "close")
        finally:
            _raise_first(self._errors)

    def _active_writer(self) -> Any:
        return self._writer if self.writes_here else Writer()
