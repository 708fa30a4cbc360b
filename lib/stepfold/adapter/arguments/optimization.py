"""Fields: the optimizer and its schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.optimizers import read_optimizer
from stepfold.adapter.arguments.readers import (
    flag,
    floating,
    function,
    integer,
    mapping,
    number,
    optional,
    pattern,
    refuse,
)
from stepfold.adapter.arguments.setting import setting
from stepfold.adapter.arguments.shapes import read_scheduler


def pruning(name: str, value: Any) -> Any:
    """Take a function of an optimizer, or what has such a method `wrap_optax`, as jaxpruner's."""
    if not (callable(value) or callable(getattr(value, "wrap_optax", None))):
        raise refuse(name, "a function from an optimizer to one, or what has wrap_optax(tx)", value)
    return value


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The optimizer and its schedule; `make_optimizer` and `make_schedule` make them."""

    optimizer: str = setting(
        "adamw", read_optimizer, "The optimizer, by its name in optax or optax.contrib."
    )
    extra_optimizer_kwargs: dict[str, Any] = setting(
        {}, mapping, "What the optimizer is given besides, by the names it has in optax."
    )
    learning_rate: float = setting(5e-5, number(above=0), "The rate, at its peak.")
    learning_rate_end: float | None = setting(
        None, optional(number(least=0)), "The rate at the last step; 0 by default."
    )
    scheduler: str | None = setting(
        None,
        optional(read_scheduler),
        "How the rate falls: none, constant, linear, cosine, polynomial, exponential, "
        "inverse_sqrt, wsd or cosine_restarts; warmup_… of any demands a warm-up.",
    )
    lr_scheduler = OtherName("scheduler")
    scheduler_kwargs: dict[str, Any] = setting(
        {}, mapping, "What the schedule is given besides, as power, decay or cycles."
    )
    lr_scheduler_kwargs = OtherName("scheduler_kwargs")
    custom_scheduler: Callable[..., Any] | None = setting(
        None,
        optional(function),
        "A schedule of optax, or a function from the number of steps to one, in place of learning_"
        "rate, scheduler and warmup_steps.",
    )
    warmup_steps: int = setting(
        0, integer(0), "For how many steps the rate rises in a line from 0, before it falls."
    )
    weight_decay: float | None = setting(
        None,
        optional(number(least=0)),
        "How much weights decay: by the optimizer if it takes it, else added to the gradient; "
        "None leaves it to the optimizer.",
    )
    clip_grad: float | None = setting(
        None, optional(number(above=0)), "The largest norm of all gradients together."
    )
    max_grad_norm = OtherName("clip_grad")
    tx_mu_dtype: str | None = setting(
        None, optional(floating), "The dtype of the optimizer's first moment, if it takes one."
    )
    frozen_parameters: str | None = setting(
        None,
        optional(pattern),
        "A regular expression; parameters whose path it finds get no update and have no state.",
    )
    pruning_module: Any = setting(
        None, optional(pruning), "What wraps the optimizer: a function, or what has wrap_optax(tx)."
    )
    init_tx: bool = setting(
        True,
        flag,
        "Whether to make the optimizer a new state where the model_state brings none that "
        "fits; False refuses that.",
    )
