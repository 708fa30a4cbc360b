"""How fast steps follow one another."""

import pytest

import stepfold as sf
from stepfold.loop.hooks.pace import Pace


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def train(step):
    return sf.Event(step, None, {"train/loss": 1.0}, None)


def evaluation(step):
    return sf.Event(step, None, {"eval/loss": 1.0}, None)


def test_the_first_interval_which_compiles_is_left_out(clock):
    pace = Pace()
    assert pace.add(train(10)) is None
    assert pace.rate is None
    clock[0] += 5
    assert pace.add(train(20)) == (10, 5.0)
    assert pace.rate == 2.0


def test_the_time_of_an_evaluation_does_not_count(clock):
    pace = Pace()
    pace.add(train(10))
    clock[0] += 60
    assert pace.add(evaluation(10)) is None
    clock[0] += 1
    assert pace.add(train(20)) == (10, 1.0)
    assert pace.rate == 10.0


def test_the_rate_is_smoothed_over_times(clock):
    pace = Pace()
    for seconds in (0, 1, 2):
        clock[0] += seconds
        pace.add(train(pace._step + 10))
    assert pace.rate == pytest.approx(10 / (0.7 * 1 + 0.3 * 2))
