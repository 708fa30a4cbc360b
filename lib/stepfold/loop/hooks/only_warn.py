"""A hook that would stop a run, and is only to warn."""

import warnings
from collections.abc import Mapping
from typing import Any

from stepfold.loop.event import Event, Hook
from stepfold.loop.hooks.around import Around


class only_warn(Around):  # noqa: N801  it is called as the functions beside it are
    """Warn of what a hook would stop for, and go on.

    >>> import warnings, stepfold as sf
    >>> hook = sf.only_warn(lambda event: "the loss is above 10")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     hook(sf.Event(20, None, {"train/loss": 12.0}, None))
    >>> print(caught[0].message)
    step 20: the loss is above 10
    """

    def __init__(self, hook: Hook) -> None:
        """Say of what.

        Raises:
          ConfigError: if it is no hook.
        """
        super().__init__("only_warn", hook)

    def __call__(self, event: Event) -> Mapping[str, Any] | None:
        """Call the hook, and warn of a reason to stop."""
        said = self._hook(event)
        if not isinstance(said, str):
            return said
        warnings.warn(f"step {event.step}: {said}", stacklevel=2)
        return None
