"""`python -m stepfold launch` starts processes, starts them again, and leaves none behind."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forks import clean_environ

from stepfold.__main__ import main

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
index, count, slot = (
    int(os.environ["STEPFOLD_" + name]) for name in ("PROCESS", "PROCESSES", "LOCAL_PROCESS")
)

def start():
    '''Return the number of the start, from 0.'''
    path = folder / f"starts-{index}"
    path.touch()
    with path.open("a") as file:
        file.write("x")
    return path.stat().st_size - 1

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

"""


@pytest.fixture
def launch(tmp_path):
    """Start the launcher with a script, and kill it in the end."""
    running = []

    def run(code, *options, arguments=(), wait=True, **environ):
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + code)
        command = [sys.executable, "-m", "stepfold", "launch", *map(str, options)]
        process = subprocess.Popen(
            [*command, str(script), str(tmp_path), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=clean_environ() | environ,
        )  # fmt: skip
        running.append(process)
        return finish(process) if wait else process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def finish(process, timeout=100):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(predicate, seconds=60):
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_output_has_the_index_of_its_process(launch):
    code, out, err = launch(
        "print(index, count, slot, *sys.argv[2:]); print('half', end='')\n"
        "print('bar', end='\\r', file=sys.stderr)\n"
        "print(os.environ['STEPFOLD_COORDINATOR'], file=sys.stderr)",
        *("--processes", 2), arguments=["--min", "x"],
    )  # fmt: skip
    assert code == 0
    lines = ["[0] 0 2 0 --min x", "[0] half", "[1] 1 2 1 --min x", "[1] half"]
    assert sorted(out.splitlines()) == lines
    assert err.count("[0] bar") == err.count("[1] bar") == 1
    assert len({line[4:] for line in err.split("\n") if "127.0.0.1:" in line}) == 1


def test_a_module_is_started_by_m():
    process = subprocess.run(
        [sys.executable, "-m", "stepfold", "launch", "-m", "timeit", "-n1", "-r1", "pass"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout.startswith("[0] 1 loop")


def test_all_start_again_when_one_dies(launch, tmp_path):
    code, out, err = launch(
        """
print("start", number := start(), os.getpid())
if number == 0:
    if index == 1:
        while len([*folder.glob("starts-*")]) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
""",
        *("--processes", 3, "--pause", 0),
    )
    assert code == 0
    assert "process 1: SIGKILL after" in err
    assert "starting 3 processes in 0 s (1 of 3 without progress)" in err
    assert out.count("start 1") == 3
    assert not any(runs(int(line.split()[-1])) for line in out.splitlines())


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("sys.exit(3)", 3, "process 0: exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "process 0: SIGSEGV"),
        ("raise KeyError('hook')", 1, "process 0: exit code 1"),
    ],
)
def test_it_ends_with_the_code_of_the_first_that_failed(ending, code, text, launch):
    script = f"start(); {ending} if index == 0 else time.sleep(600)"
    found, _, err = launch(script, "--processes", 2, "--restarts", 0)
    assert found == code
    assert text in err
    assert "ended, after 0 restarts without progress" in err


def test_a_failure_comes_back_until_the_limit_with_growing_pauses(launch, tmp_path):
    code, _, err = launch("start(); sys.exit(1)", "--pause", 0.01, "--restarts", 3)
    assert code == 1
    assert (tmp_path / "starts-0").stat().st_size == 4
    assert [line.split(" in ")[1] for line in err.splitlines()[:-1]] == [
        "0.01 s (1 of 3 without progress)",
        "0.02 s (2 of 3 without progress)",
        "0.04 s (3 of 3 without progress)",
    ]


@pytest.mark.parametrize("kind", ["checkpoints", "metrics.jsonl", "time"])
def test_progress_starts_the_count_again(kind, launch, tmp_path):
    write = {
        "checkpoints": "(folder / kind / str(10 * number)).mkdir(parents=True)",
        "metrics.jsonl": "(folder / kind).write_text('x' * number)",
        "time": "time.sleep(0.02)",
    }[kind]
    options = ["--healthy", 0.01] if kind == "time" else ["--progress", tmp_path / kind]
    code, _, err = launch(
        f"kind, number = {kind!r}, start(); {write}; sys.exit(1 if number < 5 else 0)",
        *("--restarts", 1, "--pause", 0.001, *options),
    )
    assert code == 0
    assert (tmp_path / "starts-0").stat().st_size == 6
    assert "2 of" not in err


def test_a_step_that_is_reached_again_is_no_progress(launch, tmp_path):
    code, _, _ = launch(
        "number = start(); (folder / 'saved/10').mkdir(parents=True, exist_ok=True); sys.exit(1)",
        *("--restarts", 2, "--pause", 0, "--progress", tmp_path / "saved"),
    )
    assert code == 1
    assert (tmp_path / "starts-0").stat().st_size == 4  # the first start made progress


def test_the_rest_continue_without_one_that_keeps_failing(launch):
    code, out, err = launch(
        """
if slot == 1:
    sys.exit(1)
if count == 3:
    time.sleep(600)
print(index, "of", count, "on", slot)
""",
        *("--processes", 3, "--min", 2, "--pause", 0),
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] 0 of 2 on 0", "[1] 1 of 2 on 2"]
    assert "starting 2 processes" in err
    code, _, err = launch("sys.exit(1)", "--processes", 2, "--pause", 0)
    assert (code, "starting 1 process" in err) == (1, False)


SAVES = """
def save(number, _):
    print("saving", signal.Signals(number).name)
    time.sleep(0.1)
    print("saved")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
(folder / f"ready-{index}").touch()
while True:
    time.sleep(600)
"""


def is_ready(tmp_path, count=2):
    return lambda: len([*tmp_path.glob("ready-*")]) == count


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")],
)
def test_a_signal_to_stop_is_passed_on(number, passed_on, launch, tmp_path):
    process = launch(SAVES, "--processes", 2, "--restarts", 9, wait=False)
    wait_for(is_ready(tmp_path))
    process.send_signal(getattr(signal, number))
    code, out, _ = finish(process)
    assert code == 128 + getattr(signal, number)
    assert sorted(out.split("] ")[1] if "] " in out else "" for out in out.splitlines()) == [
        *("saved", "saved", f"saving {passed_on}", f"saving {passed_on}")
    ]


def test_a_program_that_ends_well_after_a_signal_has_code_0(launch, tmp_path):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); (folder / 'ready-0').touch()\n"
    process = launch(code + "time.sleep(600)", wait=False)
    wait_for(is_ready(tmp_path, 1))
    process.terminate()
    assert finish(process)[0] == 0


