"""Objects in storage such as S3, through the key-value stores of tensorstore."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import tensorstore

from stepfold.core.validation import absolute_path
from stepfold.errors import CheckpointError, StepfoldError, refuse
from stepfold.internals import texts

_SCHEMES = {"s3": "s3", "gs": "gcs", "file": "file"}
_EXPECTED = "a URL such as 's3://bucket/run'"
_OPTIONS = ("endpoint", "aws_region")  # members of tensorstore's s3 driver, given in the query
# A request that fails is repeated after 0.5, 1, 2, … seconds, and fails after about one minute.
_RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}
_TIMEOUT = 300.0  # seconds to wait for the answer to one request, retries included
# For a minute after an unanswered request, each kind of request is preceded by a probe that has to
# be answered at once. Otherwise, the end of a run would wait this long for each of its last writes.
_PROBE = 2.0
_OUTAGE = 60.0


class _Outage:
    """Whether a server left a request unanswered, and which requests it has answered since.

    The buckets of one server share it, in several threads.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._answered: frozenset[str] = frozenset()  # verbs

    def begin(self) -> None:
        self._answered, self._began = frozenset(), time.monotonic()

    def end(self, verb: str) -> None:
        self._answered |= {verb}

    def lasts_for(self, verb: str) -> bool:
        """Return whether requests of this kind may stay unanswered."""
        is_recent = self._began is not None and time.monotonic() - self._began < _OUTAGE
        return is_recent and verb not in self._answered


