"""`start_distributed` starts jax by launcher or arguments, or refuses."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import textwrap
import types

import jax
import pytest

import stepfold as sf
from stepfold.cluster import distributed
from stepfold.cluster.distributed import Distributed, read_launcher, start_distributed

# What launchers set for the last of four processes on two hosts.
MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-big-host-5465@1",
}
MPI_4 = MPI_5 | {
    "PMIX_NAMESPACE": "1531576321",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def environ(monkeypatch):
    """Set what a launcher would, and nothing that one did."""
    prefixes = ("STEPFOLD_", "OMPI_", "SLURM_", "PMIX_", "KUBERNETES_", "JOB_", "TPU_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)

    def fill(variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    return fill


@pytest.fixture
def started(monkeypatch):
    """Record how jax would be started, in place of starting it."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *place, **options: calls.append((place, options))
    )
    return calls


def runs_as(monkeypatch, process, processes):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: processes)


def test_alone_it_does_nothing_and_says_so(environ, started):
    found = start_distributed()
    assert found == Distributed("alone", 0, 1, None) == start_distributed()
    assert str(found) == "alone: one process with 8 cpu devices"
    assert not started


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            ("Open MPI", 1, 2, "a:1"),
            "process 1 of 2 under Open MPI: 8 of 8 cpu devices, coor.* a:1",
        ),
        (("explicit coordinator", 0, 2, "a:1"), "process 0 of 2 with an explicit coordinator: .*1"),
        (("already started", 0, 2), "process 0 of 2, already started: 8 of 8 cpu devices"),
    ],
)
def test_it_says_what_it_found(found, sentence):
    assert re.fullmatch(sentence, str(Distributed(*found)))


def test_it_starts_jax_with_what_a_launcher_says(environ, started):
    environ(SRUN)
    found = start_distributed(heartbeat=7, shutdown=8)
    assert (found.how, found.process, found.processes) == ("SLURM", 3, 4)
    ((place, options),) = started
    assert place == (found.coordinator, 4, 3)
    assert options["local_device_ids"] == [1]
    assert options["heartbeat_timeout_seconds"] == 7
    assert options["shutdown_timeout_seconds"] == 8


LAUNCH = {
    "STEPFOLD_COORDINATOR": "127.0.0.1:40000",
    "STEPFOLD_PROCESSES": "3",
    "STEPFOLD_PROCESS": "1",
    "STEPFOLD_LOCAL_PROCESS": "2",
}


def test_its_own_launcher_goes_before_one_that_started_it(environ, started):
    environ(SRUN | LAUNCH)
    found = start_distributed()
    assert found == Distributed("python -m stepfold launch", 1, 3, "127.0.0.1:40000")
    assert str(found).startswith("process 1 of 3 under python -m stepfold launch: ")
    assert started[0][1]["local_device_ids"] == [2]


KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
TPU_POD = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "how", "phrase"),
    [(KUBERNETES, "Kubernetes", "under Kubernetes"), (TPU_POD, "TPU pod", "on a TPU pod")],
)
def test_it_leaves_kubernetes_and_tpu_pods_to_jax(monkeypatch, environ, variables, how, phrase):
    calls = []

    def initialize(**options):
        calls.append(options)
        runs_as(monkeypatch, 1, 2)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    environ(variables)
    found = start_distributed(timeout=5, heartbeat=7)
    assert (found.how, found.process, found.processes) == (how, 1, 2)
    assert str(found) == f"process 1 of 2 {phrase}: 8 of 8 cpu devices"
    # Without an address and without a method, jax detects the environment.
    assert not {"coordinator_address", "num_processes", "cluster_detection_method"} & set(calls[0])
    assert calls[0]["initialization_timeout"] == 5
    assert calls[0]["heartbeat_timeout_seconds"] == 7
    assert start_distributed().how == "already started"
    assert len(calls) == 1


