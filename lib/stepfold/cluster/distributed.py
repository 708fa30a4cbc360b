"""Start jax's distributed runtime with the settings of the launcher.

This is the only module that reads settings from the environment, where mpirun and srun describe
the job. jax's own detection does not support Open MPI 5 (jax 0.10), or only with mpi4py (0.12). It
assigns one GPU to a process that has its host to itself, and mistakes one SLURM task for several.
Kubernetes and TPU pods are left to jax, which asks their services.
"""

import importlib.util
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from socket import create_connection, create_server
from typing import Any

import jax

from stepfold.core.processes import DEFAULT_PATIENCE, DEFAULT_TIMEOUT, KeyValues
from stepfold.core.validation import read_positive
from stepfold.errors import ConfigError, refuse

# A coordinator that has answered before counts as ended after this many failed connections.
_POLL_SECONDS, _MAX_FAILURES = 2.0, 3


@dataclass(frozen=True)
class Distributed:
    """This process among those of a job, and how they were found; `str()` describes it.

    Attributes:
      how: "alone", "python -m stepfold launch", "Open MPI", "SLURM", "Kubernetes", "TPU pod",
        "explicit coordinator" or "already started".
      process: the index of this process.
      processes: the number of processes.
      coordinator: the address of the coordinator, if known.

    >>> import stepfold as sf
    >>> job = sf.start_distributed()
    >>> job.how, job.process, job.processes
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
        phrases = {
            "explicit coordinator": " with an explicit coordinator",
            "already started": ", already started",
            "TPU pod": " on a TPU pod",
        }
        how = phrases.get(self.how, f" under {self.how}")
        address = f", coordinator {self.coordinator}" if self.coordinator else ""
        return f"process {self.process} of {self.processes}{how}: {own} of {devices}{address}"


def start_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    devices: Sequence[int] | None = None,
    timeout: int = DEFAULT_TIMEOUT,
    heartbeat: int = 100,
    shutdown: int | None = None,
    patience: float | None = DEFAULT_PATIENCE,
) -> Distributed:
    """Join the processes of a job in one jax runtime; a no-op in a single process.

    Call it before anything uses a jax device. The same script then runs alone, under
    `python -m stepfold launch --processes 2 script.py`, under Open MPI
    (`mpirun -n 2 python script.py`), under SLURM (`srun`; a single task runs alone), and without a
    launcher if given `coordinator`, `processes` and `process`. In an indexed Kubernetes job and on
    a TPU pod, jax finds the other processes. Idempotent. For environments that it does not detect
    (MPICH), call `jax.distributed.initialize` first; this function then returns the index and the
    number of processes of that runtime. In Ray, which gives actors no index, pass all three, as
    `examples/ray_run.py` does.

    When one process ends early, the others end too:

    - before all are connected: `ConfigError` at most half a minute after process 0 ended, otherwise
      `timeout` seconds after the start of this call;
    - killed or frozen later: jax terminates the others after `heartbeat` seconds;
    - an exception: that process waits for the others at its exit. In `fit` they end within seconds.
      Elsewhere they fail in their next collective, or jax terminates all of them after `shutdown`
      seconds.

    Args:
      coordinator: "host:port", the same in all processes: the host of process 0 and any free port.
        It overrides that of a launcher, for example if mpirun runs on another host than process 0.
      processes: the number of processes.
      process: the index of this process, from 0.
      devices: the ids of the GPUs of its host that this process uses, `[]` for all visible ones. By
        default it uses all, or one by local rank if a launcher started several processes on the
        host.
      timeout: seconds to wait for all processes to connect, and later for a process that is late
        at the start of a run, or with its first batch of another size.
      heartbeat: seconds without a heartbeat after which a process counts as dead; jax then
        terminates the others.
      shutdown: seconds that a process waits at its exit, even after an exception, for the others to
        exit; jax then terminates all of them. The default is `heartbeat`. Give more if process 0
        works alone for longer at the end of the script.
      patience: seconds without progress in `fit` after which a process counts as stuck. A stuck
        process is alive and sends heartbeats, while the others wait for it. All of them then print
        its number, host, step and stacks, and exit with code 1. Choose more than the time of a
        step, and more than a batch, a hook or a save may delay one process. None waits forever.

    Raises:
      ConfigError: if the arguments or the environment do not fit together, if jax has already
        initialized its devices, or if not all processes connect in time. In the last case the
        process has to exit; otherwise jax aborts it a minute later.

    >>> import stepfold as sf
    >>> print(sf.start_distributed())
    alone: one process with ... cpu device...
    """
    shutdown = heartbeat if shutdown is None else shutdown
    for name, seconds in (("timeout", timeout), ("heartbeat", heartbeat), ("shutdown", shutdown)):
        if not isinstance(seconds, int) or seconds < 1:
            refuse(name, "a whole number of seconds", repr(seconds))
    if patience is not None:
        read_positive("patience", patience, unit="seconds")
    job, local = _find_job(coordinator, processes, process, os.environ)
    if jax.distributed.is_initialized():
        running = Distributed("already started", jax.process_index(), jax.process_count())
        settings = KeyValues("start_distributed")
        if settings and str(running.process) not in settings.get("patience"):
            settings.set(f"patience/{running.process}", patience)  # jax itself was started before
        if job.how != "alone" and replace(job, how=running.how, coordinator=None) == running:
            return job
        if process is not None:
            raise ConfigError(
                f"process: jax already runs as process {running.process} of {running.processes}, "
                f"not as process {job.process} of {job.processes}; start it once, or drop the "
                "arguments"
            )
        return running
    options: dict[str, Any] = {
        "local_device_ids": list(local if devices is None else devices) or None,
        "heartbeat_timeout_seconds": heartbeat,
        "shutdown_timeout_seconds": shutdown,
    }
    if job.how in _DETECTED_BY_JAX:
        job = _start_by_detection(job.how, timeout, options)
    elif job.how != "alone":
        _start(job, timeout, {**options, "cluster_detection_method": "deactivate"})
    if job.processes > 1 and (settings := KeyValues("start_distributed")):
        settings.set(f"timeout/{job.process}", timeout)
        settings.set(f"heartbeat/{job.process}", heartbeat)
        settings.set(f"patience/{job.process}", patience)
    return job


_DETECTED_BY_JAX = {  # with what to do where jax fails
    "Kubernetes": "pip install 'jax[k8s]' and let the service account read jobs, pods and services",
    "TPU pod": "start the same script on every host of the pod",
}


def _start_by_detection(how: str, timeout: int, options: dict[str, Any]) -> Distributed:
    """Start jax's runtime as jax detects it; how many processes there are is known afterwards."""
    try:
        jax.distributed.initialize(initialization_timeout=timeout, **options)
    except Exception as error:
        raise ConfigError(
            f"{how}: jax did not find the processes: {type(error).__name__}: {error}; "
            f"{_DETECTED_BY_JAX[how]}, or give coordinator, processes and process"
        ) from error
    return Distributed(how, jax.process_index(), jax.process_count())


