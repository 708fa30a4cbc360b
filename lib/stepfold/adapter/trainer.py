"""The trainer: an object with EasyDeL's `BaseTrainerProtocol` that delegates to `fit`."""

import functools
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from stepfold.adapter.validation import check_functions, check_list
from stepfold.checkpoint.store import open_store
from stepfold.core.state import is_available
from stepfold.core.validation import check_flags, refuse_unknown
from stepfold.errors import ConfigError, refuse
from stepfold.inspect.flops import count, estimate
from stepfold.loop.evaluate import Evaluation, evaluate
from stepfold.loop.fit import FitResult
from stepfold.loop.hooks.base import Event, Hook, call_optional
from stepfold.loop.hooks.performance import memory_use
from stepfold.loop.hooks.stop import stop_early
from stepfold.loop.hooks.weights import weight_statistics
from stepfold.loop.metrics import metric_values
from stepfold.sharding.plan import make_sharding


class Trainer:
    """A run as an object, for code that expects EasyDeL's `BaseTrainerProtocol`.

    It holds the parts of a run, and delegates to `fit` and `evaluate`. A subclass may override any
    method. Unless it overrides `on_step_start` or `on_step_end`, no Python runs between steps.

    Attributes:
      model_state: the state; `state` and `_model_state` are the same.
      mesh: the mesh of the devices.
      tx, scheduler: the optimizer, which is also `optimizer`, and its schedule.
      plan: the numbers of the run: batch sizes, steps, intervals.
      training_batch_size, evaluation_batch_size: the examples of a batch, over all devices.
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
    max_training_steps: int | None
    max_evaluation_steps: int | None
    sharded_training_step_function: Any
    sharded_evaluation_step_function: Any
    # On the class too, so that a subclass may also inherit from an abstract class with these.
    model: Any = None
    mesh: Any = None
    training_batch_size: int = 0
    evaluation_batch_size: int = 0
    optimizer = property(attrgetter("tx"))
    train_step_fn = property(attrgetter("sharded_training_step_function"))
    eval_step_fn = property(attrgetter("sharded_evaluation_step_function"))

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
            refuse("arguments", "TrainingArguments", tree.describe_value(arguments))
        functions = {"data_collator": data_collator, "scheduler": scheduler}
        check_functions(loss_fn=loss_fn, eval_loss_fn=eval_loss_fn, **functions)
        check_flags(finetune=finetune, stateful=stateful)
        self.arguments = arguments
        self._state, self.model, self.config = model_state, model, config
        self.dataset_train, self.dataset_eval = dataset_train, dataset_eval
        self.data_collator, self.finetune, self.stateful = data_collator, finetune, stateful
        self.loss_fn, self.eval_loss_fn = loss_fn, eval_loss_fn
        self.tx, self.scheduler = tx, scheduler
        self.rules = from_arguments.sharding_rules(arguments) if rules is None else rules
        self.evaluations = check_list("evaluations", evaluations, "sf.Evaluation(…)", Evaluation)
        self.hooks: list[Hook] = check_list("hooks", hooks, "functions of an event")
        self.callbacks = check_list("callbacks", callbacks, "functions (trainer, epoch, metrics)")
        self.watchers = check_list("watchers", watchers, "Watcher(name, function, every)", Watcher)
        trainer_hooks.check_watchers(self.watchers)
        self.initial = model_state if finetune else None
        self._optimizer = tx, scheduler
        self.metrics_step: Any = None  # the evaluation step, whose numbers are metrics
        self.eval_jaxpr: Any = None  # of that step, once it is compiled ahead of time
        self.own_state: Any = None  # made by `configure_model`, so it need not be copied
        self.own_step: Any = None  # made by `configure_functions`, so it skips a NaN or inf
        self.step_with_metrics: tuple[Any, Any] = None, None  # a step, and what `fit` runs for it
        self.state_source: str | None = None  # what replaced the state since the last run
        self.start_step = self.watched_step = 0  # before the run, and of the last `log_watchers`
        self.last_step: int | None = None  # of the run
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
        self.logs_path = from_arguments.logs_of(arguments)  # the working directory may change
        self.mesh = from_arguments.make_mesh(arguments, devices)
        sizes = loading.length_of(dataset_train), loading.length_of(dataset_eval)
        self.plan = from_arguments.plan(arguments, *sizes, devices=self.mesh.size)
        self.training_batch_size = self.plan.train_batch
        self.evaluation_batch_size = self.plan.eval_batch
        self.initialize_trainer_utils()

    # What a run needs, in the order in which it is made

    def initialize_trainer_utils(self) -> None:
        """Make writers, timers, batches, the state and the steps."""
        self.writer: Any = from_arguments.writers(self.arguments)
        self.timer = trainer_hooks.Timers()
        setup.use_dataloaders(self, self.configure_dataloaders())
        setup.use_model(self, self.configure_model())
        setup.use_functions(self, self.configure_functions())

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Make batches of the datasets, and count the steps."""
        train = evaluation = None
        if self.dataset_train is not None:
            train = loading.training_batches(self, self.dataset_train)
        if self.dataset_eval is not None:
            steps = self.plan.eval_steps
            evaluation = loading.evaluation_batches(self, self.dataset_eval, steps)
        return TrainerConfigureDataloaderOutput(
            train, self.plan.steps, evaluation, self.plan.eval_steps
        )

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Make the optimizer, its schedule, and the state."""
        tx, scheduler = self.make_optimizer()
        self.own_state = setup.first_state(self, self.model, self.initial, tx)
        return TrainerConfigureModelOutput(
            self.model, tx, scheduler, self.config, state=self.own_state
        )

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Make the jitted steps, the mesh, and the description of the checkpoints."""
        train_step, eval_step = steps.make_steps(self)
        train_step = self.train_tracker.track(train_step)
        shardings = (self.state_shardings, None) if self.sharded_mesh else None
        self.own_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        eval_step = jax.jit(self.evalu_tracker.track(eval_step))
        manager = from_arguments.checkpoints(self.arguments, self.plan)
        return TrainerConfigureFunctionOutput(self.own_step, self.mesh, manager, eval_step)

    def create_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
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
    ) -> TrainerOutput:
        """Do the whole run, or the rest of it after the newest checkpoint in `output_dir`.

        A NaN or inf in the loss, the time limit, a signal, or an exception in a method or hook ends
        the run after a save. Signals and exceptions are raised after the save, as by `fit`.

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
        resume = run.start(self, model_parameters, state, ckpt_path, more_steps=more_steps)
        self.writer = self.writer or from_arguments.writers(self.arguments)
        try:
            self.start_training_hook()
            with self.timer("train"):
                self._use_result(run.fit_trainer(self, more_steps=more_steps, resume=resume))
        except BaseException as error:
            trainer_hooks.add_advice(error)
            if hasattr(error, "result"):
                self._use_result(error.result)
            else:
                self.stopped = f"{type(error).__name__}: {error}"
                self._recover_state()
            raise
        finally:
            self.state_source = None
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
        for name in ("loss", "train/loss"):
            if not np.isfinite(metrics.get(name, 0.0)):
                raise StopTraining(f"{name} is {float(metrics[name])}", "nonfinite")
        limit = self.plan.seconds
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
        the last step are always shown and written. With the interval of the log points, the others
        are at every call, because the end of an epoch is a log point and need not be a multiple.

        Args:
          metrics: numbers by name; a name without a prefix gets that of the mode, as `train/loss`.
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
        if update_progress and pbar is not None and self._is_due(step, self.plan.log_steps, mode):
            pbar.set_postfix(dict(without_norms))
            pbar.update(step - getattr(pbar, "step", getattr(pbar, "n", 0)))
        is_due = force_report or self._is_due(step, self.plan.report_steps, mode)
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
          ConfigError: if a watcher returns something else than numbers.
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
        """Return the metrics of a state on the evaluation data, as `eval_loss`; log nothing.

        Args:
          state: the state, by default the trainer's. Anything else is taken as the `dataset`.
          metric_calculator: a function that returns further metrics: `(state, batch) -> metrics`,
            or a function of the numbers by name.
          dataset: other data to evaluate on.
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
            limit = self.arguments.max_evaluation_steps
            return iter(loading.evaluation_batches(self, dataset, limit))
        loader = self.dataloader_eval
        if loader is None:
            refuse("dataset_eval", "data to evaluate on", "None")
        batches = iter(loader() if callable(loader) else loader)
        return itertools.islice(batches, self.max_evaluation_steps)

    # Before the run

    def compile_aot(self) -> bool:
        """Compile the steps that there are data for ahead of time; return whether there are any."""
        return run.compile_steps(self)

    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> int:
        """Count the floating-point operations of a step on all devices.

        After `compile_aot` it is the count of matrix products and convolutions in the compiled
        step, and before the estimate of 6 for each parameter and token in training, 2 in an
        evaluation.
        """
        train_step = self.sharded_training_step_function
        jaxpr = getattr(train_step, "jaxpr", None) if is_training else self.eval_jaxpr
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
        state it is the trainer's. `to_torch` writes the parameters alone, as safetensors that torch
        loads; `easystate_to_huggingface_model_kwargs` may have `names`, which are those in torch by
        path, and `torch_save_pretrained_kwargs` the `metadata` of the file. `gather_fns` must be
        None. Returns the folder of the checkpoint, or that of the safetensors.
        """
        path, state = saving.path_and_state(state, save_directory, ckpt_path)
        state = self.model_state if state is None else state
        if gather_fns is not None:
            raise ConfigError(
                "gather_fns: expected None, since arrays are saved from where they are, got "
                f"{tree.describe_value(gather_fns)}; leave it out"
            )
        if to_torch:
            names = easystate_to_huggingface_model_kwargs or {}
            metadata = torch_save_pretrained_kwargs or {}
            refuse_unknown("save_pretrained", names, ["names"])
            refuse_unknown("save_pretrained", metadata, ["metadata"])
            saving.save_for_torch(path, getattr(state, "params", state), **names, **metadata)
            return path
        return saving.save_state(self, path, state)

    def save_information(self, output_path: str | os.PathLike[str]) -> None:
        """Write a card of the run as markdown, to a file or as `README.md` in a folder."""
        text = saving.make_card(self)
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
        parts = setup.parts_of(self.model_state, optimizer=load_optimizer, scheduler=load_scheduler)
        # One pattern, since not every state has all of them.
        restored = setup.restore_path(self, path, self.state, parts=("|".join(parts),))
        self._state = restored.state
        self.loaded, self.left = list(restored.loaded), restored.not_loaded
        self.state_source = "load_checkpoint"
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
                "early_stopping_patience with a metric of an evaluation, to know which is the best"
            )
        return manager.restore(self.abstract_state, step="best").state

    @property
    def epoch_history(self) -> dict[str, list[float]]:
        """The metrics as lists with one element for each epoch, with names such as `train_loss`."""
        epoch_steps = self.plan.epoch_steps or self.max_training_steps or 1
        return trainer_hooks.epoch_means(self.history, epoch_steps, self.start_step)

    @property
    def state(self) -> Any:
        """The state. One that is assigned starts the next run, which donates it."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state, self.state_source = state, "state"

    model_state = _model_state = state

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

    # What the other modules of the adapter use

    def make_optimizer(self, scheduler: Any = None) -> tuple[Any, Any]:
        """Make the optimizer and its schedule of the arguments, or return those that were given."""
        tx, own_scheduler = self._optimizer
        scheduler = own_scheduler if scheduler is None else scheduler
        return from_arguments.optimizer_of(self.arguments, self.max_training_steps, tx, scheduler)

    def set_state(self, state: Any) -> None:
        """Replace the state, and describe it."""
        self._state = state
        self.state_shape = self.abstract_state = jax.eval_shape(lambda: state)
        self.state_shardings = make_sharding(self.state_shape, self.mesh, self.rules)
        self.state_named_sharding = self.state_shardings
        self.state_partition_spec = jax.tree.map(lambda x: x.spec, self.state_shardings)
        if self.sharded_mesh is not None:
            make = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            self.abstract_state = jax.tree.map(make, self.state_shape, self.state_shardings)

    @property
    def sharded_mesh(self) -> Mesh | None:
        """The mesh, or None if it is jax's default device alone, which needs no shardings."""
        is_default = self.mesh.size == 1 and self.mesh.devices.flat[0] == jax.local_devices()[0]
        return None if is_default else self.mesh

    def shardings_of(self, state: Any) -> Any:
        """Return the shardings of a state, or None if it needs none."""
        return make_sharding(state, self.mesh, self.rules) if self.sharded_mesh else None

    def overrides(self, method: str) -> bool:
        """Whether a method is that of a subclass, or was set on the object."""
        return method in vars(self) or getattr(type(self), method) is not getattr(Trainer, method)

    def _is_due(self, step: int, interval: int, mode: str) -> bool:
        """Whether to show or write metrics: those of evaluations always, others at an interval."""
        is_every_log_point = interval == self.plan.log_every
        is_last = step in (self.plan.steps, self.last_step)
        return mode != "train" or is_every_log_point or step % interval == 0 or is_last

    def _eval_step(self) -> Any:
        if self.metrics_step is None:
            raise ConfigError(
                "eval_step_fn: expected a step (state, batch) -> metrics, got None; return one "
                "from configure_functions"
            )
        return self.metrics_step

    def _use_result(self, result: FitResult) -> None:
        self.result, self._state, self.best = result, result.state, result.best
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
