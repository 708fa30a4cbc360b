"""How much memory a run takes."""

import os
from pathlib import Path

import jax

from stepfold.loop.event import Event

_GIB = 2**30
_STATM = Path("/proc/self/statm")


def memory_use(_: Event) -> dict[str, float]:
    """Measure memory in GiB, for the hooks after it to show: `hooks=(sf.memory_use, …)`.

    `memory/device` is what is in use on the fullest of this process's devices, `memory/device_peak`
    the most that ever was, where the device tells; CPUs do not. `memory/host` is what this process
    holds, where the system tells, as Linux does.

    >>> import stepfold as sf
    >>> found = sf.memory_use(sf.Event(10, None, {}, None))
    >>> 0 < found["memory/host"] < 1024
    True
    """
    found = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name, key in (("device", "bytes_in_use"), ("device_peak", "peak_bytes_in_use")):
        known = [each[key] for each in stats if key in each]
        if known:
            found[f"memory/{name}"] = max(known) / _GIB
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        found["memory/host"] = pages * os.sysconf("SC_PAGE_SIZE") / _GIB
    return found
