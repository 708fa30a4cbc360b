from types import SimpleNamespace

import pytest

from stepfold.loop.schedule import Schedule


def every(steps=None, epochs=None):
    return SimpleNamespace(every=steps, every_epochs=epochs)


def made(*due, log_every=10, epoch_steps=None, by_epoch=False, total=None):
    return Schedule(log_every, due, epoch_steps=epoch_steps, by_epoch=by_epoch, total=total)


def steps_of(schedule, until):
    steps = [schedule.next_after(0)]
    while steps[-1] < until:
        steps.append(schedule.next_after(steps[-1]))
    return steps


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (made(), [10, 20, 30]),
        (made(every(15)), [10, 15, 20, 30]),
        (made(every(), total=24), [10, 20, 24]),
        (made(every(epochs=2), epoch_steps=6), [10, 12, 20, 24]),
        (made(every(25, 1), epoch_steps=12), [10, 12, 20, 24]),
        (made(epoch_steps=16, by_epoch=True), [10, 16, 20, 30]),
        (made(epoch_steps=16), [10, 20, 30]),
    ],
)
def test_every_step_at_which_there_is_something_to_do_is_met(schedule, steps):
    assert steps_of(schedule, steps[-1]) == steps


def test_what_has_both_is_due_by_steps_and_by_epochs():
    both = every(4, 1)
    schedule = made(both, epoch_steps=6)
    assert [step for step in range(1, 13) if schedule.is_due(both, step)] == [4, 6, 8, 12]


def test_an_interval_ends_with_a_log_point_a_told_epoch_and_the_last_step():
    ends = lambda **options: [
        n for n in range(1, 16) if made(log_every=5, **options).is_log_point(n)
    ]
    assert ends() == [5, 10, 15]
    assert ends(total=13) == [5, 10, 13, 15]
    assert ends(epoch_steps=6, by_epoch=True) == [5, 6, 10, 12, 15]
    assert ends(epoch_steps=6) == [5, 10, 15]


def test_epochs_are_counted_where_one_has_just_ended():
    assert [made(epoch_steps=3).epochs_done(step) for step in (2, 3, 4, 6)] == [None, 1, None, 2]
    assert made().epochs_done(10) is None
