"""Runs of the trainer: where they start, and the arguments of `fit`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepfold.adapter import from_arguments, loading, setup, steps
from stepfold.adapter import hooks as trainer_hooks
from stepfold.errors import ConfigError, refuse
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.loop.evaluate import Evaluation, mesh_of
from stepfold.loop.fit import FitResult, fit
from stepfold.loop.hooks.base import Event, Hook
from stepfold.loop.hooks.performance import memory_use
from stepfold.loop.hooks.stop import stop_early
from stepfold.loop.hooks.wrappers import callback, every
from stepfold.loop.run_info import move_previous_run
from stepfold.sharding.place import place_batch
from stepfold.tree import describe_value

if TYPE_CHECKING:
    from stepfold.adapter.trainer import Trainer

# The most steps in a row that a dynamic loss scale may skip: 25 bring it from its largest to its
# smallest value.
_MAX_SKIPPED = 50


def start(
    trainer: "Trainer", params: Any, state: Any, path: Any, *, more_steps: int | None
) -> bool:
    """Check that a run has data and an end, set its state, and move the batches to its position.

    Returns whether the run may resume from its own checkpoints.
    """
    loader, arguments = trainer.dataloader_train, trainer.arguments
    if loader is None:
        refuse("dataset_train", "data to train on", "None")
    has_end = trainer.max_training_steps or more_steps or trainer.plan.seconds is not None
    if not has_end and getattr(loader, "endless", False):
        raise ConfigError(
            "max_steps: expected a number of steps for data without an end, got None; give "
            "max_steps, or training_time_limit"
        )
    num_starts = sum(value is not None for value in (params, state, path))
    if num_starts > 1:
        refuse("train", "one of model_parameters, state and ckpt_path", "more")
    resume_from, is_first = arguments.resume_from_checkpoint, trainer.result is None
    may_resume = not is_first or (arguments.resume_if_possible and resume_from is not False)
    if is_first and num_starts == 0 and isinstance(resume_from, str):
        # A run with checkpoints of its own continues from these, but the path has to exist.
        is_own = setup.is_newest(trainer, resume_from)
        path = resume_from if is_own or trainer.checkpoint_path is None else None
    source, trainer.state_source = trainer.state_source, None
    new, data = trainer.state, None
    if params is not None:
        new, source = setup.first_state(trainer, None, params, trainer.tx), "model_parameters"
    elif state is not None:
        if not setup.is_state(state):
            advice = "give parameters alone as model_parameters"
            refuse("state", "a state, with params and step", describe_value(state), advice)
        new, source = setup.first_state(trainer, None, state, trainer.tx), "state"
    elif path is not None and setup.is_newest(trainer, path):
        may_resume = True
    elif path is not None:
        restored = setup.restore_path(trainer, path, trainer.abstract_state)
        new, data, source = restored.state, restored.data, "ckpt_path"
    if source is not None:
        setup.check_start(trainer, source, new)
        trainer.set_state(new)
    loading.seek(loader, data, int(getattr(trainer.state, "step", 0)))
    return may_resume


def fit_trainer(trainer: "Trainer", *, more_steps: int | None, resume: bool) -> FitResult:
    """Run a trainer's steps with its evaluations, hooks and checkpoints."""
    arguments, plan, loader = trainer.arguments, trainer.plan, trainer.dataloader_train
    step, evaluations = _train_step(trainer), _evaluations(trainer)
    hooks = make_hooks(trainer, has_evaluations=bool(evaluations))
    if isinstance(step, steps.StepWithHooks):
        hooks.insert(0, lambda _: step.raise_pending())
    logs = trainer.logs_path
    is_resumed = trainer.checkpoint_path is not None
    if not is_resumed and trainer.writer is not None and trainer.is_enable:
        trainer.writer.flush()  # rows logged before this run stay in the earlier run's files
        move_previous_run(logs, int(getattr(trainer.state, "step", 0)))
    total = trainer.max_training_steps if more_steps is None else None
    # A loader of a subclass may be one epoch that can be iterated again.
    epochs = arguments.num_train_epochs
    has_no_length = total is None and more_steps is None
    is_repeated = has_no_length and epochs > 1 and iter(loader) is not loader
    has_report = trainer.writer is not None and "jsonl" in arguments.report_to
    return fit(
        step,
        _take_state(trainer) if is_resumed else trainer.state,
        loader,
        steps=total,
        epochs=epochs if is_repeated else None,
        more_steps=more_steps,
        run_dir=logs if has_report else None,  # the report is drawn from the JSON lines
        evaluation=evaluations,
        checkpoints=trainer.checkpoint_manager,
        hooks=hooks,
        log_every=plan.log_every,
        resume=resume,
        steps_per_call=arguments.steps_per_call,
        time_limit=plan.seconds,
    )


def _take_state(trainer: "Trainer") -> Any:
    """Return the state without keeping it, so that its memory is free once another is restored."""
    state, trainer.state = trainer.state, None
    return state


