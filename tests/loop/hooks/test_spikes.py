"""A loss that jumps."""

import json

import numpy as np
import pytest

import stepfold as sf


def event(step, values):
    return sf.Event(step, None, {"train/loss": 0.0}, None, {"train/loss": np.array(values)})


def say(hook, values, chunk):
    """Show values in intervals of so many, and give the first reason to stop."""
    for stop in range(chunk, len(values) + 1, chunk):
        said = hook(event(stop, values[stop - chunk : stop]))
        if said:
            return said
    return None


def noisy(count):
    return 2 + 0.1 * np.random.default_rng(0).normal(size=count)


@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_a_spike_is_found_in_its_step_however_long_the_intervals_are(chunk):
    values = noisy(200)
    values[149] = 4.0
    said = say(sf.stop_on_spike(window=50), values, chunk)
    assert said is not None
    assert said.startswith("train/loss is 4 in step 150, and the median of the 50 before it is ")


@pytest.mark.parametrize("chunk", [1, 20])
def test_each_value_is_held_against_exactly_those_before_it(chunk):
    values = noisy(40)
    middle = np.median(values[20:30])
    width = 1.4826 * np.median(np.abs(values[20:30] - middle))
    for sign in (-1, 1):
        values[30] = middle + (10 + sign * 1e-6) * max(width, 0.01 * middle)
        said = say(sf.stop_on_spike(window=10), values, chunk)
        assert (said is not None and "in step 31" in said) == (sign == 1)


def test_noise_and_a_falling_loss_are_no_spikes():
    assert say(sf.stop_on_spike(window=50), noisy(1000), 10) is None
    assert say(sf.stop_on_spike(window=50), 10 / np.arange(1, 1001) + noisy(1000), 10) is None


def test_a_loss_that_hardly_moves_may_move_by_a_little():
    flat = np.full(100, 0.5)
    flat[90] = 0.54
    assert say(sf.stop_on_spike(window=50), flat, 10) is None
    flat[90] = 0.56
    assert "in step 91" in say(sf.stop_on_spike(window=50), flat, 10)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_enters_the_window(bad):
    values = noisy(200)
    values[60:140:2] = bad
    values[180] = 9.0
    hook = sf.stop_on_spike(window=100)
    assert "train/loss is 9 in step 181" in say(hook, values, 10)
    assert np.isfinite(hook.get_state()["seen"]).all()


def test_nothing_is_said_before_the_window_is_full():
    values = noisy(50)
    values[49] = 100.0
    assert say(sf.stop_on_spike(window=50), values, 10) is None
    assert say(sf.stop_on_spike(window=49), values, 10) is not None


def test_the_window_survives_a_resume():
    hook, again = sf.stop_on_spike(window=50), sf.stop_on_spike(window=50)
    hook(event(60, noisy(60)))
    again.set_state(json.loads(json.dumps(hook.get_state())))
    assert again(event(61, [4.0])) == hook(event(61, [4.0])) is not None


def test_a_narrower_window_after_a_resume_is_of_the_last_values():
    hook, again = sf.stop_on_spike(window=100), sf.stop_on_spike(window=10)
    hook(event(100, [*noisy(50), *(50 + noisy(50))]))
    again.set_state(hook.get_state())
    assert again(event(101, [52.0])) is None


def test_what_was_seen_of_another_metric_is_left_aside():
    hook, again = sf.stop_on_spike(window=10), sf.stop_on_spike("train/norm", window=10)
    hook(event(10, noisy(10)))
    again.set_state(hook.get_state())
    assert again(sf.Event(11, None, {}, None, {"train/norm": np.array([99.0])})) is None


def test_an_evaluation_is_passed_over():
    assert sf.stop_on_spike()(sf.Event(10, None, {"eval/loss": 9.0}, None)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": "eval/loss"}, "metric: expected a train metric, as 'train/loss', got 'eval/l"),
        ({"window": 1}, "window: expected an integer of at least 2, got 1"),
        ({"deviations": 0}, "deviations: expected a number above 0, got 0"),
    ],
)
def test_arguments_are_checked(options, said):
    with pytest.raises(sf.ConfigError, match=said):
        sf.stop_on_spike(**options)
