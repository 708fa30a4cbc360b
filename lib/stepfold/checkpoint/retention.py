"""Which steps a series keeps: the rule, and its application to the steps of one store."""

from collections.abc import Mapping, Set
from typing import NamedTuple

from stepfold.checkpoint.claims import Leases
from stepfold.checkpoint.manifest import StepMetadata
from stepfold.checkpoint.results import LEASES
from stepfold.checkpoint.steps import Best, order_by
from stepfold.checkpoint.store import Store, complete_steps, metrics_of


class Rule(NamedTuple):
    """Which steps to keep; the fields are those of `Checkpoints`.

    >>> Rule(keep=1, keep_every=2).expendable({1: {}, 2: {}, 3: {}, 4: {}, 5: {}})
    [1, 3]
    """

    keep: int | None
    keep_every: int | None = None
    best: Best | None = None
    keep_best: int = 1

    def expendable(
        self,
        metrics: Mapping[int, Mapping[str, object]],
        requested: Set[int] = frozenset(),
        *,
        last: int | None = None,
        held: Set[int] = frozenset(),
    ) -> list[int]:
        """List the steps to delete.

        `requested` steps and the others are counted apart, so that many requests do not push a
        scheduled step out. `last`, the step saved last, is always kept: after a rollback it may not
        be the newest. `held` steps are kept too: an evaluation in another process needs them.
        """
        if self.keep is None:
            return []
        steps = sorted(metrics)
        scheduled = [step for step in steps if step not in requested]
        kept = {*scheduled[-self.keep :], *sorted(requested)[-self.keep :], last, *held}
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.best is not None:
            kept |= set(order_by(self.best, metrics)[: self.keep_best])
        return [step for step in steps if step not in kept]


class Retention:
    """Delete the steps of one store that a rule does not keep."""

    def __init__(self, store: Store, rule: Rule) -> None:
        self._store, self._rule, self._leases = store, rule, Leases(store, LEASES)
        # The metadata of each complete step, which is read once, without its values.
        self._known: dict[int, StepMetadata] = {}

    def forget(self, step: int) -> None:
        """Read a step again, since it has changed."""
        self._known.pop(step, None)

    def apply(self, last: int, evaluated: Mapping[str, int] | None) -> None:
        """Delete steps once `last` is saved; `evaluated` is that of the series."""
        if self._rule.keep is None:
            return
        self.forget(last)  # it may replace another
        steps = self._read_steps()
        requested = {step for step, metadata in steps.items() if metadata.requested}
        is_ranked = self._rule.best is not None
        metrics = metrics_of(self._store, steps) if is_ranked else {step: {} for step in steps}
        held = self._held_steps(steps, evaluated)
        for step in self._rule.expendable(metrics, requested, last=last, held=held):
            self._store.delete(step)

    def _read_steps(self) -> Mapping[int, StepMetadata]:
        steps, known = self._store.steps(), self._known
        read = complete_steps(self._store, [step for step in steps if step not in known])
        known |= {step: each._replace(data=None, extra=None) for step, each in read.items()}
        self._known = {step: known[step] for step in steps if step in known}
        return self._known

    def _held_steps(
        self, steps: Mapping[int, StepMetadata], evaluated: Mapping[str, int] | None
    ) -> set[int]:
        """Return the steps that evaluations in other processes have yet to use, or are using."""
        awaited = {
            step
            for step, metadata in steps.items()
            for name in metadata.awaits
            if evaluated is None or evaluated.get(name, step) < step
        }
        return awaited.union(*(lease["steps"] for lease in self._leases.held()))
