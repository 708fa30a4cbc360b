"""The trainer that qurious documents: an object with its methods, on top of `fit`.

A model that carries its parameters is a `Model`, or a module of equinox.
"""

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import optax
from jax.sharding import SingleDeviceSharding

from stepfold.adapter import setup
from stepfold.adapter.epochs import EpochHook, make_evaluation, read_dataloader
from stepfold.adapter.models import Model as Model
from stepfold.adapter.models import (
    call_model,
    count_examples,
    loss_in,
    make_loss,
    split_batch,
    split_model,
)
from stepfold.adapter.qurious_arguments import (
    check_arguments,
    make_optimizer,
    read_config,
    read_metric,
)
from stepfold.adapter.steps import as_metrics
from stepfold.adapter.validation import check_list
from stepfold.checkpoint.policy import Checkpoints
from stepfold.core.metric_modes import known_mode
from stepfold.core.state import TrainState, init_state
from stepfold.core.step import make_eval_step, make_train_step
from stepfold.core.validation import read_integer
from stepfold.errors import DataError, refuse
from stepfold.loop.data import check_batches
from stepfold.loop.evaluate import evaluate
from stepfold.loop.fit import FitResult, fit
from stepfold.loop.hooks.base import Hook
from stepfold.loop.hooks.stop import stop_early
from stepfold.loop.metrics import merge_metrics, metric_values


def make_saver(
    hook: EpochHook, folder: Any, every: int, metric: str | None
) -> Callable[[Any, int, Mapping[str, float]], None]:
    """Make a callback that saves by `_save_checkpoint` at an interval, and after the best epoch."""
    name = (metric or "").replace("/", "_", 1)
    best = min if known_mode(name) == "min" else max

    def save(trainer: Any, epoch: int, metrics: Mapping[str, float]) -> None:
        value = metrics.get(name)
        values = [past for past in hook.history.get(name, []) if not math.isnan(past)]
        if (epoch + 1) % every == 0:
            trainer._save_checkpoint(
                os.path.join(folder, f"checkpoint_epoch_{epoch + 1}"), epoch, value
            )
        if values and value == best(values) and values.count(value) == 1:
            trainer._save_checkpoint(os.path.join(folder, "best_model"), epoch, value)

    return save


def _loss_of(bound: Any, batch: Any) -> Any:
    """Compose the protected methods of a trainer."""
    inputs, targets = bound._prepare_batch(batch)
    return bound._compute_loss(bound._forward_pass(inputs), targets)


class _CallTrainStep:
    """A step for `fit` that calls the `train_step` of a subclass."""

    def __init__(self, trainer: Any, step: Any) -> None:
        self._trainer, self.lower = trainer, step.lower

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self._trainer.state = state
        numbers = self._trainer.train_step(batch)
        return self._trainer.state, as_metrics(numbers, "train_step", weight=count_examples(batch))


