"""qurious' trainer: an object with the methods that qurious documents, on top of `fit`.

A model that carries its parameters is a `Model`, or a module of equinox.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from stepfold import tree
from stepfold.adapter import setup
from stepfold.adapter.model_trainer import (
    EpochHook,
    ModelTrainer,
    call_model,
    make_evaluation,
    output_of,
    read_dataloader,
    refuse_torch,
    split_batch,
    split_model,
)
from stepfold.adapter.model_trainer import Model as Model
from stepfold.adapter.steps import as_metrics
from stepfold.adapter.validation import check_list
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.core.loss import count_examples
from stepfold.core.metric_modes import known_mode
from stepfold.core.optimizer import apply_updates, as_optimizer
from stepfold.core.state import TrainState, init_state
from stepfold.core.step import make_eval_step, make_train_step
from stepfold.core.validation import (
    read_function,
    read_instance,
    read_integer,
    read_positive,
    refuse_unknown,
    spell_call,
    takes,
)
from stepfold.errors import DataError, TreeMismatchError, refuse, warn
from stepfold.hooks.stop import stop_early
from stepfold.loop.evaluate import evaluate
from stepfold.loop.feed import check_batches
from stepfold.loop.hook import AnyHook
from stepfold.loop.metrics import merge_metrics, metric_values


class Trainer(ModelTrainer):
    """A run as an object, with the methods that qurious documents of its trainer.

    A run calls what a subclass overrides: `_prepare_batch`, `_forward_pass` and `_compute_loss` in
    the loss function, `train_step`, `eval_step` and `evaluate` from the host, and
    `_save_checkpoint` in addition to its own checkpoints. Unlike torch, jax traces the first three
    once for each shape of a batch: they are pure functions of their arguments, `model` and `key`,
    and what they assign to the trainer is lost.

    Attributes:
      state: the `TrainState`, which the next step donates.
      key: the PRNG key while a training step is traced; None in an evaluation.
      tx: the whole optimizer: `optimizer` with the settings of the config and the scheduler.
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
            Adam does) and `training.scheduler_step_per_batch` (True by default). Other settings
            have no effect; a warning lists them.
          device: the device of the state, or None for jax's default.
          scheduler: a function from the number of steps, or of epochs without
            `scheduler_step_per_batch`, to a factor of the updates, as in torch's `LambdaLR`.

        Warns:
          UserWarning: if the factor of the scheduler is never above 0.1, as a learning rate is.
        """
        check_arguments(optimizer, loss_fn, device, scheduler)
        if self._overrides("train_epoch"):
            expected = "the method of the class, since a run is one fold over all epochs"
            refuse("train_epoch", expected, "an override", "override train_step or evaluate")
        self.optimizer, self.loss_fn, self.scheduler = optimizer, loss_fn, scheduler
        self.config, self.device = config, device or jax.devices()[0]
        warn_of_rate(scheduler)
        self._settings, (params, self._build) = read_settings(config), split_model(model)
        sharding = None if device is None else SingleDeviceSharding(device)
        self._set_step()
        self.state = init_state(params, self.tx, jax.random.key(0), sharding=sharding)
        self._first: TrainState | None = self.state  # until another one replaces it
        self._measure = jax.jit(make_eval_step(self._make_loss(_loss_of, is_training=False)))

    def train_step(self, batch: Any) -> dict[str, float]:
        """Do one step, and return its `loss` and other metrics; this waits for the device.

        An override may compute its own gradients, and call `apply_gradients`.
        """
        self.state, metrics = self._step(self.state, batch)
        return metric_values(jax.device_get(metrics))

    def apply_gradients(self, grads: Any) -> None:
        """Update the parameters by `tx` with gradients of `state.params`, and count a step."""
        lines = tree.diff(self.state.params, grads, "grads")
        if lines:
            raise TreeMismatchError(
                "apply_gradients: expected gradients in the form of state.params, got\n  "
                + "\n  ".join(lines)
            )
        self.state = self._update(self.state, grads)

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

        `epoch` has no effect.
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
          num_epochs: the number of epochs, counted from the state of the trainer. A new trainer
            that resumes trains the remaining ones.
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
        hooks: list[AnyHook] = [hook]
        if metric is not None and patience is not None:
            read_integer("early_stopping_patience", patience)
            hooks.append(stop_early(metric, patience=patience))
        evaluation = () if eval_dataloader is None else make_evaluation(self, eval_dataloader)
        self._set_epoch(getattr(batches, "steps_per_epoch", None))
        self._fit(
            _CallTrainStep(self, self._step) if self._overrides("train_step") else self._step,
            batches,
            epochs=num_epochs,
            evaluation=evaluation,
            checkpoints=checkpoints,
            hooks=hooks,
        )
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
          The state, its step, metrics and `extra`, the paths that were loaded, and those that were
          not.
        """
        wanted = {"optimizer": load_optimizer, "scheduler": load_scheduler}
        restored = setup.restore_parts(path, ".", self.state, **wanted)
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
        if (loss := output_of(outputs, "loss")) is None:
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

    def _set_epoch(self, steps: int | None) -> None:
        """Set the steps of an epoch, which a scheduler of epochs needs."""
        if self.scheduler is None or self._settings.scheduler_step_per_batch:
            return
        if steps is None:
            expected = "True for epochs of different lengths"
            refuse("training.scheduler_step_per_batch", expected, "False")
        self._set_step(steps)

    def _set_step(self, epoch_steps: int | None = None) -> None:
        """Make the optimizer and the step."""
        tx = make_optimizer(self.optimizer, self._settings, self.scheduler, epoch_steps)
        loss_fn = self._make_loss(_loss_of, is_training=True)
        self._step: Any = jax.jit(make_train_step(loss_fn, tx), donate_argnums=0)
        self._update: Any = jax.jit(functools.partial(_apply_gradients, tx))
        self.tx = tx

    def _check_start(self, checkpoints: Checkpoints) -> None:
        """Refuse to resume from a checkpoint if the trainer has already trained to another step."""
        newest = checkpoints.latest_step()
        if self.state is self._first or newest in (None, int(self.state.step)):
            return
        expected = f"a directory without checkpoints, to train on from step {int(self.state.step)}"
        got = f"{checkpoints.directory} with those up to step {newest}"
        refuse("save_dir", expected, got, "give another one, or resume with a new trainer")


