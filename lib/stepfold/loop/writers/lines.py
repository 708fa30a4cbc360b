"""A file of lines, one a step, that is whole whatever happens to the process that writes it.

Each line is handed to the system at once, so that a kill leaves at most the line in flight half
written; whoever opens the file next cuts that off. Only the last line is ever changed, by cutting
it off and appending it anew, and all that goes deeper replaces the file by another at once.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepfold import tree
from stepfold.errors import ConfigError


def read_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Read where a file is to be, without touching anything.

    Raises:
      ConfigError: if there cannot be a file that can be written to.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{name}: expected a path, got {tree.spell(path)}")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{name}: expected a file, got the directory {path}; name a file in it")
    see_writable(name, path)
    return path


def see_writable(name: str, path: Path) -> None:
    """See that a path, or what it is to be made in, may be written to."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise ConfigError(f"{name}: expected a path in a directory, got {path}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ConfigError(
            f"{name}: expected a place that may be written to, got {path}: there is no permission "
            f"to write to {there}; change it with chmod, or give another path"
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say in what goes wrong with a file which one it is, and what is left of it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        error.add_note(
            f"while writing {path}: what was written before is there and whole; see to space and "
            "permissions, then go on, or write to another path"
        )
        raise


def append(file: int, data: bytes) -> None:
    """Write all of it at the end of a file or, if that fails, nothing."""
    end = os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, end)
        raise


class Lines:
    """Keep one line for each step, in the order of the steps.

    Attributes:
      path: where the file is.
      last: the last line; empty if there is none.
      step: its step; -1 if there is none.
    """

    def __init__(self, path: Path, begins: bytes, step_of: Callable[[bytes], int]) -> None:
        self.path, self._step_of = path.resolve(), step_of
        self._new = self.path.with_name(self.path.name + ".new")
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        self._see_begin(begins)
        self._new.unlink(missing_ok=True)  # what a kill left of it
        self._cut(until=_is_whole)

    def _see_begin(self, begins: bytes) -> None:
        """See that the file is of this kind, before anything of it is cut off."""
        with self.path.open("rb") as file:
            there = file.read(len(begins))
        if there != begins[: len(there)]:
            os.close(self._file)
            raise ConfigError(
                f"{self.path}: expected a file that begins with {begins.decode()!r}, as this "
                f"writer's do, or none, got one that begins with {there!r}; give another path"
            )

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def _cut(self, until: Callable[[bytes], bool]) -> None:
        """Drop lines from the end, until one is as it has to be."""
        end, line = os.fstat(self._file).st_size, b""
        if end:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
                while end:
                    start = view.rfind(b"\n", 0, end - 1) + 1
                    line = view[start:end]
                    if until(line):
                        break
                    end, line = start, b""
        self.last, self.step = line, self._step_of(line) if line else -1
        with naming(self.path):
            os.ftruncate(self._file, end)

    def put(self, step: int, line: bytes) -> None:
        """Write the line of a step, in place of the last if that is of the same one.

        Raises:
          ValueError: if a later step is there.
          OSError: if it cannot be written; the file is as it was before.
        """
        self.see_order(step)
        with naming(self.path):
            if step == self.step:
                self._replace(line)
            else:
                append(self._file, line)
        self.last, self.step = line, step

    def _replace(self, line: bytes) -> None:
        os.ftruncate(self._file, os.fstat(self._file).st_size - len(self.last))
        try:
            append(self._file, line)
        except OSError:
            try:
                append(self._file, self.last)
            finally:
                self._cut(until=_is_whole)  # and know what is there now
            raise

    def see_order(self, step: int) -> None:
        """See that a step is not before the last."""
        if step < self.step:
            raise ValueError(
                f"{self.path}: expected step {self.step}, which is there, or a later one, got "
                f"{step}; call resume({step}) first if the run goes on from there, or write to "
                "another path"
            )

    def drop_after(self, step: int) -> None:
        """Drop the lines of all later steps."""
        self._cut(until=lambda line: self._step_of(line) <= step)

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the file by one of these lines, at once: there is the old one or the new one."""
        with naming(self.path):
            try:
                with self._new.open("wb") as new:
                    new.writelines(lines)
                    new.flush()
                    os.fsync(new.fileno())
                shutil.copymode(self.path, self._new)
                os.replace(self._new, self.path)
            except OSError:
                self._new.unlink(missing_ok=True)
                raise
            os.close(self._file)
            self._file = self._open()
        self._cut(until=_is_whole)

    def sync(self) -> None:
        """Return when all is on the disk."""
        with naming(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Have all on the disk, and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._file)


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n")