def test_the_third_signal_kills(launch, tmp_path):
    code = """
count = 0
def ignore(number, _):
    global count
    count += 1
    (folder / f"seen-{index}-{count}").touch()
signal.signal(signal.SIGINT, ignore)
(folder / f"ready-{index}").touch()
while True:
    time.sleep(600)
"""
    process = launch(code, "--processes", 2, wait=False)
    wait_for(is_ready(tmp_path))
    for count in (1, 2):
        process.send_signal(signal.SIGINT)
        wait_for(lambda count=count: len([*tmp_path.glob(f"seen-*-{count}")]) == 2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_a_run_that_was_asked_to_stop_by_another_way_is_not_started_again(launch, tmp_path):
    """A scheduler may send SIGTERM to a process itself; then `fit` stops all of them."""
    code, _, err = launch("start(); sys.exit(143)", "--processes", 2)
    assert (code, err) == (143, "")
    assert (tmp_path / "starts-0").stat().st_size == 1


def test_a_signal_ends_a_pause(launch, tmp_path):
    process = launch("start(); sys.exit(1)", "--pause", 50, wait=False)
    wait_for((tmp_path / "starts-0").exists)
    assert "in 50 s" in process.stderr.readline()
    process.terminate()
    assert finish(process)[0] == 143


def test_processes_without_output_are_stuck_unless_progress_shows(launch, tmp_path):
    code, out, err = launch(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as jax's runtime does
if start() == 0:
    if index == 0:
        for number in range(4):
            time.sleep(0.4)
            (folder / "steps" / str(number)).mkdir(parents=True)
    time.sleep(600)
print("done")
""",
        *("--processes", 2, "--patience", 1.0, "--pause", 0, "--progress", tmp_path / "steps"),
    )
    assert code == 0
    assert "no process printed anything for 1 s" in err
    assert out.count("done") == 2
    assert len([*(tmp_path / "steps").iterdir()]) == 4


def test_the_others_and_what_they_started_are_killed_after_the_grace_period(launch, tmp_path):
    code, out, _ = launch(
        """
import subprocess
number = start()
if number == 0 and index == 0:
    wait_for("worker")
    sys.exit(1)
if number == 0:
    signal.signal(signal.SIGTERM, lambda *_: print("asked"))
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "worker.new").write_text(str(worker.pid))
    (folder / "worker.new").rename(folder / "worker")
    while True:
        time.sleep(600)
""",
        *("--processes", 2, "--pause", 0, "--grace", 0.3),
    )
    assert code == 0
    assert "[1] asked" in out
    wait_for(lambda: not runs(int((tmp_path / "worker").read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_no_process_outlives_a_launcher_that_is_killed(launch, tmp_path):
    process = launch(
        "(folder / f'{os.getpid()}.pid').touch(); (folder / f'ready-{index}').touch()\n"
        "time.sleep(600)",
        *("--processes", 2), wait=False,
    )  # fmt: skip
    wait_for(is_ready(tmp_path))
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert all(map(runs, pids))
    process.kill()
    wait_for(lambda: not any(map(runs, pids)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--processes", "0", __file__], "--processes: expected an integer of at least 1, got 0"),
        (["--restarts", "-1", __file__], "--restarts: expected an integer of at least 0, got -1"),
        (["--grace", "inf", __file__], "--grace: expected a number of seconds, got inf"),
        (["--processes", "x", __file__], "--processes: expected an integer of at least 1, got x"),
        (["--min", "2", __file__], "--min: expected at most 1, got 2"),
        (["missing.py"], "script: expected a file, got missing.py; give the path of a file, or -m"),
        ([], "the following arguments are required: script"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", *arguments])
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_launcher_within_a_launched_process_sets_its_own_environment(launch):
    inherited = {"STEPFOLD_PROCESS": "7", "STEPFOLD_PROCESSES": "8", "OWN": "9"}
    assert launch("print(index, count, os.environ['OWN'])", **inherited)[1] == "[0] 0 1 9\n"
