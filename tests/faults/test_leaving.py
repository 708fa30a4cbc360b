"""A process that leaves without `close` has saved, or its errors say that it has not.

Once the main thread has ended, Python refuses the threads that orbax needs to finish a save, and
its exit code can no longer be changed.
"""

import os
import resource
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.processes import launch
from tests.small import ones

import stepfold as sf

from . import training

LIKE = {"w": ones((512, 1024)), "step": ones((), np.int32)}


def leaves(folder, how, failing=False):
    """Begin to save step 2 in the background, and be gone."""
    series = sf.Checkpoints(folder, every=1).open()
    for step in (1, 2):
        if failing and step == 2:
            series.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        state = {"w": jnp.full((512, 1024), float(step)), "step": jnp.asarray(step)}
        series.save(state, step=step)
    if how == "raise":
        raise ValueError("no more")
    if how == "SIGINT":
        signal.raise_signal(signal.SIGINT)
    if how == "SIGINT twice":
        main, second = threading.main_thread(), threading.Event()
        interrupt = lambda: second.wait(0.02) or signal.pthread_kill(main.ident, signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        signal.raise_signal(signal.SIGINT)
    if how == "exit":
        sys.exit()
    if how == "exit 3":
        sys.exit(3)
    if how == "forgotten":
        del series
    if how == "stdout closed":
        sys.stdout.close()
    if how == "stdout None":
        sys.stdout = None
    if how == "stderr closed":
        sys.stderr.close()
    if how == "stdout broken":
        end, other = os.pipe()
        os.dup2(other, 1)
        os.close(end)
        sys.stdout = os.fdopen(1, "w", 1000)
        print("what nobody reads any more")


def is_committed(folder):
    values = [
        sf.restore(folder, LIKE, step=step).state["w"] for step in sf.checkpoint.verify(folder)
    ]
    assert not any(sf.checkpoint.verify(folder).values())
    assert all((value == value[0, 0]).all() for value in values)
    names = {path.name.partition("-")[0] for path in folder.iterdir()}
    left = {"2.orbax", "2.saving"}  # `open` removes them
    assert names - left in ({"1"}, {"1", "2"})
    return len(values) == 2


CODES = {"return": 0, "raise": 1, "SIGINT": -signal.SIGINT, "exit": 0, "exit 3": 3, "forgotten": 0}
CLOSED = ("stdout closed", "stdout None", "stdout broken", "stderr closed")  # none can be told
WAYS = [
    pytest.param(how, marks=() if how == "return" else pytest.mark.full)
    for how in (*CODES, *CLOSED, "SIGINT twice")
]


@pytest.mark.parametrize("how", WAYS)
def test_leaving_without_close(forks, tmp_path, count, how):
    """The step is there, or a line says that it is not."""
    for i in range(count(1, 3)):
        folder = tmp_path / f"{i}"
        end = forks.run(leaves, str(folder), how)
        assert how not in CODES or end.code == CODES[how], end
        assert how != "SIGINT twice" or end.code != 0, end
        if not is_committed(folder) and how in CODES:
            # orbax's threads may print warnings of their own after it.
            lines = [line for line in end.errors.splitlines() if "CheckpointError: " in line]
            assert lines, end
            words = f"stepfold.errors.CheckpointError: {folder}/2: not saved: "
            assert lines[-1].startswith(words), end
            assert lines[-1].endswith("close the series, as a `with` block does"), end


@pytest.mark.parametrize("how", WAYS)
def test_leaving_where_the_save_fails(forks, tmp_path, how):
    end = forks.run(leaves, str(tmp_path), how, True)
    assert sf.checkpoint.verify(tmp_path) == {1: []}
    if how in CODES:
        assert end.code == CODES[how], end
        assert "Traceback" in end.errors
        assert f"stepfold.errors.CheckpointError: {tmp_path}/2: not saved" in end.errors
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def leaves_two(start, folder, how):
    start(shutdown=8)
    mesh = sf.make_mesh()
    spread, whole = jax.NamedSharding(mesh, jax.P("fsdp")), jax.NamedSharding(mesh, jax.P())
    series = sf.Checkpoints(folder, every=1).open()
    for step in (1, 2):
        state = {"w": jnp.full((512, 1024), float(step), device=spread)}
        state["step"] = jnp.full((), step, device=whole)
        series.save(state, step=step)
    if how == "raise":
        raise ValueError("no more")


@pytest.mark.full
@pytest.mark.parametrize("how", ["raise", "return"])
def test_two_processes_that_leave_without_close(tmp_path, how):
    ends = launch.ends_of_processes(leaves_two, args=(str(tmp_path), how))
    if not is_committed(tmp_path):
        # jax aborts a process whose peer does not come to its shutdown barrier.
        for end in ends:
            is_loud = "2: not saved: " in end.errors
            assert end.code == -signal.SIGABRT or is_loud, launch.report(ends)


@pytest.mark.full
def test_an_interrupt_at_any_time_of_a_run(forks, tmp_path, count):
    """In the midst of a save, of a step, of jax: the folder is good, and the run goes on."""
    for i in range(count(1, 4)):
        folder, notes = tmp_path / f"{i}", tmp_path / f"{i}.notes"
        run = forks.start(training.train, str(folder), str(notes), {})
        while not notes.exists() or b"saving" not in notes.read_bytes():
            time.sleep(0.01)
        time.sleep(0.12 * i)
        run.kill(signal.SIGINT)
        end = run.wait()
        if end.code == 0:
            assert '"end"' in notes.read_text()
        assert not any(sf.checkpoint.verify(folder).values()), end
        assert forks.run(training.train, str(folder), str(notes), {}).code == 0
        assert all(path.name.isdecimal() for path in folder.iterdir())


def forks_in_a_hook(number):
    codes = []

    def fork(_):
        ready, tell = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(tell, b"1")
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(0)
        os.read(ready, 1)
        time.sleep(0.1)
        os.kill(pid, number)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def count(state, batch):
        return {"step": state["step"] + 1}, {"loss": sf.mean(batch)}

    batches = [np.zeros(2)] * 2
    result = sf.fit(count, {"step": jnp.int32(0)}, batches, hooks=fork, log_every=1)
    print(str(result.stop_reason), codes)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, -15),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, -10, marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_a_child_and_not_the_run(forks, number, code):
    end = forks.run(forks_in_a_hook, int(number))
    assert (end.code, end.output) == (0, f"the batches ended at step 2 {[code, code]}\n"), end
