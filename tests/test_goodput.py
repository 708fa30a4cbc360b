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


def test_restarts_from_memory_have_the_goodput_of_restarts_from_attempts(goodput):
    hosts, interval, t = 16384, 1200, goodput.TIMES
    mean = goodput.DAY / (goodput.RATE * hosts)
    attempt = math.sqrt(2 * t.copy * mean)
    stops = (attempt + t.copy) * (interval + t.save) / interval - attempt
    each = goodput.exact(mean, attempt, stops, t.heartbeat + t.start + t.load + t.fetch + t.wait)
    simulated = goodput.simulate(goodput.Policy(outlive=True), hosts, interval, shared=0)
    assert simulated == pytest.approx(each, rel=0.01)


def test_spares_save_the_wait_for_a_host(goodput):
    hosts, interval, t = 2048, 1200, goodput.TIMES
    mean = goodput.DAY / (goodput.RATE * hosts)
    lost = goodput.exact(mean, interval, t.save, t.heartbeat + t.start + t.load + t.restore)
    enough = goodput.Policy(spares=1000)
    assert 2 * goodput.simulate(enough, hosts, interval, shared=0) == pytest.approx(lost, rel=0.01)
    all_shared = [
        goodput.simulate(policy, hosts, interval, shared=1)
        for policy in (goodput.Policy(), goodput.Policy(spares=4))
    ]
    assert all_shared[0] == pytest.approx(all_shared[1], rel=0.01)
