"""The lock of a run on its directory, even on file systems without locks, such as NFS.

Each run that wants the directory creates a claim, a file with a unique name, and then looks at the
claims of others. It has the lock if no other claim belongs to a live process. Of two runs, at least
the second sees the claim of the first, so they never both have the lock. Taking over from a dead
process involves no race: its claim is ignored and deleted, and its name is never used again.
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
from typing import Any, NoReturn

from stepfold.errors import refuse
from stepfold.loop.hooks.base import Stop
from stepfold.loop.json_files import parse_json, read_with_time

_PREFIX = ".lock-"
_BEAT = 5.0  # seconds between heartbeats, by which other hosts know that a process is alive
_STALE = 60.0  # seconds without a heartbeat, after which a process counts as dead
_TIE = 2.0  # seconds to wait for a run that started at the same time to give way


class RunLock:
    """A lock on a directory, held by one run at a time.

    If a claim is from this host and PID namespace, its PID and start time say whether its run is
    alive. Any other claim is watched for up to `_STALE` seconds for a heartbeat, a new modification
    time. `stop` is called, in a thread, if the claim of this run was deleted, since another run may
    then have the directory.
    """

    def __init__(self, directory: Path, stop: Callable[[Stop], None]) -> None:
        self._directory = directory
        self._path = directory / f"{_PREFIX}{secrets.token_hex(8)}"
        self._pid = os.getpid()
        self._is_released = threading.Event()
        self._stop = stop
        self._thread = threading.Thread(target=self._beat, name="stepfold-lock", daemon=True)

    def acquire(self) -> None:
        """Acquire the lock, or raise ConfigError with the process that holds it."""
        claim = {
            "host": socket.gethostname(),
            "pid": self._pid,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            "started": _start_time(self._pid) if _machine() else "",
        }
        try:
            with self._path.open("x") as file:
                json.dump(claim, file)
            self._wait_for_others()
        except OSError as error:
            self.release()
            got = f"{self._directory}: {error.strerror}"
            advice = "make room, change the permission, or give another"
            refuse("run_dir", "a directory to write in", got, advice, cause=error)
        except BaseException:
            self.release()
            raise
        self._thread.start()

    def release(self) -> None:
        """Idempotent; a no-op in a child that a hook forked."""
        if os.getpid() == self._pid:
            self._is_released.set()
            if self._thread.ident is not None:
                # `stop` refers to the run and its arrays, and a thread that frees an array while
                # the interpreter exits aborts the process. The timeout is for a blocked server.
                self._thread.join(_BEAT)
            with suppress(OSError):  # if it stays, later runs see that its process is dead
                self._path.unlink()

    def _beat(self) -> None:
        while not self._is_released.wait(_BEAT):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                message = f"another run may use {self._directory}: {self._path.name} was deleted"
                self._stop(Stop("error", message))
                return
            except OSError:  # such as a file server that does not answer for a while
                continue

    def _wait_for_others(self) -> None:
        """Return once no other run is alive; raise if one is."""
        first_beats: dict[Path, tuple[float, float]] = {}  # and when each was first seen
        live_since: dict[Path, float] = {}
        while True:
            with suppress(OSError):  # not every file system lets one set times
                os.utime(self._path)
            now = self._path.stat().st_mtime  # by the clock of the file server
            waits = False
            names = [name for name in os.listdir(self._directory) if name.startswith(_PREFIX)]
            for path in map(self._directory.joinpath, names):
                if path == self._path or (read := _read_claim(path)) is None:
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
                    # Of two runs that wait for each other, one gives way at once.
                    if path.name < self._path.name or time.monotonic() - start > _TIE:
                        _refuse(self._directory, path, claim)
                waits = True
            if not waits:
                return
            time.sleep(0.1)


def _read_claim(path: Path) -> tuple[dict[str, Any], float] | None:
    """Return a claim and the time of its last heartbeat; None if it is missing or no file."""
    try:
        text, beat = read_with_time(path)
    except (FileNotFoundError, ValueError):
        return None
    try:
        claim = parse_json(text)
    except ValueError:  # it is being written, or damaged
        claim = None
    return (claim if isinstance(claim, dict) else {}), beat


def _is_live(claim: dict[str, Any]) -> bool | None:
    """Whether the process of a claim is alive; None if only its heartbeats can tell."""
    pid, machine = claim.get("pid"), _machine()
    if machine is None or claim.get("machine") != machine or type(pid) is not int:
        return None
    start = _start_time(pid)
    return None if start == "" else start == claim.get("started")


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


def _refuse(directory: Path, path: Path, claim: dict[str, Any]) -> NoReturn:
    holder = f"process {claim.get('pid')} on {claim.get('host')} since {claim.get('since')}"
    got = f"{directory}, in use by {holder if claim else 'a run'} ({path.name})"
    advice = "wait until it ends, stop it, or give another directory"
    refuse("run_dir", "a directory that no other run uses", got, advice)
