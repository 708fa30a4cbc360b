"""When to save, and which steps to keep: a value that does nothing on disk."""

import os
from collections.abc import Mapping, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any

from stepfold.checkpoint.steps import Best, order_by, read_best
from stepfold.checkpoint.temporary import Temporary
from stepfold.core.validation import (
    absolute_path,
    check_flags,
    is_url,
    read_instance,
    read_integer,
    read_positive,
)
from stepfold.errors import refuse


@dataclass(frozen=True)
class Policy:
    """When to save, and which steps to keep; `Checkpoints` describes the fields.

    >>> policy = Policy(every=10, best="eval/loss")
    >>> policy.due(20), policy.ranking
    (True, ('eval/loss', 'min'))
    """

    directory: str | os.PathLike[str] | None = None
    _: KW_ONLY
    every: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None
    keep: int | None = 3
    keep_every: int | None = None
    best: str | None = None
    mode: str | None = None
    keep_best: int = 1
    at_start: bool = False
    async_: bool = True
    temporary: Temporary | None = None

    def __post_init__(self) -> None:
        if self.directory is not None and not is_url(self.directory):
            directory = absolute_path("directory", self.directory)  # the working one may change
            object.__setattr__(self, "directory", directory)
        for name in ("every", "every_epochs", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None or name == "keep_best":
                object.__setattr__(self, name, read_integer(name, value))
        check_flags(at_start=self.at_start, async_=self.async_)
        if self.every_minutes is not None:
            read_positive("every_minutes", self.every_minutes)
        if self.mode is not None and self.best is None:
            refuse("mode", "best=… to go with it", f"mode={self.mode!r} alone")
        read_best(self.best, self.mode)
        if self.best is None and self.keep_best != 1:
            refuse("keep_best", "best=… to go with it", f"keep_best={self.keep_best} alone")
        for name, default in (("keep_every", None), ("keep_best", 1)):
            if self.keep is None and getattr(self, name) != default:
                got, advice = "keep=None, which keeps all steps", "give a number, or leave it out"
                refuse(name, "a number as keep to go with it", got, advice)
        if self.temporary is not None:
            read_instance("temporary", self.temporary, Temporary, "sf.Temporary('path', every=…)")

    @property
    def ranking(self) -> Best | None:
        """The metric that ranks steps, and "min" or "max"; None without `best`."""
        return read_best(self.best, self.mode)

    @property
    def schedules(self) -> list[Any]:
        """What has saves at known steps: itself, and `temporary` with a number as `every`."""
        temporary = self.temporary
        has_steps = temporary is not None and isinstance(temporary.every, int)
        return [self, temporary] if has_steps else [self]

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether `every` or `every_epochs` schedules a save after `step` steps.

        `epoch` is the number of finished epochs, if the last step ended one.
        """
        by_step = self.every is not None and step % self.every == 0
        by_epoch = bool(epoch and self.every_epochs and epoch % self.every_epochs == 0)
        return step >= 1 and (by_step or by_epoch)


def expendable_steps(
    policy: Policy,
    metrics: Mapping[int, Mapping[str, object]],
    requested: Set[int] = frozenset(),
    *,
    last: int | None = None,
    held: Set[int] = frozenset(),
    for_evaluation: Set[int] = frozenset(),
) -> list[int]:
    """List the steps to delete, given the metrics of each step.

    Args:
      policy: which steps to keep.
      metrics: the metrics of all complete steps.
      requested: steps saved on request. They are counted apart, so that many requests do not push a
        scheduled step out.
      last: the step saved last, which is always kept: after a rollback it may not be the newest.
      held: steps to keep because an evaluation in another process needs them.
      for_evaluation: steps saved only for such an evaluation, which do not count.

    >>> expendable_steps(Policy(keep=1, keep_every=2), {1: {}, 2: {}, 3: {}, 4: {}, 5: {}})
    [1, 3]
    """
    if policy.keep is None:
        return []
    steps = sorted(metrics)
    scheduled = [step for step in steps if step not in requested and step not in for_evaluation]
    kept = {*scheduled[-policy.keep :], *sorted(requested)[-policy.keep :], last, *held}
    if policy.keep_every is not None:
        kept |= {step for step in steps if step % policy.keep_every == 0}
    if policy.ranking is not None:
        kept |= set(order_by(policy.ranking, metrics)[: policy.keep_best])
    return [step for step in steps if step not in kept]
