"""Start the processes of one machine, and start all of them again when one dies or is stuck.

A process that has died takes its share of the devices with it, and the others fail or wait in their
next collective. So all of them end, and start again from the newest checkpoint. The launcher knows
nothing of the run: it sees exit codes, output, time, and a path at which a run shows progress.

It imports the standard library alone, and starts in a few milliseconds.
"""

import argparse
import ctypes
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

# Twice in a row, since the first time may have been chance.
_FAILURES = 2
_MAX_PAUSE_SECONDS = 60.0
# After a signal to stop, all processes save together, and end at about the same time.
_STOP_SECONDS = 30.0
# With these, `fit` ends after a signal that somebody sent to the process itself.
_STOP_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """What to start, and when to start it again; the fields are the options of the command."""

    command: Sequence[str]
    processes: int = 1
    min: int | None = None
    restarts: int = 3
    progress: Path | None = None
    healthy: float = 600.0
    pause: float = 1.0
    grace: float = 1.0
    patience: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m stepfold launch`."""
    add = parser.add_argument
    text = "how many to start; each calls start_distributed() without arguments"
    add("--processes", type=_count, default=Launch.processes, metavar="N", help=text)
    text = f"start fewer, down to N, without the one that ended first {_FAILURES} times in a row"
    add("--min", type=_count, metavar="N", help=text)
    text = "how often to start again without progress in between (default: %(default)s)"
    add("--restarts", type=_whole, default=Launch.restarts, metavar="N", help=text)
    text = (
        "where progress shows: the largest number that names an entry of a directory, such as "
        "run_dir/checkpoints, or the size of a file, such as run_dir/metrics.jsonl"
    )
    add("--progress", type=Path, metavar="PATH", help=text)
    text = "without PATH, a start that lives so long counts as progress (default: %(default)s)"
    add("--healthy", type=_seconds, default=Launch.healthy, metavar="SECONDS", help=text)
    text = "wait after a start without progress, then twice as long each time, up to 60 s"
    add("--pause", type=_seconds, default=Launch.pause, metavar="SECONDS", help=text)
    text = "from SIGTERM to SIGKILL for the others, when one has failed (default: %(default)s)"
    add("--grace", type=_seconds, default=Launch.grace, metavar="SECONDS", help=text)
    text = "end all if no process prints anything for so long, and PATH shows no progress"
    add("--patience", type=_seconds, metavar="SECONDS", help=text)
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    add("script", help="the program of each process")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")


def launch_from(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Launch:
    """Check the options of the command line."""
    if not options.is_module and not Path(options.script).is_file():
        advice = "give the path of a file, or -m and the name of a module"
        parser.error(f"script: expected a file, got {options.script}; {advice}")
    if options.min is not None and options.min > options.processes:
        parser.error(f"--min: expected at most {options.processes}, got {options.min}")
    # `-u`, since Python keeps back what it writes to a pipe.
    program = ["-m", options.script] if options.is_module else [options.script]
    command = [sys.executable, "-u", *program, *options.arguments]
    names = ("processes", "min", "restarts", "progress", "healthy", "pause", "grace", "patience")
    return Launch(command, **{name: getattr(options, name) for name in names})


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text}")


def run(launch: Launch) -> int:
    """Start the processes until all end with code 0; return the exit code of the launcher.

    That is 0, or 128 + n after signal n, or else the code of the process that failed first in the
    last start.
    """
    minimum = launch.processes if launch.min is None else launch.min
    slots, failed, failures = [*range(launch.processes)], list[int](), 0
    best = _progress(launch.progress)
    with _signals() as signals:
        while True:
            began = time.monotonic()
            end = _run_once(launch, slots, signals)
            if end.stop_code is not None:
                return end.stop_code
            lived, before, best = time.monotonic() - began, best, _progress(launch.progress, best)
            if best > before if launch.progress else lived >= launch.healthy:
                # All are tried again, as a device that was lost may be back.
                slots, failed, failures = [*range(launch.processes)], [], 0
            else:
                failures += 1
                failed.append(end.slot)
            reason = f"{end.reason} after {lived:.1f} s"
            if failures > launch.restarts:
                _print(f"{reason}; ended, after {launch.restarts} restarts without progress")
                return end.code
            if failed[-_FAILURES:] == [end.slot] * _FAILURES and len(slots) > minimum:
                slots.remove(end.slot)
                failed.clear()
            pause = min(launch.pause * 2 ** (failures - 1), _MAX_PAUSE_SECONDS) if failures else 0
            count = f"{len(slots)} process{'es' * (len(slots) > 1)}"
            tries = f" ({failures} of {launch.restarts} without progress)" if failures else ""
            _print(f"{reason}; starting {count} in {pause:g} s{tries}")
            if number := signals.wait(pause):
                return 128 + number


def _progress(path: Path | None, best: int = -1) -> int:
    """Return the largest progress so far: a number in the names of a folder, or a file's size."""
    with suppress(OSError, TypeError):
        if path is not None and path.is_dir():
            return max([best, *(int(name) for name in os.listdir(path) if name.isdecimal())])
        return max(best, os.stat(path).st_size)  # type: ignore[arg-type]
    return best


class _End(NamedTuple):
    """How one start ended: the exit code of the launcher, or the process that failed first."""

    stop_code: int | None
    slot: int = 0
    code: int = 1
    reason: str = ""


class _Signals:
    """The signals that the launcher got, read from a socket that wakes up its selector."""

    def __init__(self, reader: socket.socket) -> None:
        self.reader = reader

    def read(self) -> list[int]:
        with suppress(BlockingIOError):
            return [number for number in self.reader.recv(4096) if number != signal.SIGCHLD]
        return []

    def wait(self, seconds: float) -> int | None:
        """Wait, and return a signal to stop that came."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.reader, selectors.EVENT_READ)
            while True:
                for number in self.read():
                    if number != signal.SIGUSR1:
                        return number
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                selector.select(left)


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Note signals instead of acting on them, except those that are ignored, as under nohup."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [
        number
        for number in numbers
        if number == signal.SIGCHLD or before[number] is not signal.SIG_IGN
    ]
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, lambda *_: None)
    try:
        with closing(reader), closing(writer):
            yield _Signals(reader)
    finally:
        for number in handled:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(previous)


def _run_once(launch: Launch, slots: Sequence[int], signals: _Signals) -> _End:
    """Start all processes, and wait until all have ended."""
    address, children = f"127.0.0.1:{_free_port()}", list[_Child]()
    try:
        for index, slot in enumerate(slots):
            environ = {
                "STEPFOLD_COORDINATOR": address,
                "STEPFOLD_PROCESSES": str(len(slots)),
                "STEPFOLD_PROCESS": str(index),
                "STEPFOLD_LOCAL_PROCESS": str(slot),
            }
            process = _start(launch.command, os.environ | environ)
            children.append(_Child(process, index, slot))
        with selectors.DefaultSelector() as selector:
            return _Supervisor(launch, children, signals, selector).run()
    finally:
        for child in children:
            if child.process.poll() is None:
                child.send(signal.SIGKILL)
                child.process.wait()
            for pipe in child.pipes:
                pipe.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        """Let the kernel kill the process when the launcher is gone, even by SIGKILL.

        A pipe that the process watches would need a thread in it, before its script begins.
        """
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the launcher died before the call
                os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on
        preexec_fn=die_with_parent,
    )


@dataclass
class _Child:
    """A process, its index, the number of its device on the machine, and its unfinished lines."""

    process: subprocess.Popen[bytes]
    index: int
    slot: int
    unended: dict[int, bytes] = field(default_factory=dict)

    @property
    def pipes(self) -> list[IO[bytes]]:
        return [pipe for pipe in (self.process.stdout, self.process.stderr) if pipe is not None]

    def send(self, number: int) -> None:
        """Send a signal to the process and to those that it started, such as workers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def pass_on(self, pipe: int, out: IO[bytes]) -> bool:
        """Write the lines that a pipe has, each with the index; return whether there were any."""
        try:
            content = os.read(pipe, 1 << 16)
        except BlockingIOError:
            content = b""
        # A progress bar ends its lines by a carriage return.
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self.unended.get(pipe, b"") + content)
        self.unended[pipe] = rest
        self._write(lines, out)
        return bool(content)

    def end(self, pipe: int, out: IO[bytes]) -> None:
        """Write what the process has written before its end, even if others hold its pipes."""
        while self.pass_on(pipe, out):
            pass
        if rest := self.unended.pop(pipe):
            self._write([rest + b"\n"], out)

    def _write(self, lines: Sequence[bytes], out: IO[bytes]) -> None:
        if lines:
            out.write(b"".join(b"[%d] %s" % (self.index, line) for line in lines))
            out.flush()


class _Supervisor:
    """Pass on output and signals until all processes have ended, and end the rest when one fails.

    Attributes:
      running: those that have not ended.
      asked: the signals to stop that the launcher got.
      deadline: when those that still run are killed.
      heard: when a process last printed something.
    """

    def __init__(
        self,
        launch: Launch,
        children: Sequence[_Child],
        signals: _Signals,
        selector: selectors.BaseSelector,
    ) -> None:
        self._launch, self._signals, self._selector = launch, signals, selector
        self._children, self._progress = children, _progress(launch.progress)
        self._end: _End | None = None  # None as long as none has failed or was asked to stop
        self.running, self.asked = [*children], list[int]()
        self.deadline, self.heard = math.inf, time.monotonic()
        selector.register(signals.reader, selectors.EVENT_READ)
        for child in children:
            for pipe, out in zip(child.pipes, (sys.stdout, sys.stderr), strict=True):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, (child, out.buffer))

    def run(self) -> _End:
        while self.running:
            until = min(self.deadline, self._silent_until())
            timeout = None if until == math.inf else max(0.0, until - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data is not None:
                    self._pass_on(key)
            for number in self._signals.read():
                self._forward(number)
            for child in [child for child in self.running if child.process.poll() is not None]:
                self._note_end(child)
            self._check_time(time.monotonic())
        if all(child.process.returncode == 0 for child in self._children):
            return _End(0)
        if self.asked:
            return _End(128 + self.asked[0])
        return self._end or _End(0)

    def _silent_until(self) -> float:
        patience = self._launch.patience
        return math.inf if patience is None or self._end else self.heard + patience

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        child, out = key.data
        if child.pass_on(key.fd, out):
            self.heard = time.monotonic()
        else:
            self._selector.unregister(key.fileobj)  # closed

    def _forward(self, number: int) -> None:
        """Pass on a signal; the third to stop kills, since the second may wait for a save."""
        if number != signal.SIGUSR1:  # which only saves
            self.asked.append(number)
        number = signal.SIGTERM if number == signal.SIGHUP else number
        for child in self.running:
            child.send(signal.SIGKILL if len(self.asked) > 2 else number)

    def _note_end(self, child: _Child) -> None:
        self.running.remove(child)
        for pipe, out in zip(child.pipes, (sys.stdout, sys.stderr), strict=True):
            child.end(pipe.fileno(), out.buffer)
            if pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe)
        code = child.process.returncode
        if code:
            child.send(signal.SIGKILL)  # what it started, such as workers
        if self.asked:
            self.deadline = min(self.deadline, time.monotonic() + _STOP_SECONDS)
        elif code and self._end is None:
            if code in _STOP_CODES:
                self._end = _End(abs(code) % 128 + 128)
                self.deadline = time.monotonic() + _STOP_SECONDS
            else:
                text = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                code = code if code > 0 else 128 - code
                self._fail(_End(None, child.slot, code, f"process {child.index}: {text}"))

    def _fail(self, end: _End) -> None:
        self._end, self.deadline = end, time.monotonic() + self._launch.grace
        for child in self.running:
            child.send(signal.SIGTERM)

    def _check_time(self, now: float) -> None:
        if now >= self.deadline:
            for child in self.running:
                child.send(signal.SIGKILL)
            self.deadline = math.inf
        if now >= self._silent_until():
            before, self._progress = self._progress, _progress(self._launch.progress)
            if self._progress > before:
                self.heard = now
            else:
                text = f"no process printed anything for {self._launch.patience:g} s"
                self._fail(_End(None, self.running[0].slot, 1, text))


def _print(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)  # noqa: T201  this is a command
