"""Temporary saves that follow one another cost the loop little of its time."""

import time

import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.temporary import ContinuousSaves


class Loop:
    """A loop with steps of a length, and saves that block it and then slow it down."""

    def __init__(self, monkeypatch, step, blocks, slows, lasts, look_every=1):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self._step, self._blocks, self._slows, self._lasts = step, blocks, slows, lasts
        self._look_every = look_every
        self.saves, self.began = ContinuousSaves(), []

    def run(self, steps):
        """Return the share of the time that the saves have taken, but for the first of them."""
        until, start, lost = 0.0, self.now, 0.0
        for number in range(1, steps + 1):
            slower = self._slows * self._step if self.now < until else 0.0
            self.now += self._step + slower
            lost += slower
            is_look = number % self._look_every == 0 and number >= self.saves.next_step
            if is_look and self.saves.is_due(number, is_saving=self.now < until):
                self.began.append(self.now)
                self.now += self._blocks
                lost += self._blocks
                self.saves.begin(self._blocks)
                until = self.now + self._lasts
        first = self._blocks + self._slows / (1 + self._slows) * self._lasts
        return max(0.0, lost - 1.1 * first) / (self.now - start)


@pytest.mark.parametrize(
    ("step", "blocks", "slows", "lasts", "look_every"),
    [
        (0.1, 0.01, 0.0, 1.0, 1),
        (0.1, 0.1, 0.5, 2.0, 1),
        (0.01, 0.05, 0.2, 3.0, 100),
        (0.5, 0.0, 1.0, 5.0, 1),
        (0.1, 2.0, 0.0, 10.0, 10),
        (5.0, 0.2, 0.1, 20.0, 1),
    ],
)
def test_saves_take_a_hundredth_of_the_time(monkeypatch, step, blocks, slows, lasts, look_every):
    loop = Loop(monkeypatch, step, blocks, slows, lasts, look_every)
    steps = round(3_000 / step)
    assert loop.run(steps) <= 0.0102
    gaps = np.diff(loop.began[2:])
    # As often as that allows, with the time of a look on top.
    cost = blocks + slows / (1 + slows) * lasts
    assert np.median(gaps) <= max(100 * cost, lasts) * 1.1 + 2 * max(1.0, look_every * step)
    assert min(gaps) >= lasts, "a save has begun before the last one had ended"


def test_a_save_that_costs_nothing_is_followed_by_the_next(monkeypatch):
    loop = Loop(monkeypatch, step=0.1, blocks=0.0, slows=0.0, lasts=3.0)
    assert loop.run(2000) == 0
    assert np.median(np.diff(loop.began)) <= 3.0 + 2 * 1.1


def test_the_first_interval_may_be_slow(monkeypatch):
    """The first steps compile; later ones tell how long a step takes."""
    loop = Loop(monkeypatch, step=0.1, blocks=0.1, slows=0.5, lasts=2.0)
    loop.saves.is_due(0, is_saving=False)
    loop.now += 30.0
    assert loop.run(30_000) <= 0.0105


def test_a_series_saves_by_itself(tmp_path):
    described = sf.Checkpoints(
        tmp_path / "durable", temporary=sf.Temporary(tmp_path / "local", every="continuous")
    )
    with described as series:
        saved = []
        # A first save that takes 1 s, as on a busy machine, is followed by one after 100 s.
        deadline = time.monotonic() + 300
        for step in range(1, 10**6):
            time.sleep(0.005)
            if series.due(step):
                saved.append(step)
                series.save({"w": np.full(10, step)}, step=step)
            if len(saved) == 2 or time.monotonic() > deadline:
                break
        series.wait()
        assert len(saved) == 2
        assert series.steps() == saved[1:]
    restored = described.restore({"w": np.zeros(10, int)})
    np.testing.assert_array_equal(restored.state["w"], np.full(10, saved[1]))


def test_other_words_are_refused():
    with pytest.raises(
        sf.errors.ConfigError, match="every: expected a number of steps, or 'continuous'"
    ):
        sf.Temporary("a", every="always")
    assert sf.Temporary("a", every="continuous").every == "continuous"
