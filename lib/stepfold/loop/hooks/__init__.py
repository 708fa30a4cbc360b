"""Hooks and sinks: `stepfold.hooks`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepfold.loop.hooks.base import BaseHook, Hook, Sink, from_object
    from stepfold.loop.hooks.events import Event, GoBack, Nonfinite, Replace, Reweight, Stop

__all__ = [
    "BaseHook",
    "Event",
    "GoBack",
    "Hook",
    "Nonfinite",
    "Replace",
    "Reweight",
    "Sink",
    "Stop",
    "from_object",
]


def __getattr__(name: str) -> object:
    """Import a name on first use, since modules of this package import each other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "base" if name in ("BaseHook", "Hook", "Sink", "from_object") else "events"
    return getattr(import_module(f"{__name__}.{module}"), name)
