"""The simulation of `benchmarks/goodput.py` agrees with formulas where there are some."""

import math
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def goodput(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import goodput

    return goodput


@pytest.mark.parametrize("hosts", [64, 2048, 16384])
@pytest.mark.parametrize("minutes", [1, 10])
def test_restarts_have_the_goodput_of_dalys_formula(goodput, hosts, minutes):
    t, mean = goodput.TIMES, goodput.DAY / (goodput.RATE * hosts)
    restart = t.heartbeat + t.start + t.load + t.restore + t.wait
    simulated = goodput.simulate(goodput.Policy(), hosts, 60 * minutes, shared=0)
    assert simulated == pytest.approx(goodput.exact(mean, 60 * minutes, t.save, restart), rel=0.01)


def test_the_best_interval_is_youngs(goodput):
    hosts, restart = 2048, goodput.Policy()
    mean = goodput.DAY / (goodput.RATE * hosts)
    young = math.sqrt(2 * goodput.TIMES.save * mean)
    rarely, at_best, often = (
        goodput.simulate(restart, hosts, young * factor) for factor in (3, 1, 1 / 3)
    )
    assert at_best > max(rarely, often)
    # Checkpoints and repeated work take a share of sqrt(2 * save / mean), and restarts another.
    t = goodput.TIMES
    restarts = t.heartbeat + t.start + t.load + t.restore + t.wait * (1 - goodput.SHARED)
    lost = math.sqrt(2 * t.save / mean) + restarts / mean
    assert 1 - at_best == pytest.approx(lost, rel=0.1)


def test_spares_have_the_goodput_of_restarts_from_attempts(goodput):
    # With enough spares and no shared failures, all but 1 in 16,384 failures repeat one attempt.
    hosts, interval, t = 16384, 1200, goodput.TIMES
    mean = goodput.DAY / (goodput.RATE * hosts)
    attempt = math.sqrt(2 * t.copy * mean)
    stops = (attempt + t.copy) * (interval + t.save) / interval - attempt
    each = goodput.exact(mean, attempt, stops, t.heartbeat + t.rebuild + t.load)
    policy = goodput.Policy(elastic=True, spares=1000)
    assert 2 * goodput.simulate(policy, hosts, interval, shared=0) == pytest.approx(each, rel=0.01)


def test_a_run_without_spares_is_slower_by_the_hosts_that_it_lacks(goodput):
    # Failures are rare enough that only the lower speed counts: half a day for each lost host.
    hosts, interval, free = 1024, 3600, goodput.Times(*[0.0] * 12)
    times = free._replace(copy=1e-6, rejoin=goodput.DAY)
    policy = goodput.Policy(elastic=True)
    simulated = goodput.simulate(policy, hosts, interval, times=times, rate=0.02, shared=0)
    assert 1 - simulated == pytest.approx(0.02 / 2, rel=0.1)


def test_going_on_saves_nothing_if_all_failures_are_shared(goodput):
    lost = [
        1 - goodput.simulate(goodput.POLICIES[name], 2048, 1200, shared=shared)
        for name, shared in [("spares", 1), ("restart", 1), ("spares", 0), ("restart", 0)]
    ]
    assert lost[0] == pytest.approx(lost[1], abs=0.02)
    assert lost[2] < lost[3] / 2
