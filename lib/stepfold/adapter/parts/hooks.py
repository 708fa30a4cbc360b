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
    """Make all the hooks that the arguments ask for: what measures first, what writes last.

    They are those of `monitors`, `progress_hook` and `report_hook`. Give `fit` the plan's
    `log_every` with them.

    Args:
      arguments: the arguments.
      plan: the numbers of the run.
      writer: what metrics are written to, as `writers` makes it.

    >>> from stepfold.adapter import TrainingArguments, hooks, plan
    >>> arguments = TrainingArguments(progress_bar_type="none", training_time_limit="1h30m")
    >>> len(hooks(arguments, plan(arguments)))
    1
    """
    bar = progress_hook(arguments, plan)
    report = None if writer is None else report_hook(arguments, plan, writer)
    found = [*monitors(arguments, plan, writer), bar, report]
    return [hook for hook in found if hook is not None]


def monitors(arguments: TrainingArguments, plan: Plan, writer: Writer | None = None) -> list[Hook]:
    """Make the hooks that stop a run, and those that measure more of it.

    A time limit counts from when they are made.

    >>> from stepfold.adapter import TrainingArguments, monitors, plan
    >>> arguments = TrainingArguments(track_memory=True, early_stopping_patience=3)
    >>> len(monitors(arguments, plan(arguments)))
    2
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
    return found


def progress_hook(arguments: TrainingArguments, plan: Plan) -> Hook | None:
    """Make what shows progress each `log_steps`, or None where nothing does.

    >>> from stepfold.adapter import TrainingArguments, plan, progress_hook
    >>> arguments = TrainingArguments(performance_mode=True)
    >>> progress_hook(arguments, plan(arguments)) is None
    True
    """
    if arguments.progress_bar_type == "none" or arguments.performance_mode:
        return None
    bar = progress(arguments.progress_bar_type, metrics=arguments.metrics_to_show_in_rich_pbar)
    return bar if plan.log_steps == plan.log_every else TrainEvery(plan.log_steps, bar)


def report_hook(arguments: TrainingArguments, plan: Plan, writer: Writer) -> Hook:
    """Make what gives metrics to a writer each `report_steps`, and every evaluation.

    >>> import stepfold as sf
    >>> from stepfold.adapter import TrainingArguments, plan, report_hook
    >>> arguments = TrainingArguments(log_grad_norms=False)
    >>> hook = report_hook(arguments, plan(arguments), sf.console_writer())
    >>> hook(sf.Event(10, None, {"train/loss": 1.0, "train/grad_norm": 2.0}, None))
          10  train/loss 1
    """
    wanted = None if plan.report_steps == plan.log_every else plan.report_steps
    write = log_to(writer, wanted, everywhere=writes_everywhere(arguments))
    return write if arguments.log_grad_norms else Without(_NORMS, write)


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
