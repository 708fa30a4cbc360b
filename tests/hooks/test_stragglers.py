"""`stragglers`: the arithmetic and the warnings; `tests/processes` has the real processes."""

import time
import warnings

import jax
import pytest
from tests.small import Shown

import stepfold as sf
from stepfold.hooks import performance


class Values(dict):
    """What the processes publish, without a service between them."""

    def __init__(self, name):
        super().__init__()

    def __bool__(self):
        return True

    def count_call(self):
        return 1

    def set(self, key, value):
        self[key.split("/")[1]] = value

    def get(self, folder):
        return dict(self)


class Others:
    """The clock and the reports of the other two of three processes."""

    def __init__(self, monkeypatch):
        self.now, self.step, self.data, self.hooks = 0.0, 0, 0.0, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(performance, "KeyValues", Values)
        hook = sf.hooks.stragglers()
        self._shown = Shown(hook)
        hook.source.open(0, None)
        self.values = hook.source._values

    def report(self, own, other, total=0.1, *, kind="train"):
        """Report the seconds in a step of this process, for data and hooks, and of another."""
        steps = 10
        self.now, self.step = self.now + steps * total, self.step + steps
        self.data, self.hooks = self.data + steps * own[0], self.hooks + steps * own[1]
        if other is not None:
            self.values["1"] = ["there", *other, total]
        self.values["2"] = ["elsewhere", 0.001, 0.0, total]
        return self._shown(
            sf.Event(
                self.step, None, {}, None, kind=kind,
                data_wait_seconds=self.data, hook_seconds=self.hooks,
            )
        )  # fmt: skip


@pytest.fixture
def others(monkeypatch):
    others = Others(monkeypatch)
    assert others.report((0, 0), (0, 0)) is None  # compiles
    others.values["0"] = ["here", 0.0, 0.0, 0.1]
    return others


def test_the_slowest_is_compared_with_the_median(others):
    assert others.report((0.001, 0), (0.001, 0)) is not None
    with warnings.catch_warnings(record=True, action="always") as caught:
        others.report((0.01, 0.01), (0.07, 0.02))
        metrics = others.report((0.01, 0.01), (0.07, 0.02))  # own numbers are one report late
    assert metrics["throughput/slowest_process"] == 1
    # Devices take 0.01 s, the median process 0.02.
    assert metrics["throughput/slowest_ratio"] == pytest.approx(0.09 / 0.02)
    assert str(caught[0].message) == (
        "step 30: process 1 on there takes 9 times as long as the median process: in a step of "
        "0.1 s, it waits 0.07 s for batches and spends 0.02 s in hooks"
    )


def test_a_process_that_is_slower_than_others_but_not_than_its_devices_is_none(others, recwarn):
    for _ in range(3):
        metrics = others.report((0.001, 0), (0.04, 0))
    assert metrics == {"throughput/slowest_process": 1.0, "throughput/slowest_ratio": 1.0}
    assert not recwarn


def test_it_warns_once_in_an_episode(others):
    def warned(own, other):
        with warnings.catch_warnings(record=True, action="always") as caught:
            others.report(own, other)
        return [str(warning.message).split(" on ")[0].split(": ")[1] for warning in caught]

    fast, slow = (0.001, 0), (0.09, 0)
    assert warned(fast, slow) == ["process 1"]
    assert warned(fast, slow) == []
    assert warned(fast, fast) == []
    assert warned(slow, slow) == ["process 1"]
    assert warned(slow, fast) == ["process 0"]
    assert warned(slow, fast) == []


def test_evaluations_do_not_count(others):
    assert others.report((5.0, 0), (0.001, 0), kind="eval") is None
    for _ in range(2):
        metrics = others.report((0.001, 0), (0.001, 0))
    assert metrics["throughput/slowest_ratio"] == 1
    del others.values["0"]  # without the report of a process there is nothing to compare
    assert others.report((0.001, 0), (0.09, 0)) is None


def test_reports_are_not_more_frequent_than_twice_a_second(others):
    events = [others.report((0.001, 0), (0.001, 0), total=0.02) for _ in range(7)]
    assert [event is not None for event in events] == [False, False, True] * 2 + [False]
