"""Run code in Python processes that start in milliseconds, forked by a server with jax imported.

Importing jax and orbax takes seconds, and the tests start hundreds of processes. The server imports
them once, initializes no backend, and forks for each request. A forked process runs a script as
`python script.py` would: in a session and a `__main__` of its own, until the interpreter exits.

>>> import tempfile
>>> from pathlib import Path
>>> with ForkServer() as server, tempfile.TemporaryDirectory() as folder:
...     script, out, err = (Path(folder, name) for name in ("script.py", "out", "err"))
...     _ = script.write_text("import sys; print(sys.argv[1])")
...     child = server.start([str(script), "hello"], out=out, err=err, cwd=folder)
...     child.wait(timeout=60), out.read_text()
(0, 'hello\\n')

The fixture `forks` runs functions of a test in this way, one process after another:

>>> def worker(text):
...     print(text)
>>> Forks().run(worker, "hello")  # doctest: +SKIP
End(code=0, output='hello\\n', errors='')
"""

import ast
import atexit
import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# What every program of the project imports, and what stepfold imports on first use.
PRELOAD = """
import clu.metrics, jax, jax.numpy, numpy, optax, stepfold
for name in stepfold.__all__:
    getattr(stepfold, name)
"""
# Everything that takes long to import and that most workers of tests use.
PRELOAD_ALL = f"""
import importlib, pkgutil, sys
{PRELOAD}
for module in pkgutil.walk_packages(stepfold.__path__, "stepfold."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
sys.path.insert(0, {str(ROOT)!r})  # for workers that import a module of tests
"""
# The kernel kills a process whose parent has died, so that nothing outlives a killed test run.
DIE_WITH_PARENT = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {signal})  # PR_SET_PDEATHSIG
"""

SERVER = """
import faulthandler, json, os, sys, time, types, warnings
sys.path.remove("")  # a script imports only what is installed, and what lies beside it
{preload}
{die_with_parent}
# The threads are idle pools of numpy and of jax, whose backend starts after the fork.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def exit_code(pid, seconds):
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)

for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(json.dumps(exit_code(request["wait"], request["seconds"])), flush=True)
    elif (pid := os.fork()) == 0:
        break
    else:
        print(pid, flush=True)
else:
    sys.exit()

{die_with_parent}
os.setsid()
for number, path in enumerate((os.devnull, request["out"], request["err"])):
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(path, flags, 0o666), number)
# The numbers stay open if a script puts another file in place of these.
sys.stdin = open(0, closefd=False)
sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
faulthandler.enable()
os.environ.update(request["environ"])
os.chdir(request["cwd"])
sys.argv = request["command"]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = sys.argv[0]
with open(sys.argv[0], "rb") as file:
    code = compile(file.read(), sys.argv[0], "exec")
exec(code, main.__dict__)
"""


class Child:
    """A forked process, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, server, command, pid):
        self._server, self.args, self.pid, self.returncode = server, command, pid, None

    def wait(self, timeout=None):
        """Return the exit code, or raise `subprocess.TimeoutExpired`; without a timeout, wait."""
        timeout = 1e9 if timeout is None else timeout
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def poll(self, timeout=0.0):
        """Return the exit code, or None if the process still runs."""
        if self.returncode is None:
            self.returncode = self._server.request({"wait": self.pid, "seconds": timeout})
        return self.returncode


