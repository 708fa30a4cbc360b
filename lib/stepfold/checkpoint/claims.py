"""A claim on a name in a directory, even on file systems without locks, such as NFS.

Each process that wants the name creates a claim, a file with a unique name, and then looks at the
claims of others. It has the name if no other claim belongs to a live process. Of two processes, at
least the second sees the claim of the first, so they never both have it. Taking over from a dead
process involves no race: its claim is ignored and deleted, and is never used again.
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
        content = {
            "host": socket.gethostname(),
            "pid": self._pid,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            "started": _start_time(self._pid) if _machine() else "",
        }
        try:
            with self.path.open("x") as file:
                json.dump(content, file)
            self._wait_for_others()
        except BaseException:
            self.release()
            raise
        self._thread.start()

    def release(self) -> None:
        """Idempotent; a no-op in a child that a hook forked."""
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
