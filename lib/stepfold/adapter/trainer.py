"""The trainer: an object with EasyDeL's `BaseTrainerProtocol` that delegates to `fit`."""

import functools
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter import from_arguments, loading, run, saving, setup, steps
from stepfold.adapter import hooks as trainer_hooks
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.hooks import ProgressBar, StopTraining, Watcher
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.adapter.parts import RunPart, RunParts
from stepfold.adapter.sizes import Sizes
from stepfold.adapter.validation import check_functions, check_list, check_methods
from stepfold.checkpoint.checkpoints import save
from stepfold.checkpoint.names import NameMap
from stepfold.checkpoint.store import open_store
from stepfold.core.state import is_available
from stepfold.core.validation import absolute_path, read_function, read_instance, refuse_unknown
from stepfold.errors import ConfigError, refuse, warn
from stepfold.hooks.weights import weight_statistics
from stepfold.inspect.flops import count, estimate
from stepfold.loop.evaluate import Evaluation, evaluate
from stepfold.loop.events import Event
from stepfold.loop.hook import AnyHook, Hook, Sink, call_optional
from stepfold.loop.metrics import metric_values
from stepfold.runs.directory import RunDirectory
from stepfold.runs.fit import FitResult, fit
from stepfold.runs.info import move_previous_run
from stepfold.runs.predict import predict

# Arguments of other trainers, and what to write here.
OTHER_LIBRARIES = {
    "args": "write arguments=…",
    "compute_metrics": "return metrics from the loss function, as {'name': sf.mean(values, mask)}",
    "eval_dataset": "write dataset_eval=…",
    "lr_scheduler": "write scheduler=…",
    "model_init": "write model=…, a function of a key",
    "optimizer": "write tx=…, an optimizer of optax",
    "optimizers": "write tx=… and scheduler=…",
    "processing_class": "write metadata={'tokenizer': …}, and tokenize in the dataset",
    "resume_from_checkpoint": "write ckpt_path=…; without it, a run resumes from its output_dir",
    "tokenizer": "write metadata={'tokenizer': …}, and tokenize in the dataset",
    "train_dataset": "write dataset_train=…",
}