class ForkServer:
    """A process that imports `preload` and forks. All of them end with the `with` block."""

    def __init__(self, preload="", environ=None):
        self._source = SERVER.format(
            preload=preload, die_with_parent=DIE_WITH_PARENT.format(signal=9)
        )
        self._environ = environ

    def __enter__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-c", self._source], env=self._environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._server.kill()
        self._server.communicate()

    def start(self, command, *, out, err, cwd, environ=None):
        """Run a script, given as a path and arguments, and append its output to two files.

        `environ` adds variables. Those that are read while a preloaded package is imported, such
        as `JAX_PLATFORMS`, have no effect here and belong to the server.
        """
        paths = {"out": os.path.abspath(out), "err": os.path.abspath(err), "cwd": str(cwd)}
        command = [str(word) for word in command]
        return Child(
            self, command, self.request({"command": command, "environ": environ or {}, **paths})
        )

    def request(self, message):
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def run(self, command, *, cwd, timeout=300):
        """Run a program until it ends, and return what it printed; fail with its errors."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            child = self.start(command, out=out, err=err, cwd=cwd)
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            assert code == 0, err.read_text()
            return out.read_text()


class End(NamedTuple):
    """How a process ended."""

    code: int
    output: str
    errors: str


class Forks:
    """Run functions in processes; their files are removed with the `with` block."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        return self

    def __exit__(self, *_):
        self._folder.cleanup()

    def start(self, worker, *args):
        """Start `worker(*args)` in a new folder, and return the running process."""
        self._count += 1
        folder = Path(self._folder.name, f"{self._count}")
        folder.mkdir()
        (folder / "script.py").write_text(program(worker, args))
        return Fork(folder)

    def run(self, worker, *args, timeout=120):
        return self.start(worker, *args).wait(timeout)

    def run_and_copy(self, worker, *args, copy, timeout=300):
        """Run a worker that stops itself where it might be killed; call `copy(output)` there.

        A stopped process and a killed one leave the same files, but the stopped one continues, so
        that one process shows what hundreds of kills would leave. `output` is what it has printed.
        """
        fork, deadline = self.start(worker, *args), time.monotonic() + timeout
        while fork.child.poll() is None:
            assert time.monotonic() < deadline, fork.errors()
            if is_stopped(fork.pid):
                copy(fork.output())
                os.kill(fork.pid, signal.SIGCONT)
            else:
                time.sleep(0.005)
        return fork.wait()


class Fork:
    """A process that runs `script.py` of a folder."""

    def __init__(self, folder):
        self._out, self._err = folder / "out", folder / "err"
        self.child = fork_server().start(
            [folder / "script.py"], out=self._out, err=self._err, cwd=folder
        )
        self.pid = self.child.pid

    def output(self):
        """Return what the process has printed so far."""
        return read(self._out)

    def errors(self):
        return read(self._err)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def wait(self, timeout=120):
        """Wait for the process to end; abort one that does not, and show where it hangs."""
        try:
            code, late = self.child.wait(timeout), False
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGABRT)  # faulthandler writes the stacks of all threads
            code, late = self.child.wait(), True
        end = End(code, self.output(), self.errors())
        assert not late, f"still running after {timeout} s:\n{end.output}{end.errors[-8000:]}"
        return end


def read(path):
    path = Path(path)
    return path.read_text(errors="replace") if path.exists() else ""


def is_stopped(pid):
    """Return whether all threads of a process are stopped."""
    with contextlib.suppress(OSError):  # it has ended, or one of its threads has
        state = lambda task: (task / "stat").read_text().rpartition(")")[2].split()[0]
        if state(process := Path(f"/proc/{pid}")) == "T":
            return all(state(task) == "T" for task in (process / "task").iterdir())
    return False


@functools.cache
def fork_server():
    """Start the server that forks the processes of all tests."""
    server = ForkServer(PRELOAD_ALL, clean_environ()).__enter__()
    atexit.register(server.__exit__)
    return server


CACHE = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")


def clean_environ():
    """Hide accelerators, and a launcher that these tests themselves may run under.

    XLA compiles in half the time without most optimizations, as in tests/conftest.py.
    """
    launchers = ("STEPFOLD_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "JAX_", "XLA_")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(launchers)}
    cache = {key: text for key, text in os.environ.items() if key.startswith(CACHE)}
    return kept | cache | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def program(worker, args, *, call=""):
    """Return a program that calls `worker(*args)`, with what the worker uses of its file.

    These are the imports, except those of tests, and the functions, classes and constants that it
    names. A worker imports modules of tests itself.
    """
    source = textwrap.dedent(inspect.getsource(worker))
    parts = parts_of(sys.modules[worker.__module__].__file__)
    used, todo = set(), names_in(ast.parse(source)) - {worker.__name__}
    while todo:
        name = todo.pop()
        if name in parts and name not in used:
            used.add(name)
            todo |= names_in(parts[name])
    kept = [ast.unparse(node) for name, node in parts.items() if name in used]
    return "\n".join([*kept, source, f"{worker.__name__}({call}*{args!r})", ""])


@functools.cache
def parts_of(path):
    """Return what a program may need of a file of tests, by the names that it defines."""
    parts = {}
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.split(".")[0] not in ("pytest", "tests") and not getattr(node, "level", 0):
                parts |= {alias.asname or alias.name.split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not any("pytest" in names_in(decorator) for decorator in node.decorator_list):
                parts[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = {name for target in node.targets for name in names_in(target)}
            parts |= {name: node for name in targets if name.isupper()}
    return parts


def names_in(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