# Steps and saves of a subclass


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


def _apply_gradients(tx: optax.GradientTransformation, state: TrainState, grads: Any) -> TrainState:
    updates, opt_state = as_optimizer(tx).update(grads, state.opt_state, state.params)
    params = apply_updates(state.params, updates)
    return state._replace(step=state.step + 1, params=params, opt_state=opt_state)


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


# The optimizer


class Settings(NamedTuple):
    """The settings of a `config`."""

    weight_decay: float | None = None
    max_grad_norm: float | None = None
    scheduler_step_per_batch: bool = True


def read_settings(config: Any) -> Settings:
    """Read the settings of nested objects or mappings, or by dotted names."""
    values = {} if config is None else dict(_flatten("", config))
    known = [f"training.{name}" for name in Settings._fields]
    others = sorted(values.keys() - {*known})
    misspelled = [name for name in others if get_close_matches(name, known, n=1, cutoff=0.85)]
    refuse_unknown("config", misspelled, known)
    if others:
        warn(
            f"config: expected {', '.join(known)}, got settings that the trainer does not use: "
            f"{', '.join(others)}",
        )
    read = {name: values.get(f"training.{name}") for name in Settings._fields}
    present: dict[str, Any] = {name: value for name, value in read.items() if value is not None}
    settings = Settings(**present)
    for name in ("weight_decay", "max_grad_norm"):
        if name in present:
            read_positive(f"training.{name}", present[name], allow_zero=name == "weight_decay")
    if not isinstance(settings.scheduler_step_per_batch, bool):
        got = tree.describe_value(settings.scheduler_step_per_batch)
        refuse("training.scheduler_step_per_batch", "True or False", got)
    return settings


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if items is not None:
        for key, item in items.items():
            if not key.startswith("_"):
                yield from _flatten(f"{name}.{key}" if name else key, item)
    elif name:
        yield name, value
    else:
        refuse("config", "an object or a mapping with training.…", tree.describe_value(value))


