"""Shapes of schedules by name: how the rate goes from its peak to its end."""

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import optax

from stepfold.adapter.arguments.readers import nearest, refuse, text
from stepfold.errors import ConfigError


def constant(peak: float, end: float, steps: int) -> optax.Schedule:
    """Stay."""
    del end, steps
    return optax.constant_schedule(peak)


def linear(peak: float, end: float, steps: int) -> optax.Schedule:
    """Go down in a straight line."""
    return optax.linear_schedule(peak, end, steps)


def cosine(peak: float, end: float, steps: int, *, exponent: float = 1.0) -> optax.Schedule:
    """Go down by half a wave of the cosine."""
    return optax.cosine_decay_schedule(peak, steps, alpha=end / peak, exponent=exponent)


def polynomial(peak: float, end: float, steps: int, *, power: float = 2.0) -> optax.Schedule:
    """Go down by a power of what is left."""
    return optax.polynomial_schedule(peak, end, power, steps)


def exponential(peak: float, end: float, steps: int) -> optax.Schedule:
    """Go down by the same factor at each step."""
    return optax.exponential_decay(peak, steps, end / peak, end_value=end)


def inverse_sqrt(peak: float, end: float, steps: int, *, timescale: int = 1000) -> optax.Schedule:
    """Go down by the root of the steps so far, for runs of any length."""
    del steps
    return lambda count: jnp.maximum(end, peak * jnp.sqrt(timescale / (timescale + count)))


def wsd(peak: float, end: float, steps: int, *, decay: float = 0.1) -> optax.Schedule:
    """Stay, and go down in a straight line in the last part, a fraction of the steps."""
    if not 0 < decay <= 1:
        raise refuse("scheduler_kwargs['decay']", "a fraction above 0 and up to 1", decay)
    down = max(1, round(decay * steps))
    stay = optax.constant_schedule(peak)
    return optax.join_schedules([stay, optax.linear_schedule(peak, end, down)], [steps - down])


def cosine_restarts(peak: float, end: float, steps: int, *, cycles: int = 4) -> optax.Schedule:
    """Go down by the cosine several times, each time from the peak."""
    if type(cycles) is not int or not 1 <= cycles <= steps:
        raise refuse("scheduler_kwargs['cycles']", f"an integer from 1 to {steps}", cycles)
    bounds = [round(steps * cycle / cycles) for cycle in range(cycles + 1)]
    lengths = [after - before for before, after in pairwise(bounds)]
    return optax.join_schedules([cosine(peak, end, each) for each in lengths], bounds[1:-1])


Shape = Callable[..., optax.Schedule]

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "constant": constant,
        "linear": linear,
        "cosine": cosine,
        "polynomial": polynomial,
        "exponential": exponential,
        "inverse_sqrt": inverse_sqrt,
        "wsd": wsd,
        "cosine_restarts": cosine_restarts,
    }
)
ENDLESS = ("constant", "inverse_sqrt")
"""Shapes that do not depend on how many steps there are."""

_SAME = {
    "none": "constant",
    "cosine_with_restarts": "cosine_restarts",
    "warmup_stable_decay": "wsd",
}
_WARM = ("warm_up_", "warmup_", "constant_with_warmup")


def shape_of(name: str) -> tuple[str, bool]:
    """Read a scheduler: the name of its shape, and whether the name asks for a warm-up.

    Raises:
      ConfigError: if there is no such shape.

    >>> shape_of("warm_up_cosine"), shape_of("none")
    (('cosine', True), ('constant', False))
    """
    if name == "constant_with_warmup":
        return "constant", True
    plain = _SAME.get(name, name)
    warm = plain.startswith(_WARM)
    for prefix in _WARM if warm else ():
        plain = plain.removeprefix(prefix)
    plain = _SAME.get(plain, plain)
    if plain not in SHAPES:
        names = ("none", *SHAPES, *(f"warmup_{shape}" for shape in SHAPES))
        raise ConfigError(
            f"scheduler: expected one of {', '.join(names)}, got {name!r}; "
            + (nearest(name, names) or "give custom_scheduler= a function of the steps")
        )
    return plain, warm


def read_scheduler(field: str, name: Any) -> str:
    """Read the name of a scheduler."""
    shape_of(text(field, name))
    return str(name)


def check_shape_options(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options that a shape does not take.

    Raises:
      ConfigError: with the options that there are.
    """
    shape, _ = shape_of(name)
    parameters = inspect.signature(SHAPES[shape]).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    for option in given:
        if option not in known:
            raise ConfigError(
                f"scheduler_kwargs: {name} takes {', '.join(known) or 'none'}, got {option!r}"
            )
