"""The optimizer: one that was given, or that of the arguments, as one chain."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from stepfold.adapter.arguments.contradictions import MOMENTS
from stepfold.adapter.arguments.optimizers import find_optimizer
from stepfold.adapter.arguments.setting import is_changed
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.freezing import frozen
from stepfold.adapter.parts.precision import precision
from stepfold.adapter.parts.schedule import make_schedule
from stepfold.core.loss_scale import dynamic_loss_scale
from stepfold.core.optimizer import as_optimizer
from stepfold.errors import ConfigError

_OF_THE_RATE = (
    *("learning_rate", "learning_rate_end", "scheduler", "scheduler_kwargs"),
    *("custom_scheduler", "warmup_steps"),
)
_OF_THE_OPTIMIZER = (
    *("optimizer", "extra_optimizer_kwargs", "weight_decay", "clip_grad", "tx_mu_dtype"),
    "frozen_parameters",
)


def make_optimizer(
    arguments: TrainingArguments, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Make the optimizer by its name in optax, with what goes around it.

    In the order in which a gradient meets them: the loss scale, if it computes in float16; the
    freezing of parameters, so that all that follows is of the others alone; pruning; clipping by
    the norm; weight decay, unless the optimizer has its own; the optimizer.

    Args:
      arguments: the arguments.
      schedule: the rate, as `make_schedule` makes it.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> from stepfold.adapter import TrainingArguments, make_optimizer, make_schedule
    >>> arguments = TrainingArguments(optimizer="lion", clip_grad=1.0, frozen_parameters="^embed")
    >>> tx = make_optimizer(arguments, make_schedule(arguments, 100))
    >>> state = sf.init_state({"embed": jnp.ones(2), "w": jnp.ones(2)}, tx, jax.random.key(0))
    """
    name, options = arguments.optimizer, dict(arguments.extra_optimizer_kwargs)
    known = inspect.signature(find_optimizer(name)).parameters
    before = []
    if arguments.clip_grad is not None:
        before.append(optax.clip_by_global_norm(arguments.clip_grad))
    if arguments.weight_decay is not None:
        if "weight_decay" in known:
            options["weight_decay"] = arguments.weight_decay
        else:
            before.append(optax.add_decayed_weights(arguments.weight_decay))
    if arguments.tx_mu_dtype is not None:
        dtype = jnp.dtype(arguments.tx_mu_dtype)
        options[next(moment for moment in MOMENTS if moment in known)] = dtype
    tx = optax.chain(*before, _with_rate(name, schedule, options))
    tx = _pruned(tx, arguments)
    if arguments.frozen_parameters is not None:
        tx = frozen(tx, arguments.frozen_parameters)
    return dynamic_loss_scale(tx) if precision(arguments).needs_loss_scale else tx


def _with_rate(name: str, schedule: optax.Schedule, options: dict[str, Any]) -> Any:
    """Give the schedule to an optimizer, in the way in which it takes one."""
    make: Any = find_optimizer(name)
    known = inspect.signature(make).parameters
    if "learning_rate" not in known:  # polyak_sgd, whose rate follows from the loss
        return make(scaling=schedule, **options)
    if "Callable" in str(known["learning_rate"].annotation):
        return make(learning_rate=schedule, **options)
    # It takes a number alone; optax's wrapper gives it that of each step.
    static = tuple(option for option in known if option != "learning_rate")
    return optax.inject_hyperparams(make, static_args=static)(learning_rate=schedule, **options)


def _pruned(tx: Any, arguments: TrainingArguments) -> Any:
    if arguments.pruning_module is None:
        return tx
    wrap = getattr(arguments.pruning_module, "wrap_optax", arguments.pruning_module)
    return as_optimizer(wrap(tx))


def optimizer_of(
    arguments: TrainingArguments,
    steps: int | None,
    tx: Any = None,
    scheduler: Callable[..., Any] | None = None,
) -> tuple[Any, Callable[..., Any] | None]:
    """Give the optimizer, and its schedule, if that is known.

    One that was given is wrapped by `pruning_module` as the arguments' own is; all else that the
    arguments say of an optimizer would have no effect, and is refused.

    Args:
      arguments: the arguments.
      steps: how many steps the run has.
      tx: an optimizer that was given.
      scheduler: its schedule; alone, it is that of the arguments' optimizer.

    Raises:
      ConfigError: if the arguments say what would have no effect.

    >>> import optax
    >>> tx, rate = optimizer_of(TrainingArguments(learning_rate=0.1), 100)
    >>> round(float(rate(0)), 3)
    0.1
    """
    unused = [*(_OF_THE_RATE if tx is not None or scheduler is not None else ())]
    unused += _OF_THE_OPTIMIZER if tx is not None else ()
    for name in unused:
        if is_changed(arguments, name):
            given = "tx" if tx is not None else "scheduler"
            raise ConfigError(
                f"{given}: expected arguments that leave it to this, got "
                f"{name}={getattr(arguments, name)!r:.60}, which would do nothing; leave one out"
            )
    if tx is None:
        rate = scheduler or make_schedule(arguments, steps)
        return make_optimizer(arguments, rate), rate
    return _pruned(tx, arguments), scheduler
