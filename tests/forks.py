"""Start Python processes in milliseconds, by forking a server that has imported the heavy packages.

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
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# What every program of the project imports, and what stepfold imports on first use.
PRELOAD = "import clu.metrics, jax, jax.numpy, numpy, optax, stepfold"
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
        time.sleep(0.005)

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
