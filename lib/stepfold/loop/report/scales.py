"""Scales of a chart: where a value lies between two edges, and which values are written at it."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Scale(NamedTuple):
    """From where to where a chart goes, and whether by logarithm.

    >>> Scale(0.0, 10.0).share(2.5), Scale(0.01, 100.0, log=True).share(1.0)
    (0.25, 0.5)
    """

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Tell how far a value is on the way from the lower edge to the upper one."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low)
            )
        return (value - self.low) / (self.high - self.low)

    def shows(self, value: float) -> bool:
        """Tell whether a value has a place on it."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[float]:
        """List round values between the edges."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def scale_of(values: Iterable[np.ndarray], *, log: bool = False) -> Scale | None:
    """Make the scale on which all values have a place, with some air; None, if there are none.

    >>> scale_of([np.array([1.0, np.nan, 3.0])])
    Scale(low=0.9, high=3.1, log=False)
    >>> scale_of([np.array([-1.0])], log=True) is None
    True
    """
    shown = [one[np.isfinite(one) & ((one > 0) | (not log))] for one in values]
    shown = [one for one in shown if len(one)]
    if not shown:
        return None
    low, high = float(min(one.min() for one in shown)), float(max(one.max() for one in shown))
    if log:
        ratio = max((high / low) ** 0.05 if math.isfinite(high / low) else 1e3, 1.1)
        return Scale(max(low / ratio, 5e-324), min(high * ratio, 1.7e308), log=True)
    flat = high - low <= abs(high) * 1e-12
    air = (abs(high) * 0.1 or 1.0) if flat else high / 20 - low / 20
    bottom = 0.0 if low >= 0 and low < air else low - air  # 0 is a better edge than just below it
    return Scale(max(bottom, -1.7e308), min(high + air, 1.7e308))


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    rough = high / count - low / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if not power or not math.isfinite(power):
        return [low, high]
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high) - math.log10(low)
    parts = (1,) if decades > 3 else (1, 3) if decades > 1.2 else (1, 1.5, 2, 3, 5, 7)
    stride = max(1, round(decades / 6))
    powers = range(first, last + 1, stride)
    found = [part * 10.0**power for power in powers if power < 308 for part in parts]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else [low, high]


def spell(value: float) -> str:
    """Write a value as it is read at a glance, to four digits.

    >>> spell(0.25), spell(1234567.0), spell(2e-7), spell(2000.4), spell(-0.0)
    ('0.25', '1.235M', '2e-7', '2,000', '0')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) < 1e5 and (abs(value) >= 1e3 or value == int(value)):
        return f"{round(value):,}"
    if 1e5 <= abs(value) < 1e12:
        return spell_step(value)
    mantissa, _, power = f"{value:.4g}".partition("e")
    return mantissa + (f"e{int(power)}" if power else "")


def spell_step(step: float) -> str:
    """Write a step at an axis.

    >>> spell_step(500), spell_step(2000), spell_step(1.5e6), spell_step(12_345)
    ('500', '2k', '1.5M', '12.35k')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(step) >= unit:
            return f"{step / unit:.4g}{name}"
    return f"{step:g}"
