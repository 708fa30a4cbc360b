"""The page: one file that asks for nothing else, and says all without a script."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from stepfold.loop.report import tables
from stepfold.loop.report.drawing import Chart, Line, draw, swatch
from stepfold.loop.report.reading import Run, names_of
from stepfold.loop.report.scales import spell
from stepfold.loop.report.sections import Section, sections_of, span_of
from stepfold.loop.report.standing import Standing, standing_of, time_of, utc_now
from stepfold.loop.report.summary import Figure, figures_of, metric_figures

_HERE = Path(__file__).parent


def render(runs: Sequence[Run], *, every: int | None = None, now: datetime | None = None) -> str:
    """Write the page of a run, or one that compares several.

    Args:
      runs: what was read of them.
      every: after how many seconds a page of a run that goes on loads itself anew.
      now: the time at which it is written.
    """
    now = now or utc_now()
    names = names_of([run.place for run in runs])
    standing = standing_of(runs[0], now)
    live = len(runs) == 1 and standing.kind == "running"
    sections = sections_of(runs, names)
    title = names[0] if len(runs) == 1 else "Comparison of " + ", ".join(names)
    told = _one(runs[0], names[0], standing) if len(runs) == 1 else _several(runs, names, now)
    after = _rest(runs[0], now) if len(runs) == 1 else ""
    body = f"{told}{_controls(sections)}{_charts(sections, span_of(runs))}{after}"
    return _document(title, body, sections, now, every if live else None, len(runs) > 1)


def _document(
    title: str,
    body: str,
    sections: Sequence[Section],
    now: datetime,
    every: int | None,
    several: bool,
) -> str:
    style, script = ((_HERE / name).read_text("utf-8") for name in ("style.css", "script.js"))
    # Should a name ever get past the escaping, this still lets nothing else run or be loaded.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    refresh = f'<meta http-equiv="refresh" content="{every}">\n' if every else ""
    # No image, for what would be asked of a server if nothing were said.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{refresh}<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body{' class="several"' if several else ""}>
<main>
{body}
</main>
<footer>Written by stepfold, <time datetime="{now.isoformat()}">{now:%Y-%m-%d %H:%M:%S} UTC</time>
<span id="age"></span></footer>
<div id="tip" hidden></div>
<script type="application/json" id="data">{_data(sections)}</script>
<script>{script}</script>
</body>
</html>
"""


def _one(run: Run, name: str, standing: Standing) -> str:
    notes = ""
    if run.damaged:
        lines = f"{run.damaged:,} line{'s' if run.damaged > 1 else ''}"
        notes = f"<p>{lines} of metrics.jsonl cannot be read, and count for nothing here.</p>"
    return (
        f'<header class="{standing.kind}"><h1>{escape(name)}</h1>'
        f'<p class="standing"><strong>{standing.word}</strong> {escape(standing.why)}</p>'
        f"{_began(run)}{notes}"
        f"</header>{_figures(figures_of(run))}{_figures(metric_figures(run), 'metrics')}"
    )


def _began(run: Run) -> str:
    if not run.attempts:
        return ""
    devices = run.record.get("devices") or {}
    first = time_of(run.attempts[0]["began"])
    on = (
        f" on {devices['count']} \N{MULTIPLICATION SIGN} {devices['kind']}"
        if {"count", "kind"} <= devices.keys()
        else ""
    )
    return f'<p class="note">Begun {first:%Y-%m-%d %H:%M} UTC{escape(on)}</p>'


def _several(runs: Sequence[Run], names: Sequence[str], now: datetime) -> str:
    keys = "".join(
        f"<li>{swatch(number)}"
        f"<b>{escape(name)}</b> {escape(standing_of(run, now).word.lower())}</li>"
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    )
    return (
        f'<header><h1>{len(runs)} runs</h1><ul class="runs">{keys}</ul></header>'
        f"<section><h2>Side by side</h2>{tables.side_by_side(runs, names, now)}"
        '<p class="note">★ the best of them</p></section>'
        f"<section><h2>What differs</h2>{tables.differences(runs, names)}</section>"
    )


