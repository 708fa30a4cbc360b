"""Requests between the processes of a run, over plain TCP and in threads.

Collectives do not fit, since all processes have to call them in the same order as their steps. The
coordination service does not fit, since it is made for small values. So each process has a server.
Its address, and a token that authorizes requests, travel through the coordination service.

A message is JSON, preceded by its length. Bytes may follow it; the JSON has their number.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from stepfold.errors import CheckpointError
from stepfold.internals.jax import coordinator_address

_TIMEOUT = 60.0  # seconds without a byte, after which a request fails
_LINGER = 60.0  # seconds without a request, after which a closed server ends
_LARGEST = 1 << 30  # bytes of the JSON of a message
_SIZE = struct.Struct("<Q")

Buffer = bytes | memoryview
Answer = Callable[[Any, "Connection"], tuple[Any, Sequence[Buffer]]]


class Address(NamedTuple):
    """Where a process listens, and the token that authorizes requests."""

    host: str
    port: int
    token: str


class Connection:
    """One end of a connection, which sends and receives messages."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(_TIMEOUT)
        self._socket = connected

    def send(self, message: Any, content: Iterable[Buffer] = ()) -> None:
        """Send a message, and the bytes that follow it."""
        text = json.dumps(message).encode()
        self._socket.sendall(_SIZE.pack(len(text)) + text)
        for each in content:
            self._socket.sendall(each)

    def receive(self) -> Any:
        """Receive a message without what follows it."""
        header = np.empty(_SIZE.size, np.uint8)
        self.fill(header)
        (size,) = _SIZE.unpack(header.data)
        if size > _LARGEST:
            raise ConnectionError(f"a message of {size:,} bytes")
        text = np.empty(size, np.uint8)
        self.fill(text)
        return json.loads(text.tobytes())

    def fill(self, array: np.ndarray) -> None:
        """Receive as many bytes as the array holds."""
        rest = array.data
        while rest:
            if not (count := self._socket.recv_into(rest)):
                raise ConnectionError("the other process closed the connection")
            rest = rest[count:]


class Server:
    """Answer the requests of other processes in threads, with a function of each request.

    The function returns JSON and the bytes that follow it. If it raises a `CheckpointError` or an
    `OSError`, so does `ask` in the process that asked.
    """

    def __init__(self, answer: Answer) -> None:
        host = _own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.settimeout(1.0)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(16))
        self._answer, self._pid = answer, os.getpid()
        self._closes_at: float | None = None
        threading.Thread(target=self._accept, name="stepfold-peers", daemon=True).start()

    def close(self) -> None:
        """End soon: other processes may still need answers, such as to restore."""
        self._closes_at = time.monotonic() + _LINGER

    def _accept(self) -> None:
        with self._listener:
            while self._closes_at is None or time.monotonic() < self._closes_at:
                try:
                    connected, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                if self._closes_at is not None:
                    self.close()
                serve = threading.Thread(target=self._serve, args=(connected,), daemon=True)
                serve.start()

    def _serve(self, connected: socket.socket) -> None:
        # The other process raises if the connection ends, so this one does not.
        with connected, suppress(OSError, ValueError):
            connection = Connection(connected)
            request = connection.receive()
            token = request.get("token") if isinstance(request, dict) else None
            if not secrets.compare_digest(str(token), self.address.token):
                return
            try:
                answer, content = self._answer(request["request"], connection)
            except (CheckpointError, OSError) as error:
                connection.send({"error": f"{error}"})
                return
            size = sum(memoryview(each).nbytes for each in content)
            connection.send({"answer": answer, "size": size}, content)


def send_request(
    address: Address, request: Any, content: Iterable[Buffer] = ()
) -> tuple[Any, np.ndarray]:
    """Send a request to a process, and return its answer and the bytes that follow it.

    Raises:
      CheckpointError: with the error of the other process, or if that cannot be reached.
    """
    try:
        with socket.create_connection(address[:2], timeout=_TIMEOUT) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(connected)
            connection.send({"token": address.token, "request": request}, content)
            answer = connection.receive()
            received = np.empty(answer.get("size", 0), np.uint8)
            connection.fill(received)
    except (OSError, ValueError) as error:
        where = f"{address.host}:{address.port}"
        reason = f"{error}" or type(error).__name__
        raise CheckpointError(f"{where} cannot be reached: {reason}") from error
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer["answer"], received


def _own_host() -> str:
    """Return the address of this host by which the others reach it."""
    coordinator = coordinator_address()
    if coordinator is None:
        return "127.0.0.1"
    host, port = coordinator.rsplit(":", 1)
    family, kind, *_, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(address)
        return str(probe.getsockname()[0])
