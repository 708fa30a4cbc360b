"""A run that hangs."""

import subprocess
import sys
import threading
import time

import pytest

import stepfold as sf

EVENT = sf.Event(1, None, {}, None)


@pytest.fixture
def stacks(tmp_path):
    """A file for stacks."""
    with (tmp_path / "stacks").open("w+") as file:
        yield file


def text_of(file):
    file.seek(0)
    return file.read()


def deep_in_the_data():
    time.sleep(0.4)


def stuck_in_a_step():
    time.sleep(0.4)


def test_all_stacks_are_dumped_and_the_run_goes_on(stacks):
    thread = threading.Thread(target=deep_in_the_data)
    hook = sf.watchdog(0.1, file=stacks)
    hook(EVENT)
    thread.start()
    stuck_in_a_step()
    hook.close()
    thread.join()
    said = text_of(stacks)
    assert "Timeout (0:00:00.1" in said
    assert "in stuck_in_a_step" in said
    assert "in deep_in_the_data" in said


def test_it_aborts_if_asked_to():
    code = (
        "import time, stepfold as sf\n"
        "def stuck_in_a_step(): time.sleep(60)\n"
        "hook = sf.watchdog(0.2, abort=True); hook.open(0, 9); stuck_in_a_step()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "in stuck_in_a_step" in ran.stderr


def test_where_events_come_it_is_silent(stacks):
    hook = sf.watchdog(0.5, file=stacks)
    hook.open(0, None)
    for _ in range(16):
        time.sleep(0.05)
        hook(EVENT)
    hook.close()
    assert text_of(stacks) == ""


@pytest.mark.parametrize("before", [lambda hook: None, lambda hook: (hook(EVENT), hook.close())])
def test_nothing_is_watched_before_the_run_begins_nor_after_it(before, stacks):
    before(sf.watchdog(0.05, file=stacks))
    time.sleep(0.2)
    assert text_of(stacks) == ""


def test_arguments_are_checked():
    for wrong in (0, -1, True, "60", float("nan")):
        with pytest.raises(sf.ConfigError, match="expected seconds, a number above 0, got "):
            sf.watchdog(wrong)
    with pytest.raises(sf.ConfigError, match="abort: expected True or False, got int 1"):
        sf.watchdog(60, 1)