def _figures(figures: Sequence[Figure], kind: str = "") -> str:
    if not figures:
        return ""
    cells = "".join(
        f"<div><dt>{escape(one.name)}</dt><dd>{escape(one.value)}</dd>"
        f"<dd class=more>{escape(one.more)}</dd></div>"
        for one in figures
    )
    return f'<dl class="figures {kind}">{cells}</dl>'


def _controls(sections: Sequence[Section]) -> str:
    if not sections:
        return '<p class="empty">No metrics yet.</p>'
    return (
        '<form class="controls"><label><input type="checkbox" id="log"> logarithmic</label>'
        '<label class="scripted">smoothing <input type="range" id="smooth" min="0" max="0.98" '
        'step="0.02" value="0"> <output id="smoothed">0</output></label></form>'
    )


def _charts(sections: Sequence[Section], span: tuple[float, float]) -> str:
    parts, number = [], 0
    for section in sections:
        figures = "".join(_chart(number + k, chart, span) for k, chart in enumerate(section.charts))
        number += len(section.charts)
        parts.append(_fold(section.title, f'<div class="charts">{figures}</div>', section.folded))
    return "".join(parts)


def _fold(title: str, content: str, folded: bool = False) -> str:
    head = f"<h2>{escape(title)}</h2>"
    if folded:
        return f"<section><details><summary>{head}</summary>{content}</details></section>"
    return f"<section>{head}{content}</section>"


def _chart(number: int, chart: Chart, span: tuple[float, float]) -> str:
    linear, log = draw(chart, span), draw(chart, span, log=True)
    keys = "".join(
        f"<li>{swatch(line.style, dotted=line.dotted)}<b>{escape(_key(line, chart))}</b> "
        f"{_last(line)}</li>"
        for line in chart.lines
    )
    shown = linear + log or '<p class="empty">No finite value.</p>'
    return (
        f'<figure class="chart{"" if log else " nolog"}" data-chart="{number}"><figcaption>'
        f'<h3>{escape(chart.title)}</h3><ul class="legend">{keys}</ul></figcaption>{shown}</figure>'
    )


def _key(line: Line, chart: Chart) -> str:
    return "last" if line.label == chart.title else line.label


def _last(line: Line) -> str:
    """Say a line's last value, and where it was not finite; a thinned line keeps both."""
    lost = [s for s, v in zip(*line.curve, strict=True) if not math.isfinite(v)]
    more = f' <span class="bad">not finite from step {lost[0]:,.0f}</span>' if lost else ""
    return f"{spell(float(line.curve.values[-1]))}{more}" if len(line.curve.values) else ""


def _rest(run: Run, now: datetime) -> str:
    parts = []
    if len(run.attempts) > 1:
        parts.append(_fold("Attempts", tables.attempts(run, now)))
    if run.checkpoints:
        parts.append(_fold("Checkpoints", tables.checkpoints(run), len(run.checkpoints) > 12))
    if run.record.get("parameters"):
        parts.append(_fold("Parameters", tables.parameters(run), folded=True))
    if run.record or run.settings:
        parts.append(_fold("Begun with", tables.facts(run), folded=True))
    return "".join(parts)


def _data(sections: Sequence[Section]) -> str:
    """Give the points of all charts, in their order, for the script; no text of it is markup."""
    charts = [
        [
            [line.label, line.style % 8, line.dotted, line.curve.steps.tolist(), _values(line)]
            for line in chart.lines
        ]
        for section in sections
        for chart in section.charts
    ]
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _values(line: Line) -> list[float | str]:
    return [
        float(f"{value:.6g}") if math.isfinite(value) else spell(value)
        for value in line.curve.values.tolist()
    ]
