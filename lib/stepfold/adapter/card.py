"""A card of a run, for a person to read: what was trained, how, on what, and how it went."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stepfold.inspect.parameters import parameter_table
from stepfold.loop.run_info import versions

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32


def card(
    title: str,
    *,
    arguments: Mapping[str, Any],
    params: Any,
    mesh: Any = None,
    history: Mapping[str, Sequence[float]] | None = None,
    stopped: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> str:
    r"""Write the card as markdown.

    Args:
      title: what the model is called.
      arguments: the arguments of the run by name; those that are None are left out.
      params: the parameters, abstract ones too.
      mesh: the mesh, if there is one.
      history: the values of each metric.
      stopped: why the run ended, in words.
      notes: what else is worth saying, by name.

    >>> import jax.numpy as jnp
    >>> text = card("digits", arguments={"learning_rate": 0.1}, params={"w": jnp.ones(3)},
    ...             history={"train/loss": [2.0, 1.0, 0.5]})
    >>> print("\n".join(line for line in text.splitlines() if "loss" in line))
    | train/loss | 3 | 2 | 0.5 | 0.5 | 2 | █▃▁ |
    """
    parts = [
        f"# {title}",
        stopped and f"The run ended: {stopped}.",
        _section("Notes", _pairs(notes or {})),
        _section("Results", _curves(history or {})),
        _section("Arguments", _pairs({k: v for k, v in arguments.items() if v is not None})),
        _section("Parameters", f"```\n{parameter_table(params)}\n```"),
        _section("Devices", _pairs(_devices(mesh))),
        _section("Versions", _pairs(versions())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [[name, f"`{value!r}`"] for name, value in values.items()]
    return _table(["name", "value"], rows) if rows else ""


def _curves(history: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, values in sorted(history.items()):
        known = [value for value in values if math.isfinite(value)]
        if known:
            ends = (values[0], values[-1], min(known), max(known))
            rows.append([name, len(values), *(f"{x:.5g}" for x in ends), spark(values)])
    head = ["metric", "values", "first", "last", "least", "greatest", "curve"]
    return _table(head, rows) if rows else ""


def spark(values: Sequence[float]) -> str:
    """Draw values as a line of blocks; what is not finite is a gap.

    >>> spark([0, 1, 2, float("nan"), 3])
    '▁▃▆ █'
    """
    picked = values
    if len(values) > _WIDTH:
        picked = [values[i * (len(values) - 1) // (_WIDTH - 1)] for i in range(_WIDTH)]
    known = [value for value in picked if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BLOCKS) - 1) / ((high - low) or 1.0)
    finite = math.isfinite
    return "".join(_BLOCKS[round((x - low) * scale)] if finite(x) else " " for x in picked)


def _devices(mesh: Any) -> dict[str, Any]:
    devices = jax.devices() if mesh is None else list(mesh.devices.flat)
    found = {
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "processes": jax.process_count(),
    }
    return found if mesh is None else found | {"mesh": dict(mesh.shape)}
