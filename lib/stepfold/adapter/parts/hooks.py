"""What watches a run, in the order in which it is shown what happens."""

import re
from collections.abc import Mapping
from typing import Any

from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.checkpoints import best_metric, best_mode
from stepfold.adapter.parts.writers import writes_everywhere
from stepfold.adapter.planning import Plan
from stepfold.loop.event import Event, Hook
from stepfold.loop.hooks.around import Around
from stepfold.loop.hooks.every import every
from stepfold.loop.hooks.log_to import log_to
from stepfold.loop.hooks.memory import memory_use
from stepfold.loop.hooks.progress import progress
from stepfold.loop.hooks.stopping import stop_after, stop_early
from stepfold.loop.hooks.weights import weight_statistics
from stepfold.loop.writers.protocol import Writer

_NORMS = r"(^|/)grad_norm$"


def hooks(arguments: TrainingArguments, plan: Plan, writer: Writer | None = None) -> list[Hook]:
    """Make the hooks that the arguments ask for: what measures first, what writes last.

    Give `fit` the plan's `log_every` with them. A time limit counts from when they are made.

    Args:
      arguments: the arguments.
      plan: the numbers of the run.
      writer: what metrics are written to, as `writers` makes it.

    >>> from stepfold.adapter import TrainingArguments, hooks, plan
    >>> arguments = TrainingArguments(progress_bar_type="none", training_time_limit="1h30m")
    >>> len(hooks(arguments, plan(arguments)))
    1
    """
    found: list[Hook] = []
    if plan.seconds is not None:
        found.append(stop_after(plan.seconds))
    if arguments.early_stopping_patience is not None:
        metric = best_metric(arguments) or "eval/loss"
        patience = arguments.early_stopping_patience
        found.append(stop_early(metric, patience=patience, mode=best_mode(arguments)))
    if arguments.track_memory:
        found.append(memory_use)
    if arguments.weight_distribution_log_steps is not None:
        pattern = arguments.weight_distribution_pattern or ""
        measure = weight_statistics(pattern, writer=writer)
        found.append(every(arguments.weight_distribution_log_steps, measure))
    if arguments.progress_bar_type != "none" and not arguments.performance_mode:
        shown = arguments.metrics_to_show_in_rich_pbar
        bar = progress(arguments.progress_bar_type, metrics=shown)
        found.append(bar if plan.log_steps == plan.log_every else TrainEvery(plan.log_steps, bar))
    if writer is not None:
        wanted = None if plan.report_steps == plan.log_every else plan.report_steps
        write = log_to(writer, wanted, everywhere=writes_everywhere(arguments))
        found.append(write if arguments.log_grad_norms else Without(_NORMS, write))
    return found


class TrainEvery(every):
    """Call a hook at every evaluation, but of train steps only each so many.

    >>> import stepfold as sf
    >>> hook = TrainEvery(20, lambda event: print(event.step, *event.metrics))
    >>> for step in (10, 20):
    ...     hook(sf.Event(step, None, {"train/loss": 1.0}, None))
    20 train/loss
    >>> hook(sf.Event(20, None, {"eval/loss": 1.0}, None))
    20 eval/loss
    """

    def __call__(self, event: Event) -> str | Mapping[str, Any] | None:
        """Call the hook, if it is due."""
        return super().__call__(event) if event.is_train else self._hook(event)


class Without(Around):
    """Hide metrics from a hook.

    >>> import stepfold as sf
    >>> hook = Without("norm", lambda event: print(*event.metrics))
    >>> hook(sf.Event(1, None, {"train/loss": 1.0, "train/grad_norm": 2.0}, None))
    train/loss
    """

    def __init__(self, pattern: str, hook: Hook) -> None:
        super().__init__("without", hook)
        self._pattern = re.compile(pattern)

    def __call__(self, event: Event) -> str | Mapping[str, Any] | None:
        """Show the hook what is left."""
        left = {k: value for k, value in event.metrics.items() if not self._pattern.search(k)}
        return self._hook(event._replace(metrics=left))
