"""A claim on a name in a directory, even on file systems without locks, such as NFS.

Each process that wants the name creates a claim, a file with a unique name, and then looks at the
claims of others. It has the name if no other claim belongs to a live process. Of two processes, at
least the second sees the claim of the first, so they never both have it. Taking over from a dead
process involves no race: its claim is ignored and deleted, and is never used again.

A lease is weaker, and works in object storage too: a note that says what a process uses. It ends
with the heartbeat of the process.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepfold.checkpoint.manifest import read_fields
from stepfold.checkpoint.steps import check_regular
from stepfold.errors import CheckpointError

_BEAT = 5.0  # seconds between heartbeats, by which other hosts know that a process is alive
_STALE = 60.0  # seconds without a heartbeat, after which a process counts as dead
_TIE = 2.0  # seconds to wait for a process that started at the same time to give way
_LARGEST = 1 << 20  # bytes of a claim


class ClaimedError(Exception):
    """Another live process has the name; the text says which one."""


class Claim:
    """A claim on a name, held by one process at a time.

    If a claim is from this host and PID namespace, its PID and start time say whether its process
    is alive. Any other claim is watched for up to `_STALE` seconds for a heartbeat, a new
    modification time. `lost` is called, in a thread, if the file of this claim was deleted, since
    another process may then have the name.
    """

    def __init__(self, directory: Path, name: str, lost: Callable[[], None]) -> None:
        self._directory, self._prefix = directory, f"{name}-"
        self.path = directory / f"{name}-{secrets.token_hex(8)}"
        self._pid = os.getpid()
        self._is_released = threading.Event()
        self._lost = lost
        self._thread = threading.Thread(target=self._beat, name="stepfold-claim", daemon=True)

    def acquire(self) -> None:
        """Claim the name, or raise ClaimedError."""
        try:
            with self.path.open("x") as file:
                json.dump(_describe_process(), file)
            self._wait_for_others()
        except BaseException:
            self.release()
            raise
        self._thread.start()

    def release(self) -> None:
        """Give up the claim; idempotent, and a no-op in a child process that a hook forked."""
        if os.getpid() == self._pid:
            self._is_released.set()
            if self._thread.ident is not None:
                # `lost` refers to the run and its arrays, and a thread that frees an array while
                # the interpreter exits aborts the process. The timeout is for a blocked server.
                self._thread.join(_BEAT)
            with suppress(OSError):  # if it stays, later processes see that its process is dead
                self.path.unlink()

    def _beat(self) -> None:
        while not self._is_released.wait(_BEAT):
            try:
                os.utime(self.path)
            except FileNotFoundError:
                self._lost()
                return
            except OSError:  # such as a file server that does not answer for a while
                continue

    def _wait_for_others(self) -> None:
        """Return once no other process with a claim is alive; raise if one is."""
        first_beats: dict[Path, tuple[float, float]] = {}  # and when each was first seen
        live_since: dict[Path, float] = {}
        while True:
            with suppress(OSError):  # not every file system lets one set times
                os.utime(self.path)
            now = self.path.stat().st_mtime  # by the clock of the file server
            waits = False
            names = [name for name in os.listdir(self._directory) if name.startswith(self._prefix)]
            for path in map(self._directory.joinpath, names):
                if path == self.path or (read := _read_claim(path)) is None:
                    continue
                claim, beat = read
                is_live = _is_live(claim)
                first_beat, since = first_beats.setdefault(path, (beat, time.monotonic()))
                if is_live is None and first_beat != beat:
                    is_live = True
                # The time of a claim may be in the future, if a clock was wrong.
                is_stale = now - beat > _STALE or time.monotonic() - since > _STALE
                if is_live is False or (is_live is None and is_stale):
                    path.unlink(missing_ok=True)
                    continue
                if is_live:
                    start = live_since.setdefault(path, time.monotonic())
                    # Of two processes that wait for each other, one gives way at once.
                    if path.name < self.path.name or time.monotonic() - start > _TIE:
                        raise ClaimedError(_holder(path, claim))
                waits = True
            if not waits:
                return
            time.sleep(0.1)


class Lease:
    """A note next to the steps of a store, which ends with the heartbeat of its process.

    >>> import tempfile
    >>> from stepfold.checkpoint.store import open_store
    >>> store = open_store(tempfile.mkdtemp())
    >>> lease, leases = Lease(store, "leases"), Leases(store, "leases")
    >>> lease.hold({"steps": [20]})
    >>> leases.held()
    [{'steps': [20]}]
    >>> lease.release()
    >>> leases.held()
    []
    """

    def __init__(self, store: Any, folder: str) -> None:
        self._store, self._name = store, f"{folder}/{secrets.token_hex(8)}"
        self._content: Any = None
        self._beats = 0
        self._is_released = threading.Event()
        self._lock = threading.Lock()  # of the note
        self._thread = threading.Thread(target=self._beat, name="stepfold-lease", daemon=True)

    def hold(self, content: Any) -> None:
        """Say what the process uses, and return once others can see it."""
        if content == self._content:
            return
        with self._lock:
            self._content = content
            self._write()
        if self._thread.ident is None:
            self._thread.start()

    def release(self) -> None:
        """End the lease; idempotent."""
        if self._thread.ident is not None and not self._is_released.is_set():
            self._is_released.set()
            self._thread.join()
            with suppress(CheckpointError):  # others will miss the heartbeat
                self._store.delete_note(self._name)

    def _write(self) -> None:
        self._beats += 1
        note = {"held": self._content, "beats": self._beats, "process": _describe_process()}
        self._store.write_note(self._name, note)

    def _beat(self) -> None:
        while not self._is_released.wait(_BEAT):
            with self._lock, suppress(CheckpointError):  # a server that does not answer
                self._write()


class Leases:
    """The leases in a folder, as one process sees them.

    A lease is live when it is first seen, and then as long as its heartbeat changes at least every
    `_STALE` seconds. It is dead if its process was on this host and is dead. A process that is
    alive but frozen has no heartbeat: its lease is not live, but stays, since it may continue.
    """

    def __init__(self, store: Any, folder: str) -> None:
        self._store, self._folder = store, folder
        self._beats: dict[str, tuple[Any, float]] = {}  # the last, and when it was first seen

    def held(self) -> list[Any]:
        """Return what live processes hold; delete the leases of dead ones."""
        held = []
        for name in self._store.list_notes(self._folder):
            path = f"{self._folder}/{name}"
            note = read_fields(self._store, path) or {}
            if not isinstance(note.get("process"), dict):
                continue
            beats, now = note.get("beats"), time.monotonic()
            if self._beats.get(name, (None, now))[0] != beats:
                self._beats[name] = beats, now
            alive = _is_live(note["process"])
            if alive is not False and now - self._beats[name][1] <= _STALE:
                held.append(note.get("held"))
            elif not alive:  # a frozen process may continue
                self._store.delete_note(path)
        return held


def _describe_process() -> dict[str, Any]:
    """Describe this process, so that `_is_live` can tell on the same host whether it is alive."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "started": _start_time(pid) if _machine() else "",
    }