class Bucket:
    """Objects below a URL such as `s3://bucket/run`.

    Credentials are those that tensorstore finds, in the environment or a profile. The query may
    have an `endpoint` and an `aws_region`, as in `s3://bucket/run?endpoint=https://host`. Requests
    have a time limit, and their errors name the object. After an unanswered request, others fail at
    once until the server answers; a bucket given as `other` shares this if it has the same server.

    Errors of requests are a `CheckpointError`, or of another `kind`.
    """

    def __init__(
        self, url: str, other: Any = None, *, kind: type[StepfoldError] = CheckpointError
    ) -> None:
        self.location, self._kind = url, kind
        self._base, spec = _read_url(url)
        self._server = [spec.get(name) for name in ("driver", "endpoint", "aws_region")]
        is_shared = isinstance(other, Bucket) and other._server == self._server
        self._outage = other._outage if is_shared else _Outage()
        retries = {f"{name}_request_retries": _RETRIES for name in ("s3", "gcs")}
        try:
            self._kv = tensorstore.KvStore.open(spec, context=tensorstore.Context(retries)).result()
        except (ValueError, RuntimeError) as error:  # the latter for a str that is not unicode
            refuse("directory", _EXPECTED, f"{url!r}: {_reason(error)}", cause=error)

    def read(self, name: str) -> bytes | None:
        """Read an object; None if it is missing."""
        result = self.start_read(name)()
        return None if result.state == "missing" else result.value

    def start_read(self, name: str, part: slice | None = None) -> Callable[[], Any]:
        """Return a function that waits for the content of an object, or of a range of its bytes.

        An answer has a `value`, a `state` that may be "missing", and a `stamp` with a `generation`
        that changes with the content.
        """
        return self._start(name, "read", lambda: self._kv.read(name, byte_range=part))

    def read_from(self, name: str, start: int, size: int) -> bytes:
        """Read bytes from an offset on, fewer than `size` only at the end of the object."""
        result = self._read_within(name, start, size)
        if result is not None:
            return result
        parts = []  # no request tells the size of an object: halve what may be left
        for power in reversed(range((size - 1).bit_length())):
            if (part := self._read_within(name, start, 1 << power)) is not None:
                parts.append(part)
                start += 1 << power
        return b"".join(parts)

    def _read_within(self, name: str, start: int, size: int) -> bytes | None:
        """Read bytes; None if the object ends before the last one."""
        try:
            content: bytes = self.start_read(name, slice(start, start + size))().value
        except self._kind as error:
            if not texts.OUT_OF_RANGE.match(str(error.__cause__)):
                raise
            return None
        return content

    def list_names(self, prefix: str) -> list[str]:
        """List the names of objects that begin with a prefix."""
        return self.start_list(prefix)()

    def start_list(self, prefix: str) -> Callable[[], list[str]]:
        """Return a function that waits for the names of objects that begin with a prefix."""
        folder, below = prefix[: prefix.rfind("/") + 1], range_below(prefix)
        wait = self._start(folder, "listed", lambda: self._kv.list(below))
        return lambda: sorted(name.decode(errors="replace") for name in wait())

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        self._start_write(name, content)()

    def _start_write(self, name: str, content: bytes) -> Callable[[], Any]:
        return self._start(name, "written", lambda: self._kv.write(name, content))

    def _replace(self, name: str, result: Any, content: bytes | None) -> bool:
        """Write or delete an object if it is still as it was found; return whether it was."""
        verb = "deleted" if content is None else "written"
        replace = lambda: self._kv.write(name, content, if_equal=result.stamp.generation)
        return bool(self._start(name, verb, replace)().generation)

    def _start(self, name: str, verb: str, request: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that waits for the answer to a request, and raises its error."""
        if self._outage.lasts_for(verb):
            self._probe(name, verb)
        limit = _PROBE if self._outage.lasts_for(verb) else _TIMEOUT
        deadline, future = time.monotonic() + limit, request()

        def wait() -> Any:
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except (ValueError, RuntimeError, OSError) as error:
                reason = _reason(error)
                if isinstance(error, TimeoutError):
                    reason = f"the server did not answer in {limit:.0f} s"
                if isinstance(error, TimeoutError) or texts.RETRIES_FAILED.search(reason):
                    self._outage.begin()
                raise self._kind(f"{self._base}{name}: cannot be {verb}: {reason}") from error
            self._outage.end(verb)
            return answer

        return wait

    def _probe(self, name: str, verb: str) -> None:
        """Raise if the server does not answer a small request at once."""


def range_below(prefix: str) -> Any:
    """Return the range of the names that begin with a prefix."""
    last = chr(ord(prefix[-1]) + 1) if prefix else ""
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + last)


def path_of_url(url: str) -> Path | None:
    """Return the path of a URL such as file:///a/folder, or None if it is that of a bucket."""
    _, spec = _read_url(url)
    return Path(spec["path"]) if spec["driver"] == "file" else None


def _read_url(url: str) -> tuple[str, dict[str, Any]]:
    """Return the URL without its query, and the specification for tensorstore."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "@" in parts.netloc:
        advice = "give credentials in the environment or a profile"
        refuse("directory", "a URL without a secret", "one with a user and a password", advice)
    is_file, is_s3 = parts.scheme == "file", parts.scheme == "s3"
    is_absolute = bool(parts.path) and not parts.netloc and not parts.path.startswith("/~")
    has_place = is_absolute if is_file else bool(parts.netloc)
    has_options = parts.fragment or set(options) - set(_OPTIONS if is_s3 else ())
    if parts.scheme not in _SCHEMES or not has_place or has_options:
        queries = " and ".join(_OPTIONS)
        advice = (
            f"the scheme is s3, gs or file (file:///a/folder), and s3 takes {queries} in the query"
        )
        refuse("directory", _EXPECTED, repr(url), advice)
    path = unquote(parts.path)
    if is_file:
        path = os.fspath(absolute_path("directory", path))
    elif {".", ".."} & {*path.split("/")}:
        advice = "a bucket has no parent directories, so give the name itself"
        refuse("directory", "a URL without '.' and '..'", repr(url), advice)
    path = path.strip("/")
    base = f"{parts.scheme}://{parts.netloc}/{path}".rstrip("/") + "/"
    spec = {"driver": _SCHEMES[parts.scheme], "path": f"{path}/" if path else "", **options}
    spec |= {"path": f"/{path}/"} if is_file else {"bucket": parts.netloc}
    return base, spec


def _reason(error: Exception) -> str:
    """Return the message of tensorstore without its details, which repeat the server's answer."""
    message = str(error).partition(" [")[0].strip()
    if texts.PERMISSION_DENIED.search(message):
        message += "; check the credentials and what they permit"
    return message or type(error).__name__
