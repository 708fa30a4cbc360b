"""A hook less often."""

import pytest

import stepfold as sf


def events(*steps):
    return [sf.Event(step, None, {"train/loss": 1.0}, None) for step in steps]


def steps_shown(hook, seen, *steps):
    for event in events(*steps):
        hook(event)
    return seen


def make(n):
    seen = []
    return sf.every(n, lambda event: seen.append(event.step)), seen


def test_the_first_event_at_or_after_each_multiple():
    assert steps_shown(*make(25), 10, 20, 30, 40, 50, 60, 100, 110) == [30, 50, 100]


def test_a_multiple_counts_once_though_an_evaluation_follows():
    assert steps_shown(*make(10), 10, 10, 20, 20) == [10, 20]


def test_what_the_hook_says_is_said():
    assert sf.every(5, lambda event: "stop")(events(5)[0]) == "stop"
    assert sf.every(5, lambda event: {"a": 1})(events(4)[0]) is None


def test_a_run_that_begins_later_counts_from_there():
    hook, seen = make(100)
    hook.open(250, None)
    assert steps_shown(hook, seen, 260, 300) == [300]


def test_a_resumed_run_calls_when_an_uninterrupted_one_would():
    hook, _ = make(100)
    hook(events(90)[0])
    again, seen = make(100)
    again.set_state(hook.get_state())
    again.open(105, None)  # saved after step 105 was done, and before step 100 was shown
    assert steps_shown(again, seen, 100, 110, 200) == [100, 200]


def test_a_run_that_goes_on_with_another_number_of_steps_counts_from_there():
    often, _ = make(10)
    steps_shown(often, [], 500, 1000)
    seldom, seen = make(100)
    seldom.set_state(often.get_state())
    seldom.open(1000, None)
    assert steps_shown(seldom, seen, 1050, 1100, 1200) == [1100, 1200]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, lambda event: None])
def test_how_often_is_a_count(wrong):
    with pytest.raises(sf.ConfigError, match="every: expected an integer of at least 1, got "):
        sf.every(wrong, lambda event: None)


def test_what_is_called_is_a_hook():
    with pytest.raises(sf.ConfigError, match="every: expected a hook, .* got int 10"):
        sf.every(10, 10)