class Trainer:
    """A run as an object, with the methods that qurious documents of its trainer.

    A run calls what a subclass overrides: `_prepare_batch`, `_forward_pass` and `_compute_loss` in
    the loss function, `train_step`, `eval_step` and `evaluate` from the host, and
    `_save_checkpoint` in addition to its own checkpoints. Other than in torch, jax traces the first
    three once for each shape of a batch: they are pure functions of their arguments, `model` and
    `key`, and what they assign to the trainer is lost.

    Attributes:
      state: the `TrainState`, which the next step donates.
      key: the PRNG key while a training step is traced; None in an evaluation.
      result: the `FitResult` of the last run, with its `stop_reason`.

    >>> import jax.numpy as jnp, optax
    >>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.zeros(2)})
    >>> batch = jnp.eye(2), jnp.array([1.0, -1.0])
    >>> trainer = Trainer(model, optax.sgd(1.0), loss_fn=optax.squared_error)
    >>> trainer.train([batch], num_epochs=3)["train_loss"]
    [1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        loss_fn: Callable[..., Any] | None,
        config: Any = None,
        device: jax.Device | None = None,
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Check the arguments, and initialize the state.

        Args:
          model: a callable pytree, such as an equinox module or a `Model`. Its floating arrays are
            trained.
          optimizer: an optax optimizer.
          loss_fn: a function `(outputs, targets)` that returns losses of examples, their mean, or
            an `sf.mean`; or one of these and a dict of metrics of these forms. None takes the
            `loss` of the outputs.
          config: nested objects or mappings, or a mapping of dotted names, with any of
            `training.max_grad_norm`, `training.weight_decay` (added to the gradients, as torch's
            Adam does) and `training.scheduler_step_per_batch` (True by default).
          device: the device of the state, or None for jax's default.
          scheduler: a function from the number of steps, or of epochs without
            `scheduler_step_per_batch`, to a factor of the updates, as in torch's `LambdaLR`.
        """
        check_arguments(optimizer, loss_fn, device, scheduler)
        if self._overrides("train_epoch"):
            expected = "the method of the class, since a run is one fold over all epochs"
            refuse("train_epoch", expected, "an override", "override train_step or evaluate")
        self.optimizer, self.loss_fn, self.scheduler = optimizer, loss_fn, scheduler
        self.config, self.device = config, device or jax.devices()[0]
        self.key: jax.Array | None = None
        self.result: FitResult | None = None
        self._settings, (params, self._build) = read_config(config), split_model(model)
        sharding = None if device is None else SingleDeviceSharding(device)
        tx = make_optimizer(optimizer, self._settings, scheduler)
        self.state = init_state(params, tx, jax.random.key(0), sharding=sharding)
        self._first: TrainState | None = self.state  # until another one replaces it
        self._step = self._make_step()
        self._measure = jax.jit(make_eval_step(make_loss(_loss_of, self._bind, is_training=False)))

    @property
    def model(self) -> Any:
        """The model with the present parameters, which the next step donates."""
        return self._build(self.state.params)

    def train_step(self, batch: Any) -> dict[str, float]:
        """Do one step, and return its `loss` and other metrics; this waits for the device."""
        self.state, metrics = self._step(self.state, batch)
        return metric_values(jax.device_get(metrics))

    def eval_step(self, batch: Any) -> dict[str, float]:
        """Return the `loss` and other metrics of a batch. An override is not traced."""
        return metric_values(jax.device_get(self._measure(self.state, batch)))

    def evaluate(self, dataloader: Iterable[Any]) -> dict[str, float]:
        """Return the metrics over all examples; those of an overridden `eval_step` are averaged."""
        check_batches(dataloader, "dataloader")
        if not self._overrides("eval_step"):
            return evaluate(self._measure, self.state, dataloader)
        measured = [
            as_metrics(self.eval_step(batch), "eval_step", weight=count_examples(batch))
            for batch in dataloader
        ]
        if not measured:
            refuse("evaluate", "at least one batch", "none", kind=DataError)
        return metric_values(merge_metrics(measured))

    def train_epoch(
        self,
        train_dataloader: Iterable[Any],
        eval_dataloader: Iterable[Any] | None = None,
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, float]:
        """Train for one epoch, and return its metrics, such as `train_loss` and `eval_loss`.

        `epoch` is for logs, of which there are none here.
        """
        history = self.train(train_dataloader, 1, eval_dataloader)
        return {name: values[-1] for name, values in history.items()}

    def train(
        self,
        train_dataloader: Iterable[Any],
        num_epochs: int,
        eval_dataloader: Iterable[Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        save_freq: int = 1,
        best_model_metric: str | None = "eval_loss",
        early_stopping_patience: int | None = None,
        callbacks: Sequence[Callable[[Any, int, dict[str, float]], Any]] | None = None,
    ) -> dict[str, list[float]]:
        """Train for several epochs, and return the metrics by name, with one value for each epoch.

        Args:
          train_dataloader: an iterable of batches, iterated in each epoch. A batch is a pair
            `(inputs, targets)`, a dict of these, or the keyword arguments of the model with
            `labels`. A dict may have a `mask` of examples, as `sf.batches` pads with.
          num_epochs: the number of epochs, from the state of the trainer on. A new trainer that
            resumes does those that are left.
          eval_dataloader: an iterable of batches to evaluate on after each epoch.
          save_dir: a directory for checkpoints, which are named by their steps. If it has some, the
            run resumes from the newest.
          save_freq: the number of epochs between checkpoints.
          best_model_metric: the metric whose best epoch is saved too; `result.best` is its step.
          early_stopping_patience: the number of epochs without improvement after which to stop.
          callbacks: functions `(trainer, epoch, metrics)`, called after each epoch, from 0 on.
        """
        patience, has_evaluation = early_stopping_patience, eval_dataloader is not None
        metric = read_metric(best_model_metric, has_evaluation=has_evaluation, patience=patience)
        calls = check_list("callbacks", callbacks or [], "functions (trainer, epoch, metrics)")
        read_integer("num_epochs", num_epochs)
        read_integer("save_freq", save_freq)
        batches, checkpoints = read_dataloader(train_dataloader), None
        if save_dir is not None:
            checkpoints = Checkpoints(save_dir, every_epochs=save_freq, keep=None, best=metric)
            self._check_start(checkpoints)
        hook = EpochHook(self, calls)
        if checkpoints is not None and self._overrides("_save_checkpoint"):
            calls.insert(0, make_saver(hook, save_dir, save_freq, metric))
        hooks: list[Hook] = [hook]
        if metric is not None and patience is not None:
            read_integer("early_stopping_patience", patience)
            hooks.append(stop_early(metric, patience=patience))
        evaluation = () if eval_dataloader is None else make_evaluation(self, eval_dataloader)
        self._set_epoch(getattr(batches, "steps_per_epoch", None))
        try:
            result = fit(
                _CallTrainStep(self, self._step) if self._overrides("train_step") else self._step,
                self.state,
                batches,
                epochs=num_epochs,
                evaluation=evaluation,
                checkpoints=checkpoints,
                hooks=hooks,
            )
        except BaseException as error:
            if hasattr(error, "result"):
                self.result, self.state = error.result, error.result.state
            raise
        self.result, self.state = result, result.state
        if result.stop_reason.kind == "nonfinite":
            warnings.warn(f"train: {result.stop_reason}, which ended the run", stacklevel=2)
        return hook.history

    def load_checkpoint(
        self,
        path: str | Path,
        load_optimizer: bool = True,
        load_scheduler: bool = True,
    ) -> dict[str, Any]:
        """Load a checkpoint: `save_dir`, the folder of a step, or what `_save_checkpoint` wrote.

        Args:
          path: the folder; of several steps in it, the newest is loaded.
          load_optimizer: whether to load the optimizer state, the step and the key.
          load_scheduler: whether to load the position of the scheduler.

        Returns:
          The state, its step, metrics and `extra`, and the paths that were loaded and were not.
        """
        parts = setup.parts_of(self.state, optimizer=load_optimizer, scheduler=load_scheduler)
        restored = setup.restore_path(path, ".", self.state, parts=("|".join(parts),))
        self.state, self._first = restored.state, None
        return restored._asdict()

    # To override

    def _prepare_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the targets of a batch; jax places them on the device."""
        # Without a loss function, the model computes the loss of its labels.
        keep_labels = self.loss_fn is None
        return split_batch(batch, keep_labels=keep_labels, method="_prepare_batch")

    def _forward_pass(self, inputs: Any) -> Any:
        """Return the outputs of the model; a dict of inputs is passed as keyword arguments."""
        return call_model(self.model, inputs)

    def _compute_loss(self, outputs: Any, targets: Any) -> Any:
        """Return what `loss_fn` does, or the `loss` of the outputs."""
        if self.loss_fn is not None:
            return self.loss_fn(outputs, targets)
        if (loss := loss_in(outputs)) is None:
            expected, got = "a function (outputs, targets) for outputs without a loss", "None"
            refuse("loss_fn", expected, got, "give one, or let the model return its loss")
        return loss

    def _save_checkpoint(
        self, path: str | os.PathLike[str], epoch: int, metric_value: float | None = None
    ) -> None:
        """Save the state to a folder, in place of an earlier one there.

        A run calls the method of a subclass in addition to its own saves, with the path
        `save_dir/checkpoint_epoch_<n>` after every `save_freq` epochs, and `save_dir/best_model`
        after the best one.
        """
        checkpoints = Checkpoints(path, keep=1, async_=False)
        if checkpoints.latest_step() != int(self.state.step):  # an epoch may be repeated
            with checkpoints as series:
                series.save(self.state, extra={"epoch": epoch, "metric_value": metric_value})

    # Helpers

    def _bind(self, params: Any, key: Any) -> Self:
        """Return the trainer with these parameters in its model."""
        bound = copy.copy(self)
        bound.state, bound.key = self.state._replace(params=params), key
        return bound

    def _set_epoch(self, steps: int | None) -> None:
        """Set the steps of an epoch, which a scheduler of epochs needs."""
        if self.scheduler is None or self._settings.scheduler_step_per_batch:
            return
        if steps is None:
            expected = "True for epochs of different lengths"
            refuse("training.scheduler_step_per_batch", expected, "False")
        self._step = self._make_step(steps)

    def _make_step(self, epoch_steps: int | None = None) -> Any:
        tx = make_optimizer(self.optimizer, self._settings, self.scheduler, epoch_steps)
        step = make_train_step(make_loss(_loss_of, self._bind, is_training=True), tx)
        return jax.jit(step, donate_argnums=0)

    def _check_start(self, checkpoints: Checkpoints) -> None:
        """Refuse to resume from a checkpoint in place of another state."""
        newest = checkpoints.latest_step()
        if self.state is self._first or newest in (None, int(self.state.step)):
            return
        expected = f"a directory without checkpoints, to train on from step {int(self.state.step)}"
        got = f"{checkpoints.directory} with those up to step {newest}"
        refuse("save_dir", expected, got, "give another one, or resume with a new trainer")

    def _overrides(self, method: str) -> bool:
        """Whether a method is that of a subclass."""
        return getattr(type(self), method) is not getattr(__class__, method)  # type: ignore[name-defined]
