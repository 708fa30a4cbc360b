"""How much a run gets done in its time."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.inspect.peaks import mfu, peak_flops
from stepfold.loop.event import Event
from stepfold.loop.hooks.pace import Pace


class throughput:  # noqa: N801  it is called as the functions beside it are
    """Measure the speed of training, for the hooks after it to show.

    With each train event but the first, whose steps were compiled, it gives

    - `throughput/step_seconds`: the time of a step, evaluations left out;
    - `throughput/examples_per_second`, counted by the leading axis of the last batch, and what
      else is to be counted;
    - `throughput/waiting`: the share of the time that was spent waiting for batches;
    - `throughput/mfu`: the share of the devices' peak, where both it and the `flops` are known;
    - `throughput/goodput`: the share of all time since the run first began, of pauses before it
      went on and of steps done twice too, that went into steps that count.

    The device is not waited for: over several intervals the clock tells what it does.

    >>> import numpy as np, stepfold as sf, time
    >>> hook = sf.throughput(tokens=lambda batch: batch["tokens"].size)
    >>> batch = {"tokens": np.zeros((8, 512))}
    >>> for step in (10, 20):
    ...     found = hook(sf.Event(step, None, {"train/loss": 2.0}, None, batch=batch))
    ...     time.sleep(0.01)
    >>> found["throughput/tokens_per_second"] / found["throughput/examples_per_second"]
    512.0
    """

    def __init__(
        self,
        *,
        flops: float | None = None,
        peak: float | None = None,
        dtype: str = "bfloat16",
        **units: Callable[[Any], Any],
    ) -> None:
        """Say what to count.

        Args:
          flops: the operations that one device runs in one step, as `describe` tells.
          peak: what one device can do in a second; if None, it is looked up.
          dtype: what is multiplied, for the peak.
          **units: functions of a batch that count, by what they count, as in the example. Each is
            asked about the last batch of an interval. Of a batch on devices take shapes alone;
            values would have to be waited for.

        Raises:
          ConfigError: if an argument is not as described.
        """
        for name, value in (("flops", flops), ("peak", peak)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: expected a number above 0, got {value!r}")
        for name, unit in units.items():
            if not callable(unit):
                raise ConfigError(f"{name}: expected a function of a batch, got {tree.spell(unit)}")
        self._flops, self._peak, self._dtype = flops, peak, dtype
        self._units = {"examples": _examples, **units}
        self._pace, self._waited = Pace(), 0.0
        self._began, self._useful = time.time(), 0.0

    def __call__(self, event: Event) -> dict[str, float] | None:
        """Measure the time since the last event."""
        passed = self._pace.add(event)
        waited, self._waited = event.waited - self._waited, event.waited
        if passed is None:
            return None
        steps, seconds = passed
        self._useful += seconds
        found = {
            "step_seconds": seconds / steps,
            "waiting": min(waited / seconds, 1.0),
            "goodput": min(self._useful / max(time.time() - self._began, seconds), 1.0),
        }
        if event.batch is not None:
            for name, unit in self._units.items():
                found[f"{name}_per_second"] = float(unit(event.batch)) * steps / seconds
        if self._flops is not None and self._peak_of_a_device():
            found["mfu"] = mfu(self._flops, seconds / steps, peak=self._peak)
        return {f"throughput/{name}": value for name, value in found.items()}

    def _peak_of_a_device(self) -> float:
        if self._peak is None:  # looked up once; 0 is not known
            self._peak = peak_flops(jax.devices()[0].device_kind, self._dtype) or 0.0
        return self._peak

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {"began": self._began, "useful": self._useful}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._began, self._useful = state["began"], state["useful"]


def _examples(batch: Any) -> int:
    """Count the examples of a batch: of all processes, whose shares are alike."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf):
            whole = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            return int(np.shape(leaf)[0]) * (1 if whole else jax.process_count())
    return 0
