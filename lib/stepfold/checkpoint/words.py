"""What goes into a checkpoint besides the state, read from what a caller gives."""

from collections.abc import Mapping
from typing import Any

from stepfold import tree
from stepfold.checkpoint.manifest import Words
from stepfold.checkpoint.sealed import integer, plain
from stepfold.errors import ConfigError


def words_of(
    state: Any,
    *,
    step: int | None,
    data: Any,
    metrics: Mapping[str, Any] | None,
    extra: Any,
    best: tuple[str, str] | None = None,
) -> Words:
    """Read what is saved beside a state.

    Raises:
      ConfigError: if the step is not known, or something is no JSON.

    >>> words_of({}, step=3, data=None, metrics={"loss": 1/2}, extra={"lr": 0.1})
    Words(step=3, data=None, metrics={'loss': 0.5}, extra={'lr': 0.1}, best=None)
    """
    if hasattr(data, "get_state"):
        data = data.get_state()
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics: expected numbers by name, got {tree.spell(metrics)}")
    numbers = {name: _number(f"metrics/{name}", value) for name, value in (metrics or {}).items()}
    return Words(
        step=_step(state, step),
        data=plain(data, "data"),
        metrics=plain(numbers, "metrics"),
        extra=plain(extra, "extra"),
        best=best,
    )


def _step(state: Any, step: Any) -> int:
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            raise ConfigError(
                "step: expected a number, since the state has no `step` of its own; give step=…"
            )
    number = integer(step)
    if number is None or number < 0:
        raise ConfigError(f"step: expected an integer of at least 0, got {tree.spell(step)}")
    return number


def _number(name: str, value: Any) -> float:
    try:
        made = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        made = None
    if made is None:
        raise ConfigError(f"{name}: expected a number, got {tree.spell(value)}")
    return made
