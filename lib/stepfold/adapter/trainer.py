"""The trainer: an object with EasyDeL's `BaseTrainerProtocol` that delegates to `fit`."""

import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter import from_arguments, loading, saving, setup, steps
from stepfold.adapter import hooks as trainer_hooks
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.hooks import ProgressBar, Watcher
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.checkpoint.restore import restore
from stepfold.core.state import is_available
from stepfold.core.validation import refuse_unknown
from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.flops import count, estimate
from stepfold.loop.evaluate import Evaluation, evaluate
from stepfold.loop.fit import fit
from stepfold.loop.hooks.base import Event, Hook, call_optional
from stepfold.loop.hooks.stop import stop_early
from stepfold.loop.hooks.throughput import memory_use
from stepfold.loop.hooks.weights import weight_statistics
from stepfold.loop.hooks.wrappers import callback, every
from stepfold.loop.metrics import metric_values
from stepfold.loop.result import FitResult
from stepfold.loop.run_info import move_previous_run
from stepfold.sharding.plan import make_sharding

# The most steps in a row that a dynamic loss scale may skip: 25 bring it from its largest to its
# smallest value.
_MAX_SKIPPED = 50


def _alias(name: str) -> Any:
    return property(operator.attrgetter(name), doc=f"The same as `{name}`.")


def _attribute(name: str, doc: str) -> Any:
    # A subclass may also inherit from an abstract class that declares it as a property.
    def assign(self: "Trainer", value: Any) -> None:
        vars(self)[name] = value

    return property(operator.attrgetter(name), assign, doc=doc)


