"""Charts as SVG: readable without any script, and with enough said for one to read values off."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from stepfold.loop.report.curves import Curve
from stepfold.loop.report.scales import Scale, scale_of, spell, spell_step

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 30  # what axes and their numbers take of it
COLUMNS = WIDTH - LEFT - RIGHT
_DOTTED = 120  # a line of more points than this has no dots
_LABELLED = 6  # more restarts than this have no words, which would cover one another


class Line(NamedTuple):
    """A curve as it is drawn.

    Attributes:
      label: what it is called.
      style: its color and its dashes, by number.
      curve: its points, thinned.
      dotted: whether each point is marked, as those of an evaluation are.
    """

    label: str
    style: int
    curve: Curve
    dotted: bool = False


class Chart(NamedTuple):
    """A metric, of one run or of several.

    Attributes:
      title: what it is called.
      lines: what is drawn.
      restarts: the steps at which a run went on.
    """

    title: str
    lines: Sequence[Line]
    restarts: Sequence[float] = ()


def draw(chart: Chart, span: tuple[float, float], *, log: bool = False) -> str:
    """Draw a chart; an empty text, where nothing of it has a place on the scale.

    Args:
      chart: what to draw.
      span: the steps at the left and at the right edge.
      log: whether values go by their logarithm.
    """
    down = scale_of([line.curve.values for line in chart.lines], log=log)
    if down is None:
        return ""
    across = Scale(span[0], span[1] if span[1] > span[0] else span[0] + 1)
    about = f'data-x="{across.low!r} {across.high!r}" data-y="{down.low!r} {down.high!r}"'
    parts = [
        f'<svg class="{"log" if log else "linear"}" viewBox="0 0 {WIDTH} {HEIGHT}" {about} '
        f'role="img" aria-label="{escape(_told(chart, log))}" tabindex="0">',
        *_grid(across, down),
        *_restarts(chart.restarts, across),
        *(part for k, line in enumerate(chart.lines) for part in _line(k, line, across, down)),
        "</svg>",
    ]
    return "".join(parts)


def _x(scale: Scale, step: float) -> float:
    return LEFT + scale.share(step) * COLUMNS


def _y(scale: Scale, value: float) -> float:
    return TOP + (1 - scale.share(value)) * (HEIGHT - TOP - BOTTOM)


def _grid(across: Scale, down: Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in down.ticks():
        y = _y(down, value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="down">{spell(_clean(value))}</text>'
    for step in across.ticks():
        if step == int(step):
            x = _x(across, step)
            yield f'<path class="tick" d="M{x:.1f} {bottom}v4"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18}" class="across">{spell_step(step)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'


def _clean(value: float) -> float:
    return float(f"{value:.10g}")


def _restarts(steps: Sequence[float], across: Scale) -> Iterator[str]:
    for step in steps:
        if across.low <= step <= across.high:
            x = _x(across, step)
            yield f'<path class="restart" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            if len(steps) <= _LABELLED:
                side, place = ("end", -4) if across.share(step) > 0.8 else ("start", 4)
                yield (
                    f'<text class="restart" text-anchor="{side}" x="{x + place:.1f}" '
                    f'y="{TOP + 9}">restart</text>'
                )


def _line(number: int, line: Line, across: Scale, down: Scale) -> Iterator[str]:
    dense = " dense" if len(line.curve.steps) > COLUMNS else ""  # as a band, not to hide others
    yield (
        f'<path class="line s{line.style % 8}{dense}" data-line="{number}" '
        f'd="{path_of(line.curve, across, down)}"/>'
    )
    if line.dotted and len(line.curve.steps) <= _DOTTED:
        shown = [p for p in zip(*line.curve, strict=True) if down.shows(p[1])]
        dots = "".join(f"M{_x(across, s):.1f} {_y(down, v):.1f}h0" for s, v in shown)
        yield f'<path class="dots s{line.style % 8}" d="{dots}"/>'
    lost = [p for p in zip(*line.curve, strict=True) if not np.isfinite(p[1])]
    if lost:  # at the edge where they would be, and of NaN nobody knows
        crosses = "".join(
            f"M{_x(across, s) - 3:.1f} {TOP + 1 if v == np.inf else HEIGHT - BOTTOM - 7}"
            "l6 6m0 -6l-6 6"
            for s, v in lost
        )
        yield f'<path class="lost s{line.style % 8}" d="{crosses}"/>'


def path_of(curve: Curve, across: Scale, down: Scale) -> str:
    """Write the path of a curve, broken where a value has no place; a lone value is a point.

    >>> steps, values = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, np.nan, 1.0])
    >>> path_of(Curve(steps, values), Scale(0.0, 3.0), Scale(0.0, 1.0))
    'M62.0 230.0L222.7 14.0M544.0 14.0h0'
    """
    parts: list[str] = []
    count = 0  # of points since the path was broken
    for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
        if down.shows(value):
            count += 1
            at = f"{_x(across, step):.1f} {_y(down, value):.1f}"
            parts.append(("M" if count == 1 else "L") + at)
        else:
            parts.append("h0" if count == 1 else "")
            count = 0
    return "".join([*parts, "h0" if count == 1 else ""])


def swatch(style: int, *, dotted: bool = False) -> str:
    """Draw a line's color, dashes and dots, for a legend."""
    dots = f'<path class="dots s{style % 8}" d="M14 5h0"/>' if dotted else ""
    return (
        '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
        f'<path class="line s{style % 8}" d="M1 5H27"/>{dots}</svg>'
    )


def _told(chart: Chart, log: bool) -> str:
    """Say in words what a chart shows."""
    parts = []
    for line in chart.lines:
        finite = np.flatnonzero(np.isfinite(line.curve.values))
        steps, values = (one[finite] for one in line.curve)
        if len(finite):
            parts.append(
                f"{line.label} from {spell(values[0])} at step {steps[0]:,.0f} to "
                f"{spell(values[-1])} at step {steps[-1]:,.0f}, between {spell(values.min())} and "
                f"{spell(values.max())}"
            )
    return f"{chart.title}{', logarithmic' if log else ''}: {'; '.join(parts)}"