def _read_claim(path: Path) -> tuple[dict[str, Any], float] | None:
    """Return a claim and the time of its last heartbeat; None if it is missing or no file."""
    try:
        check_regular(path, limit=_LARGEST)
        with path.open("rb") as file:  # opening makes NFS ask the server for the time
            text, beat = file.read(), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, CheckpointError):
        return None
    try:
        claim = json.loads(text)
    except (ValueError, RecursionError):  # it is being written, or damaged
        claim = None
    return (claim if isinstance(claim, dict) else {}), beat


def _is_live(claim: dict[str, Any]) -> bool | None:
    """Whether the process of a claim is alive; None if only its heartbeats can tell."""
    pid, machine = claim.get("pid"), _machine()
    if machine is None or claim.get("machine") != machine or type(pid) is not int:
        return None
    start = _start_time(pid)
    return None if start == "" else start is not None and start == claim.get("started")


def _machine() -> str | None:
    """Identify the boot of the host and the PID namespace; None if PIDs say nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname() if os.name == "posix" else None


def _start_time(pid: int) -> str | None:
    """Return when a process started: None if it is dead, "" if the system does not tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):  # of another user
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]  # a zombie is dead


def _holder(path: Path, claim: dict[str, Any]) -> str:
    """Describe the process that has a claim."""
    holder = f"process {claim.get('pid')} on {claim.get('host')} since {claim.get('since')}"
    return f"{holder if claim else 'a run'} ({path.name})"
