"""Hezar's trainer: an object with the methods that Hezar documents, on top of `fit`.

Its config is a `TrainerConfig`, and a model that carries its parameters is a `Model` or a module of
equinox.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import optax

from stepfold.adapter import from_arguments, hezar_config, loading, run, setup
from stepfold.adapter.hezar_config import TrainerConfig as TrainerConfig
from stepfold.adapter.hezar_metrics import MetricConfig as MetricConfig
from stepfold.adapter.hezar_metrics import MetricsHandler as MetricsHandler
from stepfold.adapter.hezar_metrics import Recorder, read_generate, read_handler
from stepfold.adapter.hooks import LossTracker
from stepfold.adapter.model_trainer import Model as Model
from stepfold.adapter.model_trainer import (
    ModelTrainer,
    call_model,
    mask_of,
    output_of,
    read_dataloader,
    split_batch,
    split_model,
)
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from stepfold.adapter.steps import call_evaluate, with_update
from stepfold.adapter.validation import check_functions
from stepfold.core.precision import LossScaled, dynamic_loss_scale
from stepfold.core.validation import read_instance, read_integer
from stepfold.data.batches import batches
from stepfold.data.prefetch import prefetch
from stepfold.errors import refuse
from stepfold.loop.evaluate import Evaluation, evaluate
from stepfold.loop.metrics import metric_values
from stepfold.runs.directory import RunDirectory
from stepfold.tree import describe_value


def _evaluation_loss(bound: Any, batch: Any) -> Any:
    """Compose `forward` and `compute_loss` of a trainer to the loss of an evaluation."""
    return bound.compute_loss(bound.forward(batch), _labels_of(batch))


def _labels_of(batch: Any) -> Any:
    return split_batch(batch, keep_labels=True, method="training_step")[1]


class Trainer(ModelTrainer):
    """A run as an object, with the methods that Hezar documents of its trainer.

    A run calls what a subclass overrides. `forward`, `compute_loss`, `training_step` and
    `optimization_step` are traced by jax once for each shape of a batch: they are pure functions of
    their arguments, `model` and `key`, and what they assign to the trainer is lost. The others run
    on the host, and may do anything.

    Attributes:
      config: the `TrainerConfig`.
      state: the `TrainState`, which the next step donates.
      key: the PRNG key while a training step is traced; None in an evaluation.
      optimizer, lr_scheduler: the optimizer, and its schedule if it is known.
      train_dataloader: the batches of `create_train_dataloader`.
      loss_tracker: has the `average` of the loss since the start of the training.
      result: the `FitResult` of the last run, with its `stop_reason`, `history` and `best`.
      loaded, not_loaded: the paths that were loaded from `init_weights_from`, and why others were
        not.

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.zeros(2)}, optax.squared_error)
    >>> config = TrainerConfig(num_epochs=3, batch_size=2, optimizer="sgd", learning_rate=1.0)
    >>> data = [(x, y) for x, y in zip(np.eye(2, dtype="float32"), np.float32([1, -1]))]
    >>> trainer = Trainer(config, model, data, eval_dataset=data)
    >>> trainer.train()
    0.3333333333333333
    >>> trainer.evaluate()
    {'loss': 0.0}
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        preprocessor: Any = None,
        metrics_handler: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        lr_scheduler: Callable[[Any], Any] | None = None,
        accelerator: None = None,
        *,
        generate: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Check the arguments, and make all that a run needs.

        Args:
          config: a `TrainerConfig`.
          model: a callable pytree, such as an equinox module or a `Model`. Its floating arrays are
            trained. The loss is that of its `loss_fn` or `compute_loss(outputs, labels)`, or the
            `loss` of its outputs.
          train_dataset: any object with `len` and `[i]`. Its last incomplete batch is dropped.
          eval_dataset: the same, to evaluate on.
          data_collator: a function from a list of examples to a batch; by default the attribute
            `data_collator` of the dataset, or else examples are stacked.
          preprocessor: an object with `save(path)` or `save_pretrained(path)`, which `train` calls
            with `output_dir/preprocessor`. If it has `decode(ids)`, texts are decoded by it.
          metrics_handler: an object with `compute_metrics(predictions, labels)`, which gets all
            examples of an evaluation and returns numbers by name.
          optimizer: an optax optimizer, in place of that of the config.
          lr_scheduler: a schedule of optax, in place of that of the config.
          accelerator: must be None.
          generate: a function `(model, batch)` that returns a prediction for each example.
        """
        read_instance("config", config, TrainerConfig, "a TrainerConfig")
        if accelerator is not None:
            expected = "None, since jax places the arrays"
            advice = "set distributed, mixed_precision or gradient_accumulation_steps in the config"
            refuse("accelerator", expected, type(accelerator).__name__, advice)
        check_functions(data_collator=data_collator, generate=generate)
        hezar_config.find_save_method(preprocessor)
        self.config, self.eval_dataset, self.preprocessor = config, eval_dataset, preprocessor
        self.train_dataset, self.data_collator = train_dataset, data_collator
        self.loss_tracker = LossTracker()
        self._may_resume = bool(config.resume_from_checkpoint)
        devices = hezar_config.find_devices(config)
        arguments = hezar_config.make_arguments(config, len(devices))
        self.metrics_handler = read_handler(metrics_handler, config.metrics, preprocessor)
        evaluates = config.do_evaluate and eval_dataset is not None
        hezar_config.check_best_metric(config, arguments, metrics_handler, evaluates=evaluates)
        params, self._build = split_model(model)
        self._generate = read_generate(config.evaluate_with_generate, generate, model)
        self._parts = setup.make_parts(
            arguments,
            devices=devices,
            initial=params,
            loss_fn=self._make_loss(lambda bound, x: bound.training_step(x), is_training=True),
            eval_loss_fn=self._make_loss(_evaluation_loss, is_training=False),
        )
        loader = read_dataloader(self.create_train_dataloader(train_dataset))
        if (epoch_steps := getattr(loader, "steps_per_epoch", None)) is None:
            expected = "batches of which each epoch has the same number"
            refuse("create_train_dataloader", expected, describe_value(loader))
        prepare = lambda batch: self.prepare_input_batch(batch)
        self.train_dataloader = loading.TrainingLoader(loader, prepare)
        self._epoch_steps: int = epoch_steps
        limits = [config.num_epochs and config.num_epochs * epoch_steps, config.max_steps]
        self._steps = min(filter(None, limits))
        self.optimizer, self.lr_scheduler = hezar_config.make_optimizers(
            config, arguments, self._steps, optimizer, lr_scheduler
        )
        self._set_up()

    def _set_up(self) -> None:
        """Make the state and the steps from the batches and the optimizer."""
        config, tx = self.config, self.optimizer
        if self._overrides("optimization_step"):
            tx = with_update(tx, "optimization_step", self.optimization_step)
        has_scale = isinstance(tx, LossScaled)
        if from_arguments.precision(self._parts.arguments).needs_loss_scale and not has_scale:
            tx = dynamic_loss_scale(tx)
        loaders = TrainerConfigureDataloaderOutput(self.train_dataloader, self._steps)
        parts = setup.with_dataloaders(self._parts, loaders)
        model = TrainerConfigureModelOutput(None, tx, self.lr_scheduler)
        parts, state = setup.with_model(parts, model)
        weights = setup.load_weights(config.init_weights_from, state, config.checkpoints_dir)
        state, self.loaded, self.not_loaded = weights
        train_step, self._eval_step = setup.jit_steps(parts)
        functions = TrainerConfigureFunctionOutput(train_step)
        self._parts, self.state = setup.with_functions(parts, state, functions)
        self._measure = jax.jit(self._measure_batch)

    # Training

    def train(self) -> float:
        """Train to the end of the run, and return the average loss since its start.

        A second call continues from the state of the trainer. After a complete run it is a no-op.
        """
        is_first = self.result is None
        start = run.find_start(self._parts, self.state, None, {}, is_first=is_first)
        if start.source is not None:
            self.state = start.state
            loading.seek(self.train_dataloader, start.data, int(self.state.step))
        self._may_resume = start.may_resume
        hezar_config.save_preprocessor(self.config, self.preprocessor)
        if not self._overrides("inner_training_loop"):
            return self._run(self._steps)
        average, epochs = self.loss_tracker.average, math.ceil(self._steps / self._epoch_steps)
        for epoch in range(self._epoch, epochs + 1):
            average = self.inner_training_loop(epoch)
            if self.result is not None and self.result.stop_reason.kind == "nonfinite":
                break
        return average

    def inner_training_loop(self, epoch_num: int) -> float:
        """Train to the end of an epoch, and return the average loss since the start of the run.

        Epochs count from 1. The call evaluates, saves and logs. `train` calls an override once for
        each epoch. Without an override, `train` runs all epochs at once.
        """
        read_integer("epoch_num", epoch_num)
        if epoch_num != self._epoch:
            expected = f"{self._epoch}, the epoch of step {self._position}"
            refuse("epoch_num", expected, f"{epoch_num}")
        return self._run(min(epoch_num * self._epoch_steps, self._steps))

    def _run(self, steps: int) -> float:
        """Run until a step, with evaluations, hooks and checkpoints."""
        parts, evaluations = self._parts, []
        if self.config.do_evaluate and self.eval_dataset is not None:
            evaluations.append(Evaluation(partial(call_evaluate, self), every_epochs=1))
        hooks = hezar_config.make_hooks(parts, int(self.state.step), may_resume=self._may_resume)
        self._fit(
            parts.train_step,
            self.train_dataloader,
            steps=steps,
            run_dir=RunDirectory(config=from_arguments.config_of(parts.arguments)),
            evaluation=evaluations,
            checkpoints=parts.checkpoint_manager,
            hooks=[self.loss_tracker, *hooks],
            log_every=parts.sizes.log_every,
            resume=self._may_resume,
        )
        self._may_resume = True
        return self.loss_tracker.average

    def create_train_dataloader(self, dataset: Any) -> Iterable[Any]:
        """Return the batches of a dataset: an iterable that starts again in each epoch.

        The constructor calls it once, to count the steps of a run.
        """
        config, size = self.config, self._parts.sizes.train_batch
        seed = config.seed if config.dataloader_shuffle else None
        loader = batches(dataset, size, seed=seed, collate=self._collator_of(dataset))
        workers = config.num_dataloader_workers
        return prefetch(loader, size=workers) if workers else loader

    def prepare_input_batch(self, input_batch: Any) -> Any:
        """Convert a batch to what the steps take, on the host, before jax places it."""
        return input_batch

    def forward(self, input_batch: Any) -> Any:
        """Return the outputs of the model."""
        keep_labels = self._loss_fn is None
        inputs, _ = split_batch(input_batch, keep_labels=keep_labels, method="forward")
        return call_model(self.model, inputs)

    def compute_loss(self, outputs: Any, labels: Any) -> Any:
        """Return the loss: values of examples, their mean, or an `sf.mean`; metrics may follow."""
        if self._loss_fn is not None:
            return self._loss_fn(outputs, labels)
        if (loss := output_of(outputs, "loss")) is None:
            expected = "a loss_fn, or outputs with a loss"
            refuse("model", expected, "neither", "give Model(apply, params, loss_fn)")
        return loss

    def training_step(self, input_batch: Any) -> Any:
        """Return the loss of a batch, which jax differentiates."""
        return _evaluation_loss(self, input_batch)

    def optimization_step(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Return the updates of the parameters, and the new state of the optimizer."""
        updates, new_state = self.optimizer.update(grads, opt_state, params)
        return updates, new_state

    # Evaluation

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return the loss and the metrics over all examples of a dataset; log nothing."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            refuse("eval_dataset", "data to evaluate on", "None")
        collate, mesh = self._collator_of(dataset), self._parts.sharded_mesh
        size, prepare = self._parts.sizes.eval_batch, self.prepare_input_batch
        loader = loading.one_pass(dataset, size, prepare, mesh, collate=collate)
        if self.metrics_handler is None:
            return evaluate(self._eval_step, self.state, loader)
        generate = self._generate and partial(self._generate, self.model)
        recorder = Recorder(self._measure, generate)
        numbers: dict[str, Any] = evaluate(recorder, self.state, loader)
        computed = self.metrics_handler.compute_metrics(recorder.predictions, recorder.labels)
        expected = "compute_metrics to return numbers by name"
        read_instance("metrics_handler", computed, Mapping, expected)
        return metric_values({**numbers, **computed})

    # Helpers

    def _collator_of(self, dataset: Any) -> Any:
        """Check that a dataset has single examples, and return its collator."""
        loading.refuse_batches(dataset)
        return loading.collator_of(self.data_collator, dataset, self.train_dataset)

    def _measure_batch(self, state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Return the metrics of a batch, with its predictions, labels and mask."""
        forward = lambda params, batch, key: self._bind(params, key).forward(batch)
        precision = from_arguments.precision(self._parts.arguments)
        outputs = precision.applied_to(forward)(state.params, batch, None)
        logits = output_of(outputs, "logits")
        predictions = outputs if logits is None else logits
        if hasattr(self.metrics_handler, "predict"):
            predictions = self.metrics_handler.predict(predictions)
        return self._eval_step(state, batch), predictions, _labels_of(batch), mask_of(batch)

    @property
    def _loss_fn(self) -> Any:
        """The loss function of the model, or None."""
        model = self.model
        return getattr(model, "loss_fn", None) or getattr(model, "compute_loss", None)

    @property
    def _epoch(self) -> int:
        """The epoch of the next step, from 1 on."""
        return self._position // self._epoch_steps + 1

    @property
    def _position(self) -> int:
        """The step at which the next run starts."""
        manager, step = self._parts.checkpoint_manager, int(self.state.step)
        newest = manager.latest_step() if manager is not None and self._may_resume else None
        return max(step, newest or 0)
