"""Run a function of a test in a process of its own that is there in a moment.

To import jax and orbax takes seconds, and hundreds of processes are to be killed. So one server
imports them, starts nothing, and forks for each run. What it forks goes on as a script does, and
ends as one.

>>> def worker(text):      # its source travels, so it imports what it needs
...     print(text)
>>> with Forks() as forks:
...     forks.run(worker, "hello")
End(code=0, output='hello\\n', errors='')
"""

import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.processes.launch import TIED, End, clean_environ

SERVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import jax, optax, training, stepfold.checkpoint.arrays, stepfold.checkpoint.store
{tied}
for line in sys.stdin:
    told = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
{tied}
for number, path in enumerate((os.devnull, told["out"], told["err"])):
    os.dup2(os.open(path, os.O_RDWR), number)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
os.setsid()
os.chdir(told["folder"])
exec(compile(told["source"], told["name"], "exec"))
globals()[told["name"]](*told["args"])
"""


def compiled_once(folder):
    """Give the variables by which jax keeps in a folder what it compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


class Forks:
    """A server that forks; it ends with the `with` block, and all that it forked too."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, kind) for kind in ("out", "err"))
        command = [sys.executable, "-c", SERVER.format(tied=TIED.format(sign=9))]
        environ = clean_environ() | compiled_once(self._folder.name)
        self._server = subprocess.Popen(
            [*command, str(Path(__file__).parent)], env=environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()

    def start(self, worker, *args, folder=None):
        """Run `worker(*args)` in a process of its own; give its number."""
        for path in (self._out, self._err):
            path.write_bytes(b"")
        told = {
            "source": textwrap.dedent(inspect.getsource(worker)),
            "name": worker.__name__,
            "args": args,
            "out": str(self._out),
            "err": str(self._err),
            "folder": str(folder or self._folder.name),
        }
        self._server.stdin.write(json.dumps(told) + "\n")
        self._server.stdin.flush()
        self._child = int(self._server.stdout.readline())
        return self._child

    def wait(self, timeout=60):
        """Wait for the process to end; one that does not is killed, and that is a failure."""
        late = not select.select([self._server.stdout], [], [], timeout)[0]
        if late:
            os.kill(self._child, signal.SIGABRT)  # faulthandler tells where it hangs
        code = int(self._server.stdout.readline())
        end = End(code, self._out.read_text(), self._err.read_text())
        assert not late, f"still running after {timeout} s:\n{end.output}{end.errors[-4000:]}"
        return end

    def run(self, worker, *args, folder=None, timeout=60):
        self.start(worker, *args, folder=folder)
        return self.wait(timeout)
