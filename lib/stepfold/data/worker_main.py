"""What runs in the processes of `workers`: the nursery, and the workers that it starts.

The nursery imports and loads what makes the batches, once, and forks a worker for each request of
its parent. Its forks are safe, since no thread runs in it but idle ones of BLAS, and the workers
share its memory. If loading the batches has started other threads, and on systems other than Linux,
each worker is a new process that loads the batches itself.

The nursery is the guard too. When its parent ends in any way, the connection between them closes,
and the nursery kills the workers.

No worker may run jax. It would take memory of the accelerator, and start threads that hang a fork.
"""

import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from stepfold.data.shared_memory import SharedMemory, dump, load, read

NO_JAX = "none_in_workers"
"""A platform that jax does not know, so that it raises if a worker uses it."""

# Large values are in shared memory, so a send never blocks. A worker gets the number of a slot,
# replaces the request in it with the reply, and returns the number.
NUMBER_BYTES = 8
"""The size of a message to the nursery, the number of the worker to start, whose descriptors come
with it. If the worker replaces one that has died, the nursery answers with how that one ended."""


class Reply(NamedTuple):
    """The reply to a request."""

    kind: str  # "batch", "end" or "error"
    value: Any  # the batch, or a Failure
    warnings: list[tuple[str, Any, str, int]]


class Failure(NamedTuple):
    """An exception in a worker, pickled if it survives that, and the same as text."""

    pickled: tuple[bytes, list[bytes]] | None
    line: str
    traceback: str

    @property
    def used_jax(self) -> bool:
        """Whether it comes from a use of jax."""
        return NO_JAX in self.traceback

    def load(self) -> BaseException | None:
        """Return the exception, or None if it cannot be pickled."""
        if self.pickled is None:
            return None
        data, buffers = self.pickled
        error: BaseException = pickle.loads(data, buffers=buffers)
        return error


def command(name: str, *args: int) -> list[str]:
    """Return the command line that runs a function of this module in a new process."""
    call = f"{name}({', '.join(map(str, args))})"
    path = f"import sys; sys.path[:] = {sys.path!r}"
    return [sys.executable, "-c", f"{path}; from stepfold.data.worker_main import {name}; {call}"]


def run_nursery(control_fd: int, payload_fd: int, may_fork: bool) -> None:
    """Load the maker of batches, and start workers until the parent has ended."""
    control, parent = socket.socket(fileno=control_fd), os.getppid()
    threads = _count_threads()
    try:
        maker = _load(payload_fd)
    except BaseException as error:  # noqa: BLE001  raised by the parent
        control.sendall(pickle.dumps(_describe(error)))
        return
    may_fork = may_fork and _count_threads() == threads
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages that it shares
    control.settimeout(1)
    workers: dict[int, int] = {}  # processes, by the numbers of the workers
    try:
        # If the parent was forked, the connection stays open when it ends.
        while os.getppid() == parent:
            try:
                message, fds, *_ = socket.recv_fds(control, NUMBER_BYTES, 64)
            except TimeoutError:
                continue
            if not message:
                return
            number = int.from_bytes(message, "big")
            if number in workers:
                control.sendall(pickle.dumps(_wait(workers.pop(number))))
            if not may_fork:
                workers[number] = _spawn(payload_fd, fds)
            elif process := _fork():
                workers[number] = process
            else:
                workers.clear()
                control.close()
                _work(maker, *fds)
                return
            for fd in fds:
                os.close(fd)
    except ConnectionError:  # the parent was killed
        pass
    finally:
        for process in workers.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def run_worker(payload_fd: int, *fds: int) -> None:
    """Load the maker of batches, and make some, until the parent has ended."""
    _work(_load(payload_fd), *fds)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def _fork() -> int:
    with warnings.catch_warnings():  # of the threads of BLAS
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        return os.fork()


def _spawn(payload_fd: int, fds: list[int]) -> int:
    arguments = command("run_worker", payload_fd, *fds)
    return subprocess.Popen(arguments, pass_fds=(payload_fd, *fds)).pid


def _wait(worker: int) -> int:
    """Return the exit code of a worker that has closed its connection."""
    for _ in range(100):
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)  # it closed its connection, and still runs
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _load(payload_fd: int) -> Any:
    """Read what makes the batches. Its arrays are shared, until a worker changes one."""
    return load(SharedMemory(payload_fd).private_view())


def _work(maker: Callable[[Any], Any], connection_fd: int, *slot_fds: int) -> None:
    """Answer the requests of the parent until it closes the connection."""
    from multiprocessing.connection import Connection  # lazy: only workers need it

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the nursery
    connection, slots = Connection(connection_fd), [SharedMemory(fd) for fd in slot_fds]
    try:
        while True:
            slot = connection.recv()
            _answer(maker, slots[slot])
            connection.send(slot)
    except (EOFError, ConnectionError):
        return


def _answer(maker: Callable[[Any], Any], memory: SharedMemory) -> None:
    """Make a batch, and write it in place of its request."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # the parent filters them
        try:
            # Of a copy, since the batch may hold arrays of the request, which it overwrites.
            batch = maker(load(read(memory).copy()))
            pickled = dump(Reply("batch", batch, _spell(caught)))
        except StopIteration:
            pickled = dump(Reply("end", None, _spell(caught)))
        except BaseException as error:  # noqa: BLE001  raised by the parent
            pickled = dump(Reply("error", _describe(error), _spell(caught)))
    pickled.write(memory)


def _spell(caught: list[warnings.WarningMessage]) -> list[tuple[str, Any, str, int]]:
    return [(str(each.message), each.category, each.filename, each.lineno) for each in caught]


def _describe(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    line = traceback.format_exception_only(error)[0].strip()
    try:
        pickled = dump(error)
        buffers = [bytes(buffer) for buffer in pickled.buffers]
        failure = Failure((pickled.data, buffers), line, text)
        failure.load()
    except Exception:  # noqa: BLE001  some exceptions cannot be pickled, or not be unpickled
        failure = Failure(None, line, text)
    return failure