def _start(job: Distributed, timeout: int, options: dict[str, Any]) -> None:
    """Start jax's runtime in a thread, since jax aborts the process when it times out."""
    address, outcome = job.coordinator or "", list[Exception | None]()
    host, _, port = address.rpartition(":")
    if job.process == 0:
        try:  # jax would crash on a port that is in use
            create_server(("", int(port))).close()
        except OSError as error:
            advice = "stop the process listening there, or give another, coordinator='host:port'"
            refuse("coordinator", "a free port", f"{address}: {error}", advice)

    def start() -> None:
        try:
            arguments = (address, job.processes, job.process)
            jax.distributed.initialize(*arguments, initialization_timeout=timeout + 60, **options)
            outcome.append(None)
        except Exception as error:  # noqa: BLE001  raised below
            outcome.append(error)

    thread = threading.Thread(target=start, name="start_distributed", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    has_answered, failures, problem = False, 0, None
    while thread.is_alive() and time.monotonic() < deadline and failures < _MAX_FAILURES:
        thread.join(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        if thread.is_alive() and job.process > 0:
            problem = _connection_problem(host.strip("[]"), int(port))
            has_answered = has_answered or problem is None
            failures = failures + 1 if has_answered and problem is not None else 0
    me = f"process {job.process} of {job.processes} ({job.how})"
    if thread.is_alive():
        if failures == _MAX_FAILURES:
            raise ConfigError(
                f"{me}: process 0 at the coordinator {address} ended before all processes "
                f"connected ({problem}); see its log, and start all of them again"
            )
        advice = "it answers, so another process was not started, or has another address or count"
        if problem is not None:
            advice = (
                f"nothing answers there ({problem}). Does process 0 run on that host, with the "
                "same address, and can its port be reached? Else give another, "
                "coordinator='host:port'"
            )
        raise ConfigError(
            f"{me}: not all processes connected to the coordinator {address} in {timeout} s; "
            f"{advice}"
        )
    if failure := outcome[0]:
        raise ConfigError(
            f"{me}: jax did not start: {type(failure).__name__}: {failure}\n"
            "Call start_distributed() first thing in the script, before jax.devices() or an array."
        ) from failure


def _connection_problem(host: str, port: int) -> OSError | None:
    """Return why there is no connection to an address, or None if there is one."""
    try:
        create_connection((host, port), timeout=5).close()
    except OSError as error:
        return error
    return None


def _find_job(
    coordinator: str | None, processes: int | None, process: int | None, environ: Mapping[str, str]
) -> tuple[Distributed, list[int]]:
    """Find out which process this is, and which local devices it uses ([] for all)."""
    port = re.fullmatch(r"\S+:(\d{1,5})", str(coordinator))
    if coordinator is not None and not (port and 0 < int(port[1]) < 65536):
        expected = "an address with a port, such as '10.0.0.1:1234'"
        advice = "any free port on the host of process 0 will do"
        refuse("coordinator", expected, repr(coordinator), advice)
    if coordinator is not None and processes is not None and process is not None:
        job = Distributed("explicit coordinator", process, processes, coordinator)
        _check_index(job)
        return job, []
    launched = read_launcher(environ)
    if (processes, process) != (None, None) or (coordinator and launched is None):
        raise ConfigError(
            "coordinator, processes, process: expected all three, none of them, or under mpirun or "
            f"srun the coordinator alone, got {coordinator=}, {processes=}, {process=}, "
            f"under {launched[0].how if launched else 'no launcher'}"
        )
    if launched is None:
        _refuse_ray()
        return Distributed(_jax_environment(environ) or "alone"), []
    job, devices = launched
    _check_index(job)
    if job.processes == 1:
        return Distributed("alone"), []
    job = replace(job, coordinator=coordinator or job.coordinator)
    if not job.coordinator:
        raise ConfigError(
            f"{job.how} does not name the host of process 0 of {job.processes}; give "
            "coordinator='host:port'"
        )
    return job, devices


def _check_index(job: Distributed) -> None:
    process, processes = job.process, job.processes
    if not (isinstance(process, int) and isinstance(processes, int) and 0 <= process < processes):
        got = f"{process=} and {processes=}"
        refuse(job.how, "0 <= process < processes", got, "the first process is 0")


def read_launcher(environ: Mapping[str, str]) -> tuple[Distributed, list[int]] | None:
    """Read the variables of a launcher, and the ids of the local devices ([] for all)."""
    if "STEPFOLD_PROCESSES" in environ:
        return _own_launcher(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(environ)
    # srun sets all of these for a task; a batch script or the shell of an allocation lacks some.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = (tasks, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
    return _slurm(environ, tasks) if all(name in environ for name in names) else None


def _refuse_ray() -> None:
    """Refuse to train alone in each actor of a placement group of Ray."""
    ray: Any = sys.modules.get("ray")  # imported in every process of Ray
    if ray is None or not ray.is_initialized():
        return
    group = ray.util.get_current_placement_group()
    if group is not None and group.bundle_count > 1:
        raise ConfigError(
            f"Ray does not number the actors of a placement group of {group.bundle_count} bundles; "
            "pass coordinator, processes and process from the driver, as examples/ray_run.py does"
        )


def _jax_environment(environ: Mapping[str, str]) -> str | None:
    """Name the environment of several hosts that is left to jax, if this is one."""
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return "Kubernetes"
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "TPU pod"
    # On a TPU host without these variables, jax asks the metadata server of the cloud.
    has_chips = os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    is_tpu_host = has_chips and importlib.util.find_spec("libtpu") is not None
    return "TPU pod" if is_tpu_host and "TPU_SKIP_MDS_QUERY" not in environ else None


def _own_launcher(environ: Mapping[str, str]) -> tuple[Distributed, list[int]]:
    how = "python -m stepfold launch"
    size, rank, local_rank = (
        _number(environ, f"STEPFOLD_{name}", how)
        for name in ("PROCESSES", "PROCESS", "LOCAL_PROCESS")
    )
    return Distributed(how, rank, size, environ.get("STEPFOLD_COORDINATOR")), [local_rank]


def _open_mpi(environ: Mapping[str, str]) -> tuple[Distributed, list[int]]:
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": environ["OMPI_COMM_WORLD_SIZE"], **environ}
    size, rank, local_rank, local_size = (
        _number(environ, f"OMPI_COMM_WORLD_{name}", "Open MPI")
        for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # The host of mpirun: Open MPI 4 passes its addresses, 5 its name as a part of the job's.
    job, uri = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)", uri) or re.match(r"prte(?:run)?-(.+)-\d+@", job)
    address = _address(host and host[1], job or uri, alone=local_size == size)
    devices = [local_rank] if local_size > 1 else []
    return Distributed("Open MPI", rank, size, address), devices


def _slurm(environ: Mapping[str, str], tasks: str) -> tuple[Distributed, list[int]]:
    environ = {"SLURM_STEP_NUM_NODES": "1", **environ}
    size, rank, local_rank, nodes = (
        _number(environ, name, "SLURM")
        for name in (tasks, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    )
    hosts = environ["SLURM_STEP_NODELIST"]  # "node[001-003,7],other" begins with node001
    host = re.sub(r"\[(\d+)[^]]*\]", r"\1", hosts).split(",")[0]
    job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID')}"
    address = _address(host, job, alone=not re.search(r"[\[,]", hosts))
    return Distributed("SLURM", rank, size, address), [local_rank] if size > nodes else []


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdecimal():
        advice = "start through the launcher, or give coordinator, processes and process"
        refuse(launcher, f"a number in the environment variable {name}", repr(text), advice)
    return int(text)


def _address(host: str | None, job: str, *, alone: bool) -> str | None:
    """Derive the port from the job, since processes cannot ask each other.

    It is above the range from which systems assign ephemeral ports.
    """
    host = "127.0.0.1" if alone else host
    return host and f"{host}:{61440 + zlib.crc32(job.encode()) % 4096}"
