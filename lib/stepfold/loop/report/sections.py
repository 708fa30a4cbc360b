"""Which curves share a chart, and which charts stand together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepfold.loop.report.curves import Curve, thin
from stepfold.loop.report.drawing import COLUMNS, Chart, Line
from stepfold.loop.report.reading import Run
from stepfold.loop.report.standing import pace_of

_MEASURING = ("train", "eval", "test", "val", "valid", "validation")
_SPEED = ("throughput", "memory")
_POINTS = 60_000  # in the page at most, or so; with very many curves each has fewer
_OPEN = 12  # charts that a section may have and yet not be folded

Named = tuple[str, str, Line]  # the section, the chart, and a line in it


class Section(NamedTuple):
    """Charts that stand together.

    Attributes:
      title: what is above them.
      charts: the charts.
      folded: whether they are hidden until they are asked for.
    """

    title: str
    charts: Sequence[Chart]
    folded: bool


def span_of(runs: Sequence[Run]) -> tuple[float, float]:
    """Give the steps from the left edge of all charts to the right one."""
    ends = [(c.steps[0], c.steps[-1]) for run in runs for c in run.curves.values() if len(c.steps)]
    if not ends:
        return 0.0, 1.0
    low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    return (0.0 if 0 <= low < 0.2 * high else low), high


def sections_of(runs: Sequence[Run], names: Sequence[str]) -> list[Section]:
    """Sort the curves of runs into charts: what is measured in training and outside it together.

    `train/loss` and `eval/loss` are lines of one chart, and so are those of several runs.
    """
    measuring = _measuring(runs)
    named = [
        one
        for number, run in enumerate(runs)
        for one in _lines(number, run, names[number] if len(runs) > 1 else "", measuring)
    ]
    span, columns = span_of(runs), max(40, min(COLUMNS, _POINTS // (2 * max(len(named), 1))))
    restarts = [one["from"] for one in runs[0].attempts[1:]] if len(runs) == 1 else []
    sections: dict[str, dict[str, list[Line]]] = {"Metrics": {}, "Speed": {}}
    for section, chart, line in named:
        thinned = line._replace(curve=thin(line.curve, columns, span))
        sections.setdefault(section, {}).setdefault(chart, []).append(thinned)
    return [_section(title, charts, restarts) for title, charts in sections.items() if charts]


def _section(title: str, charts: Mapping[str, list[Line]], restarts: Sequence[float]) -> Section:
    order = sorted(charts, key=_before)
    found = [Chart(name, charts[name], restarts) for name in order]
    return Section(title, found, folded=title != "Metrics" and len(found) > _OPEN)


def _measuring(runs: Sequence[Run]) -> list[str]:
    """List by what the metrics of training and of evaluations are called."""
    told = [one["name"] for run in runs for one in run.argument("evaluations") or ()]
    there = {name.partition("/")[0] for run in runs for name in run.curves}
    return [name for name in dict.fromkeys([*_MEASURING, *told]) if name in there]


def main_metrics(runs: Sequence[Run]) -> list[str]:
    """Name what is measured in training and outside it, the loss first."""
    measuring = _measuring(runs)
    there = dict.fromkeys(name for run in runs for name in run.curves)
    main = [name for name in there if _place_of(name, measuring)[0] == "Metrics"]
    titles = dict.fromkeys(_place_of(name, measuring)[1] for name in main)
    order = {title: at for at, title in enumerate(sorted(titles, key=_before))}
    return sorted(main, key=lambda name: order[_place_of(name, measuring)[1]])


def _before(title: str) -> tuple[bool, bool]:
    return title != "loss", "loss" not in title


def _place_of(metric: str, measuring: Sequence[str]) -> tuple[str, str]:
    """Name the section and the chart of a metric."""
    kind, _, rest = metric.partition("/")
    if not rest or kind in measuring:
        return "Metrics", rest or metric
    return ("Speed", _in_words(rest)) if kind in _SPEED else (kind, rest)


def _lines(number: int, run: Run, name: str, measuring: Sequence[str]) -> list[Named]:
    """Give the lines of a run; where there are several, its number says what they look like."""
    found: list[Named] = []
    for metric, curve in run.curves.items():
        section, title = _place_of(metric, measuring)
        kind = metric.partition("/")[0]
        line = Line(name or title, number, curve)
        if kind in measuring and title != metric:
            label, style = (f"{name} · {kind}", number) if name else (kind, measuring.index(kind))
            line = Line(label, style, curve, dotted=kind != "train")
        found.append((section, title, line))
    return [*found, *(_speed(number, name, title, c) for title, c in _pace(run).items())]


def _speed(number: int, name: str, title: str, curve: Curve) -> Named:
    return "Speed", title, Line(name or title, number, curve)


def _pace(run: Run) -> dict[str, Curve]:
    found = pace_of(run)
    if "throughput/waiting" in run.curves:
        found.pop("share of time waiting for batches", None)
    return found


def _in_words(name: str) -> str:
    """Write names of `throughput` as words; others are the user's."""
    return {
        "step_seconds": "seconds a step",
        "examples_per_second": "examples a second",
        "waiting": "share of time waiting for batches",
        "mfu": "share of the devices' peak",
        "goodput": "share of all time in steps that count",
    }.get(name, name)
