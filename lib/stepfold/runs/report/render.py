"""Render the page of a run, or of several to compare, as one self-contained HTML file.

Python decides what the page says, as JSON; the script in `page.html` lays it out and draws.
"""

import base64
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.steps import order_by
from stepfold.core.metric_modes import known_mode
from stepfold.runs.report.read import (
    CurveArrays,
    RunData,
    relative_difference,
    shared_rows,
    siblings,
    thin,
)
from stepfold.runs.report.times import (
    attempt_seconds,
    describe_slow_saves,
    goodput_of,
    last_update,
    read_clock,
    speed_curves,
    spell_duration,
    time_rows,
    times_side_by_side,
)
from stepfold.table import amount, size

_COLUMNS = 482  # pixel columns of a chart in page.html
_POINTS = 60_000  # in a page; with many curves each has fewer
_FOLDED = 12  # a section with more charts is folded
_ALL_POINTS = 10_000  # up to which a page has the whole curves
_METRICS = 24  # metrics that are compared; a third of them are shown as figures
_LEAVES = 2000  # parameters in the table; the rest are summed up
_SILENT_SECONDS = 600.0  # without an update a run counts as dead, unless updates are rarer
_TIME = "Where the time went"
_KINDS = ("train", "eval", "test", "val", "valid", "validation")
_PROGRAMS = (("loaded", "Loaded", " from the compilation cache"), ("new", "Compiled", ""))
_NONE = "\N{EN DASH}"
_loss_first = lambda chart: (chart != "loss", "loss" not in chart)  # a key to sort charts by


