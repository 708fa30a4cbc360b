import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfold.loop.report.scales import Scale, scale_of, spell, spell_step


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0.0, 10.0), [0, 2, 4, 6, 8, 10]),
        (Scale(0.13, 0.92), [0.2, 0.4, 0.6, 0.8]),
        (Scale(-3.0, 4.0), [-2, 0, 2, 4]),
        (Scale(1e-3, 1e3, log=True), [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]),
        (Scale(0.5, 20.0, log=True), [1, 3, 10]),
        (Scale(1.01, 1.02, log=True), [1.01, 1.02]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.ticks() == pytest.approx(ticks)


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
    log=st.booleans(),
)
def test_every_value_that_has_a_place_is_between_the_edges(values, log):
    scale = scale_of([np.array(values)], log=log)
    shown = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    assert (scale is None) == (not shown)
    if scale is not None and scale.high - scale.low < math.inf:
        assert scale.low < scale.high
        assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in shown)
        assert len(scale.ticks()) <= 30
        assert all(-1e-6 <= scale.share(tick) <= 1 + 1e-6 for tick in scale.ticks())


def test_nothing_below_zero_is_made_of_what_is_above():
    assert scale_of([np.array([0.01, 2.0])]).low == 0
    assert scale_of([np.array([5.0, 6.0])]).low == pytest.approx(4.95)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (0.1 + 0.2, "0.3"),
        (59850.4, "59,850"),
        (1e5, "100k"),
        (-123456.0, "-123.5k"),
        (3e-5, "3e-5"),
        (1.5e15, "1.5e15"),
        (-2.0, "-2"),
    ],
)
def test_values_are_spelled(value, text):
    assert spell(value) == text


def test_steps_are_spelled():
    assert [spell_step(s) for s in (0, 999, 1000, 250_000, 2e9)] == ["0", "999", "1k", "250k", "2G"]
