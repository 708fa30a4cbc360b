"""The parent's side of worker processes: requests, replies, and replacement of dead workers.

A request describes a batch completely. So a worker has no state that matters, and a new process
makes the batches of one that died.
"""

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from stepfold.data.shared_memory import Pickled, SharedMemory, dump, load, read
from stepfold.data.worker_main import NO_JAX, NUMBER_BYTES, Failure, Reply, command
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


class BatchRequest:
    """A request to a worker, and its reply."""

    def __init__(self, worker: "_Worker", slot: int, pickled: Pickled) -> None:
        self.worker, self.slot, self.pickled = worker, slot, pickled
        self.reply: Reply | None = None
        self.is_dropped = False  # nothing needs the reply


class WorkerPool:
    """Processes that make batches on request.

    `maker` is a function from a message to a batch, which each worker gets as a copy. A worker has
    up to `ahead` requests at a time.
    """

    def __init__(
        self, maker: Any, count: int, ahead: int, *, may_fork: bool = sys.platform == "linux"
    ) -> None:
        self._processes = _Processes(maker, count, ahead + _HELD, may_fork)
        self._turns = itertools.cycle(self._processes.workers)
        self._processes.start()
        self.close = weakref.finalize(self, self._processes.close)

    def submit(self, message: Any) -> BatchRequest:
        """Ask for a batch, by a message that can be pickled."""
        worker = next(self._turns)
        while not worker.free:
            self._read(worker)
        request = BatchRequest(worker, worker.free.pop(), dump(message))
        worker.pending.append(request)
        _send(request)
        return request

    def receive(self, request: BatchRequest) -> Reply:
        """Wait for the reply to a request.

        If the processes that made it died, its kind is "died", and its value the last exit code.

        Raises:
          DataError: if the processes cannot load what makes the batches.
        """
        while request.reply is None:
            self._read(request.worker)
        return request.reply

    def _read(self, worker: "_Worker") -> None:
        """Read the next answer of a worker; replace the worker if it has died."""
        try:
            slot = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        worker.deaths, self._processes.are_loaded = 0, True
        request = worker.pending.popleft()
        if request.is_dropped:
            worker.free.append(slot)
        else:
            request.reply = _open(worker, slot)

    def _replace(self, worker: "_Worker") -> None:
        """Start another process in place of one that died, and send its open requests again."""
        worker.deaths += 1
        status, new = self._processes.replace(worker)
        if worker.deaths == ATTEMPTS:  # leave out the batch that kills it
            worker.deaths = 0
            request = worker.pending.popleft()
            worker.free.append(request.slot)
            request.reply = Reply("died", status, [])
        for each in new:
            for request in each.pending:
                _send(request)


def _send(request: BatchRequest) -> None:
    worker, slot = request.worker, request.slot
    request.pickled.write(worker.slots[slot])
    with contextlib.suppress(ConnectionError):  # it has died, which `_read` will see
        worker.connection.send(slot)


def _open(worker: "_Worker", slot: int) -> Reply:
    """Load a reply from shared memory, which is free again when no array refers to it."""
    root = read(worker.slots[slot])
    held = len(worker.slots) - len(worker.free) - len(worker.pending)
    if held > _HELD:  # else there might be no memory for the next request
        root = root.copy()
        worker.free.append(slot)
    else:
        weakref.finalize(root, worker.free.append, slot).atexit = False
    reply: Reply = load(root)
    return reply


def spell_status(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"{name}, as if memory ran out" if name == "SIGKILL" else name


class _Worker:
    """A worker and its open requests. If its process dies, another one takes its place."""

    connection: "Connection"

    def __init__(self, number: int, slots: int) -> None:
        self.number, self.deaths = number, 0
        self.slots = [SharedMemory() for _ in range(slots)]
        self.free = list(range(slots))  # a stack, so that slots that are not needed stay empty
        self.pending: deque[BatchRequest] = deque()


class _Processes:
    """The nursery and the workers, and their end."""

    def __init__(self, maker: Any, count: int, slots: int, may_fork: bool) -> None:
        pickled = dump(maker)
        self._payload, self._may_fork = SharedMemory(), may_fork
        pickled.write(self._payload)
        self.workers = [_Worker(number, slots) for number in range(count)]
        self.are_loaded, self._parent = False, os.getpid()

    def start(self) -> None:
        """Start the nursery, and ask it for all workers."""
        self._control, control = socket.socketpair()
        self._answers = self._control.makefile("rb")
        fds = control.fileno(), self._payload.fd
        self._nursery = subprocess.Popen(
            command("run_nursery", *fds, self._may_fork),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, "JAX_PLATFORMS": NO_JAX},
            pass_fds=fds,
            process_group=0,  # so that Ctrl-C interrupts this process only
        )
        control.close()
        for worker in self.workers:
            self._connect(worker)

    def replace(self, worker: _Worker) -> tuple[int, list[_Worker]]:
        """Start a process in place of one that died; return how it ended, and what has started."""
        worker.connection.close()
        try:
            self._connect(worker)
            answer = pickle.load(self._answers)
        except (EOFError, OSError):  # the nursery died too, and all workers with it
            self._hang_up()
            status = self._wait_for_nursery()
            for other in self.workers:
                other.connection.close()
            self.start()
            return status, self.workers
        if isinstance(answer, Failure):
            _refuse_payload(answer)
        return answer, [worker]

    def _connect(self, worker: _Worker) -> None:
        """Ask for a process for a worker."""
        from multiprocessing.connection import Connection  # lazy: only workers need it

        ours, its = socket.socketpair()
        worker.connection = Connection(ours.detach())
        with its, contextlib.suppress(ConnectionError):  # it has died, which `replace` will see
            fds = [its.fileno(), *(slot.fd for slot in worker.slots)]
            socket.send_fds(self._control, [worker.number.to_bytes(NUMBER_BYTES, "big")], fds)

    def _hang_up(self) -> None:
        self._answers.close()
        self._control.close()

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
        self._hang_up()
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
