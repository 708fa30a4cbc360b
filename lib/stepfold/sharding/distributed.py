"""Start jax's distributed runtime with the settings of the launcher.

This is the only module of stepfold that reads the environment, in which mpirun and srun describe
the job.
"""

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import create_connection, create_server
from typing import Any

import jax

from stepfold.errors import ConfigError
from stepfold.sharding.launchers import launched


@dataclass(frozen=True)
class Distributed:
    """This process among those of a job, and how they were found; `str()` describes it.

    Attributes:
      how: "alone", "Open MPI", "SLURM", "explicit coordinator" or "already started".
      process: the index of this process.
      processes: the number of processes.
      coordinator: the address of the coordinator, if known.

    >>> import stepfold as sf
    >>> found = sf.start_distributed()
    >>> found.how, found.process, found.processes
    ('alone', 0, 1)
    """

    how: str
    process: int = 0
    processes: int = 1
    coordinator: str | None = None

    def __str__(self) -> str:
        """Describe the process and its devices; counting them initializes jax's backend."""
        own, every = jax.local_device_count(), jax.device_count()
        devices = f"{every} {jax.default_backend()} device{'s' if every > 1 else ''}"
        if self.how == "alone":
            return f"alone: one process with {devices}"
        said = {
            "explicit coordinator": " with an explicit coordinator",
            "already started": ", already started",
        }
        how = said.get(self.how, f" under {self.how}")
        where = f", coordinator {self.coordinator}" if self.coordinator else ""
        return f"process {self.process} of {self.processes}{how}: {own} of {devices}{where}"


def start_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    devices: Sequence[int] | None = None,
    timeout: int = 300,
    heartbeat: int = 100,
    shutdown: int = 300,
) -> Distributed:
    """Join the processes of a job in one jax runtime; a no-op in a single process.

    Call it before anything uses a jax device. The same script then runs alone, under Open MPI
    (`mpirun -n 2 python script.py`), under SLURM (`srun`; a single task runs alone), and without a
    launcher if given `coordinator`, `processes` and `process`. Idempotent. For environments that it
    does not detect (TPU pods, Kubernetes, MPICH), call `jax.distributed.initialize` first; this
    function then returns the index and the number of processes of that runtime.

    Args:
      coordinator: "host:port", the same in all processes: the host of process 0 and any free port.
        It overrides that of a launcher, for example if mpirun runs on another host than process 0.
      processes: the number of processes.
      process: the index of this process, from 0.
      devices: the ids of the GPUs of its host that this process uses, `[]` for all visible ones. By
        default it uses all, or one by local rank if a launcher started several processes on the
        host.
      timeout: seconds to wait for all processes to connect.
      heartbeat: seconds without a heartbeat after which a process counts as dead; jax then
        terminates the others.
      shutdown: seconds that a process waits at its exit, also after an exception, for the others to
        exit; jax then terminates them all.

    Raises:
      ConfigError: if the arguments or the environment do not fit together, if jax has already
        initialized its devices, or if not all processes connect in time. In the last case the
        process has to exit; otherwise jax aborts it a minute later.

    >>> import stepfold as sf
    >>> print(sf.start_distributed())
    alone: one process with ... cpu device...
    """
    for name, seconds in (("timeout", timeout), ("heartbeat", heartbeat), ("shutdown", shutdown)):
        if not isinstance(seconds, int) or seconds < 1:
            raise ConfigError(f"{name}: expected a whole number of seconds, got {seconds!r}")
    found, local = _find(coordinator, processes, process, os.environ)
    if jax.distributed.is_initialized():
        return _held_against_what_runs(found, explicit=process is not None)
    if found.how != "alone":
        options = {
            "local_device_ids": list(local if devices is None else devices) or None,
            "cluster_detection_method": "deactivate",
            "heartbeat_timeout_seconds": heartbeat,
            "shutdown_timeout_seconds": shutdown,
        }
        _start(found, timeout, options)
    return found


