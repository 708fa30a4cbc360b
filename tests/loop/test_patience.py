"""Which process the others wait for, by the positions of all."""

import pytest

import stepfold as sf
from stepfold.core.processes import Group, Position
from stepfold.loop.patience import Seen, end_if_stuck, find_stuck


def seen(meetings, moves, doing="hooks", *, has_run=True):
    return Seen(meetings, moves, 0, 30, doing, has_run, "host")


def test_the_process_that_is_behind_is_stuck():
    others = {0: seen(5, 0), 1: seen(4, 3, Position.DEVICES)}
    assert find_stuck({**others, 2: seen(4, 1)}) == [2]
    assert find_stuck({**others, 2: seen(4, 1), 3: seen(4, 1)}) == [2, 3]


def test_processes_at_the_same_point_are_stuck_only_between_steps():
    assert find_stuck(dict.fromkeys(range(3), seen(4, 1, Position.BATCH))) == [0, 1, 2]
    assert find_stuck({0: seen(4, 2, Position.DEVICES), 1: seen(4, 2, Position.DEVICES)}) == [0, 1]
    for doing in ("hooks", "evaluation eval", "a save", "a step"):
        assert find_stuck(dict.fromkeys(range(3), seen(4, 1, doing))) == []


def test_a_process_that_may_still_compile_its_first_step_is_not_stuck():
    ahead = seen(4, 3, Position.DEVICES)
    assert find_stuck({0: ahead, 1: seen(4, 2, "a step", has_run=False)}) == []


def test_a_position_grows_with_what_is_begun_and_with_meetings():
    position = Position()
    counts = []
    for begin in (
        lambda: position.move(Position.BATCH, 7),
        lambda: position.move("a step", 7),
        lambda: position.enter("a meeting"),
        lambda: position.reach("a save of the others"),
        lambda: position.enter("a meeting"),
    ):
        begin()
        counts.append((position.meetings, position.moves))
    assert counts == sorted(set(counts))
    position.reach("a save of the others")
    position.reach("a save of the others")
    assert (position.meetings, position.moves, position.step) == (2, 1, 7)


def test_a_position_has_run_after_a_step_until_a_restore():
    position = Position()
    position.move("a step", 0)
    assert not position.has_run
    position.move(Position.DEVICES, 1)
    position.move(Position.BATCH, 1)
    assert position.has_run
    position.move(Position.RESTORE, 1)
    assert not position.has_run


def test_a_watchdog_has_the_same_timer():
    with (
        pytest.raises(sf.ConfigError, match="no sf.watchdog next to Elastic"),
        end_if_stuck(lambda: Group((0,)), 5, [sf.watchdog(60)], leave_behind=True),
    ):
        pass