class Trainer:
    """A run as an object, for code that expects EasyDeL's `BaseTrainerProtocol`.

    It holds the parts of a run, and delegates to `fit` and `evaluate`. A subclass may override any
    method. A run calls those that configure it, collate, log, evaluate and save, and the hooks;
    `evaluate`, `eval` and `save_pretrained` only if they are overridden. Unless `on_step_start` or
    `on_step_end` is overridden, no Python runs between steps.

    Attributes:
      model_state: the state; `state` and `_model_state` are the same.
      mesh: the mesh of the devices.
      tx, scheduler: the optimizer, which is also `optimizer`, and its schedule.
      sizes: the `Sizes` of the run: batch sizes, steps, intervals.
      training_batch_size, evaluation_batch_size: the examples of a batch, over all devices.
      history: the metrics of the run, as of `fit`; `epoch_history` has them by epoch.
      stopped: why the last run ended.
      result: the `FitResult` of the last run, with its `stop_reason` and `capsule`.
      loaded, not_loaded: the paths that were loaded from `init_weights_from` or by
        `load_checkpoint`, and why others were not.

    >>> import jax, numpy as np, stepfold as sf
    >>> from stepfold.adapter import Trainer, TrainingArguments
    >>> trainer = Trainer(
    ...     TrainingArguments(max_steps=20, total_batch_size=8, progress_bar_type="none"),
    ...     model=lambda key: jax.random.normal(key, (3,)),
    ...     dataset_train={"x": np.ones((16, 3), np.float32)},
    ...     loss_fn=lambda params, batch, key: sf.mean((batch["x"] @ params) ** 2, batch["mask"]),
    ... )
    >>> trainer.train().stopped, int(trainer.state.step)
    ('all 20 steps were done', 20)
    """

    # On the class, so that a subclass may also inherit from an abstract class with these.
    arguments, sizes, mesh, rules, logs_path = RunPart(), RunPart(), RunPart(), RunPart(), RunPart()
    model, config, data_collator, finetune = RunPart(), RunPart(), RunPart(), RunPart()
    stateful, dataset_train, dataset_eval = RunPart(), RunPart(), RunPart()
    dataloader_train, dataloader_eval = RunPart(), RunPart()
    max_training_steps, max_evaluation_steps = RunPart(), RunPart()
    loss_fn, eval_loss_fn, tx, scheduler = RunPart(), RunPart(), RunPart(), RunPart()
    pruning_module, evaluations, hooks, callbacks = RunPart(), RunPart(), RunPart(), RunPart()
    watchers, checkpoint_manager, train_tracker = RunPart(), RunPart(), RunPart()
    evalu_tracker, dtype, param_dtype = RunPart(), RunPart(), RunPart()
    memory_monitor, state_shape = RunPart(), RunPart()
    state_shardings = state_named_sharding = property(
        attrgetter("_parts.state_shardings"), doc="The sharding of each leaf of the state."
    )
    state_partition_spec = property(
        attrgetter("_parts.state_partition_spec"), doc="The partition spec of each leaf."
    )
    abstract_state = property(
        attrgetter("_parts.abstract_state"), doc="The state without its values, to restore into."
    )
    sharded_mesh = property(
        attrgetter("_parts.sharded_mesh"),
        doc="The mesh, or None if it is jax's default device alone, which needs no shardings.",
    )
    training_batch_size = property(
        attrgetter("sizes.train_batch"), doc="The examples of a training batch, over all devices."
    )
    evaluation_batch_size = property(
        attrgetter("sizes.eval_batch"), doc="The examples of an evaluation batch, over all devices."
    )
    optimizer = RunPart("tx")
    train_step_fn = sharded_training_step_function = RunPart("train_step", RunParts.with_train_step)
    eval_step_fn = sharded_evaluation_step_function = RunPart("eval_step", RunParts.with_eval_step)
    # Of the last run.
    result: FitResult | None = None
    stopped: str | None = None
    watched_step = 0  # of the last `log_watchers`
    _run_hooks: Sequence[AnyHook] = ()
    _best_states: Mapping[str, Any] = {}  # by hook: the step and state, or None
    _state_source: str | None = None  # the argument that replaced the state since then
    best = property(
        lambda self: getattr(self.result, "best", None),
        doc="The step of the best checkpoint of the last run, or None.",
    )
    epochs_done = property(
        lambda self: getattr(self._run_hook, "epochs_done", 0),
        doc="The number of epochs that the last run has done.",
    )
    progress_bar = property(
        lambda self: getattr(self._run_hook, "bar", None),
        doc="The progress bar of the last run, or None.",
    )

    def __init__(
        self,
        arguments: TrainingArguments | None = None,
        model_state: Any = None,
        model: Any = None,
        dataset_train: Any = None,
        dataset_eval: Any = None,
        data_collator: Callable[..., Any] | None = None,
        finetune: bool = True,
        *,
        loss_fn: Callable[..., Any] | None = None,
        eval_loss_fn: Callable[..., Any] | None = None,
        stateful: bool = False,
        tx: optax.GradientTransformation | None = None,
        scheduler: Callable[..., Any] | None = None,
        rules: Any = None,
        names: NameMap | None = None,
        devices: Sequence[jax.Device] | None = None,
        evaluations: Sequence[Evaluation] = (),
        hooks: Sequence[AnyHook] = (),
        callbacks: Sequence[Callable[..., Any]] = (),
        watchers: Sequence[Watcher] = (),
        config: Any = None,
        metadata: Mapping[str, Any] | None = None,
        **deprecated_kwargs: Any,
    ) -> None:
        """Check the arguments, and make all that a run needs.

        Args:
          arguments: `TrainingArguments`.
          model_state: the initial state or parameters.
          model: a function `key -> params` or a tree of parameters; with `model_state`, any object.
          dataset_train: a source or stream, as for `stepfold.batches`.
          dataset_eval: the same, for evaluations.
          data_collator: a function from a list of examples to a batch; by default the attribute
            `data_collator` of the dataset, if it has one.
          finetune: whether to use the parameters of `model_state`; False initializes new ones.
          loss_fn: a `LossFn`; required unless a subclass overrides `configure_functions`.
          eval_loss_fn: the loss function of evaluations; `loss_fn` by default.
          stateful: whether the loss functions have a model state.
          tx: an optimizer, instead of that of the arguments.
          scheduler: a schedule, instead of that of the arguments; with `tx`, it is only logged.
          rules: sharding rules of the state, as for `make_sharding`.
          names: the names of the parameters in safetensors, which `init_weights_from` reads, with
            a cast to the dtypes of the state, and `save_pretrained` writes for torch.
          devices: the devices of the mesh; all by default.
          evaluations: further evaluations, such as one that generates text.
          hooks: hooks, as for `fit`.
          callbacks: functions `(trainer, epoch, metrics)`, called after each epoch.
          watchers: functions of the state whose numbers are logged.
          config: the configuration of the model.
          metadata: objects by name to write next to the checkpoints, such as a tokenizer: by their
            own `save_pretrained`, or as JSON. One of the name `config` replaces `config`.
          **deprecated_kwargs: not accepted; the error says what to write.

        Raises:
          ConfigError: if an argument is not as described.
        """
        known = [*inspect.signature(Trainer.__init__).parameters][1:-1]
        refuse_unknown(type(self).__name__, deprecated_kwargs, known, OTHER_LIBRARIES)
        expected = "TrainingArguments"
        arguments = read_instance("arguments", arguments, TrainingArguments, expected)
        check_methods(self)
        self._parts = setup.make_parts(
            arguments,
            devices=devices,
            rules=rules,
            names=names,
            model=model,
            initial=model_state,
            config=config,
            dataset_train=dataset_train,
            dataset_eval=dataset_eval,
            data_collator=data_collator,
            finetune=finetune,
            loss_fn=loss_fn,
            eval_loss_fn=eval_loss_fn,
            stateful=stateful,
            tx_argument=tx,
            scheduler_argument=scheduler,
            evaluations=check_list("evaluations", evaluations, "sf.Evaluation(…)", Evaluation),
            hooks=check_list("hooks", hooks, "functions of an event", others=(Hook, Sink)),
            callbacks=check_list("callbacks", callbacks, "functions (trainer, epoch, metrics)"),
            watchers=trainer_hooks.check_watchers(watchers),
            metadata=saving.check_metadata(config, metadata),
        )
        self._state = model_state
        self.history: Any = {}
        self.initialize_trainer_utils()

    def __getattr__(self, name: str) -> Any:
        error = AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "plan" and "_parts" in vars(self):
            warn("Trainer.plan is now Trainer.sizes", DeprecationWarning)
            return self.sizes
        if name == "left":
            error = AttributeError("Trainer.left is now Trainer.not_loaded")
        elif "_parts" not in vars(self) and not name.startswith("__"):
            error.add_note(
                "call super().__init__(arguments, …), which makes the parts of a Trainer"
            )
        raise error

    def _complete(self) -> None:
        """Make the parts of a subclass whose `__init__` does not call `super().__init__`."""
        own = vars(self)
        if "_parts" in own or "arguments" not in own:
            return
        state, names = own.get("_state"), ("model", "dataset_train", "dataset_eval")
        options: dict[str, Any] = {name: own.get(name) for name in names}
        Trainer.__init__(self, own["arguments"], **options)
        if state is not None:
            self.set_state(state)

    # What a run needs, in the order in which it is made

    def initialize_trainer_utils(self) -> None:
        """Make writers, timers, batches, the state and the steps."""
        arguments = self.arguments
        self.writer: Any = from_arguments.writers(arguments)
        self.timer = trainer_hooks.Timers()
        self._parts = setup.with_dataloaders(self._parts, self.configure_dataloaders())
        model = self.configure_model()
        self._parts, state = setup.with_model(self._parts, model)
        weights, folder = arguments.init_weights_from, arguments.checkpoints_dir
        loaded = setup.load_weights(weights, state, folder, self._parts.names)
        state, self.loaded, self.not_loaded = loaded
        if self.overrides("configure_functions") and self.tx is not None:
            self._parts = replace(self._parts, state_type=steps.make_state_type(self.tx))
        self.set_state(state)
        functions, state = self.configure_functions(), self._state
        self._parts, self._state = setup.with_functions(self._parts, state, functions)

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Make batches of the datasets, and count the steps."""
        sizes, data, train, evaluation = self.sizes, self.dataset_train, None, None
        if data is not None:
            collect = self._collect_of(data)
            train = loading.training_batches(self.arguments, sizes, data, collect)
        if self.dataset_eval is not None:
            evaluation = self._evaluation_batches(self.dataset_eval, sizes)
        return TrainerConfigureDataloaderOutput(train, sizes.steps, evaluation, sizes.eval_steps)

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Make the optimizer, its schedule, and the state."""
        parts = self._parts
        tx, scheduler = self.make_optimizer()
        state = setup.first_state(parts, self.model, parts.initial, tx)
        self._parts = replace(parts, own_state=state)
        return TrainerConfigureModelOutput(self.model, tx, scheduler, self.config, state=state)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Make the jitted steps, the mesh, and the description of the checkpoints."""
        parts = self._parts
        train_step, eval_step = setup.jit_steps(parts)
        self._parts = replace(parts, own_step=train_step)
        manager = from_arguments.checkpoints(self.arguments, parts.sizes)
        return TrainerConfigureFunctionOutput(train_step, parts.mesh, manager, eval_step)

    def _collect_of(self, dataset: Any) -> loading.Collect | None:
        """Return the function from a list of examples to a batch; None stacks them."""
        loading.refuse_batches(dataset)
        kind = "tfds_" if hasattr(dataset, "as_numpy_iterator") else ""
        kind = "grain_" if self.arguments.use_grain else kind
        names = [f"create_{kind}collect_function", "create_collect_function"]
        own = next(filter(self.overrides, names), None)
        make = getattr(self, own or names[0])
        collator = loading.collator_of(self.data_collator, dataset, self.dataset_train)
        check_functions(data_collator=collator)
        if collator is None and own is None:
            loading.warn_of_batches(dataset)
        return loading.collect_of(self.arguments, collator, make, is_own=own is not None)

    def _evaluation_batches(self, dataset: Any, sizes: Sizes) -> loading.EvaluationLoader:
        collect, mesh = self._collect_of(dataset), self._parts.sharded_mesh
        return loading.evaluation_batches(self.arguments, sizes, dataset, collect, mesh)

    def create_collect_function(
        self, max_sequence_length: int | None = None, truncation_mode: str = "keep_end"
    ) -> loading.Collect:
        """Make a function that pads and truncates a list of examples, or a dict of columns."""
        return loading.collect_function(max_sequence_length, truncation_mode)

    def create_grain_collect_function(self, *args: Any, **kwargs: Any) -> loading.Collect:
        """Make the collect function of data that grain reads; by default the same."""
        return self.create_collect_function(*args, **kwargs)

    def create_tfds_collect_function(self, *args: Any, **kwargs: Any) -> loading.Collect:
        """Make the collect function of data that tf.data reads; by default the same."""
        return self.create_collect_function(*args, **kwargs)

    # The run

    def train(
        self,
        model_parameters: Any = None,
        state: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        more_steps: int | None = None,
        **unknown: Any,
    ) -> TrainerOutput:
        """Train to the end of the run, from the newest checkpoint in `output_dir` if there is one.

        A NaN or inf in the loss, the time limit, a signal, or an exception in a method or hook ends
        the run after a save. Signals and exceptions are raised after the save, as by `fit`.

        Args:
          model_parameters: parameters to start with; a path is taken as the `ckpt_path`.
          state: a state to continue from.
          ckpt_path: a checkpoint to continue from: the folder of a step or of a run, or what
            `save_pretrained` wrote.
          more_steps: the number of steps to do, in place of the end that the arguments set. The
            schedule stays that of the arguments.
          **unknown: not accepted; the error says what to write.

        Returns:
          The state, and the path of the last checkpoint.
        """
        self._complete()
        known = [*inspect.signature(Trainer.train).parameters][1:-1]
        refuse_unknown("train", unknown, known, OTHER_LIBRARIES)
        if not self.arguments.do_train:
            return self._output("do_train is False")
        run.check_length(self._parts, more_steps)
        if isinstance(model_parameters, str | os.PathLike):
            model_parameters, ckpt_path = None, model_parameters if ckpt_path is None else ckpt_path
        state = setup.state_of(state)
        chosen = {"model_parameters": model_parameters, "state": state, "ckpt_path": ckpt_path}
        before, is_first = (self.state, self._state_source), self.result is None
        start = run.find_start(self._parts, *before, chosen, is_first=is_first)
        if start.source is not None:
            self.set_state(start.state)
        step = int(getattr(self.state, "step", 0))
        if start.data is not None:
            self._parts = replace(self._parts, data_offset=loading.offset_of(start.data, step))
        loading.seek(self.dataloader_train, start.data, step + self._parts.data_offset)
        may_resume = start.may_resume
        # So that a restored state can take their memory.
        del start, before, chosen, state, model_parameters
        self.writer = self.writer or from_arguments.writers(self.arguments)
        try:
            self.start_training_hook()
            with self.timer("train"):
                self._use_result(self._fit(more_steps, resume=may_resume))
        except BaseException as error:
            trainer_hooks.add_advice(error)
            if hasattr(error, "result"):
                self._use_result(error.result)
            else:
                self.stopped = f"{type(error).__name__}: {error}"
                self._recover_state()
            raise
        finally:
            self._state_source = None
            self.finish()
        return self._output(str(self.stopped))

    def _fit(self, more_steps: int | None, *, resume: bool) -> FitResult:
        """Run the steps, with evaluations, hooks and checkpoints."""
        arguments, parts = self.arguments, self._parts
        step, evaluations = run.make_fit_step(parts, self), run.evaluations_of(parts, self)
        hooks = run.make_hooks(parts, self, step, evaluations=evaluations)
        self._best_states = best = dict[str, Any]()
        self._run_hooks = [trainer_hooks.note_best_state(hook, best) for hook in hooks]
        evaluations += run.saves_of(parts, self)
        is_resumed = self.checkpoint_path is not None
        if not is_resumed and self.writer is not None and self.is_enable:
            self.writer.flush()  # rows logged before this run stay in the earlier run's files
            move_previous_run(self.logs_path, int(getattr(self.state, "step", 0)))
        self.dataloader_train = loading.skippable(self.dataloader_train)
        if arguments.output_dir is not None:
            folder = absolute_path("output_dir", arguments.output_dir)
            saving.write_arguments(folder, arguments)
            saving.write_metadata(folder, parts.metadata)
        has_report = self.writer is not None and "jsonl" in arguments.report_to
        length, epochs = run.run_length(parts, more_steps)
        logs = self.logs_path if has_report else None  # the report is drawn from the JSON lines
        directory = RunDirectory(logs, config=from_arguments.config_of(arguments))
        return fit(  # without `**`, since a tuple of its arguments would keep the state
            step,
            self._take_state() if is_resumed else self.state,
            self.dataloader_train,
            steps=length,
            epochs=epochs,
            more_steps=more_steps,
            run_dir=directory,
            evaluation=evaluations,
            checkpoints=self.checkpoint_manager,
            hooks=self._run_hooks,
            log_every=self.sizes.log_every,
            resume=resume,
            steps_per_call=arguments.steps_per_call,
            time_limit=self.sizes.seconds,
        )

    def _take_state(self) -> Any:
        """Return the state without keeping it, so that a restored one can take its memory."""
        state, self._state = self._state, None
        return state

    def finish(self) -> None:
        """Close the bar and the writers. Idempotent."""
        call_optional(self._run_hook, "close_bar")
        writer, self.writer = self.writer, None
        if writer is not None and self.is_enable:
            writer.close()

    def on_step_start(self, state: Any, step: int) -> Any:  # noqa: ARG002
        """Override to run before each step; return the state, or None to leave it unchanged."""
        return state

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:  # noqa: ARG002
        """Override to run after each step; return `(state, metrics)`, or None."""
        return state, metrics

    def on_log(self, metrics: Mapping[str, float], step: int) -> None:
        """Override to run at each log point and after each evaluation."""

    def start_training_hook(self) -> None:
        """Override to run before the first step."""

    def start_evaluation_hook(self) -> None:
        """Override to run before each evaluation."""

    def apply_training_hooks(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """End the run if the loss is NaN or inf, or the time is up; called at each log point.

        Raises:
          StopTraining: to end the run after a save.
        """
        numbers = steps.by_name(metrics, "apply_training_hooks")
        for name in ("loss", "train/loss"):
            if not np.isfinite(numbers.get(name, 0.0)):
                raise StopTraining(f"{name} is {float(numbers[name])}", "nonfinite")
        limit = self.sizes.seconds
        if limit is not None and self.timer.running("train") >= limit:
            raise StopTraining(f"the time limit of {limit:g} s was reached", "time_limit")
        return metrics

    # Metrics

    def create_progress_bar(
        self, total: int | None, desc: str = "", disabled: bool = False
    ) -> ProgressBar | trainer_hooks.NullProgressBar:
        """Make the bar of `progress_bar_type`, or one that draws nothing."""
        kind = self.arguments.progress_bar_type
        if disabled or kind == "none" or self.arguments.performance_mode:
            return trainer_hooks.NullProgressBar()
        return ProgressBar(kind, total, desc, metrics=self.arguments.metrics_to_show_in_rich_pbar)

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        pbar: Any,
        step: int,
        mode: str = "train",
        *,
        update_progress: bool = True,
        log_to_backends: bool = True,
        force_report: bool = False,
    ) -> None:
        """Show metrics on a bar every `log_steps`, and write them every `report_steps`.

        A run calls this at each log point and after each evaluation. Metrics of evaluations and of
        the last step are always shown and written. If the interval is that of the log points,
        others are shown or written at every call: the end of an epoch is a log point too, and need
        not be a multiple.

        Args:
          metrics: numbers by name; a name without a prefix gets that of the mode, such as `train/`.
            Gradient norms are not shown, and written only with `log_grad_norms`.
          pbar: a bar of `create_progress_bar` or of tqdm, or None.
          step: the number of steps done.
          mode: "train" or "eval".
          update_progress: whether the metrics may be shown.
          log_to_backends: whether they may be written.
          force_report: whether to write them at any step.
        """
        numbers = {
            name if "/" in name else f"{mode}/{name}": float(value)
            for name, value in metrics.items()
            if "mlperf" not in name
        }
        without_norms = {name: x for name, x in numbers.items() if "grad_norm" not in name}
        if update_progress and pbar is not None and self._is_due(step, self.sizes.log_steps, mode):
            pbar.set_postfix(dict(without_norms))
            pbar.update(step - getattr(pbar, "step", getattr(pbar, "n", 0)))
        is_due = force_report or self._is_due(step, self.sizes.report_steps, mode)
        if log_to_backends and is_due:
            self._write(step, numbers if self.arguments.log_grad_norms else without_norms)

    def log_weight_distribution(self, state: Any, step: int) -> dict[str, float]:
        """Measure and write the distribution of the weights by path, with histograms."""
        writer = self.writer if self.is_enable else None
        pattern = self.arguments.weight_distribution_pattern or ""
        measure = weight_statistics(pattern, writer=writer)
        return self._write(step, measure(Event(step, None, {}, state)))

    def log_watchers(self, state: Any, step: int) -> dict[str, float]:
        """Call the watchers whose interval has passed since the last call, and write their numbers.

        In a run it is called at each log point, with the state of exactly that step.

        Raises:
          ConfigError: if a watcher returns anything but numbers.
        """
        since = self.watched_step if self.watched_step < step else step - 1
        self.watched_step = step
        due = [w for w in self.watchers if step // w.every > since // w.every]
        values = {watcher.name: watcher.function(state) for watcher in due}
        return self._write(step, metric_values(jax.device_get(values), "watch/"))

    def _write(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        if numbers and self.writer is not None and self.is_enable:
            self.writer.write_scalars(step, numbers)
        return numbers

    # Evaluation

    def evaluate(
        self, state: Any = None, metric_calculator: Any = None, *, dataset: Any = None
    ) -> dict[str, float]:
        """Return the metrics of a state on the evaluation data, such as `eval_loss`; log nothing.

        A run calls the method of a subclass for each of its evaluations.

        Args:
          state: the state, by default the trainer's. Anything else is taken as the `dataset`.
          metric_calculator: a function that returns further metrics: `(state, batch) -> metrics`,
            or a function of the numbers by name.
          dataset: other data to evaluate on.
        """
        self._complete()
        state = setup.state_of(state)
        if state is not None and not setup.is_state(state) and dataset is None:
            state, dataset = None, state
        state = self.state if state is None else state
        batches = self.eval_batches(dataset)
        with self.timer("evaluation"):
            return steps.evaluate_with(self._eval_step(), state, batches, metric_calculator)

    def eval(self, model_state: Any) -> Iterator[dict[str, float]]:
        """Evaluate a state on each batch of the evaluation data.

        A run calls the method of a subclass that does not override `evaluate`. It may return a
        dict, or yield one for each batch. The run logs the means over batches. They are exact for
        metrics such as `sf.mean(values, mask)`, and not for numbers of unequal batches.
        """
        for batch in self.eval_batches():
            metrics = evaluate(self._eval_step(), setup.state_of(model_state), [batch])
            yield {f"eval_{name}": value for name, value in metrics.items()}

    def predict(
        self,
        dataset: Any,
        function: Callable[[Any, Any], Any] | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Return the outputs for every example of a dataset, in order, as `sf.predict` does.

        `function` is `(params, batch) -> outputs`, such as the model that the loss function calls.
        With a folder `to`, outputs are written to files, and the paths of these are returned.
        """
        function = read_function("function", function, "a function (params, batch) -> outputs")
        sizes = self.sizes._replace(eval_steps=None)
        batches = iter(self._evaluation_batches(dataset, sizes))
        params = getattr(self.state, "params", self.state)
        return predict(function, params, batches, to=to)

    def eval_batches(self, dataset: Any = None) -> Iterator[Any]:
        """Return the batches of an evaluation, after `start_evaluation_hook`."""
        self.start_evaluation_hook()
        if dataset is not None:
            sizes = self.sizes._replace(eval_steps=self.arguments.max_evaluation_steps)
            return iter(self._evaluation_batches(dataset, sizes))
        loader = self.dataloader_eval
        if loader is None:
            refuse("dataset_eval", "data to evaluate on", "None")
        batches = iter(loader() if callable(loader) else loader)
        return itertools.islice(batches, self.max_evaluation_steps)

    # Before the run

    def compile_aot(self) -> bool:
        """Compile the steps that there are data for ahead of time; return whether there are any."""
        self._parts = run.compile_steps(self._parts, self.state)
        return self.dataloader_train is not None or self.dataloader_eval is not None

    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> int:
        """Count the floating-point operations of a step on all devices.

        After `compile_aot`, this counts the matrix products and convolutions in the compiled step.
        Before, it estimates 6 operations for each parameter and token in training, and 2 in an
        evaluation.
        """
        train_step = self.sharded_training_step_function
        jaxpr = getattr(train_step, "jaxpr", None) if is_training else self._parts.eval_jaxpr
        if jaxpr is not None:
            return count(jaxpr).dots
        batch = self.training_batch_size if is_training else self.evaluation_batch_size
        tokens = batch * (self.arguments.max_length or 1)
        return estimate(self.count_model_parameters(params), tokens, training=is_training)

    @staticmethod
    def count_model_parameters(prm: Any) -> int:
        """Count the numbers in the arrays of any tree, abstract ones included."""
        arrays = [leaf for leaf in jax.tree.leaves(prm) if tree.is_array(leaf)]
        keys = jax.dtypes.prng_key
        return sum(math.prod(x.shape) for x in arrays if not jnp.issubdtype(x.dtype, keys))

    def specs_to_name_sharding(self, tree: Any, mesh: Mesh | None = None) -> Any:
        """Make named shardings of a tree of partition specs, on this mesh or another."""
        make = functools.partial(NamedSharding, self.mesh if mesh is None else mesh)
        return jax.tree.map(make, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    # Saving and loading

    def save_pretrained(
        self,
        state: Any = None,
        save_directory: Any = None,
        gather_fns: Any = None,
        to_torch: bool = False,
        easystate_to_huggingface_model_kwargs: Mapping[str, Any] | None = None,
        torch_save_pretrained_kwargs: Mapping[str, Any] | None = None,
        *,
        ckpt_path: Any = None,
    ) -> Path:
        """Save a state with arguments and data position, to resume from, or parameters for torch.

        Both `save_pretrained(path, state)` and `(state, save_directory=path)` work. Without a
        state, the trainer's is saved. `to_torch` writes the parameters alone, as safetensors that
        torch loads, with the `names` of the trainer. `easystate_to_huggingface_model_kwargs` may
        have other `names`, also as names in torch by path, and `torch_save_pretrained_kwargs` the
        `metadata` of the file. The `metadata` of the trainer are written too. `gather_fns` must be
        None. The default path is `output_dir/pretrained`. A state that is there already is not
        saved again; another state of the same step is refused. Returns the folder of the
        checkpoint, or that of the safetensors.

        A run saves its own checkpoints. In addition it calls the method of a subclass at each step
        of `save_strategy` and at the end, with the path `output_dir/pretrained/<step>`. The latest
        `save_total_limit` of these folders are kept.
        """
        self._complete()
        output_dir, values = self.arguments.output_dir, (save_directory, ckpt_path)
        default = None if output_dir is None else Path(output_dir) / run.PRETRAINED
        path, state = saving.path_and_state(setup.state_of(state), *values, default=default)
        state = self.state if state is None else state
        if gather_fns is not None:
            expected = "None, since arrays are saved from where they are"
            refuse("gather_fns", expected, tree.describe_value(gather_fns), "leave it out")
        if to_torch:
            names = {"names": self._parts.names, **(easystate_to_huggingface_model_kwargs or {})}
            metadata = torch_save_pretrained_kwargs or {}
            refuse_unknown("save_pretrained", names, ["names"])
            refuse_unknown("save_pretrained", metadata, ["metadata"])
            saving.save_for_torch(path, getattr(state, "params", state), **names, **metadata)
            saving.write_metadata(path, self._parts.metadata)
            return path
        step = int(getattr(state, "step", 0))
        data = loading.position_at(self.dataloader_train, step + self._parts.data_offset)
        saving.write_arguments(path, self.arguments)
        saving.write_metadata(path, self._parts.metadata)
        metrics = {name: curve[-1] for name, curve in self.history.items() if len(curve)}
        if not saving.holds_state(path, state, step):
            save(path, state, step=step, data=data, metrics=metrics)
        return path / str(step)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> Path:
        """Write the parameters for torch, as `save_pretrained(to_torch=True)` does."""
        return self.save_pretrained(save_directory=output_dir, to_torch=True)

    def save_information(self, output_path: str | os.PathLike[str]) -> None:
        """Write a card of the run as markdown, to a file or as `README.md` in a folder."""
        notes: dict[str, Any] = {"checkpoint": self.checkpoint_path, "loaded": self.loaded}
        notes["not loaded"] = self.not_loaded
        text = saving.make_card(self._parts, self.history, notes, self.stopped)
        if self.is_process_zero:
            saving.write_card(output_path, text)

    def load_checkpoint(
        self, path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint, or parts of it, into the trainer's state.

        `path` is the folder of a step or of a run, or what `save_pretrained` wrote.
        `load_optimizer` loads the optimizer state, the step and the key, and `load_scheduler` the
        position of the schedule. Returns the state, its step and metrics, and the paths that were
        loaded and that were not.
        """
        wanted = {"optimizer": load_optimizer, "scheduler": load_scheduler}
        folder = self.arguments.checkpoints_dir
        restored = setup.restore_parts(path, folder, self.state, **wanted)
        self._state, self._state_source = restored.state, "load_checkpoint"
        self.loaded, self.not_loaded = list(restored.loaded), restored.not_loaded
        return restored._asdict()

    @property
    def best_state(self) -> Any:
        """The best state so far: that of early stopping, or of the best checkpoint."""
        if best := next(filter(None, self._best_states.values()), None):
            return best[1]
        manager = self.checkpoint_manager
        if manager is None or manager.best is None:
            raise ConfigError(
                "best_state needs metric_for_best_model and output_dir, or "
                "early_stopping_patience with a metric of an evaluation"
            )
        return manager.restore(self.abstract_state, step="best").state

    @property
    def epoch_history(self) -> dict[str, list[float]]:
        """The metrics of the last run as lists with one element for each epoch.

        They are named `train_loss` and so on. Those of train steps are means over the examples of
        the epoch, all others its last value.
        """
        kind = trainer_hooks.EpochHistory
        hooks = (hook for hook in self._run_hooks if isinstance(hook, kind))
        return next((hook.by_name() for hook in hooks), {})

    @property
    def _run_hook(self) -> trainer_hooks.TrainerHook | None:
        """The hook that calls methods of the trainer in a run."""
        kind = trainer_hooks.TrainerHook
        return next((hook for hook in self._run_hooks if isinstance(hook, kind)), None)

    @property
    def state(self) -> Any:
        """The state. Assign one to start the next run from it; the run donates it."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        parts: RunParts | None = vars(self).get("_parts")
        self._state = state if parts is None else parts.bind(state)
        self._state_source = "state"

    model_state: Any = state
    _model_state: Any = state

    @property
    def checkpoint_path(self) -> str | None:
        """The folder of the newest checkpoint in `output_dir`, or None."""
        own = self.checkpoint_manager
        newest = None if own is None else own.latest_step()
        return None if newest is None else open_store(own.directory).path_of(newest)

    @property
    def is_process_zero(self) -> bool:
        """Whether this is the first process."""
        return jax.process_index() == 0

    @property
    def is_enable(self) -> bool:
        """Whether this process writes metrics."""
        return self.is_process_zero or from_arguments.writes_everywhere(self.arguments)

    @property
    def wandb_runtime(self) -> Any:
        """The run of Weights & Biases once it has started, or None."""
        return getattr(sys.modules.get("wandb"), "run", None) if self.arguments.use_wandb else None

    # Helpers

    def make_optimizer(self, scheduler: Any = None) -> tuple[Any, Any]:
        """Return the optimizer and the schedule, by default made from the arguments."""
        return setup.optimizer_for(self._parts, scheduler)

    def set_state(self, state: Any) -> None:
        """Replace the state, and describe it."""
        self._state = self._parts.bind(state)
        self._parts = self._parts.with_state(self._state)

    def overrides(self, method: str) -> bool:
        """Whether a method is that of a subclass, or was set on the object."""
        return method in vars(self) or getattr(type(self), method) is not getattr(Trainer, method)

    def _is_due(self, step: int, interval: int, mode: str) -> bool:
        """Whether to show or write metrics: those of evaluations always, others at an interval."""
        is_every_log_point = interval == self.sizes.log_every
        is_last = step in (self.sizes.steps, getattr(self._run_hook, "last_step", None))
        return mode != "train" or is_every_log_point or step % interval == 0 or is_last

    def _eval_step(self) -> Any:
        if self._parts.metrics_step is None:
            expected = "a step (state, batch) -> metrics"
            refuse("eval_step_fn", expected, "None", "return one from configure_functions")
        return self._parts.metrics_step

    def _use_result(self, result: FitResult) -> None:
        self.result, self._state = result, result.state
        self.history = result.history or self.history
        self.stopped = str(result.stop_reason)

    def _recover_state(self) -> None:
        """Restore the newest checkpoint if an exception left no state."""
        is_lost = self.model_state is None or not is_available(self.model_state)
        is_alone = jax.process_count() == 1  # all processes take part in a restore
        if is_lost and is_alone and self.checkpoint_path is not None:
            self._state = self.checkpoint_manager.restore(self.abstract_state).state

    def _output(self, stopped: str) -> TrainerOutput:
        self.stopped, path = stopped, self.checkpoint_path
        name = None if path is None else Path(path).name
        return TrainerOutput(self.model_state, self.mesh, name, path, stopped=stopped)
