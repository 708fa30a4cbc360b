"""The speed of a run, the memory it takes, and profiler traces of some steps."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepfold.core.processes import KeyValues
from stepfold.core.validation import is_url, read_function, read_integer, read_positive
from stepfold.errors import warn
from stepfold.hooks.objects import from_object
from stepfold.hooks.progress import pace_after
from stepfold.inspect.peaks import mfu, peak_flops
from stepfold.loop.events import Event
from stepfold.loop.hook import Hook, Sink
from stepfold.writers.base import check_path

_REPORT_SECONDS = 0.5  # between reports of `stragglers`, each of which takes about a millisecond


def throughput(
    *,
    flops: float | None = None,
    peak: float | None = None,
    dtype: str = "bfloat16",
    **units: Callable[[Any], Any],
) -> Hook:
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
    >>> hook = sf.hooks.throughput(tokens=lambda batch: batch.size)
    >>> state = hook.init
    >>> for n in (1, 2):
    ...     event = sf.Event(10 * n, None, {}, None, batch=np.zeros((8, 512)), time=n)
    ...     state, speed = hook.update(state, event)
    >>> speed["throughput/tokens_per_second"]
    40960.0
    """
    for name, value in {"flops": flops, "peak": peak}.items():
        if value is not None:
            read_positive(name, value)
    for name, unit in units.items():
        read_function(name, unit, "a function of a batch")
    init = {"started": None, "useful_seconds": 0.0, "_pace": None, "_waited": 0.0}

    def update(state: Any, event: Event) -> tuple[Any, dict[str, float] | None]:
        if state["started"] is None:
            state = {**state, "started": time.time()}
        if event.kind == "start":  # what was measured last is of another attempt
            return {**state, "_pace": None, "_waited": 0.0}, None
        pace, interval = pace_after(state.get("_pace"), event)
        waited = event.data_wait_seconds - state.get("_waited", 0.0)
        state = {**state, "_pace": pace, "_waited": event.data_wait_seconds}
        if interval is None:
            return state, None
        state["useful_seconds"] += interval[1]
        age = max(time.time() - state["started"], interval[1])
        goodput = min(state["useful_seconds"] / age, 1.0)
        return state, {**measure(event, *interval, waited), "throughput/goodput": goodput}

    def measure(event: Event, steps: int, seconds: float, waited: float) -> dict[str, float]:
        speed = {"step_seconds": seconds / steps, "waiting": min(waited / seconds, 1.0)}
        if event.batch is not None:
            counts = {"examples": _num_examples(event)}
            counts |= {name: float(unit(event.batch)) for name, unit in units.items()}
            speed |= {f"{name}_per_second": n * steps / seconds for name, n in counts.items()}
        if flops is not None:
            most = peak or peak_flops(jax.devices()[0].device_kind, dtype)
            if most:
                speed["mfu"] = mfu(flops, seconds / steps, peak=most)
        return {f"throughput/{name}": value for name, value in speed.items()}

    return Hook(init, update, "throughput", ("start",), provides=("throughput/",), returns=())


def _num_examples(event: Event) -> float:
    """Count the examples of a batch over all processes."""
    for leaf in jax.tree.leaves(event.batch):
        if np.ndim(leaf):
            is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            return float(np.shape(leaf)[0] * (1 if is_global else jax.process_count()))
    return 0.0


def stragglers(*, threshold: float = 1.5) -> Hook:
    """Find the process whose host the others wait for, and warn of it.

    Collectives make the steps of all processes take equally long. What differs is host time: the
    time a process waits for batches or spends in hooks. Its step time is its host time or, if
    longer, the time that the slowest process leaves for its devices. At log points process 0
    reports

    - `throughput/slowest_process`: the process with the longest host time;
    - `throughput/slowest_ratio`: its step time relative to the median process, 1 if the devices
      take longer.

    Once the ratio exceeds `threshold`, it warns of the process and its host. It warns again after
    the ratio was below, or of another process. Slow devices and networks, and callbacks inside the
    step, do not show: they delay all processes alike. A hook that waits for devices has a long host
    time. Give the hook to all processes, which do not wait for each other's numbers. In a single
    process it is a no-op.

    >>> import stepfold as sf
    >>> hook = sf.hooks.stragglers(threshold=2.0)
    >>> hook.update(hook.init, sf.Event(10, None, {"train/loss": 1.0}, None))
    (None, None)
    """
    return from_object(_Stragglers(read_positive("threshold", threshold)), "stragglers")


