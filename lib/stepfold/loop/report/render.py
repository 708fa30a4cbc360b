"""Render the page of a run, or of several to compare: one HTML file that requests nothing else.

Python decides what the page says, as JSON; the script in `page.html` lays it out and draws.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.retention import order_by, read_best
from stepfold.loop.report.read import Curve, Run, thin
from stepfold.table import amount, size

_COLUMNS = 482  # pixel columns of a chart in page.html
_POINTS = 60_000  # in a page; with many curves each has fewer
_FOLDED = 12  # a section with more charts is folded
_METRICS = 24  # metrics that are compared; a third of them are shown as figures
_LEAVES = 2000  # parameters in the table; the rest are summed up
_SILENT_SECONDS = 600.0  # without an update a run counts as dead, unless updates are rarer
_KINDS = ("train", "eval", "test", "val", "valid", "validation")
_NONE = "\N{EN DASH}"


def render(
    runs: Sequence[Run], *, refresh_seconds: int | None = None, now: datetime | None = None
) -> str:
    """Render the page of a run, or one that compares several.

    Args:
      runs: the runs.
      refresh_seconds: how often the page of a single, running run reloads itself.
      now: the time at which the page is written.
    """
    now = now or datetime.now(UTC)
    names = _run_names([run.path for run in runs])
    runs = [run._replace(curves={**_speed_curves(run), **run.curves}) for run in runs]
    page = _describe(runs[0], names[0], now) if len(runs) == 1 else _compare(runs, names, now)
    data = json.dumps(page | _charts(runs, names), separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # so that no name ends the script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (Path(__file__).parent / "page.html").read_text("utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    is_live = refresh_seconds and page["kind"] == "running"
    parts = {
        "title": escape(page["title"]),
        # The policy lets only this script run, should a name ever be taken for markup.
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "refresh": f'<meta http-equiv="refresh" content="{refresh_seconds}">' if is_live else "",
        "time": now.isoformat(),
        "data": data,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _run_names(paths: Sequence[Path]) -> list[str]:
    """Name runs by as many of the last parts of their paths as make them unique."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _describe(run: Run, name: str, now: datetime) -> dict[str, Any]:
    (kind, word, reason), notes = _status(run, now), []
    if run.attempts:
        devices = run.info.get("devices") or {}
        on = f" on {devices.get('count', '')} \xd7 {devices['kind']}" if "kind" in devices else ""
        notes.append(f"Started {_time(run.attempts[0]['began'])} UTC{on}")
    if run.damaged_lines:
        lines = "1 line" if run.damaged_lines == 1 else f"{run.damaged_lines:,} lines"
        notes.append(f"{lines} of metrics.jsonl cannot be read")
    extents = [_extent(run, metric) for metric in _main_metrics([run])[: _METRICS // 3]]
    attempts = _attempts(run, now) if len(run.attempts) > 1 else ()
    tables = {  # of rows, the head first
        "Attempts": [("started (UTC)", "from step", "to step", "time", "end"), *attempts],
        "Checkpoints": [("step", "saved (UTC)", "metrics"), *_checkpoints(run)],
        "Parameters": [("path", "shape", "dtype", "number", "share"), *_parameters(run)],
        "Configuration": [("", "value"), *_configuration(run).items()],
    }
    return {
        "title": name,
        "kind": kind,
        "reason": reason,
        "notes": notes,
        "runs": [(name, word)],
        "figures": [[*_figures(run)], [(e.metric, _spell(e.last), e.text) for e in extents if e]],
        "tables": {title: rows for title, rows in tables.items() if len(rows) > 1},
    }


def _compare(runs: Sequence[Run], names: Sequence[str], now: datetime) -> dict[str, Any]:
    words = [_status(run, now)[1] for run in runs]
    configurations = [_configuration(run) for run in runs]
    entries = dict.fromkeys(name for configuration in configurations for name in configuration)
    rows = [(name, *(c.get(name, _NONE) for c in configurations)) for name in entries]
    return {
        "title": f"Comparison of {', '.join(names)}",
        "kind": "several",
        "runs": list(zip(names, words, strict=True)),
        "tables": {
            "Side by side": [("★ the best", *names), ("state", *words), *_side_by_side(runs)],
            "What differs": [("", *names), *(row for row in rows if len(set(row[1:])) > 1)],
        },
    }


def _attempts(run: Run, now: datetime) -> Iterator[Sequence[str]]:
    for attempt in run.attempts:
        reason = _attempt_status(attempt, now)[2]
        if attempt.get("ended") is None and attempt is not run.attempts[-1]:
            reason = f"killed after step {attempt['to']:,}"
        steps = f"{attempt['from']:,}", f"{attempt['to']:,}"
        yield _time(attempt["began"]), *steps, _duration(_seconds(attempt)), reason


def _checkpoints(run: Run) -> Iterator[Sequence[str]]:
    plan, main = run.argument("checkpoints") or {}, _main_metrics([run])
    by = read_best(plan.get("best"), plan.get("mode"))
    metrics = {saved.step: saved.metrics or {} for saved in run.checkpoints}
    best = order_by(by, metrics)[:1] if by else []
    for step, time, values in run.checkpoints:
        star = "★ " if step in best else ""
        texts = [f"{name} {_spell(value)}" for name, value in metrics[step].items() if name in main]
        saved = _time(datetime.fromtimestamp(time, UTC).isoformat())
        yield f"{star}{step:,}", saved, "damaged" if values is None else ", ".join(texts)


def _parameters(run: Run) -> Iterator[Sequence[str]]:
    parameters = run.info.get("parameters") or {}
    leaves = sorted(parameters.get("leaves") or (), key=lambda leaf: -leaf[3])
    rows = [(n, " \xd7 ".join(map(str, s)) or "scalar", *rest) for n, s, *rest in leaves[:_LEAVES]]
    if rest := leaves[_LEAVES:]:
        rows.append((f"{len(rest):,} smaller ones", "", "", sum(leaf[3] for leaf in rest)))
    for *row, count in rows:
        yield *row, f"{count:,}", f"{count / (parameters['count'] or 1):.1%}"


def _configuration(run: Run) -> dict[str, str]:
    """Flatten what the run was started with: `batches/seed`, `versions/jax`, and so on."""
    names = ("seed", "devices", "mesh", "versions", "program")
    entries = {**(run.info.get("arguments") or {}), **{name: run.info.get(name) for name in names}}
    entries["hparams"] = dict(run.hparams)
    entries["parameters"] = (run.info.get("parameters") or {}).get("count")
    is_leaf = lambda node: isinstance(node, list) and not any(isinstance(i, dict) for i in node)
    texts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(entries, is_leaf=is_leaf):
        text = ", ".join(map(str, leaf)) if isinstance(leaf, list) else str(leaf)
        texts[tree.path_name(path)] = text
    return {name: text for name, text in texts.items() if text}


def _side_by_side(runs: Sequence[Run]) -> Iterator[Sequence[str]]:
    figures = [{name: value for name, value, _ in _figures(run)} for run in runs]
    for name in dict.fromkeys(name for values in figures for name in values):
        yield name, *(values.get(name, _NONE) for values in figures)
    for metric in _main_metrics(runs)[:_METRICS]:
        extents = [_extent(run, metric) for run in runs]
        yield f"{metric}, last", *(_spell(e.last) if e else _NONE for e in extents)
        best = [e.best for e in extents if e and e.best is not None]
        if best:
            word = next(e.word for e in extents if e and e.word)
            top = min(best) if word == "lowest" else max(best)
            cells = (_spell_best(e, top if len(best) > 1 else None) for e in extents)
            yield f"{metric}, {word}", *cells


def _spell_best(extent: "_Extent | None", top: float | None) -> str:
    if extent is None or extent.best is None:
        return _NONE
    star = "★ " if extent.best == top else ""
    return f"{star}{_spell(extent.best)} at {extent.step:,.0f}"


def _status(run: Run, now: datetime) -> tuple[str, str, str]:
    """Return a kind for the style sheet, a word, and a sentence."""
    if run.attempts:
        return _attempt_status(run.attempts[-1], now)
    reason = "There is no run.json, so how it ended is unknown." if run.curves else ""
    return "unknown", "Unknown", reason


def _attempt_status(attempt: Mapping[str, Any], now: datetime) -> tuple[str, str, str]:
    step, total, stop = attempt["to"], attempt.get("total"), attempt.get("stop") or {}
    kind, message = stop.get("kind"), stop.get("message", f"stopped at step {step:,}")
    if kind == "error":
        return "failed", "Failed", f"{message} (at step {step:,})"
    if attempt.get("ended") is None:
        silent = (now - _last_update(attempt)).total_seconds()
        if silent <= max(_SILENT_SECONDS, 3 * (attempt.get("pause") or 0.0)):
            of = f" of {total:,}" if total else ""
            return "running", "Running", f"Step {step:,}{of} is done."
        reason = f"No update for {_duration(silent)}, after step {step:,}: it was killed, or the "
        return "silent", "No word", f"{reason}machine is gone."
    # A message may begin with the name of a metric, which is left as it is.
    is_word = message.split(" ", 1)[0].isalpha()
    reason = (message[:1].upper() + message[1:] if is_word else message) + "."
    if kind in ("completed", "exhausted", "already_completed"):
        return "finished", "Finished", reason
    if kind in (None, "unknown"):  # stepfold 0.1 did not write the kind
        return "unknown", "Stopped", reason
    return "stopped", "Stopped" if step == total else "Stopped early", reason


def _last_update(attempt: Mapping[str, Any]) -> datetime:
    times = (attempt.get(name) for name in ("ended", "updated", "began"))
    return datetime.fromisoformat(next(filter(None, times)))


def _seconds(attempt: Mapping[str, Any]) -> float:
    duration = _last_update(attempt) - datetime.fromisoformat(attempt["began"])
    return max(duration.total_seconds(), 0.0)


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name the key figures of a run, each with a note."""
    attempts, speed, goodput = run.attempts, _speed(run), _goodput(run)
    last = attempts[-1] if attempts else {}
    total = last.get("total")
    ends = (int(curve.steps[-1]) for curve in run.curves.values())
    steps = last["to"] if attempts else max(ends, default=0)
    yield "steps", f"{steps:,}", f"of {total:,}" if total else ""
    if attempts:
        note = f"in {len(attempts)} attempts" if len(attempts) > 1 else ""
        if speed and total and not last.get("ended"):
            note = f"about {_duration((total - last['to']) / speed[0])} to go"
        yield "time", _duration(sum(map(_seconds, attempts))), note
    if goodput is not None:
        yield "goodput", f"{goodput:.0%}", "of the time, in steps that count"
    if speed:
        yield "steps/s", _spell(speed[0]), f"first metrics after {_duration(speed[2])}"
    examples = run.curves.get("throughput/examples_per_second")
    if examples and not np.isnan(examples.values).all():
        yield "examples/s", _spell(float(np.nanmedian(examples.values))), "median"
    if speed:
        yield "waiting for batches", f"{speed[1]:.1%}", "of the time"
    if parameters := run.info.get("parameters"):
        yield "parameters", amount(parameters["count"]), size(parameters["bytes"])


def _clock(attempt: Mapping[str, Any]) -> np.ndarray:
    """Return rows of a step, the seconds since the start, and those spent waiting for batches."""
    return np.array(attempt.get("clock") or [], np.float64).reshape(-1, 3)


def _speed(run: Run) -> tuple[float, float, float] | None:
    """Return steps per second, the share of waiting, and the seconds up to the first metrics."""
    rows = _clock(run.attempts[-1])[1:] if run.attempts else np.zeros((0, 3))
    if len(rows) < 2 or not np.all(rows[-1, :2] > rows[0, :2]):
        return None
    steps, seconds, waited = (rows[-1] - rows[0]).tolist()  # the first interval compiles
    return steps / seconds, min(waited / seconds, 1.0), float(rows[0, 1])


def _speed_curves(run: Run) -> dict[str, Curve]:
    points = [np.zeros((0, 3))]
    for attempt in run.attempts:
        rows = _clock(attempt)[1:]
        changes = np.diff(rows, axis=0)
        valid = (changes[:, :2] > 0).all(axis=1)
        steps, seconds, waited = changes[valid].T
        shares = np.clip(waited / seconds, 0, 1)
        points.append(np.stack([rows[1:, 0][valid], steps / seconds, shares], axis=1))
    table = np.concatenate(points)
    steps, rates, shares = table[np.argsort(table[:, 0], kind="stable")].T
    curves = {"steps_per_second": Curve(steps, rates), "waiting": Curve(steps, shares)}
    return {f"throughput/{name}": curve for name, curve in curves.items() if len(steps)}


def _goodput(run: Run) -> float | None:
    """Return the share of the time, pauses included, in steps that no restart repeated."""
    if len(run.attempts) < 2:
        return None
    useful = 0.0
    for number, attempt in enumerate(run.attempts):
        rows = _clock(attempt)
        kept = min([attempt["to"], *(later["from"] for later in run.attempts[number + 1 :])])
        if len(rows) and kept > attempt["from"]:
            useful += float(np.interp(kept, rows[:, 0], rows[:, 1]))
    total = _seconds({**run.attempts[-1], "began": run.attempts[0]["began"]})
    return min(useful / total, 1.0) if total else None


class _Extent(NamedTuple):
    """The last value of a metric, and the best: the lowest, the highest, or None of either."""

    metric: str
    last: float
    text: str
    best: float | None = None
    step: float = 0.0
    word: str = ""


def _extent(run: Run, metric: str) -> _Extent | None:
    if metric not in run.curves:
        return None
    steps, values = run.curves[metric]
    last, finite = float(values[-1]), np.isfinite(values)
    if not finite.any():
        return _Extent(metric, last, "never finite")
    steps, values = steps[finite], values[finite]
    word = _better(run, metric)
    if not word:
        low, high = _spell(values.min()), _spell(values.max())
        text = f"always {low}" if low == high else f"between {low} and {high}"
        return _Extent(metric, last, text)
    index = np.argmin(values) if word == "lowest" else np.argmax(values)
    best, step = float(values[index]), float(steps[index])
    return _Extent(metric, last, f"{word} {_spell(best)} at step {step:,.0f}", best, step, word)


def _better(run: Run, metric: str) -> str:
    """Return which end of a metric is better, if it is a loss or evaluations measure it too."""
    plan = run.argument("checkpoints") or {}
    is_best = plan.get("best") == metric
    best = read_best(metric, plan.get("mode") if is_best else None)
    if best and best[1] == "min":
        return "lowest"
    prefix, _, name = metric.partition("/")
    namesakes = [other for other in run.curves if other.partition("/")[2] == name]
    is_evaluated = name and (prefix != "train" or len(namesakes) > 1)
    return "highest" if is_best or is_evaluated else ""


def _charts(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Sort curves into charts and sections; `train/loss` and `eval/loss` of all runs share one."""
    curves = [curve for run in runs for curve in run.curves.values()]
    ends = [float(end) for curve in curves for end in curve.steps[[0, -1]]]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    span = (0.0 if low < 0.2 * high else low, high)
    columns = max(10, min(_COLUMNS, _POINTS // (3 * max(len(curves), 1))))
    several, kinds = len(runs) > 1, _kinds(runs)
    sections: dict[str, dict[str, list[Any]]] = {"Metrics": {}, "Speed": {}}
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        for metric, curve in run.curves.items():
            section, chart, kind = _chart_of(metric, kinds)
            label = [name] * several + [kind] * (kind != "")
            points = thin(curve, columns, span)
            line = {
                "label": " \xb7 ".join(label) or chart,
                "style": (kinds.index(kind) if kind and not several else number) % 8,
                "dotted": kind not in ("", "train"),
                "steps": list(map(_shorten, points.steps.tolist())),
                "values": list(map(_shorten, points.values.tolist())),
            }
            sections.setdefault(section, {}).setdefault(chart, []).append(line)
    return {
        "span": span,
        "restarts": [attempt["from"] for attempt in runs[0].attempts[1:] if not several],
        "sections": [
            {
                "title": title,
                "folded": title != "Metrics" and len(charts) > _FOLDED,
                "charts": [
                    {"title": t, "lines": charts[t]} for t in sorted(charts, key=_loss_first)
                ],
            }
            for title, charts in sections.items()
            if charts
        ],
    }


def _kinds(runs: Sequence[Run]) -> list[str]:
    """Return the prefixes of train and evaluation metrics."""
    evaluations = [e["name"] for run in runs for e in run.argument("evaluations") or ()]
    prefixes = {metric.partition("/")[0] for run in runs for metric in run.curves}
    return [kind for kind in dict.fromkeys([*_KINDS, *evaluations]) if kind in prefixes]


def _chart_of(metric: str, kinds: Sequence[str]) -> tuple[str, str, str]:
    """Return the section of a metric, its chart, and its kind: "train", "eval", or none."""
    prefix, _, name = metric.partition("/")
    if not name:
        return "Metrics", metric, ""
    if prefix in kinds:
        return "Metrics", name, prefix
    return ("Speed", metric, "") if prefix in ("throughput", "memory") else (prefix, name, "")


def _main_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of the first section, in the order of its charts."""
    kinds, charts = _kinds(runs), dict[str, list[str]]()
    for metric in dict.fromkeys(metric for run in runs for metric in run.curves):
        section, chart, _ = _chart_of(metric, kinds)
        if section == "Metrics":
            charts.setdefault(chart, []).append(metric)
    return [metric for chart in sorted(charts, key=_loss_first) for metric in charts[chart]]


def _loss_first(chart: str) -> tuple[bool, bool]:
    return chart != "loss", "loss" not in chart


def _shorten(value: float) -> float | str:
    """Shorten a number for JSON, which has no NaN and no inf."""
    if not math.isfinite(value):
        return _spell(value)
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def _spell(value: float) -> str:
    """Write a value to four digits, as the script does."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    magnitude = abs(value)
    if magnitude < 1e5 and (magnitude >= 1e3 or value == int(value)):
        return f"{round(value):,}"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e5 <= magnitude < 1e12 and magnitude >= unit:
            return f"{value / unit:.4g}{name}"
    mantissa, _, power = f"{value:.4g}".partition("e")
    return mantissa + (f"e{int(power)}" if power else "")


def _duration(seconds: float) -> str:
    """Write a duration in its two largest units."""
    for large, small, unit, per in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if seconds >= unit:
            return f"{int(seconds // unit)} {large} {int(seconds % unit // per)} {small}"
    return f"{seconds:.3g} s"


def _time(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d\N{NO-BREAK SPACE}%H:%M:%S}"
