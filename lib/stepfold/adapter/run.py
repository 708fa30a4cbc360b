"""Runs of the trainer: where they start, and the arguments of `fit`."""

import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepfold.adapter import hooks as trainer_hooks
from stepfold.adapter import setup
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import best_metric, precision
from stepfold.adapter.loading import TrainingLoader
from stepfold.adapter.optimizers import is_plateau, plateau_hook
from stepfold.adapter.parts import RunParts
from stepfold.adapter.steps import Step, StepWithHooks, call_evaluate
from stepfold.core.validation import absolute_path, takes_any_keyword
from stepfold.data.epochs import EpochEnds
from stepfold.errors import refuse, warn
from stepfold.hooks.objects import BaseHook
from stepfold.hooks.performance import memory_use
from stepfold.hooks.stop import stop_early
from stepfold.hooks.wrappers import callback, every
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.loop.evaluate import Evaluation, mesh_of
from stepfold.loop.events import Event
from stepfold.loop.hook import AnyHook
from stepfold.sharding.place import place_batch
from stepfold.tree import describe_value

# Where a run starts


class Start(NamedTuple):
    """Where a run starts.

    `source` is the argument that replaced the state, and `data` the data position that belongs to
    it.
    """

    state: Any
    source: str | None
    data: Any
    may_resume: bool


def find_start(
    parts: RunParts,
    state: Any,
    source: str | None,
    replacements: Mapping[str, Any],
    *,
    is_first: bool,
) -> Start:
    """Find the state of a run and the position of its data.

    `replacements` are the arguments of `train` that replace the state, of which at most one is not
    None. `source` is the argument that replaced it earlier, and `is_first` is True before the first
    run.
    """
    own, arguments = parts.checkpoint_manager, parts.arguments
    folder, resume_from = arguments.checkpoints_dir, arguments.resume_from_checkpoint
    chosen = {name: value for name, value in replacements.items() if value is not None}
    if len(chosen) > 1:
        refuse("train", "one of model_parameters, state and ckpt_path", "more")
    may_resume, data = True, None
    if is_first:
        may_resume = arguments.resume_if_possible and resume_from is not False
    if is_first and resume_from:
        is_new = own is None or own.latest_step() is None
        if resume_from is True and is_new:
            where = "nothing is saved" if own is None else f"{own.directory} has no checkpoint"
            text = f"resume_from_checkpoint=True: {where}, so the run starts from the beginning"
            warn(text)
        is_path = isinstance(resume_from, str) and not chosen
        # A run that has checkpoints continues from these, but the path has to exist.
        if is_path and (setup.is_newest(own, str(resume_from), folder) or is_new):
            chosen = {"ckpt_path": resume_from}
    path = chosen.pop("ckpt_path", None)
    if path is not None and setup.is_newest(own, path, folder):
        may_resume = True
    elif path is not None:
        restored = setup.restore_path(path, folder, parts.abstract_state)
        state, data, source = restored.state, restored.data, "ckpt_path"
    for name, value in chosen.items():  # parameters or a state
        if name == "state" and not setup.is_state(value):
            advice = "give parameters alone as model_parameters"
            refuse("state", "a state, with params and step", describe_value(value), advice)
        state, source = parts.bind(setup.first_state(parts, None, value, parts.tx)), name
    if source is not None:
        setup.check_start(own, source, state, parts.abstract_state)
    return Start(state, source, data, may_resume)


def check_length(parts: RunParts, more_steps: int | None) -> None:
    """Check that a run has data and an end."""
    loader = parts.dataloader_train
    if loader is None:
        refuse("dataset_train", "data to train on", "None")
    has_end = parts.max_training_steps or more_steps or parts.sizes.seconds is not None
    if not has_end and getattr(loader, "endless", False):
        expected = "a number of steps for data without an end"
        refuse("max_steps", expected, "None", "give max_steps, or training_time_limit")


# The arguments of `fit`


def run_length(parts: RunParts, more_steps: int | None) -> tuple[int | None, int | None]:
    """Return the steps and the epochs of a run without `more_steps`."""
    steps, epochs = parts.max_training_steps, parts.arguments.num_train_epochs
    if more_steps is not None or steps is not None:
        return None if more_steps is not None else steps, None
    # A loader of a subclass may be one epoch that can be iterated again.
    is_iterator = iter(parts.dataloader_train) is parts.dataloader_train
    return None, epochs if epochs > 1 and not is_iterator else None


def make_fit_step(parts: RunParts, trainer: trainer_hooks.Methods) -> Step:
    """Return the step for `fit`: with metrics, and with the methods of a subclass around it."""
    has_hooks = any(map(trainer.overrides, ("on_step_start", "on_step_end")))
    if (steps := parts.arguments.steps_per_call) > 1:
        if has_hooks:
            expected = "1 with on_step_start or on_step_end overridden, which run between steps"
            refuse("steps_per_call", expected, f"{steps}", "override on_log instead")
        return _unjitted(parts.fit_step)  # several steps in a call are compiled as one
    step: Step = parts.fit_step
    return StepWithHooks(step, trainer.on_step_start, trainer.on_step_end) if has_hooks else step


