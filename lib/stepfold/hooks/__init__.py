"""Hooks, which fit calls with each event, and what they may return."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.hooks.objects import BaseHook, from_object
    from stepfold.hooks.performance import memory_use, profile, stragglers, throughput
    from stepfold.hooks.progress import progress
    from stepfold.hooks.stop import (
        on_nonfinite,
        on_spike,
        stop_early,
        stop_on_corruption,
        watchdog,
    )
    from stepfold.hooks.weights import weight_statistics
    from stepfold.hooks.wrappers import callback, every, only_warn
    from stepfold.loop.events import Event, GoBack, Nonfinite, Replace, Reweight, Stop
    from stepfold.loop.hook import Hook, Sink

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
    "callback",
    "every",
    "from_object",
    "memory_use",
    "on_nonfinite",
    "on_spike",
    "only_warn",
    "profile",
    "progress",
    "stop_early",
    "stop_on_corruption",
    "stragglers",
    "throughput",
    "watchdog",
    "weight_statistics",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "hooks.objects": "BaseHook from_object",
        "hooks.performance": "memory_use profile stragglers throughput",
        "hooks.progress": "progress",
        "hooks.stop": "on_nonfinite on_spike stop_early stop_on_corruption watchdog",
        "hooks.weights": "weight_statistics",
        "hooks.wrappers": "callback every only_warn",
        "loop.events": "Event GoBack Nonfinite Replace Reweight Stop",
        "loop.hook": "Hook Sink",
    },
)
