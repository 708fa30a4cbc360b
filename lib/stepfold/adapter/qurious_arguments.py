"""The arguments of qurious's trainer: their checks, and the optimizer that they describe."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.adapter.models import refuse_torch
from stepfold.core.metric_modes import known_mode
from stepfold.core.validation import (
    read_function,
    read_instance,
    read_positive,
    refuse_unknown,
    spell_call,
    takes,
)
from stepfold.errors import refuse

# The optimizer


class Settings(NamedTuple):
    """The settings of a `config`."""

    weight_decay: float | None = None
    max_grad_norm: float | None = None
    scheduler_step_per_batch: bool = True


def read_config(config: Any) -> Settings:
    """Read the settings of nested objects or mappings, or by dotted names."""
    values = {} if config is None else dict(_flatten("", config))
    refuse_unknown("config", values, [f"training.{name}" for name in Settings._fields])
    given = {name.removeprefix("training."): x for name, x in values.items() if x is not None}
    settings = Settings(**given)
    for name in ("weight_decay", "max_grad_norm"):
        if name in given:
            read_positive(f"training.{name}", given[name], allow_zero=name == "weight_decay")
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
    """Count epochs instead of steps; without their length, it is always the first."""
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
