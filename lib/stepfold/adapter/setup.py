"""What a trainer holds, and how it is made: batches, model, state, steps, in this order."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from stepfold import tree
from stepfold.adapter.arguments.names import refuse_unknown
from stepfold.adapter.arguments.readers import flag, function, listed, optional
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.collecting import Collect, collect_function
from stepfold.adapter.evaluating import whole_if_uneven
from stepfold.adapter.functions import jitted, make_functions
from stepfold.adapter.held import Held
from stepfold.adapter.loading import (
    check_again,
    evaluation_batches,
    length_of,
    training_batches,
    with_mask,
)
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from stepfold.adapter.overriding import chosen_collect
from stepfold.adapter.parts.checkpoints import checkpoints
from stepfold.adapter.parts.devices import make_mesh, start_processes
from stepfold.adapter.parts.optimizer import optimizer_of
from stepfold.adapter.parts.precision import cast_params, precision
from stepfold.adapter.parts.writers import writers
from stepfold.adapter.planning import plan
from stepfold.adapter.starting import check_model, first_state, placed, weights_from
from stepfold.adapter.stepping import as_eval_step
from stepfold.adapter.tracking import CompilationTracker, Timers
from stepfold.errors import ConfigError
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.throughput import memory_use


class Setup(Held):
    """Make and hold what a run needs; `Trainer` runs it.

    Each `configure_…` gives what it makes, and only then is it held, so that a subclass may give
    something else, or change what `super()` gives.
    """

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
        hooks: Sequence[Callable[..., Any]] = (),
        callbacks: Sequence[Callable[..., Any]] = (),
        config: Any = None,
        **deprecated_kwargs: Any,
    ) -> None:
        """Say what to train, on what, and how.

        Args:
          arguments: all that can be said in words and numbers.
          model_state: a state to begin with, or parameters.
          model: a function `key -> params`, a tree of parameters, or any object, if `model_state`
            brings what it takes.
          dataset_train: what `stepfold.batches` takes.
          dataset_eval: the same, for evaluations.
          data_collator: a function that makes a batch of a list of examples.
          finetune: whether to begin with the parameters of `model_state`, instead of new ones.
          loss_fn: a loss function; needed unless a subclass writes `configure_functions` anew.
          eval_loss_fn: that of evaluations, where it is another.
          stateful: whether the loss functions carry a model state.
          tx: an optimizer, in place of the arguments'.
          scheduler: its schedule, to be shown.
          rules: how the state is spread over the mesh, as for `make_sharding`.
          devices: the devices of the mesh; all by default.
          evaluations: more of them, such as one that generates text.
          hooks: those of `fit`.
          callbacks: functions `(trainer, epoch, metrics)`, called after each epoch.
          config: the model's own configuration.
          **deprecated_kwargs: nothing; a name that is none is an error that names the nearest.
        """
        refuse_unknown(type(self).__name__, deprecated_kwargs, _PARAMETERS)
        if not isinstance(arguments, TrainingArguments):
            raise ConfigError(f"arguments: expected TrainingArguments, got {tree.spell(arguments)}")
        for name, value in (
            ("data_collator", data_collator),
            ("loss_fn", loss_fn),
            ("eval_loss_fn", eval_loss_fn),
            ("scheduler", scheduler),
        ):
            optional(function)(name, value)
        self.arguments = arguments
        self.finetune, self.stateful = flag("finetune", finetune), flag("stateful", stateful)
        self.dataset_train, self.dataset_eval = dataset_train, dataset_eval
        self.data_collator, self.loss_fn, self.eval_loss_fn = data_collator, loss_fn, eval_loss_fn
        self.model, self.model_state, self.config = model, model_state, config
        self._given, self._born = model_state, None
        self._own_optimizer = tx, scheduler
        self.tx, self.scheduler, self.rules = tx, scheduler, rules
        self.evaluations = listed("evaluations", evaluations, "sf.Evaluation(…)", Evaluation)
        self.hooks = listed("hooks", hooks, "functions of an event")
        self.callbacks = listed("callbacks", callbacks, "functions (trainer, epoch, metrics)")
        self.pruning_module, self.memory_monitor = arguments.pruning_module, memory_use
        self.dtype = precision(arguments).compute
        self.param_dtype = jax.numpy.dtype(arguments.param_dtype or "float32")
        self.train_tracker, self.evalu_tracker = CompilationTracker(), CompilationTracker()
        self.history: Any = {}
        self.loaded: list[str] = []
        self.left: dict[str, str] = {}
        start_processes(arguments)
        self.mesh = make_mesh(arguments, devices)
        examples, eval_examples = length_of(dataset_train), length_of(dataset_eval)
        self.plan = plan(arguments, examples, eval_examples, devices=self.mesh.size)
        self.initialize_trainer_utils()

    # What a run needs, in the order in which it is made

    def initialize_trainer_utils(self) -> None:
        """Make all that a run needs: writers, timer, batches, model, state, and steps."""
        self.writer = writers(self.arguments)
        self.timer = Timers()
        self._take_dataloaders(self.configure_dataloaders())
        self._take_model(self.configure_model())
        self._take_functions(self.configure_functions())

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Make batches of the datasets, and say how many steps there are."""
        data, dataloader_train, dataloader_eval = self.dataset_train, None, None
        if self.dataset_eval is not None:
            check_again("dataset_eval", self.dataset_eval)
            dataloader_eval = self._evaluation_batches(self.dataset_eval, self.plan.eval_steps)
        if data is not None:
            dataloader_train = training_batches(
                self.arguments,
                data,
                self.plan.train_batch,
                collect=self._collect(data),
                prepare=self._masked,
                epoch_steps=self.plan.epoch_steps,
                epochs=None if self.plan.steps else self.arguments.num_train_epochs,
            )
        return TrainerConfigureDataloaderOutput(
            dataloader_train, self.plan.steps, dataloader_eval, self.plan.eval_steps
        )

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Make optimizer and schedule of the arguments, and the state of the model."""
        check_model(self.model, self._given, finetune=self.finetune)
        tx, scheduler = self._optimizer()
        state = self._born = self.make_state(self.model, tx, self._begins_with)
        return TrainerConfigureModelOutput(self.model, tx, scheduler, self.config, state=state)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Make the steps of the loss function; say where they run, and what saves the state."""
        if self.loss_fn is None:
            raise ConfigError(
                "loss_fn: expected a loss function (params, batch, key) -> loss, got None; give "
                "one, or write configure_functions in a subclass"
            )
        step, evaluate = make_functions(
            self.arguments,
            self.loss_fn,
            self.tx,
            eval_loss_fn=self.eval_loss_fn,
            scheduler=self.scheduler,
            accumulate=self.plan.accumulate,
            mesh=self._large_mesh,
            stateful=self.stateful,
        )
        step, evaluate = jitted(
            self.train_tracker.tracked(step),
            self.evalu_tracker.tracked(evaluate),
            self.state_shardings if self._large_mesh else None,
        )
        manager = checkpoints(self.arguments, self.plan)
        return TrainerConfigureFunctionOutput(step, self.mesh, manager, evaluate)

    def _evaluation_batches(self, dataset: Any, steps: int | None = None) -> Any:
        return evaluation_batches(
            self.arguments,
            dataset,
            self.plan.eval_batch,
            collect=self._collect(dataset),
            prepare=lambda batch: whole_if_uneven(self._masked(batch), self._large_mesh),
            steps=steps,
        )

    def _take_dataloaders(self, made: TrainerConfigureDataloaderOutput) -> None:
        self.dataloader_train, self.dataloader_eval = made.dataloader_train, made.dataloader_eval
        self.max_training_steps = made.max_training_steps or self.plan.steps
        self.plan = self.plan._replace(steps=self.max_training_steps)
        self.max_evaluation_steps = made.max_evaluation_steps

    def _take_model(self, made: TrainerConfigureModelOutput) -> None:
        self.model, self.scheduler, self.config = made.model, made.scheduler, made.config
        state, self.tx = made.state, made.tx or getattr(made.state, "tx", None)
        if self.tx is None:
            self.tx, self.scheduler = self._optimizer()
        if state is None:
            state = self.make_state(made.model, self.tx, self._begins_with)
        elif state is not self._born:  # somebody else's, which is not to be donated
            state = placed(state, self._shardings_of(state))
        self._born = None
        if self.arguments.init_weights_from is not None:
            where, folder = self.arguments.init_weights_from, self.arguments.checkpoints_dir
            state, self.loaded, self.left = weights_from(where, state, folder)
        self.hold(state)

    def _take_functions(self, made: TrainerConfigureFunctionOutput) -> None:
        if made.mesh is not None and made.mesh != self.mesh:
            self.mesh = made.mesh
            self.hold(placed(self.model_state, self._shardings_of(self.model_state)))
        self.sharded_training_step_function = made.train_step_fn
        self.sharded_evaluation_step_function = made.eval_step_fn
        self.measuring_step = made.eval_step_fn and jax.jit(as_eval_step(made.eval_step_fn))
        manager = made.checkpoint_manager or checkpoints(self.arguments, self.plan)
        if manager is not None and manager.directory is None and self.arguments.output_dir:
            place = Path(self.arguments.output_dir) / self.arguments.checkpoints_dir
            manager = dataclasses.replace(manager, directory=place)
        self.checkpoint_manager = manager

    def _optimizer(self) -> tuple[Any, Any]:
        return optimizer_of(self.arguments, self.max_training_steps, *self._own_optimizer)

    def make_state(self, model: Any, tx: Any, given: Any = None) -> Any:
        """Make a state of a model, or of parameters or a state, where the mesh wants it."""
        return first_state(
            model,
            given,
            tx,
            seed=self.arguments.seed,
            plan=self._shardings_of,
            cast=functools.partial(cast_params, self.arguments),
            stateful=self.stateful,
            init_tx=self.arguments.init_tx,
            step=self.arguments.step_start_point,
        )

    @property
    def _begins_with(self) -> Any:
        return self._given if self.finetune else None

    def _collect(self, dataset: Any) -> Any:
        kind = "tfds_" if hasattr(dataset, "as_numpy_iterator") else ""
        return chosen_collect(self, Setup, "grain_" if self.arguments.use_grain else kind)

    def _masked(self, batch: Any) -> Any:
        return batch if "mask" in self.arguments.ids_to_pop_from_dataset else with_mask(batch)

    def create_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> Collect:
        """Make what pads and cuts the sequences of a list of examples, or of a dict of columns."""
        return collect_function(max_sequence_length, truncation_mode)

    def create_grain_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> Collect:
        """Make the same for what grain reads."""
        return self.create_collect_function(max_sequence_length, truncation_mode)

    def create_tfds_collect_function(
        self, max_sequence_length: int | None, truncation_mode: str = "keep_end"
    ) -> Collect:
        """Make the same for what tf.data reads."""
        return self.create_collect_function(max_sequence_length, truncation_mode)


_PARAMETERS = list(inspect.signature(Setup.__init__).parameters)[1:-1]