def _unjitted(step: Step) -> Step:
    return getattr(step, "__wrapped__", step)


def evaluations_of(parts: RunParts, trainer: trainer_hooks.Methods) -> list[Evaluation]:
    """Return the evaluation on the trainer's data, if there is one, and its `evaluations`.

    An `evaluate` or `eval` of a subclass measures in place of the evaluation step.
    """
    sizes, loader, measure = parts.sizes, parts.dataloader_eval, parts.metrics_step
    own = next(filter(trainer.overrides, ("evaluate", "eval")), None)
    interval: dict[str, Any] = {
        "every": sizes.evaluation_every,
        "every_epochs": sizes.evaluation_every_epochs,
    }
    has_interval = any(interval.values())
    if not sizes.evaluates:
        return list(parts.evaluations)
    if own is not None and (loader is not None or has_interval):
        measure_by = lambda state: call_evaluate(trainer, state, state, method=own)
        return [Evaluation(measure_by, **interval), *parts.evaluations]
    if loader is not None and measure is not None:
        return [Evaluation(measure, trainer.eval_batches, **interval), *parts.evaluations]
    if has_interval:
        name = "eval_steps" if parts.arguments.eval_steps else "evaluation_strategy"
        advice = "give dataset_eval, or leave it out"
        if loader is not None:
            advice = "return eval_step_fn from configure_functions too"
        refuse(name, "data and a step to evaluate with", "none", advice)
    return list(parts.evaluations)


PRETRAINED = "pretrained"
"""The folder in `output_dir` for what a subclass's `save_pretrained` writes in a run."""


def saves_of(parts: RunParts, trainer: trainer_hooks.Methods) -> list[Evaluation]:
    """Return evaluations that call `save_pretrained` of a subclass at checkpoints and at the end.

    An evaluation gets the exact state of its step, and may return no metrics.
    """
    manager = parts.checkpoint_manager
    if manager is None or not trainer.overrides("save_pretrained"):
        return []
    if parts.arguments.output_dir is None:
        expected = "a directory for what save_pretrained of a subclass writes in a run"
        refuse("output_dir", expected, "None")
    parameters = inspect.signature(trainer.save_pretrained).parameters
    path = "ckpt_path" if "ckpt_path" in parameters else "save_directory"
    if not ({"state", path} <= {*parameters} or takes_any_keyword(trainer.save_pretrained)):
        expected = "the parameters ckpt_path and state, or state and save_directory"
        refuse("save_pretrained", expected, ", ".join(parameters), "name them so")
    folder = absolute_path("output_dir", parts.arguments.output_dir) / PRETRAINED

    def save(state: Any) -> dict[str, float]:
        step = int(getattr(state, "step", 0))
        if jax.process_index() == 0:
            _delete_old(folder, step, manager.keep)
        trainer.model_state = state
        trainer.save_pretrained(**{path: str(folder / str(step)), "state": state})
        return {}

    return [
        Evaluation(save, every=manager.every, every_epochs=manager.every_epochs, name=PRETRAINED)
    ]


def _delete_old(folder: Path, step: int, keep: int | None) -> None:
    """Make room for a step: delete its own folder, and the oldest beyond `keep`."""
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    others = [number for number in steps if number != step]
    old = [] if keep is None else others[: max(0, len(others) + 1 - keep)]
    for number in [*old, *({step} & {*steps})]:
        shutil.rmtree(folder / str(number))


class _AroundStep(BaseHook):
    """Restart the count of a `StepWithHooks`, and raise its pending exception at events."""

    def __init__(self, step: StepWithHooks) -> None:
        self._step = step

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self._step.restart(step)

    def __call__(self, event: Event) -> None:  # noqa: ARG002
        self._step.raise_pending()


def make_hooks(
    parts: RunParts,
    trainer: trainer_hooks.Methods,
    step: Step | None = None,
    *,
    evaluations: Sequence[Evaluation],
) -> list[AnyHook]:
    """Make the hooks of a run. The trainer's comes after those that return numbers."""
    arguments = parts.arguments
    hooks: list[AnyHook] = [_AroundStep(step)] if isinstance(step, StepWithHooks) else []
    if parts.train_step is parts.own_step:  # which skips a NaN or inf
        hooks.append(stop_on_skipped(arguments))
    metric, mode = best_metric(arguments)
    patience = arguments.early_stopping_patience
    metric = "eval/loss" if metric is None and patience is not None else metric
    is_of_evaluation = metric is not None and not metric.startswith("train/")
    if metric is not None and patience is None and not getattr(parts.checkpoint_manager, "best", 0):
        expected = "checkpoints of which the best is kept, or early_stopping_patience"
        refuse("metric_for_best_model", expected, "neither", "give output_dir")
    if is_of_evaluation:
        _check_evaluations(parts, str(metric), evaluations)
    if metric is not None and patience is not None:
        hooks.append(stop_early(metric, patience=patience, mode=mode, keep_state=is_of_evaluation))
    if is_plateau(arguments.scheduler):
        _check_evaluations(parts, "eval/loss", evaluations, "scheduler")
        hooks.append(plateau_hook(arguments.scheduler_kwargs))
    if arguments.track_memory:
        hooks.append(memory_use)
    if arguments.weight_distribution_log_steps is not None:

        def log_weights(event: Event) -> None:  # returns none, since they are too many for a bar
            trainer.log_weight_distribution(event.state, event.step)

        hooks.append(every(arguments.weight_distribution_log_steps, log_weights, kind="train"))
    hooks += [*(callback(function, trainer) for function in parts.callbacks), *parts.hooks]
    loader = parts.dataloader_train
    has_epochs = bool(getattr(loader, "epoch_ends", getattr(loader, "steps_per_epoch", None)))
    is_exact = bool(parts.watchers) or trainer.overrides("log_watchers")
    own = trainer_hooks.TrainerHook(trainer, has_epochs=has_epochs, needs_exact_state=is_exact)
    epochs = trainer_hooks.EpochHistory(lambda: _epoch_ends(trainer), parts.data_offset)
    return [*hooks, own, *([] if metric is None else [_expect_metric(metric)]), epochs]


