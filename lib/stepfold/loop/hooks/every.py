"""A hook less often."""

from collections.abc import Mapping
from typing import Any

from stepfold.errors import ConfigError
from stepfold.loop.event import Event, Hook
from stepfold.loop.hooks.around import Around


class every(Around):  # noqa: N801  it is called as the functions beside it are
    """Call a hook only at the first event at or after each multiple of so many steps.

    What the events between would have shown it, it never sees: `stop_on_nonfinite` belongs to every
    event.

    >>> import stepfold as sf
    >>> hook = sf.every(100, lambda event: print(event.step))
    >>> for step in (60, 120, 180, 240, 300):
    ...     hook(sf.Event(step, None, {"train/loss": 1.0}, None))
    120
    240
    300
    """

    def __init__(self, n: int, hook: Hook) -> None:
        """Say how often, and what.

        Args:
          n: the steps from one call to the next.
          hook: any hook.

        Raises:
          ConfigError: if one is not as described.
        """
        if type(n) is not int or n < 1:
            raise ConfigError(f"every: expected an integer of at least 1, got {n!r}")
        super().__init__("every", hook)
        self._n, self._seen = n, 0
        self._told = False

    def __call__(self, event: Event) -> str | Mapping[str, Any] | None:
        """Call the hook, if its time has come."""
        multiple = event.step // self._n
        if multiple <= self._seen:
            return None
        self._seen = multiple
        return self._hook(event)

    def open(self, step: int, total: int | None) -> None:
        """Count from where the run begins, unless it goes on."""
        if not self._told:
            self._seen = step // self._n
        super().open(step, total)

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {**super().get_state(), "multiple": self._seen, "n": self._n}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; with another number of steps, from where the run goes on."""
        if state.get("n", self._n) == self._n:
            self._seen, self._told = state["multiple"], True
        super().set_state(state)
