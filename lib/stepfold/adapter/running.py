"""A trainer's run, handed to `fit`: its step, its evaluations, and what watches it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepfold.adapter import resuming
from stepfold.adapter.calling import Called
from stepfold.adapter.overriding import is_overridden
from stepfold.adapter.parts.checkpoints import best_metric, best_mode
from stepfold.adapter.parts.precision import precision
from stepfold.adapter.parts.writers import logs_of
from stepfold.adapter.setup import Setup
from stepfold.adapter.stepping import HookedStep, as_train_step
from stepfold.adapter.stopping import StopOnSkipped
from stepfold.adapter.watching import Watch, WatchEpochs
from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.fit import fit
from stepfold.loop.hooks.base import Event, Hook
from stepfold.loop.hooks.stop import stop_early
from stepfold.loop.hooks.throughput import memory_use
from stepfold.loop.hooks.wrappers import callback, every
from stepfold.loop.result import FitResult

_OF_LOSS_SCALE = 50
"""How many steps in a row a loss scale may leave out; from its largest to its least it takes 25."""


def run(trainer: Any) -> FitResult:
    """Fold a trainer's batches into its state."""
    arguments, step = trainer.arguments, watched_step(trainer)
    evaluations = evaluations_of(trainer)
    hooks = hooks_of(trainer, evaluations)
    if isinstance(step, HookedStep):
        hooks.insert(0, lambda _: step.raise_pending())
    return fit(
        step,
        _let_go(trainer),
        trainer.dataloader_train,
        steps=trainer.max_training_steps,
        run_dir=_run_dir(trainer),
        evaluation=evaluations,
        checkpoints=trainer.checkpoint_manager,
        hooks=hooks,
        log_every=trainer.plan.log_every,
        resume=arguments.resume_if_possible and arguments.resume_from_checkpoint is not False,
        time_limit=trainer.plan.seconds,
    )


def _let_go(trainer: Any) -> Any:
    """Give the state; where one is restored in its place, there need not be two."""
    state = trainer.model_state
    if resuming.has_steps(resuming.own_place(trainer)):
        trainer.model_state = None
    return state


def _run_dir(trainer: Any) -> Path | None:
    """Give where the page of the run goes: beside the lines that it is drawn from."""
    writes = trainer.writer is not None and "jsonl" in trainer.arguments.report_to
    return logs_of(trainer.arguments) if writes else None


def watched_step(trainer: Any) -> Callable[..., Any]:
    """Give the step; with a call before and after it, if a subclass has something to say."""
    step = trainer.sharded_training_step_function
    step = step if isinstance(step, CompiledStep) else as_train_step(step)
    if not any(is_overridden(trainer, Called, name) for name in ("on_step_start", "on_step_end")):
        return step
    return HookedStep(step, trainer.on_step_start, trainer.on_step_end)


def evaluations_of(trainer: Any) -> list[Evaluation]:
    """List what is measured in the course of a run: the evaluation data, and what else is given."""
    step, plan = trainer.measuring_step, trainer.plan
    if trainer.dataloader_eval is None or not plan.evaluates or step is None:
        return [*trainer.evaluations]
    own = Evaluation(
        step,
        trainer.eval_batches,
        every=plan.evaluation_every,
        every_epochs=plan.evaluation_every_epochs,
    )
    return [own, *trainer.evaluations]


def hooks_of(trainer: Any, evaluations: list[Evaluation]) -> list[Hook]:
    """Make the hooks of a run: what stops it, what measures it, what shows it, and the user's.

    Raises:
      ConfigError: if it is to stop early, and there is nothing to tell when.
    """
    arguments = trainer.arguments
    hooks: list[Hook] = []
    if not is_overridden(trainer, Setup, "configure_functions"):
        scales = precision(arguments).needs_loss_scale
        hooks.append(StopOnSkipped(_OF_LOSS_SCALE if scales else 1))
    metric = _watched_metric(arguments, measured=bool(evaluations))
    trainer.early_stopping = None
    patience = arguments.early_stopping_patience
    if metric is not None and patience is not None:
        trainer.early_stopping = stop_early(
            metric,
            patience=patience,
            mode=best_mode(arguments),
            keep_state=not metric.startswith("train/"),
        )
        hooks.append(trainer.early_stopping)
    if arguments.track_memory:
        hooks.append(memory_use)
    if arguments.weight_distribution_log_steps is not None:
        hooks.append(every(arguments.weight_distribution_log_steps, _weights(trainer)))
    watch = WatchEpochs if getattr(trainer.dataloader_train, "steps_per_epoch", None) else Watch
    calls = [callback(function, trainer) for function in trainer.callbacks]
    last = [] if metric is None else [_expecting(metric)]  # who may measure it comes before
    return [*hooks, watch(trainer), *calls, *trainer.hooks, *last]


def _watched_metric(arguments: Any, *, measured: bool) -> str | None:
    """Give the metric that tells which state is the best, if anything hangs on that."""
    patient = arguments.early_stopping_patience is not None
    metric = best_metric(arguments) or ("eval/loss" if patient else None)
    if metric is not None and not measured and not metric.startswith("train/"):
        asked = "early_stopping_patience" if patient else "metric_for_best_model"
        raise ConfigError(
            f"{asked}: expected data to evaluate on, to know {metric}, got none; give "
            "dataset_eval, or metric_for_best_model='train.loss'"
        )
    return metric


def _expecting(metric: str) -> Hook:
    """Make a hook that sees that an evaluation measures what it is to measure."""
    kind = metric.rpartition("/")[0]

    def expect(event: Event) -> None:
        there = [name for name in event.metrics if name.rpartition("/")[0] == kind]
        if there and not event.is_train and metric not in there:
            raise ConfigError(
                f"metric_for_best_model: expected one of {', '.join(sorted(there))}, which are "
                f"measured, got {metric}"
            )

    return expect


def _weights(trainer: Any) -> Hook:
    def measure(event: Event) -> Mapping[str, Any] | None:
        trainer.log_weight_distribution(event.state, event.step)
        return None  # the writer has them; there are too many of them for a bar

    return measure
