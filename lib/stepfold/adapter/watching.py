"""The hook through which a run calls the methods of the trainer that holds it."""

from collections.abc import Mapping
from typing import Any

from stepfold.adapter.stopping import StopTraining
from stepfold.loop.hooks.base import Event


class Watch:
    """Tell a trainer what happens in its run, in the order of its methods.

    At each log point the trainer's state is that of the run. `apply_training_hooks`, `log_metrics`
    and `on_log` are called, and a `StopTraining` that one of them raises is why to stop.
    """

    writes_metrics = True  # by `log_metrics`, so that `fit` need not

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._known: Any = None

    def open(self, step: int, total: int | None) -> None:
        """Make the bar, and tell the writer where the run begins."""
        trainer = self._trainer
        name = trainer.arguments.model_name
        bar = trainer.create_progress_bar(total, desc=name, disabled=not trainer.is_process_zero)
        if self._known is not None and hasattr(bar, "set_state"):
            bar.set_state(self._known)
        if hasattr(bar, "open"):
            bar.open(step)
        trainer.progress_bar = bar
        if trainer.writer is not None and trainer.is_enable and hasattr(trainer.writer, "resume"):
            trainer.writer.resume(step)

    def __call__(self, event: Event) -> str | None:
        """Tell of an event."""
        trainer = self._trainer
        trainer.model_state = event.state
        metrics: Mapping[str, float] = event.metrics
        try:
            if event.is_train:
                changed = trainer.apply_training_hooks(dict(metrics))
                metrics = metrics if changed is None else changed
            mode = "train" if event.is_train else "eval"
            trainer.log_metrics(metrics, trainer.progress_bar, event.step, mode)
            trainer.on_log(metrics, event.step)
        except StopTraining as reason:
            return str(reason)
        return None

    def close(self) -> None:
        """Leave the bar, and see that all is written."""
        trainer = self._trainer
        if trainer.progress_bar is not None:
            trainer.progress_bar.close()
        if trainer.writer is not None and trainer.is_enable:
            trainer.writer.flush()

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        bar = self._trainer.progress_bar
        return {"bar": bar.get_state() if hasattr(bar, "get_state") else self._known}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._known = state["bar"]


class WatchEpochs(Watch):
    """The same, where batches know their epochs, so that no interval reaches into the next one."""

    def end_epoch(self, epoch: int) -> None:
        """Count the epoch."""
        self._trainer.epochs_done = epoch + 1


def by_epoch(history: Mapping[str, Any], epoch_steps: int) -> dict[str, list[float]]:
    """Give the values of a run epoch by epoch, by names as `train_loss`.

    Of train steps it is the mean over the epoch's steps, and of all else the last value. Epochs in
    which something was not measured are left out of its list.

    >>> from stepfold.loop.metrics import History
    >>> history = History()
    >>> for step, loss in zip((2, 4, 6, 8), (4.0, 2.0, 1.0, 1.0)):
    ...     history.add(step, {"train/loss": loss})
    >>> history.add(8, {"eval/loss": 1.5})
    >>> by_epoch(history, 4)
    {'train_loss': [3.0, 1.0], 'eval_loss': [1.5]}
    """
    return {
        name.replace("/", "_"): _epochs(curve, epoch_steps, averaged=name.startswith("train/"))
        for name, curve in history.items()
    }


def _epochs(curve: Any, epoch_steps: int, *, averaged: bool) -> list[float]:
    found: dict[int, list[tuple[float, int]]] = {}
    before = 0
    for step, value in zip(curve.steps, curve, strict=True):
        found.setdefault((step - 1) // epoch_steps, []).append((value, step - before))
        before = step
    if not averaged:
        return [values[-1][0] for values in found.values()]
    return [sum(x * n for x, n in rows) / sum(n for _, n in rows) for rows in found.values()]
