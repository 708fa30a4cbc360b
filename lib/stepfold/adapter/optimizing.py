"""Which optimizer a run has: one that was given, or that of the arguments."""

from collections.abc import Callable
from typing import Any

from stepfold.adapter.arguments.setting import is_changed
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.optimizer import make_optimizer
from stepfold.adapter.parts.schedule import make_schedule
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
    if arguments.pruning_module is not None:
        wrap = getattr(arguments.pruning_module, "wrap_optax", arguments.pruning_module)
        tx = as_optimizer(wrap(tx))
    return tx, scheduler
