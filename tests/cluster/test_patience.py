"""Which process the others wait for, by the positions of all."""

from stepfold.cluster.patience import Seen, find_stuck
from stepfold.core.processes import Position


def seen(moves, doing="hooks", *, has_run=True):
    return Seen(moves, 30, doing, has_run, "host")


def test_the_process_that_is_behind_is_stuck():
    others = {0: seen(5), 1: seen(4, Position.DEVICES)}
    assert find_stuck({**others, 2: seen(3)}) == [2]
    assert find_stuck({**others, 2: seen(3), 3: seen(3)}) == [2, 3]


def test_processes_at_the_same_point_are_stuck_only_between_steps():
    assert find_stuck(dict.fromkeys(range(3), seen(1, Position.BATCH))) == [0, 1, 2]
    assert find_stuck({0: seen(2, Position.DEVICES), 1: seen(2, Position.DEVICES)}) == [0, 1]
    for doing in ("hooks", "evaluation eval", "a save", "a step"):
        assert find_stuck(dict.fromkeys(range(3), seen(1, doing))) == []


def test_a_process_that_may_still_compile_its_first_step_is_not_stuck():
    ahead = seen(3, Position.DEVICES)
    assert find_stuck({0: ahead, 1: seen(2, "a step", has_run=False)}) == []


def test_a_position_has_run_after_a_step_until_a_restore():
    position = Position()
    position.move("a step", 0)
    assert not position.has_run
    position.move(Position.DEVICES, 1)
    position.move(Position.BATCH, 1)
    assert position.has_run
    position.move(Position.RESTORE, 1)
    assert not position.has_run
    assert (position.moves, position.step) == (4, 1)
