"""Tables of a page: what a run was begun with, what is left of it, and how runs differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from stepfold.checkpoint.retention import order_by, read_best
from stepfold.loop.report.reading import Run
from stepfold.loop.report.scales import spell
from stepfold.loop.report.sections import main_metrics
from stepfold.loop.report.standing import (
    duration,
    how_it_ended,
    overall,
    seconds_of,
    standing_of,
    time_of,
)
from stepfold.loop.report.summary import Extent, extent_of, steps_of, wall_of

_METRICS = 24  # that runs are compared by, at most
NONE = "\N{EN DASH}"
_LEAVES = 2000  # rows of parameters; beyond that only the largest

Rows = Sequence[Sequence[object]]


def table(head: Sequence[str], rows: Rows, numeric: Sequence[int] = ()) -> str:
    """Write a table; everything in it is escaped, and the columns of numbers are to the right."""

    def kind(at: int) -> str:
        return ' class="n"' if at in numeric else ""

    heads = "".join(f'<th scope="col"{kind(k)}>{escape(one)}</th>' for k, one in enumerate(head))
    body = "".join(
        f'<tr><th scope="row"{kind(0)}>{escape(str(row[0]))}</th>'
        + "".join(f"<td{kind(k)}>{escape(str(one))}</td>" for k, one in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    # It can be scrolled sideways, also by whoever has no mouse.
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def attempts(run: Run, now: datetime) -> str:
    """List how often the run was started, and how each start ended."""
    rows = []
    for number, one in enumerate(run.attempts):
        last = number == len(run.attempts) - 1
        began = _time(time_of(one["began"]))
        ended = how_it_ended(one, last=last, now=now)
        steps = (f"{one['from']:,}", f"{one['to']:,}")
        rows.append((began, *steps, duration(seconds_of(one)), ended))
    return table(("began (UTC)", "from step", "to step", "time", "how it ended"), rows, (1, 2, 3))


def checkpoints(run: Run) -> str:
    """List the checkpoints that are there; a star is at the best, where one is told apart."""
    rows, said = [], run.argument("checkpoints") or {}
    by = read_best(said.get("best"), said.get("mode"))
    best = order_by(by, {one.step: one.metrics for one in run.checkpoints})[:1] if by else []
    main = main_metrics([run])
    for one in run.checkpoints:
        metrics = (
            f"{name} {_number(value)}" for name, value in one.metrics.items() if name in main
        )
        saved = datetime.fromtimestamp(one.time, UTC)
        told = ", ".join(metrics) if one.whole else "not whole"
        star = "★ " if one.step in best else ""
        rows.append((f"{star}{one.step:,}", _time(saved), told))
    return table(("step", "saved (UTC)", "metrics"), rows, (0,))


def parameters(run: Run) -> str:
    """List the parameters, the largest first."""
    found = run.record.get("parameters") or {}
    leaves = sorted(found.get("leaves") or (), key=lambda leaf: -leaf[3])
    total = found.get("count") or 1
    rows = [
        (name, _shape(shape), dtype, f"{count:,}", f"{count / total:.1%}")
        for name, shape, dtype, count in leaves[:_LEAVES]
    ]
    if len(leaves) > _LEAVES:
        rest = leaves[_LEAVES:]
        count = sum(leaf[3] for leaf in rest)
        rows.append((f"{len(rest):,} smaller ones", "", "", f"{count:,}", f"{count / total:.1%}"))
    return table(("path", "shape", "dtype", "number", "share"), rows, (3, 4))


def _shape(shape: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(f"{n:,}" for n in shape) or "scalar"


def facts(run: Run) -> str:
    """List what the run was begun with."""
    rows = [(name, value) for name, value in flat_facts(run).items() if value != NONE]
    return table(("", "value"), rows)


def differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    """List in what runs differ; a sentence, where they do not."""
    found = [flat_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name, NONE) for one in found]
        if len(set(values)) > 1:
            rows.append((name, *values))
    if not rows:
        return "<p>Nothing differs in what is known of their arguments, versions and devices.</p>"
    return table(("", *names), rows)


def side_by_side(runs: Sequence[Run], names: Sequence[str], now: datetime) -> str:
    """List the figures of runs, a column each; a star is at the best of them."""
    rows: list[Sequence[object]] = [
        ("state", *(standing_of(run, now).word for run in runs)),
        ("steps", *(f"{steps_of(run):,}" for run in runs)),
        ("time", *(duration(wall_of(run)) if run.attempts else NONE for run in runs)),
        ("steps a second", *(_rate(run) for run in runs)),
    ]
    for metric in main_metrics(runs)[:_METRICS]:
        extents = [extent_of(run, metric) for run in runs]
        rows.append((f"{metric}, last", *(spell(e.last) if e else NONE for e in extents)))
        modes = {one.mode for one in extents if one}
        if modes & {"min", "max"}:
            word = "lowest" if "min" in modes else "highest"
            rows.append((f"{metric}, {word}", *_starred(extents, min if "min" in modes else max)))
    return table(("", *names), rows, range(1, len(runs) + 1))


def _rate(run: Run) -> str:
    found = overall(run)
    return spell(found[0]) if found else NONE


def _starred(
    extents: Sequence[Extent | None], better: Callable[[Sequence[float]], float]
) -> Iterator[str]:
    values = [one.best for one in extents if one is not None and one.best is not None]
    for one in extents:
        if one is None or one.best is None:
            yield NONE
        else:
            star = "★ " if len(values) > 1 and one.best == better(values) else ""
            yield f"{star}{spell(one.best)} at {one.step:,.0f}"


def flat_facts(run: Run) -> dict[str, str]:
    """Name each fact by its way through `run.json`, in words."""
    record = run.record
    found: dict[str, str] = {}
    for name in ("arguments", "seed", "devices", "mesh", "versions"):
        prefix = "" if name == "arguments" else name
        _flatten(prefix, record.get(name), found)
    _flatten("hyper-parameters", run.settings or None, found)
    if record.get("parameters"):
        found["number of parameters"] = f"{record['parameters']['count']:,}"
    if record.get("program"):
        found["program"] = record["program"]
    return {name: value for name, value in found.items() if name not in ("mesh", "")}


def _flatten(name: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name} {key}".strip(), inner, found)
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for number, inner in enumerate(value):
            rest = {key: one for key, one in inner.items() if key != "name"}
            _flatten(f"{name} {inner.get('name', number)}", rest, found)
    elif isinstance(value, list):
        found[name] = ", ".join(map(str, value)) or NONE
    else:
        found[name] = NONE if value is None else str(value)


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d}\N{NO-BREAK SPACE}{time:%H:%M:%S}"


def _number(value: Any) -> str:
    return spell(float(value)) if isinstance(value, int | float) else str(value)
