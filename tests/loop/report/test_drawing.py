import math
from xml.etree import ElementTree

import numpy as np

from stepfold.loop.report.curves import Curve
from stepfold.loop.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Line,
    draw,
    swatch,
)


def curve(*points):
    return Curve(*map(np.array, zip(*[map(float, point) for point in points], strict=True)))


def drawn(*lines, span=(0, 100), restarts=(), **options):
    return ElementTree.fromstring(draw(Chart("loss", lines, restarts), span, **options))


def paths(svg, kind):
    return [path.get("d") for path in svg.iter("path") if path.get("class").split()[0] == kind]


def test_points_are_where_they_belong():
    svg = drawn(Line("train", 0, curve((0, 0), (50, 10), (100, 5))))
    low, high = map(float, svg.get("data-y").split())
    assert (low, svg.get("data-x")) == (0, "0 100")
    tall = HEIGHT - TOP - BOTTOM
    expected = [(LEFT, 0), ((LEFT + WIDTH - RIGHT) / 2, 10), (WIDTH - RIGHT, 5)]
    points = [point.split() for point in paths(svg, "line")[0][1:].split("L")]
    for (x, y), (at, value) in zip(points, expected, strict=True):
        assert abs(float(x) - at) < 0.06
        assert abs(float(y) - (TOP + (1 - value / high) * tall)) < 0.06


def test_a_scale_of_logarithms_puts_equal_ratios_at_equal_distances():
    svg = drawn(Line("train", 0, curve((0, 1), (50, 10), (100, 100))), log=True)
    ys = [float(point.split()[1]) for point in paths(svg, "line")[0][1:].split("L")]
    assert abs((ys[0] - ys[1]) - (ys[1] - ys[2])) < 0.15
    assert svg.get("class") == "log"


def test_what_is_not_finite_is_a_gap_with_a_mark():
    points = curve((0, 1), (25, 2), (50, math.nan), (75, 2), (90, math.inf), (100, 2))
    svg = drawn(Line("train", 3, points))
    (line,) = paths(svg, "line")
    assert line.count("M") == 3
    assert line.endswith("h0")  # a point with nothing beside it is drawn too
    (marks,) = paths(svg, "lost")
    assert [mark.split()[1].partition("l")[0] for mark in marks.split("M")[1:]] == [
        str(HEIGHT - BOTTOM - 7),
        str(TOP + 1),
    ]


def test_on_a_scale_of_logarithms_what_is_not_above_zero_is_a_gap():
    svg = drawn(Line("train", 0, curve((0, 1), (50, 0), (75, 2), (100, 3))), log=True)
    assert paths(svg, "line")[0].count("M") == 2


def test_where_nothing_has_a_place_nothing_is_drawn():
    chart = Chart("loss", [Line("train", 0, curve((0, math.nan), (1, -1)))])
    assert draw(chart, (0, 1)) != ""
    assert draw(chart, (0, 1), log=True) == ""


def test_evaluations_have_dots_and_curves_have_none():
    points = curve((0, 1), (50, 3), (100, 2))
    svg = drawn(Line("train", 0, points), Line("eval", 1, points, dotted=True))
    (dots,) = paths(svg, "dots")
    assert dots.count("M") == 3
    assert "dots" in swatch(1, dotted=True)
    assert "dots" not in swatch(1)


def test_restarts_are_marked_and_named():
    svg = drawn(Line("train", 0, curve((0, 1), (100, 2))), restarts=[50, 95, 500])
    assert len(paths(svg, "restart")) == 2
    assert [t.text for t in svg.iter("text") if t.get("class") == "restart"] == ["restart"] * 2


def test_a_chart_is_told_in_words():
    svg = drawn(Line("train", 0, curve((0, 4), (50, math.nan), (90, 1), (100, 2))))
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "loss: train from 4 at step 0 to 2 at step 100, between 1 and 4"


def test_names_do_not_get_out_of_their_place():
    chart = Chart('"><script>', [Line("<b>&", 0, curve((0, 1), (1, 2)))])
    svg = ElementTree.fromstring(draw(chart, (0, 1)))
    assert svg.get("aria-label").startswith('"><script>: <b>& from 1')


def test_one_step_is_enough():
    svg = drawn(Line("eval", 0, curve((10, 3)), dotted=True), span=(10, 10))
    assert paths(svg, "line")[0].endswith("h0")
