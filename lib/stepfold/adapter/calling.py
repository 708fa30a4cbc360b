"""What a run calls of the trainer that holds it, all of which a subclass may write anew."""

from collections.abc import Mapping
from typing import Any

from stepfold.adapter.bars import NullProgressBar, ProgressBar
from stepfold.adapter.setup import Setup
from stepfold.adapter.stopping import refuse_late, refuse_nonfinite
from stepfold.loop.hooks.base import Event
from stepfold.loop.hooks.weights import weight_statistics

_INTERNAL = "mlperf"
_NORM = "grad_norm"


class Called(Setup):
    """Be called by a run: before and after a step, at a log point, before an evaluation."""

    def on_step_start(self, state: Any, step: int) -> Any:  # noqa: ARG002
        """Be called before each step, with the steps done; give the state, or None to leave it."""
        return state

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:  # noqa: ARG002
        """Be called after each step, with numbers by name; give both, or None to leave them."""
        return state, metrics

    def on_log(self, metrics: Mapping[str, float], step: int) -> None:
        """Be called at each log point and after each evaluation."""

    def start_training_hook(self) -> None:
        """Be called before the first step."""

    def start_evaluation_hook(self) -> None:
        """Be called before each evaluation."""

    def apply_training_hooks(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """End the run if the loss is not finite, or the time is up; called at each log point.

        Raises:
          StopTraining: which ends the run after a save, with its words.
        """
        refuse_nonfinite(metrics)
        refuse_late(self.timer.running("train"), self.plan.seconds)
        return metrics

    def create_progress_bar(
        self, total: int | None, desc: str = "", disabled: bool = False
    ) -> ProgressBar | NullProgressBar:
        """Make the bar of `progress_bar_type`, or one that shows nothing."""
        kind = self.arguments.progress_bar_type
        if disabled or kind == "none" or self.arguments.performance_mode:
            return NullProgressBar()
        shown = self.arguments.metrics_to_show_in_rich_pbar
        return ProgressBar(kind, total, desc, metrics=shown)

    def log_metrics(
        self, metrics: Mapping[str, float], pbar: Any, step: int, mode: str = "train"
    ) -> None:
        """Show metrics on the bar each `log_steps`, and write them each `report_steps`.

        They are called by the mode, as `train/loss`. Norms of gradients are written alone, and not
        even that without `log_grad_norms`.
        """
        found = named(metrics, mode)
        if pbar is not None and is_due(step, self.plan.log_steps, self.plan, mode):
            show(found, pbar, step)
        if self.writer is None or not self.is_enable:
            return
        if is_due(step, self.plan.report_steps, self.plan, mode):
            kept = found if self.arguments.log_grad_norms else without_norms(found)
            self.writer.write_scalars(step, kept)

    def log_weight_distribution(self, state: Any, step: int) -> dict[str, float]:
        """Measure how the weights are distributed, by path, and write it, histograms too."""
        writer = self.writer if self.is_enable else None
        pattern = self.arguments.weight_distribution_pattern or ""
        found: Any = weight_statistics(pattern, writer=writer)(Event(step, None, {}, state))
        if writer is not None:
            writer.write_scalars(step, found)
        return dict(found)


def named(metrics: Mapping[str, Any], mode: str) -> dict[str, float]:
    """Name metrics by the mode, unless they have a first name, and leave out internal ones.

    >>> named({"loss": 1.0, "train/accuracy": 0.5, "mlperf/step": 1}, "train")
    {'train/loss': 1.0, 'train/accuracy': 0.5}
    """
    return {
        name if "/" in name else f"{mode}/{name}": float(value)
        for name, value in metrics.items()
        if _INTERNAL not in name
    }


def without_norms(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the norms of gradients."""
    return {name: value for name, value in metrics.items() if _NORM not in name}


def is_due(step: int, every: int, plan: Any, mode: str) -> bool:
    """Tell whether a step is one to show or write: of train steps each so many, and the last.

    Where they are shown at each log point, those at the ends of epochs are shown too.
    """
    return mode != "train" or every == plan.log_every or step % every == 0 or step == plan.steps


def show(metrics: Mapping[str, float], bar: Any, step: int) -> None:
    """Show metrics on a bar: one of ours, or whatever has tqdm's methods."""
    bar.set_postfix(dict(without_norms(metrics)))
    bar.update(step - getattr(bar, "step", getattr(bar, "n", 0)))
