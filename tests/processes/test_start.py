"""Several processes form one jax runtime, and none outlives another for long."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from stepfold.errors import ConfigError

from . import launch

HOW = {"explicit": "with an explicit coordinator", "mpirun": "under Open MPI"}


def sums_over_all_devices(start):
    found = start()
    assert (jax.process_index(), jax.process_count()) == (found.process, found.processes)
    assert (jax.local_device_count(), jax.device_count()) == (2, 4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    every = NamedSharding(mesh, PartitionSpec("x"))
    numbers = jax.make_array_from_callback((4,), every, lambda at: np.arange(1.0, 5.0)[at])
    total = jax.shard_map(
        lambda part: jax.lax.psum(part, "x"), mesh=mesh, in_specs=every.spec, out_specs=every.spec
    )
    print("sum", [float(part.data[0]) for part in jax.jit(total)(numbers).addressable_shards])
    assert start() == found, "a second call does nothing"
    print(found)


def one_sentence(process, launcher):
    return rf"process {process} of 2 {HOW[launcher]}: 2 of 4 cpu devices, coordinator 127.0.0.1:\d+"


def test_two_processes_are_one_runtime(launcher):
    for process, output in enumerate(launch.run_processes(sums_over_all_devices, 2, launcher)):
        total, sentence = output.splitlines()
        assert total == "sum [10.0, 10.0]"
        assert re.fullmatch(one_sentence(process, launcher), sentence)


@pytest.mark.full
@pytest.mark.parametrize(
    ("hosts", "address"), [("here", "127.0.0.1"), ("localhost,b", "localhost")]
)
def test_variables_of_srun_are_enough(hosts, address):
    environ = [
        {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": hosts,
            "SLURM_STEP_NUM_NODES": str(len(hosts.split(","))),
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process),
        }
        for process in range(2)
    ]
    ends = launch.ends_of_processes(sums_over_all_devices, 2, "by hand", environ=environ)
    assert not any(end.code for end in ends), launch.report(ends)
    sentence = f"process 1 of 2 under SLURM: 2 of 4 cpu devices, coordinator {address}:6"
    assert sentence in ends[1].output


def dies_while_the_other_waits(start, who):
    found = start(heartbeat=5)
    multihost_utils.sync_global_devices("all are there")
    print("together")
    if found.process == who:
        time.sleep(1)  # for the other to have told so too
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.sync_global_devices("never all are")
    print("came through")


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.full), 1])
def test_killed_process_ends_the_others_with_an_error(launcher, who):
    begin = time.monotonic()
    ends = launch.ends_of_processes(dies_while_the_other_waits, 2, launcher, args=(who,))
    # The heartbeat is 5 s, not jax's 100.
    assert time.monotonic() - begin < 90
    assert all(end.code != 0 and end.output == "together\n" for end in ends)


def freezes(start):
    found = start(heartbeat=4)
    multihost_utils.sync_global_devices("all are there")
    print("together")
    if found.process == 1:
        subprocess.Popen(["/bin/sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    multihost_utils.sync_global_devices("never all are")
    print("came through")


@pytest.mark.full
def test_frozen_process_ends_the_others():
    waiting, _ = launch.ends_of_processes(freezes)
    assert waiting.code == -signal.SIGABRT
    assert "stopped sending heartbeats" in waiting.errors
    assert waiting.output == "together\n"


def raises(start):
    found = start(shutdown=3)
    multihost_utils.sync_global_devices("all are there")
    print("together")
    if found.process == 1:
        time.sleep(1)
        raise ValueError("no more")
    multihost_utils.sync_global_devices("never all are")
    print("came through")


@pytest.mark.full
def test_error_ends_the_others_within_the_shutdown_timeout(launcher):
    begin = time.monotonic()
    ends = launch.ends_of_processes(raises, 2, launcher)
    assert time.monotonic() - begin < 90
    assert all(end.code != 0 and end.output == "together\n" for end in ends)
    assert "ValueError: no more" in ends[1].errors


def coordinator_dies_before_all_are_there(start):
    rank = int(os.path.basename(sys.argv[1])[0])
    if rank == 2:
        sys.exit()
    if rank == 0:
        threading.Timer(4, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        start(timeout=100)
    except ConfigError as error:
        print(f"{time.monotonic() - began:.1f} {error}")


@pytest.mark.full
def test_a_coordinator_that_is_killed_before_all_are_connected_ends_the_others_within_seconds():
    ends = launch.ends_of_processes(coordinator_dies_before_all_are_there, 3)
    assert [end.code for end in ends] == [-signal.SIGKILL, 0, 0], launch.report(ends)
    seconds, _, message = ends[1].output.partition(" ")
    assert 4 < float(seconds) < 90
    assert "process 0 at the coordinator" in message
    assert "ended before all processes connected (" in message
