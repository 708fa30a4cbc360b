"""Read what Open MPI and SLURM pass to a process in its environment.

jax's own detection does not support Open MPI 5 (jax 0.10), or only with mpi4py (0.12). It assigns
one GPU to a process that has its host to itself, and mistakes one SLURM task for several.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from stepfold.errors import ConfigError


class Launched(NamedTuple):
    """The launcher, this process among all, the coordinator's address, and the local devices.

    `devices` are ids on the host, empty for all of them.
    """

    how: str
    process: int
    processes: int
    coordinator: str | None
    devices: list[int]


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Read the variables of a launcher; None if there is none."""
    return _open_mpi(environ) or _slurm(environ)


def _open_mpi(environ: Mapping[str, str]) -> Launched | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": environ["OMPI_COMM_WORLD_SIZE"], **environ}
    size, rank, local_rank, local_size = (
        _number(environ, f"OMPI_COMM_WORLD_{name}", "Open MPI")
        for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # The host of mpirun: Open MPI 4 passes its addresses, 5 its name as a part of the job's.
    job, uri = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)", uri) or re.match(r"prte(?:run)?-(.+)-\d+@", job)
    address = _address(host and host[1], job or uri, alone=local_size == size)
    return Launched("Open MPI", rank, size, address, [local_rank] if local_size > 1 else [])


def _slurm(environ: Mapping[str, str]) -> Launched | None:
    # srun sets all of these for a task; a batch script or the shell of an allocation lacks some.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = (tasks, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
    if not all(name in environ for name in names):
        return None
    size, rank, local_rank = (_number(environ, name, "SLURM") for name in names[:3])
    hosts = environ["SLURM_STEP_NODELIST"]  # "node[001-003,7],other" begins with node001
    host = re.sub(r"\[(\d+)[^]]*\]", r"\1", hosts).split(",")[0]
    job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID')}"
    address = _address(host, job, alone=not re.search(r"[\[,]", hosts))
    shared = size > _number(
        {"SLURM_STEP_NUM_NODES": "1", **environ}, "SLURM_STEP_NUM_NODES", "SLURM"
    )
    return Launched("SLURM", rank, size, address, [local_rank] if shared else [])


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"{launcher}: expected a number in the environment variable {name}, got {text!r}; "
            "start through the launcher, or give coordinator, processes and process"
        )
    return int(text)


def _address(host: str | None, job: str, *, alone: bool) -> str | None:
    """Derive the port from the job, since processes cannot ask each other.

    It is above the range from which systems assign ephemeral ports.
    """
    host = "127.0.0.1" if alone else host
    return host and f"{host}:{61440 + zlib.crc32(job.encode()) % 4096}"
