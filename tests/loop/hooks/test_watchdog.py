"""A watchdog for runs that hang."""

import subprocess
import sys
import threading
import time

import pytest

import stepfold as sf
from stepfold.loop.hooks.base import Event
from stepfold.loop.hooks.watchdog import watchdog

EVENT = Event(1, None, {}, None)


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


def test_it_provides_no_numbers_and_cannot_stop():
    assert watchdog(60).provides == ()
    assert not watchdog(60).can_stop


def test_all_stacks_are_dumped_and_the_run_continues(stacks):
    thread = threading.Thread(target=deep_in_the_data)
    hook = watchdog(0.1, file=stacks)
    hook(EVENT)
    thread.start()
    stuck_in_a_step()
    hook.close()
    thread.join()
    text = text_of(stacks)
    assert "Timeout (0:00:00.1" in text
    assert "in stuck_in_a_step" in text
    assert "in deep_in_the_data" in text


def test_with_abort_the_process_exits():
    code = (
        "import time\n"
        "from stepfold.loop.hooks.watchdog import watchdog\n"
        "def stuck_in_a_step(): time.sleep(60)\n"
        "hook = watchdog(0.2, abort=True); hook.open(0, 9); stuck_in_a_step()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "in stuck_in_a_step" in ran.stderr


def test_while_events_come_it_is_silent(stacks):
    hook = watchdog(0.5, file=stacks)
    hook.open(0, None)
    for _ in range(16):
        time.sleep(0.05)
        hook(EVENT)
    hook.close()
    assert text_of(stacks) == ""


@pytest.mark.parametrize("use", [lambda hook: None, lambda hook: (hook(EVENT), hook.close())])
def test_nothing_is_watched_before_the_run_nor_after_it(use, stacks):
    use(watchdog(0.05, file=stacks))
    time.sleep(0.2)
    assert text_of(stacks) == ""


def test_arguments_are_checked():
    for wrong in (0, -1, True, "60", float("nan")):
        with pytest.raises(sf.ConfigError, match="expected seconds, a number above 0, got "):
            watchdog(wrong)
    with pytest.raises(sf.ConfigError, match="abort: expected True or False, got int 1"):
        watchdog(60, 1)