def _start(found: Distributed, timeout: int, options: dict[str, Any]) -> None:
    """Start jax's runtime in a thread, since jax aborts the process when it times out."""
    address, outcome = found.coordinator or "", list[Exception | None]()
    if found.process == 0:
        _check_port(address)

    def start() -> None:
        try:
            place = (address, found.processes, found.process)
            jax.distributed.initialize(*place, initialization_timeout=timeout + 60, **options)
            outcome.append(None)
        except (RuntimeError, ValueError, OSError) as error:
            outcome.append(error)

    thread = threading.Thread(target=start, name="start_distributed", daemon=True)
    thread.start()
    thread.join(timeout)
    me = f"process {found.process} of {found.processes} ({found.how})"
    if thread.is_alive():
        raise ConfigError(
            f"{me}: expected all of them at the coordinator {address} within {timeout} s;"
            f" {_who_is_missing(address)}"
        )
    if outcome != [None]:
        raise ConfigError(
            f"{me}: jax did not start: {outcome[0] if outcome else 'see the traceback above'}\n"
            "Call start_distributed() first thing in the script, before jax.devices() or an array."
        )


def _check_port(address: str) -> None:
    """Refuse a port that is in use, on which jax would crash."""
    try:
        create_server(("", _split(address)[1])).close()
    except OSError as error:
        raise ConfigError(
            f"coordinator: expected a free port, got {address}: {error}; "
            "end what listens there, or give another, coordinator='host:port'"
        ) from None


def _who_is_missing(address: str) -> str:
    try:
        create_connection(_split(address), timeout=5).close()
    except OSError as error:
        return (
            f"nothing answers there ({error}). Does process 0 run on that host, with the same "
            "address, and can its port be reached? Else give another, coordinator='host:port'"
        )
    return "it answers, so another process was not started, or was given another address or count"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _held_against_what_runs(found: Distributed, *, explicit: bool) -> Distributed:
    process, processes = jax.process_index(), jax.process_count()
    if found.how != "alone" and (found.process, found.processes) == (process, processes):
        return found
    if explicit:
        raise ConfigError(
            f"expected process {found.process} of {found.processes}, as asked for, but jax already "
            f"runs as process {process} of {processes}; start it once, or drop the arguments"
        )
    return Distributed("already started", process, processes)


def _find(
    coordinator: str | None, processes: int | None, process: int | None, environ: Mapping[str, str]
) -> tuple[Distributed, list[int]]:
    """Find out which process this is, and which local devices it uses ([] for all)."""
    port = re.fullmatch(r"\S+:(\d{1,5})", str(coordinator))
    if coordinator is not None and not (port and 0 < int(port[1]) < 65536):
        raise ConfigError(
            f"coordinator: expected an address with a port, such as '10.0.0.1:1234', got "
            f"{coordinator!r}; any free port on the host of process 0 will do"
        )
    if coordinator is not None and processes is not None and process is not None:
        return _checked(Distributed("explicit coordinator", process, processes, coordinator)), []
    told = launched(environ)
    if (processes, process) != (None, None) or (coordinator and not told):
        raise ConfigError(
            f"expected coordinator, processes and process together, or under mpirun or srun the "
            f"coordinator alone, or nothing; got coordinator={coordinator!r}, "
            f"processes={processes!r}, process={process!r}, "
            f"and {told.how if told else 'no launcher'} around"
        )
    if not told:
        return Distributed("alone"), []
    found = Distributed(told.how, told.process, told.processes, coordinator or told.coordinator)
    if _checked(found).processes == 1:
        return Distributed("alone"), []
    if not found.coordinator:
        raise ConfigError(
            f"{found.how}: expected the environment to tell on which host process 0 of "
            f"{found.processes} runs, got nothing; give coordinator='host:port'"
        )
    return found, told.devices


def _checked(found: Distributed) -> Distributed:
    process, processes = found.process, found.processes
    if not (isinstance(process, int) and isinstance(processes, int) and 0 <= process < processes):
        raise ConfigError(
            f"{found.how}: expected 0 <= process < processes, got process={process!r} and "
            f"processes={processes!r}; the first process is 0"
        )
    return found
