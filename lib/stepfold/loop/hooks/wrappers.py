"""Hooks around another hook, and callbacks at the ends of epochs."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import Event, Hook, StatefulHook, Stop, hook_name


class HookWrapper:
    """Base class of hooks around another. Attributes that it lacks are those of the inner hook.

    The inner state is kept with the kind of the hook, and not given to a hook of another kind.
    """

    def __init__(self, hook: Hook) -> None:
        name = type(self).__name__
        if not callable(hook) or isinstance(hook, type):
            raise ConfigError(f"{name}: expected a hook, (event) -> …, got {tree.spell(hook)}")
        if hasattr(hook, "end_epoch"):
            raise ConfigError(
                f"{name}: expected a hook that is called with events, got {tree.spell(hook)}, "
                "which is called after epochs; give it to fit directly"
            )
        self._hook: Any = hook

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # special methods, and `_hook` itself during unpickling
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __call__(self, event: Event) -> str | Stop | Mapping[str, Any] | None:
        return self._hook(event)  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        inner = self._hook.get_state() if hasattr(self._hook, "get_state") else None
        return {"hook": inner, "kind": hook_name(self._hook)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        is_same_kind = state["kind"] == hook_name(self._hook)
        if is_same_kind and state["hook"] is not None and hasattr(self._hook, "set_state"):
            self._hook.set_state(state["hook"])


class every(HookWrapper):  # noqa: N801
    """Call a hook only at the first event at or after each multiple of `n` steps.

    The hook does not see skipped events, so do not wrap `stop_on_nonfinite`.

    Args:
      n: the steps from one call to the next.
      hook: any hook that is called with events.

    >>> import stepfold as sf
    >>> hook = sf.every(100, lambda event: print(event.step))
    >>> for step in (60, 120, 180, 240, 300):
    ...     hook(sf.Event(step, None, {"train/loss": 1.0}, None))
    120
    240
    300
    """

    def __init__(self, n: int, hook: Hook) -> None:
        check_count("every", n)
        super().__init__(hook)
        self._n, self._multiple, self._is_restored = n, 0, False

    def __call__(self, event: Event) -> str | Stop | Mapping[str, Any] | None:
        multiple = event.step // self._n
        if multiple <= self._multiple:
            return None
        self._multiple = multiple
        return super().__call__(event)

    def open(self, step: int, total: int | None) -> None:
        if not self._is_restored:
            self._multiple = step // self._n
        self._is_restored = False
        if hasattr(self._hook, "open"):
            self._hook.open(step, total)

    def close(self) -> None:
        self._is_restored = False
        if hasattr(self._hook, "close"):
            self._hook.close()

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "multiple": self._multiple, "n": self._n}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if state["n"] == self._n:
            self._multiple, self._is_restored = state["multiple"], True
        super().set_state(state)


class only_warn(HookWrapper):  # noqa: N801
    """Warn of a hook's reason to stop instead of stopping.

    >>> import warnings, stepfold as sf
    >>> hook = sf.only_warn(lambda event: "the loss is above 10")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     hook(sf.Event(20, None, {"train/loss": 12.0}, None))
    >>> print(caught[0].message)
    step 20: the loss is above 10
    """

    can_stop = False

    def __call__(self, event: Event) -> Mapping[str, Any] | None:
        returned = super().__call__(event)
        if not isinstance(returned, str | Stop):
            return returned
        if str(returned):
            warnings.warn(f"step {event.step}: {returned}", stacklevel=2)
        return None


class callback(StatefulHook):  # noqa: N801
    """Call a function `(trainer, epoch, metrics)` after each epoch, including one the run stops at.

    Epochs count from 0. Metrics are named `train_loss`, `eval_loss` and so on. Those of train steps
    are means over the steps of the epoch, all others the latest value. An exception in the function
    ends the run, after a save.

    Args:
      function: the function to call.
      trainer: its first argument.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, x, key: sf.mean((params - x) ** 2), tx)
    >>> def show(trainer, epoch, metrics):
    ...     print(epoch, round(metrics["train_loss"], 3))
    >>> batches = [np.zeros(4, np.float32)] * 2
    >>> result = sf.fit(step, state, batches, epochs=3, hooks=[sf.callback(show)])
    0 0.82
    1 0.336
    2 0.138
    """

    run_state = ("_sums", "_latest")

    def __init__(
        self, function: Callable[[Any, int, dict[str, float]], Any], trainer: Any = None
    ) -> None:
        if not callable(function):
            raise ConfigError(
                "callback: expected a function (trainer, epoch, metrics), got "
                f"{tree.spell(function)}"
            )
        self._function, self._trainer = function, trainer
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._sums: dict[str, list[float]] = {}  # total and count of the epoch so far
        self._latest: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        for name, values in event.per_step.items():
            if np.ndim(values) == 1:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = [total + float(np.sum(values)), count + len(values)]
        self._latest.update(event.metrics)

    def end_epoch(self, epoch: int) -> None:
        """Call the function."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        metrics = {name.replace("/", "_"): x for name, x in {**self._latest, **means}.items()}
        self.reset(0)
        self._function(self._trainer, epoch, metrics)