def render(
    runs: Sequence[RunData],
    *,
    refresh_seconds: int | None = None,
    now: datetime | None = None,
    path: Path | None = None,
) -> str:
    """Render the page of a run, which reloads while it is running, or one that compares several.

    If the `path` of the page is known, it links to the files of runs.
    """
    now = now or datetime.now(UTC)
    # Name runs by the shortest suffixes of their paths that are unique.
    for depth in range(1, max(len(run.path.parts) for run in runs) + 1):
        names = ["/".join(run.path.parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    logged = [run.curves.keys() for run in runs]
    runs = [run._replace(curves={**speed_curves(run), **run.curves}) for run in runs]
    page = _describe(runs[0], names[0], now) if len(runs) == 1 else _compare(runs, names, now)
    page |= _charts(runs, names, logged) | {"files": _files(runs, names, path)}
    data = json.dumps(page, separators=(",", ":"), allow_nan=False)
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


def _describe(run: RunData, name: str, now: datetime) -> dict[str, Any]:
    (kind, word, reason), notes = _status(run, now), []
    if run.attempts:
        devices = run.info.get("devices") or {}
        on = f" on {devices.get('count', '')} \xd7 {devices['kind']}" if "kind" in devices else ""
        notes.append(f"Started {_time(run.attempts[0]['began'])} UTC{on}")
    if slow_saves := describe_slow_saves(run):
        notes.append(slow_saves)
    if run.damaged_lines:
        lines = "1 line" if run.damaged_lines == 1 else f"{run.damaged_lines:,} lines"
        notes.append(f"{lines} of metrics.jsonl cannot be read")
    for attempt in run.attempts[1:]:
        for name, values in (attempt.get("config_changes") or {}).items():
            old, new = values
            notes.append(f"config/{name} changed from {old} to {new} at step {attempt['from']:,}")
    notes += _programs(run)
    attempts = _attempts(run, now) if len(run.attempts) > 1 else ()
    metrics = _main_metrics([run])[: _METRICS // 3]
    tables = {  # of rows, the header first
        _TIME: [("", "time", "share", "per step"), *time_rows(run)],
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
        "figures": [[*_figures(run)], [_metric_figure(run, metric) for metric in metrics]],
        "tables": {title: rows for title, rows in tables.items() if len(rows) > 1},
    }


def _compare(runs: Sequence[RunData], names: Sequence[str], now: datetime) -> dict[str, Any]:
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
            _TIME: [("", *names), *times_side_by_side(runs)],
            "What differs": [("", *names), *(row for row in rows if len(set(row[1:])) > 1)],
        },
    }


def _files(runs: Sequence[RunData], names: Sequence[str], path: Path | None) -> dict[str, Any]:
    """Name the files next to the page, the runs next to this one, and how to compare them."""
    folder, folders = path and path.parent, [run.path.absolute() for run in runs]
    others = siblings(folders[0]) if len(runs) == 1 else []
    shown = [*zip(names, folders, strict=True)] if len(runs) > 1 else [(o.name, o) for o in others]
    words = [shlex.quote(str(each)) for each in [*folders, *others]]
    words += ["OTHER_RUN_DIR"] if len(words) == 1 else []
    default = output = folders[0].parent / "report.html"
    if len(runs) > 1:
        output = path or default
    elif (default.parent / "run.json").exists():  # it is the page of another run
        output = default.with_name("comparison.html")
    words += [] if output == default else ["--out", shlex.quote(str(output))]
    return {
        "command": " ".join(["python -m stepfold report", *words]),
        "runs": [(name, _link(each / "report.html", folder)) for name, each in shown],
        "metrics": [_link(each / "metrics.jsonl", folder) for each in folders],
        "output": (str(output), _link(output, folder)),
    }


def _link(file: Path, folder: Path | None) -> str | None:
    """Return the relative URL of a file, if it exists, for a page in a folder."""
    if folder is None or not file.is_file():
        return None
    relative = Path(os.path.relpath(file, folder.absolute())).as_posix()
    return "./" + quote(os.fsencode(relative))


def _attempts(run: RunData, now: datetime) -> Iterator[Sequence[str]]:
    for number, attempt in enumerate(run.attempts):
        steps = f"{attempt['from']:,}", f"{attempt['to']:,}"
        reason = _status(run, now, number)[2]
        yield _time(attempt["began"]), *steps, spell_duration(attempt_seconds(attempt)), reason


def _programs(run: RunData) -> Iterator[str]:
    """Say what the last attempt loaded from the compilation cache, and why it compiled its step."""
    programs = (run.attempts[-1].get("compiled") if run.attempts else None) or {}
    texts = []
    for kind, verb, source in _PROGRAMS:
        if count := programs.get(kind, {}).get("count"):
            seconds = spell_duration(programs[kind]["seconds"])
            texts.append(f"{verb} {count:,} program{'s' * (count != 1)} in {seconds}{source}")
    if texts:
        yield "; ".join(texts)
    yield from (reason[0].upper() + reason[1:] for reason in programs.get("reasons") or ())


def _checkpoints(run: RunData) -> Iterator[Sequence[str]]:
    plan, main = run.argument("checkpoints") or {}, _main_metrics([run])
    name = plan.get("best") or ""
    mode = plan.get("mode") or known_mode(name)
    metrics = {saved.step: saved.metrics or {} for saved in run.checkpoints}
    best = order_by((name, mode), metrics)[:1] if mode else []
    for step, time, values in run.checkpoints:
        star = "★ " if step in best else ""
        texts = [f"{name} {_spell(value)}" for name, value in metrics[step].items() if name in main]
        saved = _time(datetime.fromtimestamp(time, UTC).isoformat())
        yield f"{star}{step:,}", saved, "damaged" if values is None else ", ".join(texts)


def _parameters(run: RunData) -> Iterator[Sequence[str]]:
    parameters = run.info.get("parameters") or {}
    leaves = sorted(parameters.get("leaves") or (), key=lambda leaf: -leaf[3])
    rows = [(n, " \xd7 ".join(map(str, s)) or "scalar", *rest) for n, s, *rest in leaves[:_LEAVES]]
    if rest := leaves[_LEAVES:]:
        rows.append((f"{len(rest):,} smaller ones", "", "", sum(leaf[3] for leaf in rest)))
    for *row, count in rows:
        yield *row, f"{count:,}", f"{count / (parameters['count'] or 1):.1%}"


def _configuration(run: RunData) -> dict[str, str]:
    """Flatten the settings of a run: `batches/seed`, `versions/jax`, and so on."""
    names = ("seed", "devices", "mesh", "versions", "program")
    entries = {"config": run.info.get("config"), **(run.info.get("arguments") or {})}
    entries |= {name: run.info.get(name) for name in names}
    entries["hparams"] = dict(run.hparams)
    entries["parameters"] = (run.info.get("parameters") or {}).get("count")
    is_leaf = lambda node: isinstance(node, list) and not any(isinstance(i, dict) for i in node)
    texts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(entries, is_leaf=is_leaf):
        text = ", ".join(map(str, leaf)) if isinstance(leaf, list) else str(leaf)
        texts[tree.path_name(path)] = text
    return {name: text for name, text in texts.items() if text}


def _side_by_side(runs: Sequence[RunData]) -> Iterator[Sequence[str]]:
    figures = [{name: value for name, value, _ in _figures(run)} for run in runs]
    for name in dict.fromkeys(name for values in figures for name in values):
        yield name, *(values.get(name, _NONE) for values in figures)
    for metric in _main_metrics(runs)[:_METRICS]:
        curves = [run.curves.get(metric) for run in runs]
        lasts = (_NONE if curve is None else _spell(curve.values[-1]) for curve in curves)
        yield f"{metric}, last", *lasts
        bests = [_best(run, metric) for run in runs]
        if known := [best for best in bests if best]:
            word, top = known[0][0], sorted(value for _, value, _ in known)
            star = {top[0 if word == "lowest" else -1]: "★ "} if len(known) > 1 else {}
            cells = (b and f"{star.get(b[1], '')}{_spell(b[1])} at {b[2]:,.0f}" for b in bests)
            yield f"{metric}, {word}", *(cell or _NONE for cell in cells)


def _status(run: RunData, now: datetime, number: int = -1) -> tuple[str, str, str]:
    """Return the status of an attempt: a kind for the style sheet, a word, and a sentence."""
    if not run.attempts:
        reason = "There is no run.json, so how it ended is unknown." if run.curves else ""
        return "unknown", "Unknown", reason
    attempt = run.attempts[number]
    step, total, stop = attempt["to"], attempt.get("total"), attempt.get("stop") or {}
    kind, message = stop.get("kind"), stop.get("message", f"stopped at step {step:,}")
    if attempt.get("ended") is None and attempt is not run.attempts[-1]:
        return "silent", "Killed", f"killed after step {step:,}"
    if kind == "error":
        return "failed", "Failed", f"{message} (at step {step:,})"
    if attempt.get("ended") is None:
        silent = (now - last_update(attempt)).total_seconds()
        if silent <= max(_SILENT_SECONDS, 3 * (attempt.get("pause") or 0.0)):
            of = f" of {total:,}" if total else ""
            return "running", "Running", f"Step {step:,}{of} is done."
        reason = f"No update for {spell_duration(silent)}, after step {step:,}"
        return "silent", "No word", f"{reason}: it was killed, or the machine is gone."
    # A message may begin with the name of a metric, which is left as it is.
    is_word = message.split(" ", 1)[0].isalpha()
    reason = (message[:1].upper() + message[1:] if is_word else message) + "."
    if kind in ("completed", "exhausted", "already_completed"):
        return "finished", "Finished", reason
    if kind in (None, "unknown"):  # stepfold 0.1 did not write the kind
        return "unknown", "Stopped", reason
    return "stopped", "Stopped" if step == total else "Stopped early", reason


def _figures(run: RunData) -> Iterator[tuple[str, str, str]]:
    """Name the key figures of a run, each with a note."""
    attempts, goodput = run.attempts, goodput_of(run)
    last = attempts[-1] if attempts else {}
    total, speed = last.get("total"), 0.0
    rows = read_clock(last)[1:]  # without the first interval, which compiles
    if len(rows) > 1 and np.all(rows[-1, :2] > rows[0, :2]):
        done, seconds, waited = (rows[-1] - rows[0]).tolist()
        speed = done / seconds
    ends = (int(curve.steps[-1]) for curve in run.curves.values())
    steps = last["to"] if attempts else max(ends, default=0)
    yield "steps", f"{steps:,}", f"of {total:,}" if total else ""
    if attempts:
        note = f"in {len(attempts)} attempts" if len(attempts) > 1 else ""
        if speed and total and not last.get("ended"):
            note = f"about {spell_duration((total - last['to']) / speed)} to go"
        yield "time", spell_duration(sum(map(attempt_seconds, attempts))), note
    if goodput is not None:
        yield "goodput", f"{goodput:.0%}", "of the time, in steps that count"
    if speed:
        # Both medians of the same intervals; the mean would count an evaluation as a slow step.
        note = f"median; first metrics after {spell_duration(rows[0, 1])}"
        yield "steps/s", _median(run, "throughput/steps_per_second") or _spell(speed), note
    if examples := _median(run, "throughput/examples_per_second"):
        yield "examples/s", examples, "median"
    if speed:
        yield "waiting for batches", f"{min(waited / seconds, 1.0):.1%}", "of the time"
    if parameters := run.info.get("parameters"):
        yield "parameters", amount(parameters["count"]), size(parameters["bytes"])


def _median(run: RunData, metric: str) -> str | None:
    curve = run.curves.get(metric)
    if curve is None or np.isnan(curve.values).all():
        return None
    return _spell(float(np.nanmedian(curve.values)))


def _best(run: RunData, metric: str) -> tuple[str, float, float] | None:
    """Return "lowest" or "highest", that value and its step; None if it is unknown which is better.

    The name tells, or `Checkpoints(best=…, mode=…)`.
    """
    if metric not in run.curves:
        return None
    curve, plan = run.curves[metric], run.argument("checkpoints") or {}
    mode = plan.get("mode") if plan.get("best") == metric else None
    is_low = (mode := mode or known_mode(metric)) == "min"
    finite = np.flatnonzero(np.isfinite(curve.values))
    if not len(finite) or mode is None:
        return None
    values = curve.values[finite]
    index = finite[np.argmin(values) if is_low else np.argmax(values)]
    word = "lowest" if is_low else "highest"
    return word, float(curve.values[index]), float(curve.steps[index])


def _metric_figure(run: RunData, metric: str) -> tuple[str, str, str]:
    """Return a metric, its last value, and its best or its range."""
    values, best = run.curves[metric].values, _best(run, metric)
    finite = values[np.isfinite(values)]
    if best:
        text = f"{best[0]} {_spell(best[1])} at step {best[2]:,.0f}"
    elif len(finite):
        low, high = _spell(finite.min()), _spell(finite.max())
        text = f"always {low}" if low == high else f"between {low} and {high}"
    else:
        text = "never finite"
    return metric, _spell(values[-1]), text


def _charts(
    runs: Sequence[RunData], names: Sequence[str], logged: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Sort curves into charts and sections; `train/loss` and `eval/loss` of all runs share one.

    `logged` are the metrics of each run that are in its file, which the page offers as a table.
    """
    curves = [curve for run in runs for curve in run.curves.values()]
    ends = [float(end) for curve in curves for end in curve.steps[[0, -1]]]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    span = (0.0 if low < 0.2 * high else low, high)
    columns = max(10, min(_COLUMNS, _POINTS // (3 * max(len(curves), 1))))
    several, kinds, is_thinned = len(runs) > 1, _kinds(runs), False
    if sum(len(curve.steps) for curve in curves) <= _ALL_POINTS:
        columns = _ALL_POINTS
    sections: dict[str, dict[str, list[Any]]] = {"Metrics": {}, "Speed": {}}
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        for metric, curve in run.curves.items():
            section, chart, kind = _chart_of(metric, kinds)
            label = [name] * several + [kind] * (kind != "")
            points = thin(curve, columns, span)
            is_logged = metric in logged[number]
            is_thinned |= is_logged and len(points.steps) < len(curve.steps)
            line = {
                "metric": [number, metric] if is_logged else None,
                "label": " \xb7 ".join(label) or chart,
                "style": (kinds.index(kind) if kind and not several else number) % 8,
                "dotted": kind not in ("", "train"),
                "steps": list(map(_as_json, points.steps.tolist())),
                "values": list(map(_as_json, points.values.tolist())),
            }
            sections.setdefault(section, {}).setdefault(chart, []).append(line)
    if len(runs) == 2:
        sections["Relative difference"] = _differences(runs, columns, span)
    return {
        "span": span,
        "thinned": is_thinned,
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


def _differences(
    runs: Sequence[RunData], columns: int, span: tuple[float, float]
) -> dict[str, list[Any]]:
    """Draw the relative difference of two runs in each metric of the first section."""
    charts = {}
    for metric in _main_metrics(runs):
        curves = [run.curves[metric] for run in runs if metric in run.curves]
        if len(curves) == 2:
            steps, *values = shared_rows(metric, *curves)
            points = thin(CurveArrays(steps, relative_difference(*values)), columns, span)
            charts[metric] = [{
                "metric": None, "label": metric, "style": 2, "dotted": False,
                "steps": list(map(_as_json, points.steps.tolist())),
                "values": list(map(_as_json, points.values.tolist())),
            }]  # fmt: skip
    return charts


def _kinds(runs: Sequence[RunData]) -> list[str]:
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


def _main_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of the first section, in the order of its charts."""
    kinds, charts = _kinds(runs), dict[str, list[str]]()
    for metric in dict.fromkeys(metric for run in runs for metric in run.curves):
        section, chart, _ = _chart_of(metric, kinds)
        if section == "Metrics":
            charts.setdefault(chart, []).append(metric)
    return [metric for chart in sorted(charts, key=_loss_first) for metric in charts[chart]]


def _as_json(value: float) -> float | str:
    """Convert a number to JSON, which has no NaN and no inf."""
    if not math.isfinite(value):
        return _spell(value)
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


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


def _time(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d\N{NO-BREAK SPACE}%H:%M:%S}"
