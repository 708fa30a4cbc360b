"""The optimizer, as one chain."""

import inspect
from typing import Any

import jax.numpy as jnp
import optax

from stepfold.adapter.arguments.contradictions import MOMENTS
from stepfold.adapter.arguments.optimizers import find_optimizer
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.freezing import frozen
from stepfold.adapter.parts.precision import precision
from stepfold.core.loss_scale import dynamic_loss_scale
from stepfold.core.optimizer import as_optimizer


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
    if arguments.pruning_module is not None:
        wrap = getattr(arguments.pruning_module, "wrap_optax", arguments.pruning_module)
        tx = as_optimizer(wrap(tx))
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