class Trainer:
    """A run as an object, for code that expects EasyDeL's `BaseTrainerProtocol`.

    It holds the parts of a run, and delegates to `fit` and `evaluate`. Every method that a subclass
    overrides is the one that is called. Without `on_step_start` and `on_step_end` overridden, no
    Python runs between steps.

    Attributes:
      model_state: the state; `state` and `_model_state` are the same.
      plan: the numbers of the run: batch sizes, steps, intervals.
      history: the metrics of the run, as of `fit`; `epoch_history` has them by epoch.
      stopped: why the last run ended.
      result: the `FitResult` of the last run, with its `stop_reason` and `capsule`.
      loaded, left: the paths that were loaded from `init_weights_from` or by
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

    dataloader_train: Any
    dataloader_eval: Any
    sharded_training_step_function: Any
    sharded_evaluation_step_function: Any

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
        devices: Sequence[jax.Device] | None = None,
        evaluations: Sequence[Evaluation] = (),
        hooks: Sequence[Hook] = (),
        callbacks: Sequence[Callable[..., Any]] = (),
        watchers: Sequence[Watcher] = (),
        config: Any = None,
        **deprecated_kwargs: Any,
    ) -> None:
        """Check the arguments, and make all that a run needs.

        Args:
          arguments: `TrainingArguments`.
          model_state: the initial state or parameters.
          model: a function `key -> params` or a tree of parameters; with `model_state`, any object.
          dataset_train: a source or stream, as for `stepfold.batches`.
          dataset_eval: the same, for evaluations.
          data_collator: a function from a list of examples to a batch.
          finetune: whether to use the parameters of `model_state`; False initializes new ones.
          loss_fn: a `LossFn`; required unless a subclass overrides `configure_functions`.
          eval_loss_fn: the loss function of evaluations; `loss_fn` by default.
          stateful: whether the loss functions have a model state.
          tx: an optimizer, instead of that of the arguments.
          scheduler: a schedule, instead of that of the arguments; with `tx`, it is only logged.
          rules: sharding rules of the state, as for `make_sharding`.
          devices: the devices of the mesh; all by default.
          evaluations: further evaluations, such as one that generates text.
          hooks: hooks, as for `fit`.
          callbacks: functions `(trainer, epoch, metrics)`, called after each epoch.
          watchers: functions of the state whose numbers are logged.
          config: the configuration of the model.
          **deprecated_kwargs: not accepted; the error suggests the nearest name.

        Raises:
          ConfigError: if an argument is not as described.
        """
        names = [*inspect.signature(Trainer.__init__).parameters][1:-1]
        refuse_unknown(type(self).__name__, deprecated_kwargs, names)
        if not isinstance(arguments, TrainingArguments):
            raise ConfigError(f"arguments: expected TrainingArguments, got {tree.spell(arguments)}")
        functions = {"data_collator": data_collator, "loss_fn": loss_fn, "scheduler": scheduler}
        for name, function in {**functions, "eval_loss_fn": eval_loss_fn}.items():
            if function is not None:
                _check_function(name, function)
        for name, flag in {"finetune": finetune, "stateful": stateful}.items():
            if not isinstance(flag, bool):
                raise ConfigError(f"{name}: expected True or False, got {flag!r}")
        self.arguments = arguments
        self._state, self.model, self.config = model_state, model, config
        self.dataset_train, self.dataset_eval = dataset_train, dataset_eval
        self.data_collator, self.finetune, self.stateful = data_collator, finetune, stateful
        self.loss_fn, self.eval_loss_fn = loss_fn, eval_loss_fn
        self.tx, self.scheduler, self.rules = tx, scheduler, rules
        self.evaluations = _check_list("evaluations", evaluations, "sf.Evaluation(…)", Evaluation)
        self.hooks: list[Hook] = _check_list("hooks", hooks, "functions of an event")
        self.callbacks = _check_list("callbacks", callbacks, "functions (trainer, epoch, metrics)")
        self.watchers = _check_list("watchers", watchers, "Watcher(name, function, every)", Watcher)
        for watcher in self.watchers:
            watcher.check()
        names = [watcher.name for watcher in self.watchers]
        if len(set(names)) < len(names):
            raise ConfigError(f"watchers: expected different names, got {', '.join(names)}")
        self._initial = model_state if finetune else None
        self._optimizer = tx, scheduler
        self._metrics_step: Any = None  # the evaluation step, whose numbers are metrics
        self._new_state: Any = None  # made by `configure_model`, so it need not be copied
        self._own_step: Any = None  # made by `configure_functions`, so it skips a NaN or inf
        self._step_with_metrics: tuple[Any, Any] = None, None  # a step, and what `fit` runs for it
        self._state_source: str | None = None  # what replaced the state since the last run
        self._watched_at = 0  # the step of the last `log_watchers`
        self._last_step: int | None = None  # of the run
        self.pruning_module, self.memory_monitor = arguments.pruning_module, memory_use
        self.dtype = from_arguments.precision(arguments).compute
        self.param_dtype = jnp.dtype(arguments.param_dtype or "float32")
        self.train_tracker = trainer_hooks.CompilationTracker()
        self.evalu_tracker = trainer_hooks.CompilationTracker()
        self.early_stopping: stop_early | None = None
        self.progress_bar: Any = None
        self.history: Any = {}
        self.result: FitResult | None = None
        self.stopped: str | None = None
        self.best: int | None = None
        self.epochs_done = 0
        self.checkpoint_manager: Any = None
        self.loaded: list[str] = []
        self.left: dict[str, str] = {}
        from_arguments.start_processes(arguments)
        self.mesh = from_arguments.make_mesh(arguments, devices)
        sizes = loading.length_of(dataset_train), loading.length_of(dataset_eval)
        self.plan = from_arguments.plan(arguments, *sizes, devices=self.mesh.size)
        self.initialize_trainer_utils()

    # What a run needs, in the order in which it is made

    def initialize_trainer_utils(self) -> None:
        """Make writers, timers, batches, the state and the steps."""
        self.writer: Any = from_arguments.writers(self.arguments)
        self.timer = trainer_hooks.Timers()
        self._use_dataloaders(self.configure_dataloaders())
        self._use_model(self.configure_model())
        self._use_functions(self.configure_functions())

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Make batches of the datasets, and count the steps."""
        dataloader_train = dataloader_eval = None
        if self.dataset_eval is not None:
            dataloader_eval = self._evaluation_batches(self.dataset_eval, self.plan.eval_steps)
        if self.dataset_train is not None:
            dataloader_train = loading.training_batches(
                self.arguments,
                self.dataset_train,
                self.plan.train_batch,
                collect=self._collect(self.dataset_train),
                prepare=self._add_mask,
                epoch_steps=self.plan.epoch_steps,
                epochs=None if self.plan.steps else self.arguments.num_train_epochs,
            )
        return TrainerConfigureDataloaderOutput(
            dataloader_train, self.plan.steps, dataloader_eval, self.plan.eval_steps
        )

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Make the optimizer, its schedule, and the state."""
        setup.check_model(self.model, self._initial, finetune=self.finetune)
        tx, scheduler = self._make_optimizer()
        state = self._new_state = self.make_state(self.model, tx, self._initial)
        return TrainerConfigureModelOutput(self.model, tx, scheduler, self.config, state=state)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Make the jitted steps, the mesh, and the description of the checkpoints."""
        if self.loss_fn is None:
            raise ConfigError(
                "loss_fn: expected a loss function (params, batch, key) -> loss, got None; give "
                "one, or override configure_functions in a subclass"
            )
        train_step, eval_step = steps.make_steps(
            self.arguments,
            self.loss_fn,
            self.tx,
            eval_loss_fn=self.eval_loss_fn,
            scheduler=self.scheduler,
            accumulate=self.plan.accumulate,
            mesh=self._mesh_if_large,
            stateful=self.stateful,
        )
        train_step = self.train_tracker.track(train_step)
        eval_step = self.evalu_tracker.track(eval_step)
        shardings = (self.state_shardings, None) if self._mesh_if_large else None
        self._own_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        return TrainerConfigureFunctionOutput(
            self._own_step,
            self.mesh,
            from_arguments.checkpoints(self.arguments, self.plan),
            jax.jit(eval_step),
        )

    def make_state(self, model: Any, tx: Any, initial: Any = None) -> Any:
        """Make a state of a model, parameters or a state, sharded over the mesh."""
        return setup.first_state(
            model,
            initial,
            tx,
            seed=self.arguments.seed,
            plan=self._shardings_of,
            cast=functools.partial(from_arguments.cast_params, self.arguments),
            stateful=self.stateful,
            init_tx=self.arguments.init_tx,
            step=self.arguments.step_start_point,
        )

    def create_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> loading.Collect:
        """Make a function that pads and truncates a list of examples, or a dict of columns."""
        return loading.collect_function(max_sequence_length, truncation_mode)

    def create_grain_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> loading.Collect:
        """Make the same for what grain reads."""
        return self.create_collect_function(max_sequence_length, truncation_mode)

    def create_tfds_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> loading.Collect:
        """Make the same for what tf.data reads."""
        return self.create_collect_function(max_sequence_length, truncation_mode)

    # The run

    def train(
        self,
        model_parameters: Any = None,
        state: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        more_steps: int | None = None,
    ) -> TrainerOutput:
        """Do the whole run, or the rest of it after the newest checkpoint in `output_dir`.

        The run ends after a save at a NaN or inf in the loss, the time limit, Ctrl-C, and an
        exception in a method or hook. Ctrl-C and exceptions are raised after the save.

        Args:
          model_parameters: parameters to start with.
          state: a state to continue from.
          ckpt_path: a checkpoint to continue from: the folder of a step or of a run, or what
            `save_pretrained` wrote.
          more_steps: the number of steps to do, in place of the end that the arguments set. The
            schedule stays that of the arguments.

        Returns:
          The state, and the path of the last checkpoint.
        """
        if not self.arguments.do_train:
            return self._output("do_train is False")
        if self.dataloader_train is None:
            raise ConfigError("dataset_train: expected data to train on, got None")
        has_end = self.max_training_steps or more_steps or self.plan.seconds is not None
        if not has_end and getattr(self.dataloader_train, "endless", False):
            raise ConfigError(
                "max_steps: expected a number of steps for data without an end, got None; give "
                "max_steps, or training_time_limit"
            )
        self.writer = self.writer or from_arguments.writers(self.arguments)
        self._start_with(model_parameters, state, ckpt_path)
        self.start_training_hook()
        try:
            with self.timer("train"):
                self._keep(self._fit(more_steps))
        except BaseException as error:
            trainer_hooks.add_advice(error)
            result = getattr(error, "result", None)
            if result is not None:
                self._keep(result)
            else:
                self.stopped = f"{type(error).__name__}: {error}"
                self._recover_state()
            raise
        finally:
            self._state_source = None
            self.finish()
        return self._output(str(self.stopped))

    def finish(self) -> None:
        """Close the bar and the writers. Idempotent."""
        bar, writer = self.progress_bar, self.writer
        self.progress_bar = self.writer = None
        call_optional(bar, "close")
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
        trainer_hooks.check_finite(metrics)
        trainer_hooks.check_time(self.timer.running("train"), self.plan.seconds)
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

        Names without a prefix get that of the mode, as in `train/loss`. Gradient norms are not
        shown, and written only with `log_grad_norms`.

        Args:
          metrics: numbers by name.
          pbar: the bar: one of `create_progress_bar`, tqdm's, or None.
          step: the number of steps done.
          mode: "train" or "eval"; metrics of evaluations are always shown and written.
          update_progress: whether to show them.
          log_to_backends: whether to write them.
          force_report: whether to write them at any step.
        """
        numbers = {
            name if "/" in name else f"{mode}/{name}": float(value)
            for name, value in metrics.items()
            if "mlperf" not in name
        }
        without_norms = {name: x for name, x in numbers.items() if "grad_norm" not in name}
        if update_progress and pbar is not None and self._is_due(step, self.plan.log_steps, mode):
            pbar.set_postfix(dict(without_norms))
            pbar.update(step - getattr(pbar, "step", getattr(pbar, "n", 0)))
        is_due = force_report or self._is_due(step, self.plan.report_steps, mode)
        if log_to_backends and is_due and self.writer is not None and self.is_enable:
            kept = numbers if self.arguments.log_grad_norms else without_norms
            self.writer.write_scalars(step, kept)

    def log_weight_distribution(self, state: Any, step: int) -> dict[str, float]:
        """Measure and write the distribution of the weights by path, with histograms."""
        writer = self.writer if self.is_enable else None
        pattern = self.arguments.weight_distribution_pattern or ""
        numbers = weight_statistics(pattern, writer=writer)(Event(step, None, {}, state))
        if writer is not None:
            writer.write_scalars(step, numbers)
        return numbers

    def log_watchers(self, state: Any, step: int) -> dict[str, float]:
        """Call the watchers whose interval has passed since the last call, and write their numbers.

        In a run it is called at each log point, with the state of exactly that step.

        Raises:
          ConfigError: if a watcher returns something else than numbers.
        """
        since = self._watched_at if self._watched_at < step else step - 1
        self._watched_at = step
        due = [w for w in self.watchers if step // w.every > since // w.every]
        values = {watcher.name: watcher.function(state) for watcher in due}
        numbers = metric_values(jax.device_get(values), "watch/")
        if numbers and self.writer is not None and self.is_enable:
            self.writer.write_scalars(step, numbers)
        return numbers

    # Evaluation

    def evaluate(
        self, state: Any = None, metric_calculator: Any = None, *, dataset: Any = None
    ) -> dict[str, float]:
        """Evaluate a state on the evaluation data, exactly; nothing is logged.

        Args:
          state: the state, by default the trainer's. A value that is not a state is the dataset.
          metric_calculator: a function `(state, batch) -> metrics`, or of the numbers by name,
            that returns further ones.
          dataset: other data to evaluate on.

        Returns:
          Numbers by name: `eval_loss` and so on.
        """
        if state is not None and not setup.is_state(state) and dataset is None:
            state, dataset = None, state
        state = self.model_state if state is None else state
        batches = self.eval_batches(dataset)
        with self.timer("evaluation"):
            return steps.evaluate_with(self._eval_step(), state, batches, metric_calculator)

    def eval(self, model_state: Any) -> Iterator[dict[str, float]]:
        """Evaluate a state on each batch of the evaluation data."""
        for batch in self.eval_batches():
            metrics = evaluate(self._eval_step(), model_state, [batch])
            yield {f"eval_{name}": value for name, value in metrics.items()}

    def eval_batches(self, dataset: Any = None) -> Iterator[Any]:
        """Return the batches of an evaluation, after `start_evaluation_hook`."""
        self.start_evaluation_hook()
        if dataset is not None:
            return iter(self._evaluation_batches(dataset))
        loader = self.dataloader_eval
        if loader is None:
            raise ConfigError("dataset_eval: expected data to evaluate on, got None")
        batches = iter(loader() if callable(loader) else loader)
        return itertools.islice(batches, self.max_evaluation_steps)

    # Before the run

    def compile_aot(self) -> bool:
        """Compile both steps ahead of time; return True."""
        if self.arguments.steps_per_call > 1:
            raise ConfigError(
                "steps_per_call: expected 1 for compile_aot, which compiles a single step, got "
                f"{self.arguments.steps_per_call}; leave one of them out"
            )
        step, loader = self.sharded_training_step_function, self.dataloader_train
        if loader is not None and not isinstance(step, CompiledStep):
            batches = steps.PeekedBatches(iter(loader), "dataloader_train")
            if iter(loader) is loader:
                self.dataloader_train = batches
            compiled = compile_step(steps.as_train_step(step), self.model_state, batches.first)
            self._own_step = compiled if step is self._own_step else self._own_step
            self.sharded_training_step_function = compiled
        step, loader = self.sharded_evaluation_step_function, self.dataloader_eval
        if loader is not None and not isinstance(step, steps.CompiledEvalStep | None):
            loader = iter(loader() if callable(loader) else loader)
            batch = steps.PeekedBatches(loader, "dataloader_eval").first
            step = steps.CompiledEvalStep(steps.as_eval_step(step), self.model_state, batch)
            self.sharded_evaluation_step_function = self._metrics_step = step
        return True

    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> int:
        """Count the floating-point operations of a step on all devices.

        After `compile_aot` it is the count of matrix products and convolutions in the compiled
        step, and before the estimate of 6 for each parameter and token in training, 2 in an
        evaluation.
        """
        steps = self.sharded_training_step_function, self.sharded_evaluation_step_function
        jaxpr = getattr(steps[not is_training], "jaxpr", None)
        if jaxpr is None:
            batch = self.training_batch_size if is_training else self.evaluation_batch_size
            tokens = batch * (self.arguments.max_length or 1)
            return estimate(self.count_model_parameters(params), tokens, training=is_training)
        return count(jaxpr).dots

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
        state it is the trainer's.

        Args:
          state: the state, or the path.
          save_directory: the path, or the state.
          gather_fns: must be None, since arrays are saved from where they are.
          to_torch: whether to write the parameters alone, as safetensors that torch loads.
          easystate_to_huggingface_model_kwargs: `names`, the names of parameters in torch by path.
          torch_save_pretrained_kwargs: `metadata` of the safetensors.
          ckpt_path: the path.

        Returns:
          The folder of the checkpoint, or that of the safetensors.
        """
        path, state = saving.path_and_state(state, save_directory, ckpt_path)
        state = self.model_state if state is None else state
        if gather_fns is not None:
            raise ConfigError(
                "gather_fns: expected None, since arrays are saved from where they are, got "
                f"{tree.spell(gather_fns)}; leave it out"
            )
        if to_torch:
            names = dict(easystate_to_huggingface_model_kwargs or {})
            metadata = dict(torch_save_pretrained_kwargs or {})
            refuse_unknown("save_pretrained", names, ["names"])
            refuse_unknown("save_pretrained", metadata, ["metadata"])
            saving.save_for_torch(path, state.params, **names, **metadata)
            return path
        loader = self.dataloader_train
        return saving.save_state(
            path,
            state,
            arguments=self.arguments,
            data=None
            if loader is None
            else loading.position_at(loader, int(getattr(state, "step", 0))),
            metrics={name: curve[-1] for name, curve in self.history.items() if len(curve)},
        )

    def save_information(self, output_path: str | os.PathLike[str]) -> None:
        """Write a card of the run as markdown, to a file or as `README.md` in a folder."""
        notes = {"checkpoint": self.checkpoint_path, "loaded": self.loaded}
        text = saving.make_card(
            self.arguments.model_name,
            arguments=self.arguments.to_dict(),
            params=getattr(self.state_shape, "params", self.state_shape),
            mesh=self.mesh,
            history=self.history,
            stop_reason=self.stopped,
            notes={**notes, "not loaded": self.left},
        )
        if self.is_process_zero:
            saving.write_card(output_path, text)

    def load_checkpoint(
        self, path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint, or parts of it, into the trainer's state.

        Args:
          path: the folder of a step or of a run, or what `save_pretrained` wrote.
          load_optimizer: whether to load the optimizer state, the step and the key.
          load_scheduler: whether to load the position of the schedule.

        Returns:
          The state, its step and metrics, and the paths that were loaded and that were not.
        """
        parts = setup.parts_of(self.model_state, optimizer=load_optimizer, scheduler=load_scheduler)
        folder = self.arguments.checkpoints_dir
        restored = setup.restore_path(path, self.model_state, folder, parts=parts)
        self._state = restored.state
        self.loaded, self.left = restored.loaded, restored.left
        self._state_source = "load_checkpoint"
        return restored._asdict()

    @property
    def best_state(self) -> Any:
        """The best state so far: that of early stopping, or of the best checkpoint."""
        best = getattr(self.early_stopping, "best_state", None)
        if best is not None:
            return best
        manager = self.checkpoint_manager
        if manager is None or manager.best is None:
            raise ConfigError(
                "best_state: expected metric_for_best_model and an output_dir, or "
                "early_stopping_patience, to know which state is the best"
            )
        return restore(manager.directory, self._abstract_state, step="best").state

    @property
    def epoch_history(self) -> dict[str, list[float]]:
        """The metrics as lists with one element for each epoch, with names such as `train_loss`."""
        return trainer_hooks.epoch_means(
            self.history, self.plan.epoch_steps or self.max_training_steps or 1
        )

    # Names of the protocol for the same things

    @property
    def state(self) -> Any:
        """The state. The next run starts with one that is assigned, and donates it to a step."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state, self._state_source = state, "state"

    model_state = _model_state = state

    model = _attribute("_model", "The model, as it was given.")
    mesh = _attribute("_mesh", "The mesh of the devices.")
    optimizer = _alias("tx")
    train_step_fn = _alias("sharded_training_step_function")
    eval_step_fn = _alias("sharded_evaluation_step_function")

    @property
    def checkpoint_path(self) -> str | None:
        """The folder of the newest checkpoint in `output_dir`, or None."""
        own = self._own_checkpoints
        newest = setup.newest_step(own)
        return None if own is None or newest is None else str(own / str(newest))

    @property
    def training_batch_size(self) -> int:
        """The examples of a step, over all devices and microbatches."""
        return self.plan.train_batch

    @property
    def evaluation_batch_size(self) -> int:
        """The examples of a batch of an evaluation, over all devices."""
        return self.plan.eval_batch

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

    # Outputs of the configure methods

    def _use_dataloaders(self, output: TrainerConfigureDataloaderOutput) -> None:
        self.dataloader_train = output.dataloader_train
        self.dataloader_eval = output.dataloader_eval
        self.max_training_steps = output.max_training_steps or self.plan.steps
        self.max_evaluation_steps = output.max_evaluation_steps
        self.plan = self.plan._replace(steps=self.max_training_steps)

    def _use_model(self, output: TrainerConfigureModelOutput) -> None:
        self.model, self.scheduler = output.model, output.scheduler
        self.config = self.config if output.config is None else output.config
        state, self.tx = output.state, output.tx or getattr(output.state, "tx", None)
        if self.tx is None:
            self.tx, self.scheduler = self._make_optimizer(output.scheduler)
        if state is None:
            state = self.make_state(output.model, self.tx, self._initial)
        elif state is not self._new_state:  # a subclass's own, which must not be donated
            state = setup.copy_to(state, self._shardings_of(state))
        self._new_state = None
        path = self.arguments.init_weights_from
        if path is not None:
            weights = setup.load_weights(path, state, self.arguments.checkpoints_dir)
            state, self.loaded, self.left = weights
        self._set_state(state)

    def _use_functions(self, output: TrainerConfigureFunctionOutput) -> None:
        if output.mesh is not None and output.mesh != self.mesh:
            self.mesh = output.mesh
            self._set_state(setup.copy_to(self.model_state, self._shardings_of(self.model_state)))
        self.sharded_training_step_function = output.train_step_fn
        self.sharded_evaluation_step_function = output.eval_step_fn
        evaluate = output.eval_step_fn
        self._metrics_step = evaluate and jax.jit(steps.as_eval_step(evaluate))
        manager = output.checkpoint_manager or from_arguments.checkpoints(self.arguments, self.plan)
        if manager is not None and manager.directory is None:
            if self.arguments.output_dir is None:
                raise ConfigError(
                    "checkpoint_manager: expected one with a directory, got none; give output_dir, "
                    "or sf.Checkpoints('path', …)"
                )
            directory = Path(self.arguments.output_dir) / self.arguments.checkpoints_dir
            manager = dataclasses.replace(manager, directory=directory)
        self.checkpoint_manager = manager

    def _make_optimizer(self, scheduler: Any = None) -> tuple[Any, Any]:
        tx, own_scheduler = self._optimizer
        scheduler = own_scheduler if scheduler is None else scheduler
        return from_arguments.optimizer_of(self.arguments, self.max_training_steps, tx, scheduler)

    def _set_state(self, state: Any) -> None:
        self._state = state
        self.state_shape = jax.eval_shape(lambda: state)
        self.state_shardings = make_sharding(self.state_shape, self.mesh, self._rules)
        self.state_named_sharding = self.state_shardings
        self.state_partition_spec = jax.tree.map(lambda x: x.spec, self.state_shardings)

    @property
    def _rules(self) -> Any:
        return from_arguments.sharding_rules(self.arguments) if self.rules is None else self.rules

    @property
    def _mesh_if_large(self) -> Mesh | None:
        """The mesh, or None if it is jax's default device alone, which needs no shardings."""
        is_default = self.mesh.size == 1 and self.mesh.devices.flat[0] == jax.local_devices()[0]
        return None if is_default else self.mesh

    def _shardings_of(self, state: Any) -> Any:
        return make_sharding(state, self.mesh, self._rules) if self._mesh_if_large else None

    @property
    def _abstract_state(self) -> Any:
        if self._mesh_if_large is None:
            return self.state_shape
        make = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(make, self.state_shape, self.state_shardings)

    def _evaluation_batches(self, dataset: Any, steps: int | None = None) -> Any:
        return loading.evaluation_batches(
            self.arguments,
            dataset,
            self.plan.eval_batch,
            collect=self._collect(dataset),
            prepare=lambda batch: loading.replicate_if_uneven(
                self._add_mask(batch), self._mesh_if_large
            ),
            steps=steps,
        )

    def _add_mask(self, batch: Any) -> Any:
        return (
            batch if "mask" in self.arguments.ids_to_pop_from_dataset else loading.with_mask(batch)
        )

    def _collect(self, dataset: Any) -> loading.Collect | None:
        """Return the function from a list of examples to a batch; None stacks them.

        It is the collect function of a subclass, called with the output of `data_collator` or with
        columns; or `data_collator`; or, with `max_length`, a function that pads and truncates.
        """
        arguments = self.arguments
        kind = "tfds_" if hasattr(dataset, "as_numpy_iterator") else ""
        kind = "grain_" if arguments.use_grain else kind
        names = [f"create_{kind}collect_function", "create_collect_function"]
        own = next((name for name in names if self._overrides(name)), None)
        if own is None and (self.data_collator is not None or arguments.max_length is None):
            return self.data_collator
        make = getattr(self, own or names[0])
        options: dict[str, Any] = {"max_sequence_length": arguments.max_length}
        options["truncation_mode"] = arguments.truncation_mode
        parameters = inspect.signature(make).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            options = {name: value for name, value in options.items() if name in parameters}
        collect: loading.Collect = make(**options)
        if own is None:
            return collect
        first = loading.columns if self.data_collator is None else self.data_collator
        return lambda examples: collect(first(examples))

    def _overrides(self, method: str) -> bool:
        """Whether a method is that of a subclass, or was set on the object."""
        return method in vars(self) or getattr(type(self), method) is not getattr(Trainer, method)

    # Running

    def _start_with(self, params: Any, state: Any, path: Any) -> None:
        """Set the state to start with, and move the batches to its position."""
        if sum(value is not None for value in (params, state, path)) > 1:
            raise ConfigError(
                "train: expected one of model_parameters, state and ckpt_path, got more"
            )
        own, folder = self._own_checkpoints, self.arguments.checkpoints_dir
        source, self._state_source = self._state_source, None
        resume_from = self.arguments.resume_from_checkpoint
        is_first = self.result is None
        if is_first and params is state is path is None and isinstance(resume_from, str):
            # A run with checkpoints of its own continues from these, but the path has to exist.
            is_own = setup.is_newest(resume_from, own, folder)
            path = resume_from if is_own or setup.newest_step(own) is None else None
        new, data = self.model_state, None
        if params is not None:
            new, source = self.make_state(None, self.tx, params), "model_parameters"
        elif state is not None:
            if not setup.is_state(state):
                raise ConfigError(
                    f"state: expected a state, with params and step, got {tree.spell(state)}; give "
                    "parameters alone as model_parameters"
                )
            new, source = self.make_state(None, self.tx, state), "state"
        elif path is not None and not setup.is_newest(path, own, folder):
            restored = setup.restore_path(path, self._abstract_state, folder)
            new, data, source = restored.state, restored.data, "ckpt_path"
        if source is not None:
            setup.check_start(source, own, self._abstract_state, new)
            self._set_state(new)
        loading.seek(self.dataloader_train, data, int(getattr(self.model_state, "step", 0)))

    @property
    def _own_checkpoints(self) -> Path | None:
        return self.checkpoint_manager and Path(self.checkpoint_manager.directory)

    def _fit(self, more_steps: int | None) -> FitResult:
        arguments, step, evaluations = self.arguments, self._train_step(), self._evaluations()
        hooks = self._hooks(bool(evaluations))
        if isinstance(step, steps.StepWithHooks):
            hooks.insert(0, lambda _: step.raise_pending())
        logs, state = from_arguments.logs_of(arguments), self.model_state
        if setup.newest_step(self._own_checkpoints) is not None:
            self._state = None  # so that the restored one can take its memory
        elif self.writer is not None and self.is_enable:
            self.writer.flush()  # rows logged before this run stay in the earlier run's files
            move_previous_run(logs, int(getattr(state, "step", 0)))
        total = self.max_training_steps if more_steps is None else None
        # A loader of a subclass may be one epoch that can be iterated again.
        loader, epochs = self.dataloader_train, arguments.num_train_epochs
        is_repeated = (
            total is None and more_steps is None and epochs > 1 and iter(loader) is not loader
        )
        may_resume = arguments.resume_if_possible and arguments.resume_from_checkpoint is not False
        return fit(
            step,
            state,
            loader,
            steps=total,
            epochs=epochs if is_repeated else None,
            more_steps=more_steps,
            # The report is drawn from the JSON lines.
            run_dir=logs if self.writer is not None and "jsonl" in arguments.report_to else None,
            evaluation=evaluations,
            checkpoints=self.checkpoint_manager,
            hooks=hooks,
            log_every=self.plan.log_every,
            resume=may_resume or self.result is not None,
            steps_per_call=arguments.steps_per_call,
            time_limit=self.plan.seconds,
        )

    def _train_step(self) -> Callable[..., Any]:
        own = self.sharded_training_step_function
        if self._step_with_metrics[0] is not own:  # kept, since `fit` reuses its program
            is_compiled = isinstance(own, CompiledStep)
            self._step_with_metrics = own, own if is_compiled else steps.as_train_step(own)
        step: Callable[..., Any] = self._step_with_metrics[1]
        if not self._overrides("on_step_start") and not self._overrides("on_step_end"):
            return step
        if self.arguments.steps_per_call > 1:
            raise ConfigError(
                "steps_per_call: expected 1 with on_step_start or on_step_end overridden, which "
                f"run between steps, got {self.arguments.steps_per_call}; override on_log instead"
            )
        return steps.StepWithHooks(step, self.on_step_start, self.on_step_end)

    def _evaluations(self) -> list[Evaluation]:
        if self.dataloader_eval is None or not self.plan.evaluates or self._metrics_step is None:
            return list(self.evaluations)
        own = Evaluation(
            self._metrics_step,
            self.eval_batches,
            every=self.plan.evaluation_every,
            every_epochs=self.plan.evaluation_every_epochs,
        )
        return [own, *self.evaluations]

    def _hooks(self, has_evaluations: bool) -> list[Hook]:
        """Make the hooks of a run. The trainer's comes after those that return numbers."""
        arguments = self.arguments
        hooks: list[Hook] = []
        if self.sharded_training_step_function is self._own_step:  # which skips a NaN or inf
            scales_loss = from_arguments.precision(arguments).needs_loss_scale
            hooks.append(trainer_hooks.StopOnSkipped(_MAX_SKIPPED if scales_loss else 1))
        metric, patience = from_arguments.best_metric(arguments), arguments.early_stopping_patience
        metric = "eval/loss" if metric is None and patience is not None else metric
        if metric is not None and not has_evaluations and not metric.startswith("train/"):
            name = "metric_for_best_model" if patience is None else "early_stopping_patience"
            raise ConfigError(
                f"{name}: expected data to evaluate on, to measure {metric}, got none; give "
                "dataset_eval, or metric_for_best_model='train.loss'"
            )
        self.early_stopping = None
        if metric is not None and patience is not None:
            keep_state = not metric.startswith("train/")
            mode = from_arguments.best_mode(arguments)
            self.early_stopping = stop_early(
                metric, patience=patience, mode=mode, keep_state=keep_state
            )
            hooks.append(self.early_stopping)
        if arguments.track_memory:
            hooks.append(memory_use)
        if arguments.weight_distribution_log_steps is not None:
            hooks.append(every(arguments.weight_distribution_log_steps, self._log_weights))
        hooks += [*(callback(function, self) for function in self.callbacks), *self.hooks]
        knows_epochs = getattr(self.dataloader_train, "steps_per_epoch", None)
        hooks.append(
            trainer_hooks.EpochTrainerHook(self)
            if knows_epochs
            else trainer_hooks.TrainerHook(self)
        )
        return hooks if metric is None else [*hooks, _expect_metric(metric)]

    def _log_weights(self, event: Event) -> None:
        self.log_weight_distribution(event.state, event.step)  # too many numbers for a bar

    @property
    def has_watchers(self) -> bool:
        """Whether `log_watchers` has something to do."""
        return bool(self.watchers) or self._overrides("log_watchers")

    def open_run(self, bar: Any, step: int, total: int | None) -> None:
        """Prepare for a run that starts after `step`: drop the rows of later steps."""
        self.progress_bar, self._watched_at, self._last_step = bar, step, total
        if self.writer is not None and self.is_enable and hasattr(self.writer, "resume"):
            self.writer.resume(step)

    def _is_due(self, step: int, interval: int, mode: str) -> bool:
        """Whether to show or write metrics: those of evaluations always, others at an interval."""
        # A log point at the end of an epoch need not be a multiple of the interval.
        is_every_log_point = interval == self.plan.log_every
        is_last = step in (self.plan.steps, self._last_step)
        return mode != "train" or is_every_log_point or step % interval == 0 or is_last

    def _eval_step(self) -> Any:
        if self._metrics_step is None:
            raise ConfigError(
                "eval_step_fn: expected a step (state, batch) -> metrics, got None; return one "
                "from configure_functions"
            )
        return self._metrics_step

    def _keep(self, result: FitResult) -> None:
        self.result, self._state, self.best = result, result.state, result.best
        self.history = result.history or self.history
        self.stopped = str(result.stop_reason)

    def _recover_state(self) -> None:
        """Restore the newest checkpoint if an exception left no state."""
        is_lost = self.model_state is None or not is_available(self.model_state)
        own = self._own_checkpoints
        is_alone = jax.process_count() == 1  # all processes take part in a restore
        if is_lost and is_alone and own is not None and setup.newest_step(own) is not None:
            self._state = restore(own, self._abstract_state).state

    def _output(self, stopped: str) -> TrainerOutput:
        self.stopped, path = stopped, self.checkpoint_path
        name = None if path is None else Path(path).name
        return TrainerOutput(self.model_state, self.mesh, name, path, stopped=stopped)


def _check_function(name: str, value: Any) -> None:
    if not callable(value) or isinstance(value, type):
        raise ConfigError(f"{name}: expected a function, got {tree.spell(value)}")


def _check_list(name: str, values: Any, expected: str, kind: type | None = None) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{name}: expected a list of {expected}, got {tree.spell(values)}")
    for index, value in enumerate(values):
        if kind is None:
            _check_function(f"{name}[{index}]", value)
        elif not isinstance(value, kind):
            raise ConfigError(f"{name}[{index}]: expected {expected}, got {tree.spell(value)}")
    return list(values)


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
