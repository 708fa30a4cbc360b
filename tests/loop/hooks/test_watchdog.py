"""A run that hangs."""

import subprocess
import sys
import time

import pytest

import stepfold as sf


def run(code):
    code = f"import time, stepfold as sf\nevent = sf.Event(1, None, {{}}, None)\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


HANG = """
import threading
def deep_in_the_data():
    time.sleep(1.5)
threading.Thread(target=deep_in_the_data).start()
def stuck_in_a_step():
    time.sleep(1.5)
"""


def test_all_stacks_are_dumped_and_the_run_goes_on():
    ran = run(HANG + "hook = sf.watchdog(0.5); hook(event); stuck_in_a_step(); hook.close()")
    assert ran.returncode == 0
    assert "Timeout (0:00:00.5" in ran.stderr
    assert "in stuck_in_a_step" in ran.stderr
    assert "in deep_in_the_data" in ran.stderr


def test_it_aborts_if_asked_to():
    ran = run(HANG + "hook = sf.watchdog(0.5, abort=True); hook.open(0, 9); stuck_in_a_step()")
    assert ran.returncode == 1
    assert "in stuck_in_a_step" in ran.stderr


def test_where_events_come_it_is_silent():
    ran = run(
        "hook = sf.watchdog(0.5, abort=True); hook.open(0, None)\n"
        "for _ in range(15):\n    time.sleep(0.1); hook(event)\n"
        "hook.close(); time.sleep(1)"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_nothing_is_watched_before_the_run_begins():
    ran = run("hook = sf.watchdog(0.2, abort=True); time.sleep(1)")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_stacks_go_to_a_file(tmp_path):
    with (tmp_path / "stacks").open("w+") as file:
        hook = sf.watchdog(0.05, file=file)
        hook.open(0, None)
        time.sleep(0.3)
        hook.close()
        file.seek(0)
        assert "test_stacks_go_to_a_file" in file.read()


def test_arguments_are_checked():
    for wrong in (0, -1, True, "60", float("nan")):
        with pytest.raises(sf.ConfigError, match="expected seconds, a number above 0, got "):
            sf.watchdog(wrong)
    with pytest.raises(sf.ConfigError, match="abort: expected True or False, got int 1"):
        sf.watchdog(60, 1)
