"""A hook around another: what is not about events goes through."""

from typing import Any

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Hook


class Around:
    """Hold a hook, and pass on to it what `fit` tells and asks besides events."""

    def __init__(self, name: str, hook: Hook) -> None:
        if not callable(hook) or isinstance(hook, type):
            raise ConfigError(f"{name}: expected a hook, (event) -> …, got {tree.spell(hook)}")
        if hasattr(hook, "end_epoch"):
            raise ConfigError(
                f"{name}: expected a hook that is shown events, got {tree.spell(hook)}, which is "
                "called after epochs; give it to fit as it is"
            )
        self._hook = hook

    def open(self, step: int, total: int | None) -> None:
        """Pass on where the run begins."""
        if hasattr(self._hook, "open"):
            self._hook.open(step, total)

    def close(self) -> None:
        """Pass on that the run is over."""
        if hasattr(self._hook, "close"):
            self._hook.close()

    def get_state(self) -> dict[str, Any]:
        """Give what the hook wants to be kept."""
        inner = self._hook.get_state() if hasattr(self._hook, "get_state") else None
        return {"hook": inner, "kind": type(self._hook).__qualname__}

    def set_state(self, state: dict[str, Any]) -> None:
        """Give back to the hook what was kept for it, and not for one of another kind."""
        kind = type(self._hook).__qualname__
        mine = state["hook"] is not None and state.get("kind", kind) == kind
        if mine and hasattr(self._hook, "set_state"):
            self._hook.set_state(state["hook"])


def innermost(hook: Hook) -> Hook:
    """Give the hook that others are around, if any are.

    >>> import stepfold as sf
    >>> hook = sf.stop_on_nonfinite()
    >>> innermost(sf.only_warn(sf.every(10, hook))) is hook
    True
    """
    while isinstance(hook, Around):
        hook = hook._hook
    return hook
