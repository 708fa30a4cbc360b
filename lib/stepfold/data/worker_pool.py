"""The parent's side of worker processes: requests to them, their answers, and their deaths.

A request describes a batch completely. So a worker has no state that matters, and a new process
makes the batches of one that died.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from stepfold.data.shared_memory import Memory, Pickled, dump, load, read
from stepfold.data.worker_main import (
    FORK,
    FORKED,
    NO_JAX,
    REPLY,
    REQUEST,
    UNKNOWN,
    Failure,
    Reply,
    command,
)
from stepfold.errors import DataError, refuse

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ATTEMPTS = 3  # to make a batch whose worker dies
_HELD = 2  # batches of a worker that are in its memory while they are used; others are copied
_STOP_SECONDS = 5.0
# Each numerical library would start a thread per core, in every worker.
_ONE_THREAD = dict.fromkeys(
    (
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
        *("VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"),
    ),
    "1",
)


class WorkerPool:
    """Processes that make batches on request.

    `maker` is a function from a request to a batch, which each worker gets as a copy. A worker has
    up to `ahead` requests at a time.
    """

    def __init__(
        self, maker: Any, count: int, ahead: int, *, may_fork: bool = sys.platform == "linux"
    ) -> None:
        self._processes = _Processes(maker, count, ahead + _HELD, may_fork)
        self._requests: dict[int, _Request] = {}
        self._done: dict[int, Reply] = {}
        self._discarded: set[int] = set()
        self._last_ticket = 0
        self._processes.start()
        self.close = weakref.finalize(self, self._processes.close)

    def submit(self, request: Any) -> int:
        """Ask for a batch, by a request that can be pickled; return a ticket for `receive`."""
        self._last_ticket += 1
        ticket, workers = self._last_ticket, self._processes.workers
        worker = workers[ticket % len(workers)]
        while not worker.free:
            self._read(worker)
        slot = worker.free.pop()
        self._requests[ticket] = _Request(worker, slot, dump(request))
        worker.pending.append(ticket)
        self._send(ticket)
        return ticket

    def receive(self, ticket: int) -> Reply:
        """Wait for what came of a request.

        If the processes that made it died, its kind is "died", and its value the last exit code.

        Raises:
          DataError: if the processes cannot load what makes the batches.
        """
        while ticket not in self._done:
            self._read(self._requests[ticket].worker)
        return self._done.pop(ticket)

    def discard(self, ticket: int) -> None:
        """Drop what came of a request, or what will come of it."""
        if self._done.pop(ticket, None) is None:
            self._discarded.add(ticket)

    def _send(self, ticket: int) -> None:
        worker, slot, pickled = self._requests[ticket]
        parts = pickled.write(worker.slots[slot])
        with contextlib.suppress(ConnectionError):  # it has died, which `_read` will see
            worker.connection.send_bytes(REQUEST.pack(slot, parts))

    def _read(self, worker: "_Worker") -> None:
        """Read the next answer of a worker; replace the worker if it has died."""
        try:
            (parts,) = REPLY.unpack(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._replace(worker)
            return
        worker.deaths, self._processes.are_loaded = 0, True
        ticket = worker.pending.popleft()
        slot = self._requests.pop(ticket).slot
        if ticket in self._discarded:
            self._discarded.remove(ticket)
            worker.free.append(slot)
        else:
            self._done[ticket] = _open(worker, slot, parts)

    def _replace(self, worker: "_Worker") -> None:
        """Start another process in place of one that died, to make what it has not made."""
        worker.deaths += 1
        status, new = self._processes.replace(worker)
        if worker.deaths == ATTEMPTS:  # leave out the batch that kills it
            worker.deaths = 0
            ticket = worker.pending.popleft()
            request = self._requests.pop(ticket)
            worker.free.append(request.slot)
            if ticket in self._discarded:
                self._discarded.remove(ticket)
            else:
                self._done[ticket] = Reply("died", status, [])
        for each in new:
            for ticket in each.pending:
                self._send(ticket)


class _Request(NamedTuple):
    worker: "_Worker"
    slot: int
    pickled: Pickled


def _open(worker: "_Worker", slot: int, parts: int) -> Reply:
    """Return a reply in shared memory, which is free again when no array of it is left."""
    root = read(worker.slots[slot], parts)
    held = len(worker.slots) - len(worker.free) - len(worker.pending)
    if held > _HELD:  # else there might be no memory for the next request
        root = root.copy()
        worker.free.append(slot)
    else:
        weakref.finalize(root, worker.free.append, slot).atexit = False
    reply: Reply = load(root, parts)
    return reply


def spell_status(status: int) -> str:
    """Describe how a process ended."""
    if status == UNKNOWN:
        return "an unknown cause"
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"{name}, as if memory ran out" if name == "SIGKILL" else name


class _Worker:
    """The connection and the memory of a worker, and the tickets that it has not answered."""

    connection: "Connection"

    def __init__(self, slots: int) -> None:
        self.pid = self.deaths = 0
        self.slots = [Memory() for _ in range(slots)]
        self.free = list(range(slots))  # a stack, so that slots that are not needed stay empty
        self.pending: deque[int] = deque()


class _Processes:
    """The nursery and the workers, and their end."""

    def __init__(self, maker: Any, count: int, slots: int, may_fork: bool) -> None:
        pickled = dump(maker)
        self._payload, self._may_fork = Memory(), may_fork
        self._parts = pickled.write(self._payload)
        self.workers = [_Worker(slots) for _ in range(count)]
        self.are_loaded, self._parent = False, os.getpid()
        self._starting: deque[_Worker] = deque()  # those whose number the nursery has not sent

    def start(self) -> None:
        """Start the nursery, and ask it for all workers."""
        self._control, control = socket.socketpair()
        fds = control.fileno(), self._payload.fd
        self._nursery = subprocess.Popen(
            command("run_nursery", *fds, self._parts, self._may_fork),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, "JAX_PLATFORMS": NO_JAX},
            pass_fds=fds,
            process_group=0,  # so that Ctrl-C interrupts this process only
        )
        control.close()
        self._starting.clear()
        for worker in self.workers:
            worker.pid = 0
            self._fork(worker)

    def replace(self, worker: _Worker) -> tuple[int, list[_Worker]]:
        """Start a process in place of one that died; return how it ended, and what has started."""
        worker.connection.close()
        try:
            while self._starting:
                self._read_forked()
            self._fork(worker)
            return self._read_forked(), [worker]
        except (EOFError, OSError):  # the nursery died too, and all workers with it
            self._control.close()
            status = self._wait_for_nursery()
            for other in self.workers:
                other.connection.close()
            self.start()
            return status, self.workers

    def _fork(self, worker: _Worker) -> None:
        """Ask for a process for a worker."""
        from multiprocessing.connection import Connection  # lazy: only workers need it

        ours, its = socket.socketpair()
        worker.connection = Connection(ours.detach())
        self._starting.append(worker)
        with its, contextlib.suppress(ConnectionError):  # it has died, which `_read` will see
            fds = [its.fileno(), *(slot.fd for slot in worker.slots)]
            socket.send_fds(self._control, [FORK.pack(worker.pid)], fds)

    def _read_forked(self) -> int:
        """Read the next answer of the nursery; return how the process before ended."""
        status: int
        pid, status = FORKED.unpack(self._receive(FORKED.size))
        if not pid:
            _refuse_payload(pickle.loads(self._receive(status)))
        self._starting.popleft().pid = pid
        return status

    def _receive(self, size: int) -> bytes:
        message = b""
        while len(message) < size:
            received = self._control.recv(size - len(message))
            if not received:
                raise EOFError
            message += received
        return message

    def _wait_for_nursery(self) -> int:
        try:
            return self._nursery.wait(_STOP_SECONDS if self.are_loaded else 0)
        except subprocess.TimeoutExpired:  # it has not loaded the batches, and has no workers
            self._nursery.kill()
            return self._nursery.wait()

    def close(self) -> None:
        """End all processes. They are killed, since they have nothing to finish."""
        if os.getpid() != self._parent:  # a copy in a process that was forked
            return
        with contextlib.suppress(OSError):  # the nursery has ended
            self._control.shutdown(socket.SHUT_RDWR)  # a forked process may still have it open
        self._control.close()
        self._wait_for_nursery()
        self._payload.close()
        for worker in self.workers:
            worker.connection.close()
            for slot in worker.slots:
                slot.close()


def _refuse_payload(failure: Failure) -> None:
    """Raise what the nursery raised while it loaded the batches."""
    advice = f"its traceback is\n{failure.traceback}"
    if failure.used_jax:
        advice = (
            "move what runs jax when its module is imported into a function, and give numpy arrays "
            f"instead of jax's; {advice}"
        )
    expected = "batches that another process can load without running jax"
    refuse("workers", expected, f"{failure.line}", advice, kind=DataError)