class _Stragglers:
    """What `stragglers` calls with events; it has no state to continue from."""

    provides, can_stop = ("throughput/",), False

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self._values = KeyValues("stragglers")
        self._folder = str(self._values.count_call()) if self._values else ""
        self._mark: np.ndarray | None = None  # steps and seconds at the last event
        self._sums = np.zeros(4)  # of the time since the last report
        self._warned_of: str | None = None  # the process, until it is fast again

    def __call__(self, event: Event) -> dict[str, float] | None:
        if jax.process_count() == 1 or not self._values:
            return None
        now = time.perf_counter()
        mark = np.array([event.step, event.data_wait_seconds, event.hook_seconds, now])
        before, self._mark = self._mark, mark
        if event.is_late:
            self._mark = before
        if before is None or not event.is_train or event.step <= before[0]:
            return None  # compiling, and evaluations
        self._sums += mark - before
        if self._sums[3] < _REPORT_SECONDS:
            return None
        means, self._sums = (self._sums[1:] / self._sums[0]).tolist(), np.zeros(4)
        # The values of others are from their last report: no process waits for another.
        rows = self._values.get(self._folder) if jax.process_index() == 0 else {}
        key = f"{self._folder}/{jax.process_index()}"
        self._values.set(key, [socket.gethostname(), *means])
        return self._compare(event.step, rows) if len(rows) == jax.process_count() else None

    def _compare(self, step: int, rows: Mapping[str, Any]) -> dict[str, float]:
        own = {process: data + hooks for process, (_, data, hooks, _) in rows.items()}
        on_devices = min(total - own[process] for process, (*_, total) in rows.items())
        slowest = max(own, key=own.__getitem__)
        typical = max(statistics.median_low(own.values()), on_devices, 1e-9)
        ratio = max(own[slowest], on_devices) / typical
        host, data, hooks, total = rows[slowest]
        if ratio <= self._threshold:
            self._warned_of = None
        elif slowest != self._warned_of:
            self._warned_of = slowest
            warn(
                f"step {step}: process {slowest} on {host} takes {ratio:.3g} times as long as the "
                f"median process: in a step of {total:.2g} s, it waits {data:.2g} s for batches "
                f"and spends {hooks:.2g} s in hooks",
                RuntimeWarning,
            )
        return {"throughput/slowest_process": float(slowest), "throughput/slowest_ratio": ratio}


def memory_use(_: Event) -> dict[str, float]:
    """Measure memory in GiB.

    `memory/device` is the memory in use on the fullest of this process's devices and
    `memory/device_peak` the highest so far; CPUs do not report them. `memory/host` is the resident
    memory of this process, on Linux.

    >>> import stepfold as sf
    >>> 0 < sf.hooks.memory_use(sf.Event(10, None, {}, None))["memory/host"] < 1024
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


def profile(first: int, count: int, folder: str | os.PathLike[str]) -> "Profile":
    """Trace some steps with jax's profiler, for TensorBoard, xprof or Perfetto.

    The trace starts at the first train event at or after step `first` and ends at the first one
    `count` steps later: with `log_every=10`, both `profile(100, 10, folder)` and `profile(100, 3,
    folder)` trace 10 steps. It waits for the device at both ends, so no step is traced in part. At
    an event later steps have been dispatched, so the trace starts after those. If there is an
    evaluation or a save at one end only, the trace is as many steps longer or shorter. The
    attributes `begun` and `ended` are the steps done when it started and ended, or None. The end of
    the run ends an open trace. A resumed run does not trace the same steps again. With several
    processes, only the first is traced.

    >>> import stepfold as sf, tempfile
    >>> sink = sf.hooks.profile(100, 10, tempfile.mkdtemp())
    >>> sink.write(sink.init, sf.Event(90, None, {"train/loss": 1.0}, None))
    {'first': 100, 'is_done': False}
    """
    steps = read_integer("first", first, minimum=0), read_integer("count", count)
    return Profile(
        *steps, folder if is_url(folder) else str(check_path("folder", folder, "folder"))
    )


class Profile(Sink):
    """What `profile` returns; its state says whether the trace is done."""

    name = "profile"

    def __init__(self, first: int, count: int, folder: str | os.PathLike[str]) -> None:
        self._first, self._count, self._folder = first, count, folder
        self.init = {"first": first, "is_done": False}
        self._end: int | None = None  # the step of the event that ends the trace, while it is open
        self.begun: int | None = None
        self.ended: int | None = None

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        self.begun = self.ended = None

    def write(self, state: Any, event: Event) -> Any:
        state = state if state["first"] == self._first else self.init
        is_due = event.is_train and event.step >= self._first
        if not is_due or state["is_done"] or jax.process_index() > 0:
            return state
        if self._end is None:
            self.begun = _steps_done(event.state)
            jax.profiler.start_trace(self._folder)
            self._end = event.step + self._count
        elif event.step >= self._end:
            self.ended = _steps_done(event.state)
            self.close()
            return {**state, "is_done": True}
        return state

    def close(self) -> None:
        if self._end is not None:
            self._end = None
            jax.profiler.stop_trace()


def _steps_done(state: Any) -> int | None:
    """Wait for a state and return its step."""
    step = getattr(jax.block_until_ready(state), "step", None)
    return None if step is None else int(step)