def _epoch_ends(trainer: trainer_hooks.Methods) -> EpochEnds:
    """Return where epochs end: those of the batches, or the steps that the arguments set."""
    ends = getattr(trainer.dataloader_train, "epoch_ends", None)
    if ends is not None and trainer.arguments.per_epoch_training_steps is None:
        return ends  # type: ignore[no-any-return]
    return EpochEnds.of_length(trainer.sizes.epoch_steps or trainer.max_training_steps or 1)


def stop_on_skipped(arguments: TrainingArguments) -> AnyHook:
    """Make a hook that stops the run if the step skips a NaN or inf."""
    # 25 steps bring a dynamic loss scale from its largest to its smallest value.
    has_scale = precision(arguments).needs_loss_scale
    return trainer_hooks.StopOnSkipped(50 if has_scale else 1)


def _check_evaluations(
    parts: RunParts, metric: str, evaluations: Sequence[Evaluation], name: str | None = None
) -> None:
    """Check that evaluations measure the metric of a field early enough for it.

    Without a `name`, the field is the one that ends the run or ranks its checkpoints.
    """
    has_patience = parts.arguments.early_stopping_patience is not None
    is_ranked = name is None and not has_patience
    if name is None:
        name = "early_stopping_patience" if has_patience else "metric_for_best_model"
    if not evaluations:
        advice = "give dataset_eval"
        advice += "" if name == "scheduler" else ", or metric_for_best_model='train.loss'"
        refuse(name, f"data to evaluate on, to measure {metric}", "none", advice)
    manager = parts.checkpoint_manager
    saves = manager and (manager.every, manager.every_epochs, manager.every_minutes)
    if is_ranked and not any(saves or ()):
        return  # the only checkpoint is that of the end
    own = [item for item in evaluations if metric.startswith(f"{item.name}/")]
    if own and not any(item.every or item.every_epochs for item in own):
        advice = "write evaluation_strategy='epoch', or eval_steps"
        refuse(name, f"{metric} to be measured during the run", "one evaluation at the end", advice)


def _expect_metric(metric: str) -> AnyHook:
    """Make a hook that checks that an evaluation measures a metric."""
    kind = metric.rpartition("/")[0]

    def check(event: Event) -> None:
        names = sorted(name for name in event.metrics if name.rpartition("/")[0] == kind)
        if names and not event.is_train and metric not in names:
            expected = f"one of {', '.join(names)}, which are measured"
            refuse("metric_for_best_model", expected, f"{metric}")

    return check


# Before a run


def compile_steps(parts: RunParts, state: Any) -> RunParts:
    """Compile the steps that there are data for."""
    if (steps := parts.arguments.steps_per_call) > 1:
        expected = "1 for compile_aot, which compiles a single step"
        refuse("steps_per_call", expected, f"{steps}", "leave one of them out")
    loader, step = parts.dataloader_train, parts.train_step
    if loader is not None and not isinstance(step, CompiledStep):
        batches = loader if isinstance(loader, TrainingLoader) else TrainingLoader(iter(loader))
        compiled = compile_step(_unjitted(parts.fit_step), state, batches.peek())
        if iter(loader) is loader:
            parts = replace(parts, dataloader_train=batches)
        if step is parts.own_step:
            parts = replace(parts, own_step=compiled)
        parts = parts.with_train_step(compiled)
    loader, mesh = parts.dataloader_eval, mesh_of(state)
    if loader is None or parts.metrics_step is None:
        return parts
    batch = next(iter(loader() if callable(loader) else loader), None)
    if batch is None:
        refuse("dataloader_eval", "a batch to compile for", "none")
    if mesh is not None:
        batch = place_batch(batch, mesh)
    traced = parts.metrics_step.trace(state, batch)
    traced.lower().compile()  # jax keeps the program, and calls use it
    return replace(parts, eval_jaxpr=traced.jaxpr)
