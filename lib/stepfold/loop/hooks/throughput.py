"""The speed of a run, and the memory it takes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.core.validation import check_positive
from stepfold.errors import ConfigError
from stepfold.inspect.peaks import mfu, peak_flops
from stepfold.loop.hooks.base import Event, StatefulHook


class throughput(StatefulHook):  # noqa: N801
    """Measure the speed of training.

    Each train event but the first, whose interval includes compiling, gets

    - `throughput/step_seconds`: the time of a step, without evaluations;
    - `throughput/examples_per_second`, by the leading axis of the last batch, and other units;
    - `throughput/waiting`: the share of the time spent waiting for batches;
    - `throughput/mfu`: model FLOPs utilization, where `flops` and the peak are known;
    - `throughput/goodput`: the share of the time since the run first started that went into steps
      that count. Pauses before a resume and steps done twice lower it.

    `flops` are the operations of one device in one step, as `describe` reports them. `peak` are
    those per second, by default looked up for `dtype`. `units` are functions that count something
    in the last batch by its shapes; reading values of a batch on devices would wait for them.

    >>> import numpy as np, stepfold as sf
    >>> hook = sf.throughput(tokens=lambda batch: batch.size)
    >>> for n in (1, 2):
    ...     speed = hook(sf.Event(10 * n, None, {}, None, batch=np.zeros((8, 512)), time=n))
    >>> speed["throughput/tokens_per_second"]
    40960.0
    """

    provides = ("throughput/",)
    run_state = ("_started", "_useful_seconds")

    def __init__(
        self,
        *,
        flops: float | None = None,
        peak: float | None = None,
        dtype: str = "bfloat16",
        **units: Callable[[Any], Any],
    ) -> None:
        for name, value in {"flops": flops, "peak": peak}.items():
            if value is not None:
                check_positive(name, value)
        for name, unit in units.items():
            if not callable(unit):
                raise ConfigError(f"{name}: expected a function of a batch, got {tree.spell(unit)}")
        self._flops, self._peak, self._dtype = flops, peak, dtype
        self._units = {"examples": _num_examples, **units}
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._started, self._useful_seconds = time.time(), 0.0
        self._pace, self._data_wait = Pace(), 0.0

    def __call__(self, event: Event) -> dict[str, float] | None:
        interval = self._pace.add(event)
        waited = event.data_wait_seconds - self._data_wait
        self._data_wait = event.data_wait_seconds
        if interval is None:
            return None
        steps, seconds = interval
        self._useful_seconds += seconds
        speed = {
            "step_seconds": seconds / steps,
            "waiting": min(waited / seconds, 1.0),
            "goodput": min(self._useful_seconds / max(time.time() - self._started, seconds), 1.0),
        }
        if event.batch is not None:
            for name, unit in self._units.items():
                speed[f"{name}_per_second"] = float(unit(event.batch)) * steps / seconds
        if self._flops is not None:
            peak = self._peak or peak_flops(jax.devices()[0].device_kind, self._dtype)
            if peak:
                speed["mfu"] = mfu(self._flops, seconds / steps, peak=peak)
        return {f"throughput/{name}": value for name, value in speed.items()}


def _num_examples(batch: Any) -> int:
    """Count the examples of a batch over all processes, whose shares are equal."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf):
            is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            return int(np.shape(leaf)[0]) * (1 if is_global else jax.process_count())
    return 0


class Pace:
    """The pace of train steps, by the times of events."""

    def __init__(self) -> None:
        self.rate: float | None = None  # steps per second, smoothed
        self._step = 0
        self._time: float | None = None

    def add(self, event: Event) -> tuple[int, float] | None:
        """Return the steps since the last event and their seconds; None unless they are known."""
        now = time.perf_counter() if event.time is None else event.time
        steps, before = event.step - self._step, self._time
        self._step, self._time = event.step, now
        if before is None or not event.is_train or steps < 1 or now <= before:
            return None
        seconds = (now - before) / steps
        self.rate = 1 / (seconds if self.rate is None else 0.7 / self.rate + 0.3 * seconds)
        return steps, now - before


def memory_use(_: Event) -> dict[str, float]:
    """Measure memory in GiB.

    `memory/device` is the memory in use on the fullest of this process's devices and
    `memory/device_peak` the highest so far; CPUs do not report them. `memory/host` is the resident
    memory of this process, on Linux.

    >>> import stepfold as sf
    >>> 0 < sf.memory_use(sf.Event(10, None, {}, None))["memory/host"] < 1024
    True
    """
    memory = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name, key in (("device", "bytes_in_use"), ("device_peak", "peak_bytes_in_use")):
        if sizes := [device[key] for device in stats if key in device]:
            memory[f"memory/{name}"] = max(sizes) / 2**30
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[1])
        memory["memory/host"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    return memory


memory_use.provides = ("memory/",)  # type: ignore[attr-defined]
memory_use.can_stop = False  # type: ignore[attr-defined]
