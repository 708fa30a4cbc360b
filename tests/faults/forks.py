"""Run a function of a test in a process of its own, forked by the server of `tests.forks`.

>>> def worker(text):      # only its source is sent, so it imports what it needs
...     print(text)
>>> Forks().run(worker, "hello")  # doctest: +SKIP
End(code=0, output='hello\\n', errors='')
"""

import contextlib
import inspect
import os
import signal
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

from tests.processes.launch import End, fork_server


class Forks:
    """Run one process after another; their files are removed with the `with` block."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        names = ("script.py", "out", "err")
        self._script, self._out, self._err = (Path(self._folder.name, name) for name in names)
        return self

    def __exit__(self, *_):
        self._folder.cleanup()

    def start(self, worker, *args, folder=None):
        """Start `worker(*args)`, and return the process ID."""
        for path in (self._out, self._err):
            path.write_bytes(b"")
        source = textwrap.dedent(inspect.getsource(worker))
        self._script.write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{source}\n"
            f"{worker.__name__}(*{args!r})\n"
        )
        self._child = fork_server().start(
            [self._script], out=self._out, err=self._err, cwd=folder or self._folder.name
        )
        return self._child.pid

    def output(self):
        """Return what the process has printed so far."""
        return self._out.read_text()

    def wait(self, timeout=60):
        """Wait for the process to end; kill one that does not, which is a failure."""
        try:
            code, late = self._child.wait(timeout), False
        except subprocess.TimeoutExpired:
            os.kill(self._child.pid, signal.SIGABRT)  # faulthandler shows where it hangs
            code, late = self._child.wait(), True
        end = End(code, self.output(), self._err.read_text())
        assert not late, f"still running after {timeout} s:\n{end.output}{end.errors[-4000:]}"
        return end

    def run(self, worker, *args, folder=None, timeout=60):
        self.start(worker, *args, folder=folder)
        return self.wait(timeout)

    def run_and_copy(self, worker, *args, copy, timeout=300):
        """Run a worker that stops itself where it might be killed; call `copy(output)` there.

        A stopped process and a killed one leave the same files, but the stopped one continues, so
        that one process shows what hundreds of kills would leave. `output` is what it has printed.
        """
        pid, deadline = self.start(worker, *args), time.monotonic() + timeout
        while self._child.poll() is None:
            assert time.monotonic() < deadline, self._err.read_text()
            if is_stopped(pid):
                copy(self.output())
                os.kill(pid, signal.SIGCONT)
            else:
                time.sleep(0.005)
        return self.wait()


def is_stopped(pid):
    """Return whether all threads of a process are stopped."""
    with contextlib.suppress(OSError):  # it has ended, or one of its threads has
        state = lambda task: (task / "stat").read_text().rpartition(")")[2].split()[0]
        if state(process := Path(f"/proc/{pid}")) == "T":
            return all(state(task) == "T" for task in (process / "task").iterdir())
    return False