@pytest.mark.parametrize("bundles", [None, 1, 2])
def test_one_of_several_actors_of_ray_does_not_train_alone(bundles, environ, started, monkeypatch):
    group = bundles and types.SimpleNamespace(bundle_count=bundles)
    util = types.SimpleNamespace(get_current_placement_group=lambda: group)
    ray = types.SimpleNamespace(util=util, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    if bundles != 2:
        assert start_distributed().how == "alone"
        return
    with pytest.raises(
        sf.errors.ConfigError, match="Ray does not number the actors of a placement group of 2"
    ):
        start_distributed()
    assert start_distributed("a:1", 2, 1).process == 1


@pytest.mark.parametrize(("devices", "taken"), [([2, 3], [2, 3]), ([], None), (None, [1])])
def test_devices_may_be_chosen(environ, started, devices, taken):
    environ(SRUN)
    start_distributed(devices=devices)
    assert started[0][1]["local_device_ids"] == taken


def test_explicit_arguments_go_before_a_launcher(environ, started):
    environ(MPI_5 | {"OMPI_COMM_WORLD_RANK": "nonsense"})
    found = start_distributed("other:1234", 2, 1)
    assert found == Distributed("explicit coordinator", 1, 2, "other:1234")
    assert started[0][0] == ("other:1234", 2, 1)


@pytest.mark.parametrize(
    "variables",
    [
        LAUNCH | {"STEPFOLD_PROCESSES": "1", "STEPFOLD_PROCESS": "0"},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # srun --pty bash
        SRUN
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # the same, in an allocation of 4
        {key: text for key, text in SRUN.items() if "STEP" not in key},  # a batch script
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-4]"},  # salloc
        MPI_5 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_launcher_of_one_task_leaves_it_alone(environ, started, variables):
    environ(variables)
    assert start_distributed().how == "alone"
    assert not started


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "Open MPI: expected a number in the environment variable OMPI_COMM_WORLD_RANK, got None"
            "; start through the launcher, or give coordinator, processes and process",
        ),
        (
            MPI_5 | {"PMIX_NAMESPACE": "?"},
            "Open MPI does not name the host of process 0 of 4; give coordinator='host:port'",
        ),
        (SRUN | {"SLURM_PROCID": "x"}, "SLURM: expected a number .* SLURM_PROCID, got 'x'"),
        (
            SRUN | {"SLURM_PROCID": "4"},
            "SLURM: expected 0 <= process < processes, got process=4 and processes=4",
        ),
    ],
)
def test_half_an_environment_is_refused(environ, started, variables, message):
    environ(variables)
    with pytest.raises(sf.errors.ConfigError, match=message):
        start_distributed()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"coordinator": "10.0.0.1"},
            "coordinator: expected an address with a port, such as '10.0.0.1:1234', got '10.0.0.1';"
            " any free port on the host of process 0 will do",
        ),
        ({"coordinator": "a:0"}, "coordinator: expected an address with a port, .* got 'a:0'"),
        ({"coordinator": "a:65536"}, "coordinator: expected .* got 'a:65536'"),
        ({"coordinator": ""}, "coordinator: expected an address with a port, .* got ''"),
        ({"coordinator": 1234}, "coordinator: expected an address with a port, .* got 1234"),
        (
            {"coordinator": "a:1"},
            "coordinator, processes, process: expected all three, none of them, or under mpirun or "
            "srun the coordinator alone, got coordinator='a:1', processes=None, process=None, "
            "under no launcher",
        ),
        ({"processes": 2, "process": 0}, "got coordinator=None, processes=2, process=0, under"),
        (
            {"coordinator": "a:1", "processes": 2, "process": 2},
            "explicit coordinator: expected 0 <= process < processes, got process=2 and "
            "processes=2; the first process is 0",
        ),
        ({"coordinator": "a:1", "processes": 2, "process": -1}, "got process=-1 and processes=2"),
        ({"coordinator": "a:1", "processes": "2", "process": 1}, "process=1 and processes='2'"),
        ({"timeout": 0}, "timeout: expected a whole number of seconds, got 0"),
        ({"heartbeat": 0.5}, "heartbeat: expected a whole number of seconds, got 0.5"),
        ({"shutdown": "9"}, "shutdown: expected a whole number of seconds, got '9'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(environ, started, given, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        start_distributed(**given)
    assert not started


def test_processes_and_process_are_not_taken_alone_from_under_a_launcher(environ, started):
    environ(SRUN)
    with pytest.raises(sf.errors.ConfigError, match="processes=None, process=1, under SLURM"):
        start_distributed("a:1", process=1)


def test_what_runs_cannot_be_changed(environ, started, monkeypatch):
    runs_as(monkeypatch, 1, 2)
    message = (
        "process: jax already runs as process 1 of 2, not as process 0 of 2; start it once, or "
        "drop the arguments"
    )
    with pytest.raises(sf.errors.ConfigError, match=message):
        start_distributed("a:1", 2, 0)


def test_a_port_that_is_taken_is_refused(environ, started):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        message = f"coordinator: expected a free port, got {address}: .* in use.*; stop the process"
        with pytest.raises(sf.errors.ConfigError, match=message):
            start_distributed(address, 2, 0)
    assert not started


def test_it_has_to_come_before_the_devices(environ):
    jax.devices()
    message = r"process 1 of 2 \(explicit coordinator\): jax did not start: (?s:.*)first thing in"
    with pytest.raises(sf.errors.ConfigError, match=message):
        start_distributed(free_address(), 2, 1)


def test_a_start_that_fails_in_another_way_is_no_start(environ, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: {}["missing"])
    with pytest.raises(
        sf.errors.ConfigError, match="jax did not start: KeyError: 'missing'"
    ) as caught:
        start_distributed("a:1", 2, 1)
    assert isinstance(caught.value.__cause__, KeyError)


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


NOBODY, FIRST, ONLY = (free_address() for _ in range(3))
PROGRAMS = {
    "kubernetes": "start_distributed(timeout=5)",
    "no answer": f"start_distributed({NOBODY!r}, 2, 1, timeout=1)",
    "no peer": f"start_distributed({FIRST!r}, 2, 0, timeout=1)",
    "one process": f"""
        start_distributed()
        jax.config.update("jax_num_cpu_devices", 3)  # refused once there is a backend
        found = start_distributed({ONLY!r}, 1, 0)
        assert jax.distributed.is_initialized() and found == start_distributed({ONLY!r}, 1, 0)
        print(start_distributed())
        """,
}


@pytest.fixture(scope="module")
def ended():
    """Run programs side by side, each in a process, as starting jax cannot be taken back."""
    first = "import jax\nfrom stepfold.cluster.distributed import start_distributed\n"
    pipe, environ = subprocess.PIPE, os.environ | {"JAX_PLATFORMS": "cpu"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", first + textwrap.dedent(code)], stdout=pipe, stderr=pipe,
            text=True, env=environ | KUBERNETES if name == "kubernetes" else environ,
        )
        for name, code in PROGRAMS.items()
    }  # fmt: skip
    outputs = {name: process.communicate(timeout=120) for name, process in running.items()}
    return {name: (running[name].returncode, *outputs[name]) for name in running}


