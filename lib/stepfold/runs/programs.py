"""The programs of a run: jax's compilation cache in its directory, and what a start compiled."""

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.errors import warn
from stepfold.inspect.compiled import CompiledStep
from stepfold.internals.jax import compilation_cache, watch_compilations
from stepfold.runs.info import versions

NAME = "compiled"
# Programs that compile faster are not kept. By default jax keeps those that take a second, which
# leaves out many that together take seconds, such as those of evaluations.
_MIN_SECONDS = 0.1
_MAX_BYTES = 1 << 30
_SUFFIX, _UNFINISHED = "-program", ".new"
_WRITING_SECONDS = 3600.0  # a file that another process may still write
_SHOWN_SECONDS = 1.0  # a step that compiles faster is only in the report
_MAX_STEPS = 20  # that `run.json` describes


class Programs:
    """What a call of `fit` compiles, and what it loads from jax's compilation cache.

    If the user has configured no cache, there is one in the directory of the run. An entry is
    executed: anyone with write access to that directory can run code.

    Attributes:
      before: descriptions of the steps that earlier attempts of the run compiled or loaded.
      show: prints a line.
    """

    def __init__(self, run_dir: Path | None, *, has_cache: bool = True) -> None:
        self._directory = run_dir / NAME if run_dir is not None and has_cache else None
        self.before: Sequence[Mapping[str, Any]] = ()
        self.show: Callable[[str], None] = lambda _: None
        self._last = threading.local()  # program of this thread: seconds, and whether it was loaded
        self._numbers = {name: {"count": 0, "seconds": 0.0} for name in ("loaded", "new")}
        self._steps: list[dict[str, Any]] = []
        self._reasons: list[str] = []

    def clean(self) -> None:
        """Delete incomplete files of killed processes, and the oldest programs beyond the limit.

        jax deletes none. No file is read: an entry is checked when jax asks for it.
        """
        if self._directory is None or not self._directory.is_dir():
            return
        files = [(path, path.stat()) for path in self._directory.rglob("*") if path.is_file()]
        files.sort(key=lambda pair: pair[1].st_mtime, reverse=True)
        size, now = 0, time.time()
        for path, stat in files:
            size += stat.st_size
            is_left = path.suffix == _UNFINISHED and now - stat.st_mtime > _WRITING_SECONDS
            if size > _MAX_BYTES or is_left:
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use the cache, and watch what compiles."""
        directory = None if has_virtual_devices() else self._directory
        cache = None if directory is None else ProgramFiles(directory)
        with compilation_cache(cache, _MIN_SECONDS), watch_compilations(self._note):
            yield

    def _note(self, seconds: float, *, was_loaded: bool) -> None:
        self._last.program = seconds, was_loaded
        numbers = self._numbers["loaded" if was_loaded else "new"]
        numbers["count"] += 1
        numbers["seconds"] += seconds

    def note_step(self, step: CompiledStep, count: int) -> None:
        """Note the program of a step, right after it was compiled; say why a restart needs one."""
        seconds, was_loaded = getattr(self._last, "program", (0.0, False))
        description = _describe(step, count)
        self._steps = [*self._steps, description][-_MAX_STEPS:]
        if was_loaded or not self.before or seconds < _MIN_SECONDS:
            return
        reason = f"compiled the step in {seconds:.1f} s: {_changes(self.before, description)}"
        self._reasons = [*self._reasons, reason][-_MAX_STEPS:]
        if seconds >= _SHOWN_SECONDS:
            self.show(reason)

    def summary(self) -> dict[str, Any]:
        """Return what `run.json` says about them."""
        numbers = {name: {**each} for name, each in self._numbers.items()}
        return {**numbers, "steps": self._steps, "reasons": self._reasons}


class ProgramFiles:
    """A compilation cache of jax, in files that are written atomically and have a checksum.

    jax's own files have none if it compresses by zstandard: a program with a flipped bit computes
    other values, or crashes. A bad entry is deleted, and the program is compiled again. The
    checksum covers the key too, so that no file stands in for another.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> bytes | None:
        """Read a program; warn of a damaged one and delete it."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        checksum, program = content[:4], content[4:]
        if checksum == _checksum(key, program):
            return program
        warn(
            f"{path}: the compiled program is damaged; it is deleted, and compiled again",
        )
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write a program, unless it is there."""
        path = self._path / f"{key}{_SUFFIX}"
        if path.exists():
            return
        self._path.mkdir(parents=True, exist_ok=True)
        writer = f"{os.getpid()}-{threading.get_ident()}"
        unfinished = path.with_name(f"{path.name}-{writer}{_UNFINISHED}")
        try:
            unfinished.write_bytes(_checksum(key, value) + value)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise  # jax warns


def _checksum(key: str, program: bytes) -> bytes:
    return zlib.crc32(program, zlib.crc32(key.encode())).to_bytes(4, "little")


def has_virtual_devices() -> bool:
    """Whether devices share a CPU, where a loaded program can wait for a collective forever.

    Seen with jax 0.12 on two cores with eight devices; the compiled program did not hang.
    """
    devices = jax.local_devices()
    return len(devices) > 1 and devices[0].platform == "cpu"


def _describe(step: CompiledStep, count: int) -> dict[str, Any]:
    """Describe a program of a step, by all that determines it besides the code."""
    shapes = [
        f"{name}: {tree.describe_value(leaf)}, {leaf.sharding}"
        for name, leaf in tree.named_leaves(step.state)
    ]
    batch = step.batch if count == 1 else step.batch[0]
    packages = versions()
    return {
        "jax": packages["jax"],
        "jaxlib": packages["jaxlib"],
        "devices": f"{jax.device_count()} of {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "state": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16],
        "batch": ", ".join(
            f"{name} {tree.describe_value(leaf)}".strip() for name, leaf in tree.named_leaves(batch)
        )[:200],
        "steps in a call": count,
        "program": step.digest,
    }


def _changes(before: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> str:
    """Say what differs from the most similar step of earlier attempts."""
    known = [name for name in new if name != "program"]
    changed = [[name for name in known if old.get(name) != new[name]] for old in before]
    names, old = min(zip(changed, before, strict=True), key=lambda pair: len(pair[0]))
    if not names:
        return "its code, a constant or a setting of XLA has changed, or the cache lacks it"
    texts = [
        "the shapes or shardings of the state changed"
        if name == "state"
        else f"{name} changed from {old.get(name)} to {new[name]}"
        for name in names
    ]
    return ", ".join(texts)
