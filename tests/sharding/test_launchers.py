"""What is read from the variables that launchers set."""

import re

import pytest

from stepfold.sharding.launchers import launched

from .environments import MPI_4, MPI_5, SRUN


@pytest.mark.parametrize(
    ("variables", "found", "devices"),
    [
        (MPI_5, r"Open MPI 3 4 big-host:6\d{4}", [1]),
        (MPI_4, r"Open MPI 3 4 10\.96\.0\.1:6\d{4}", [1]),
        (MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, r"Open MPI 3 4 127\.0\.0\.1:6\d{4}", [1]),
        (MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, r"Open MPI 3 4 big-host:6\d{4}", []),
        (SRUN, r"SLURM 3 4 node007:6\d{4}", [1]),
        (SRUN | {"SLURM_STEP_NUM_NODES": "4"}, r"SLURM 3 4 node007:6\d{4}", []),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,b[2-3]"}, r"SLURM 3 4 a1:6\d{4}", [1]),
        (SRUN | {"SLURM_STEP_NODELIST": "r[1,4-5]n[2-3]-x,b"}, r"SLURM 3 4 r1n2-x:6\d{4}", [1]),
        (SRUN | {"SLURM_STEP_NODELIST": "node007"}, r"SLURM 3 4 127\.0\.0\.1:6\d{4}", [1]),
        (SRUN | MPI_5, r"Open MPI 3 4 big-host:6\d{4}", [1]),
    ],
)
def test_it_reads_what_a_launcher_says(variables, found, devices):
    *said, taken = launched(variables)
    assert re.fullmatch(found, " ".join(map(str, said)))
    assert taken == devices


def test_without_a_launcher_there_is_nothing():
    assert launched({"PATH": "/bin"}) is None


@pytest.mark.parametrize("job", [SRUN, MPI_5])
def test_all_processes_of_a_job_meet_at_one_port(job):
    others = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "2"}
    assert launched(job).coordinator == launched(job | others).coordinator


@pytest.mark.parametrize("change", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}])
def test_jobs_and_steps_have_ports_of_their_own(change):
    assert launched(SRUN).coordinator != launched(SRUN | change).coordinator
