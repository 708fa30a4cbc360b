"""Read ranges of bytes of files, which have a path or a URL of object storage.

Every read checks that the file is still the one that was opened.
"""

import glob
import os
import secrets
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from threading import RLock
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from stepfold.core.validation import absolute_path, is_url
from stepfold.errors import DataError, refuse

if TYPE_CHECKING:
    from stepfold.object_storage import Bucket

_CHUNK = 1 << 20  # bytes of one read of a whole file
_OPEN = 64  # files


class Stamp(NamedTuple):
    """Size and modification of a file, which change with its content."""

    size: int | None  # None for an object, whose size no request returns
    version: str  # the time of the last change in nanoseconds, or the generation of an object


class FileReader:
    """Read files by path or URL. A pickled reader opens its files again."""

    def __init__(self) -> None:
        self._open = lru_cache(_OPEN)(_OpenFile)
        self._bucket = lru_cache(_bucket)

    def __reduce__(self) -> Any:
        return FileReader, ()

    def find(self, path: Any) -> list[str]:
        """Return the locations that a path, a URL or a glob pattern names, sorted."""
        if is_url(path) and not path.startswith("file://"):
            base, query = split_query(path)
            if not glob.has_magic(base):
                return [path]
            bucket, name = self._in_bucket(path)
            pattern, prefix = name.split("/"), name[: _first_magic(name)]
            folder = base[: len(base) - len(name)]
            return [
                f"{folder}{each}{query}"
                for each in bucket.list_names(prefix)
                if _fits(each.split("/"), pattern)
            ]
        if is_url(path):
            from stepfold.object_storage import path_of_url  # lazy: imports tensorstore

            path = path_of_url(path)
        text = str(absolute_path("files", path))
        if os.path.isdir(text):
            advice = "give a pattern of the files in it, such as 'folder/*.jsonl'"
            refuse("files", "files", f"a directory: {text}", advice, kind=DataError)
        if os.path.exists(text) or not glob.has_magic(text):
            return [text]
        return sorted(each for each in glob.glob(text, recursive=True) if os.path.isfile(each))

    def stamp(self, location: str) -> Stamp | None:
        """Return the stamp of a file; None if it is missing."""
        if is_url(location):
            bucket, name = self._in_bucket(location)
            answer = bucket.start_read(name, slice(0, 0))()
            return None if answer.state == "missing" else _stamp_of_answer(answer)
        try:
            status = os.stat(location)
        except FileNotFoundError:
            return None
        except OSError as error:
            refuse_os_error(location, error)
        return _stamp_of_status(status)

    def start_read(
        self, location: str, start: int, stop: int, stamp: Stamp | None = None
    ) -> Callable[[], bytes]:
        """Start to read a range of bytes; return a function that waits for it.

        Raises:
          DataError: if the file is gone, or has changed since it had the stamp.
        """
        if is_url(location):
            bucket, name = self._in_bucket(location)
            wait = bucket.start_read(name, slice(start, stop))
            return lambda: _checked(location, wait(), stamp)
        file = self._open(location)
        status, content = os.fstat(file.fd), os.pread(file.fd, stop - start, start)
        if len(content) < stop - start or (stamp and _stamp_of_status(status) != stamp):
            refuse_changed(location)
        return lambda: content

    def read_start(self, location: str, size: int) -> bytes:
        """Read up to `size` bytes from the start of a file; none if it is missing."""
        if is_url(location):
            bucket, name = self._in_bucket(location)
            is_there = bucket.start_read(name, slice(0, 0))().state != "missing"
            return bucket.read_from(name, 0, size) if is_there else b""
        try:
            with open(location, "rb") as file:
                return file.read(size)
        except OSError:
            return b""

    def chunks(self, location: str) -> Iterator[bytes]:
        """Read a whole file in pieces."""
        if not is_url(location):
            try:
                with open(location, "rb") as file:
                    while content := file.read(_CHUNK):
                        yield content
            except OSError as error:
                refuse_os_error(location, error)
            return
        bucket, name = self._in_bucket(location)
        start = 0
        while content := bucket.read_from(name, start, _CHUNK):
            yield content
            start += len(content)

    def write(self, location: str, content: IO[bytes]) -> None:
        """Write a file atomically."""
        if is_url(location):
            bucket, name = self._in_bucket(location)
            bucket.write(name, content.read())
            return
        folder, name = os.path.split(location)
        unfinished = os.path.join(folder, f".{name}-{secrets.token_hex(4)}")
        try:
            with open(unfinished, "xb") as file:
                shutil.copyfileobj(content, file)
            os.replace(unfinished, location)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)

    def _in_bucket(self, url: str) -> tuple["Bucket", str]:
        """Return the bucket of a URL, and the name of the object in it."""
        base, query = split_query(url)
        scheme, _, rest = base.partition("://")
        host, _, name = rest.partition("/")
        return self._bucket(f"{scheme}://{host}{query}"), name