def _train_step(trainer: "Trainer") -> Callable[..., Any]:
    own = trainer.sharded_training_step_function
    if trainer.step_with_metrics[0] is not own:  # kept, since `fit` reuses its program
        trainer.step_with_metrics = own, steps.as_train_step(own)
    step: Callable[..., Any] = trainer.step_with_metrics[1]
    if not trainer.overrides("on_step_start") and not trainer.overrides("on_step_end"):
        return step
    if trainer.arguments.steps_per_call > 1:
        raise ConfigError(
            "steps_per_call: expected 1 with on_step_start or on_step_end overridden, which run "
            f"between steps, got {trainer.arguments.steps_per_call}; override on_log instead"
        )
    return steps.StepWithHooks(step, trainer.on_step_start, trainer.on_step_end)


def _evaluations(trainer: "Trainer") -> list[Evaluation]:
    plan, measure = trainer.plan, trainer.metrics_step
    if trainer.dataloader_eval is None or not plan.evaluates or measure is None:
        return list(trainer.evaluations)
    own = Evaluation(
        measure,
        trainer.eval_batches,
        every=plan.evaluation_every,
        every_epochs=plan.evaluation_every_epochs,
    )
    return [own, *trainer.evaluations]


def make_hooks(trainer: "Trainer", *, has_evaluations: bool) -> list[Hook]:
    """Make the hooks of a run. The trainer's comes after those that return numbers."""
    arguments = trainer.arguments
    hooks: list[Hook] = []
    if trainer.sharded_training_step_function is trainer.own_step:  # which skips a NaN or inf
        scales_loss = from_arguments.precision(arguments).needs_loss_scale
        hooks.append(trainer_hooks.StopOnSkipped(_MAX_SKIPPED if scales_loss else 1))
    metric, mode = from_arguments.best_metric(arguments)
    patience = arguments.early_stopping_patience
    metric = "eval/loss" if metric is None and patience is not None else metric
    is_of_evaluation = metric is not None and not metric.startswith("train/")
    if is_of_evaluation and not has_evaluations:
        name = "metric_for_best_model" if patience is None else "early_stopping_patience"
        raise ConfigError(
            f"{name}: expected data to evaluate on, to measure {metric}, got none; give "
            "dataset_eval, or metric_for_best_model='train.loss'"
        )
    trainer.early_stopping = None
    if metric is not None and patience is not None:
        trainer.early_stopping = stop_early(
            metric, patience=patience, mode=mode, keep_state=is_of_evaluation
        )
        hooks.append(trainer.early_stopping)
    if arguments.track_memory:
        hooks.append(memory_use)
    if arguments.weight_distribution_log_steps is not None:

        def log_weights(event: Event) -> None:  # returns none, since they are too many for a bar
            trainer.log_weight_distribution(event.state, event.step)

        hooks.append(every(arguments.weight_distribution_log_steps, log_weights))
    hooks += [*(callback(function, trainer) for function in trainer.callbacks), *trainer.hooks]
    hooks.append(trainer_hooks.TrainerHook(trainer))
    return hooks if metric is None else [*hooks, _expect_metric(metric)]


def _expect_metric(metric: str) -> Hook:
    """Make a hook that checks that an evaluation measures a metric."""
    kind = metric.rpartition("/")[0]

    def check(event: Event) -> None:
        names = sorted(name for name in event.metrics if name.rpartition("/")[0] == kind)
        if names and not event.is_train and metric not in names:
            raise ConfigError(
                f"metric_for_best_model: expected one of {', '.join(names)}, which are measured, "
                f"got {metric}"
            )

    return check


def compile_steps(trainer: "Trainer") -> bool:
    """Compile the steps that a trainer has data for; return whether there are any."""
    if trainer.arguments.steps_per_call > 1:
        raise ConfigError(
            "steps_per_call: expected 1 for compile_aot, which compiles a single step, got "
            f"{trainer.arguments.steps_per_call}; leave one of them out"
        )
    state, step = trainer.model_state, trainer.sharded_training_step_function
    loader = trainer.dataloader_train
    if loader is not None and not isinstance(step, CompiledStep):
        is_ours = isinstance(loader, loading.TrainingLoader)
        batches = loader if is_ours else loading.TrainingLoader(iter(loader))
        if iter(loader) is loader:
            trainer.dataloader_train = batches
        compiled = compile_step(steps.as_train_step(step), state, batches.peek())
        trainer.own_step = compiled if step is trainer.own_step else trainer.own_step
        trainer.sharded_training_step_function = compiled
    loader, mesh = trainer.dataloader_eval, mesh_of(state)
    if loader is not None and trainer.metrics_step is not None:
        batch = next(iter(loader() if callable(loader) else loader), None)
        if batch is None:
            refuse("dataloader_eval", "a batch to compile for", "none")
        if mesh is not None:
            batch = place_batch(batch, mesh)
        traced = trainer.metrics_step.trace(state, batch)
        traced.lower().compile()  # jax keeps the program, and calls use it
        trainer.eval_jaxpr = traced.jaxpr
    return trainer.dataloader_train is not None or trainer.dataloader_eval is not None