@pytest.mark.full
def test_a_kubernetes_job_that_jax_cannot_ask_about_is_refused(ended):
    code, _, errors = ended["kubernetes"]
    assert code == 1
    assert "Kubernetes: jax did not find the processes: " in errors
    assert "pip install 'jax[k8s]'" in errors


@pytest.mark.full
def test_a_coordinator_that_does_not_answer_is_named(ended):
    code, _, errors = ended["no answer"]
    assert code == 1
    assert (
        "ConfigError: process 1 of 2 (explicit coordinator): not all processes connected to the "
        f"coordinator {NOBODY} in 1 s; nothing answers there ([Errno 111] Connection refused)"
    ) in errors


@pytest.mark.full
def test_processes_that_do_not_come_are_missed(ended):
    code, _, errors = ended["no peer"]
    assert code == 1
    assert (
        "ConfigError: process 0 of 2 (explicit coordinator): not all processes connected to the "
        f"coordinator {FIRST} in 1 s; it answers, so another process was not started, or has"
    ) in errors


@pytest.mark.full
def test_alone_jax_is_untouched_and_one_process_with_a_coordinator_is_started(ended):
    _, output, errors = ended["one process"]
    assert "process 0 of 1, already started: 3 of 3 cpu devices\n" in output, errors


# The variables that launchers set


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
    job, taken = read_launcher(variables)
    text = f"{job.how} {job.process} {job.processes} {job.coordinator}"
    assert re.fullmatch(found, text)
    assert taken == devices


def coordinator(environ):
    return read_launcher(environ)[0].coordinator


@pytest.mark.parametrize("job", [SRUN, MPI_5])
def test_all_processes_of_a_job_meet_at_one_port(job):
    others = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "2"}
    assert coordinator(job) == coordinator(job | others)


@pytest.mark.parametrize("change", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}])
def test_jobs_and_steps_have_ports_of_their_own(change):
    assert coordinator(SRUN) != coordinator(SRUN | change)


@pytest.mark.parametrize(("chips", "found"), [(False, None), (True, "TPU pod")])
def test_libtpu_without_chips_is_no_tpu_host(monkeypatch, chips, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(os.path, "exists", lambda path: chips)
    assert distributed._jax_environment({}) == found
    assert distributed._jax_environment({"TPU_SKIP_MDS_QUERY": "1"}) is None