def split_query(location: str) -> tuple[str, str]:
    """Split the query from a URL; a path has none."""
    base, mark, query = location.partition("?") if is_url(location) else (location, "", "")
    return base, mark + query


def _bucket(url: str) -> "Bucket":
    from stepfold.object_storage import Bucket  # lazy: imports tensorstore

    return Bucket(url, kind=DataError)


class _OpenFile:
    """A file descriptor, closed when nothing refers to it: another thread may be reading."""

    def __init__(self, location: str) -> None:
        try:
            self.fd = os.open(location, os.O_RDONLY)
        except OSError as error:
            refuse_os_error(location, error)
        # At exit, the system closes it: a daemon thread may still be reading.
        weakref.finalize(self, os.close, self.fd).atexit = False


def _stamp_of_status(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, str(status.st_mtime_ns))


def _stamp_of_answer(answer: Any) -> Stamp:
    return Stamp(None, answer.stamp.generation.hex())


def _checked(location: str, answer: Any, stamp: Stamp | None) -> bytes:
    if answer.state == "missing" or (stamp and answer.stamp.generation.hex() != stamp.version):
        refuse_changed(location)
    content: bytes = answer.value
    return content


def _first_magic(name: str) -> int:
    return min(name.find(character) for character in "*?[" if character in name)


def _fits(parts: list[str], pattern: list[str]) -> bool:
    """Whether a name fits a pattern, in which a star matches no slash and no leading dot."""
    return len(parts) == len(pattern) and all(
        fnmatchcase(part, each) and part.startswith(".") <= each.startswith(".")
        for part, each in zip(parts, pattern, strict=True)
    )


def refuse_os_error(location: str, error: OSError) -> NoReturn:
    """Raise an OSError as a DataError."""
    got = f"{location}: {error.strerror}"
    refuse("files", "files that can be read", got, kind=DataError, cause=error)


def refuse_changed(location: str) -> NoReturn:
    """Raise because a file is not the one that was opened."""
    raise DataError(
        f"{location}: the file changed or was deleted after the source was made; make the source "
        "again, after the file was written"
    )


class Cache:
    """The content of ranges that were used last, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size, self._lock = limit, 0, RLock()
        self._contents: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def __reduce__(self) -> Any:
        return Cache, (self._limit,)

    def get(self, key: Any) -> Any:
        """Return some content, or None."""
        with self._lock:
            if key not in self._contents:
                return None
            self._contents.move_to_end(key)
            return self._contents[key][0]

    def put(self, key: Any, content: Any, size: int) -> None:
        """Add content, and evict the least recently used."""
        with self._lock:
            _, former = self._contents.pop(key, (None, 0))
            self._contents[key] = content, size
            self._size += size - former
            while self._size > self._limit and len(self._contents) > 1:
                _, (_, dropped) = self._contents.popitem(last=False)
                self._size -= dropped