def make_optimizer(
    optimizer: optax.GradientTransformation,
    settings: Settings,
    scheduler: Callable[[Any], Any] | None,
    epoch_steps: int | None = None,
) -> optax.GradientTransformation:
    """Add clipping and weight decay before an optimizer, and the factor of a scheduler after it."""
    parts = [optimizer]
    if settings.weight_decay:
        parts.insert(0, optax.add_decayed_weights(settings.weight_decay))
    if settings.max_grad_norm:
        parts.insert(0, optax.clip_by_global_norm(settings.max_grad_norm))
    if scheduler is not None:
        by_step = settings.scheduler_step_per_batch
        factor = scheduler if by_step else _by_epoch(scheduler, epoch_steps)
        parts.append(optax.scale_by_schedule(factor))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _by_epoch(scheduler: Callable[[Any], Any], epoch_steps: int | None) -> Callable[[Any], Any]:
    """Make a scheduler count epochs; if their length is unknown, it stays at the first."""
    return lambda count: scheduler(count // epoch_steps if epoch_steps else jnp.zeros_like(count))


# The arguments of the trainer and of `train`


def check_arguments(optimizer: Any, loss_fn: Any, device: Any, scheduler: Any) -> None:
    """Refuse what has no meaning in JAX, with what to give in its place."""
    refuse_torch("optimizer", optimizer, "give an optimizer of optax, such as optax.adam(1e-3)")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        got, advice = tree.describe_value(optimizer), "such as optax.adam(1e-3)"
        refuse("optimizer", "an optax transformation", got, advice)
    if loss_fn is not None:
        refuse_torch("loss_fn", loss_fn, "give a function, such as optax.l2_loss")
        read_function("loss_fn", loss_fn, "a function (outputs, targets), or None")
        if not takes(loss_fn, 2):
            refuse("loss_fn", "a function (outputs, targets)", spell_call(loss_fn))
    if device is not None:
        advice = "give one of jax.devices(), or leave it out"
        read_instance("device", device, jax.Device, "a device of jax", advice)
    if scheduler is not None:
        advice = "give a schedule of optax, such as optax.linear_schedule(1.0, 0.0, 1000)"
        refuse_torch("scheduler", scheduler, advice)
        read_function("scheduler", scheduler, "a function of a count", advice)


def warn_of_rate(scheduler: Callable[[Any], Any] | None) -> None:
    """Warn of a scheduler that looks like a schedule of the learning rate, not of a factor."""
    if scheduler is None:
        return
    factors = [abs(float(scheduler(jnp.int32(count)))) for count in (0, *(4**n for n in range(11)))]
    if 0 < max(factors) <= 0.1:
        warn(
            "scheduler: expected a factor of the updates, usually up to 1, got values up to "
            f"{max(factors):.3g}, which look like a learning rate; give the schedule to optax "
            "instead, as optax.adam(schedule), or divide it by its highest value",
        )


def read_metric(name: Any, *, has_evaluation: bool, patience: int | None) -> str | None:
    """Return the metric that ranks epochs by its name in `fit`; None if nothing is ranked."""
    if name is None and patience is not None:
        refuse("best_model_metric", "a metric for early_stopping_patience", "None")
    if name is None or (name == "eval_loss" and not has_evaluation and patience is None):
        return None
    if not isinstance(name, str) or not name.startswith(("eval_", "train_")):
        got = tree.describe_value(name)
        refuse("best_model_metric", "a name that begins with eval_ or train_", got)
    if name.startswith("eval_") and not has_evaluation:
        refuse("best_model_metric", f"eval_dataloader, to measure {name}", "none")
    if known_mode(name) is None:
        expected = "a name that says which value is better, as that of a loss or an accuracy does"
        refuse("best_model_metric", expected, repr(name), "rename the metric")
    return name.replace("_", "/", 1)
