"""The steps of a run, made from its arguments and a loss function."""

from collections.abc import Callable
from typing import Any

import jax

from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.loss import make_loss
from stepfold.adapter.parts.precision import precision, remat
from stepfold.adapter.schedules import rate_of
from stepfold.adapter.stepping import weighed_by_rows
from stepfold.core.observe import observe
from stepfold.core.step import make_eval_step, make_train_step


def make_functions(
    arguments: TrainingArguments,
    loss_fn: Callable[..., Any],
    tx: Any,
    *,
    eval_loss_fn: Callable[..., Any] | None = None,
    scheduler: Callable[..., Any] | None = None,
    accumulate: int = 1,
    mesh: Any = None,
    stateful: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make a training step and an evaluation step, both un-jitted.

    A training step whose loss or gradients are not finite leaves the state as it was, so that there
    is something worth saving. It tells the learning rate, where there is a schedule. In an
    evaluation a loss that is a plain number weighs as much as its batch has examples.

    >>> import jax.numpy as jnp, optax
    >>> loss_fn = lambda params, batch, key: ((params * batch["x"]) ** 2).mean()
    >>> train, evaluate = make_functions(TrainingArguments(), loss_fn, optax.sgd(0.1))
    """
    options: dict[str, Any] = {"precision": precision(arguments), "stateful": stateful}
    step = make_train_step(
        make_loss(arguments, loss_fn, mesh),
        tx,
        accumulate=accumulate,
        remat=remat(arguments),
        skip_nonfinite=True,
        **options,
    )
    if scheduler is not None:
        step = observe(step, learning_rate=rate_of(scheduler))
    # Without the mesh, since the last batch of an evaluation need not divide by its devices.
    measured = make_loss(arguments, loss_fn if eval_loss_fn is None else eval_loss_fn)
    return step, make_eval_step(weighed_by_rows(measured), **options)


def jitted(
    step: Callable[..., Any], evaluate: Callable[..., Any], shardings: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jit both, the state donated to the training step, and coming back where it was."""
    places: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, None)}
    return jax.jit(step, donate_argnums=0, **places), jax.jit(evaluate)
