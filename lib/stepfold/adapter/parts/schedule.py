"""The learning rate, step by step."""

import optax

from stepfold.adapter.arguments.shapes import ENDLESS, SHAPES, shape_of
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import ConfigError


def make_schedule(arguments: TrainingArguments, steps: int | None) -> optax.Schedule:
    """Make the schedule: up in a line from 0 for `warmup_steps`, then down as `scheduler` says.

    The rate is `learning_rate` when the warm-up is over, and `learning_rate_end` after all steps.

    Args:
      arguments: the arguments.
      steps: how many steps the run has in all, as `plan` tells; None if that is not known.

    Raises:
      ConfigError: if the schedule needs to know the steps, or they are over before the warm-up is.

    >>> from stepfold.adapter import TrainingArguments, make_schedule
    >>> arguments = TrainingArguments(learning_rate=0.1, scheduler="linear", warmup_steps=10)
    >>> schedule = make_schedule(arguments, 110)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    if arguments.custom_scheduler is not None:
        return _custom(arguments, steps)
    shape, _ = shape_of(arguments.scheduler or "none")
    warm, peak = arguments.warmup_steps, arguments.learning_rate
    if steps is None:
        if shape not in ENDLESS:
            raise ConfigError(
                f"scheduler={arguments.scheduler!r}: expected to know how many steps there are; "
                f"give max_steps, or one of {', '.join(ENDLESS)}"
            )
    elif steps <= warm:
        raise ConfigError(
            f"warmup_steps: expected fewer than the {steps} steps of the run, got {warm}"
        )
    left = 1 if steps is None else steps - warm
    end = arguments.learning_rate_end or 0.0
    down = SHAPES[shape](peak, end, left, **arguments.scheduler_kwargs)
    if not warm:
        return down
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warm), down], [warm])


def _custom(arguments: TrainingArguments, steps: int | None) -> optax.Schedule:
    """Tell a schedule from a function that makes one by what it gives for a number."""
    given = arguments.custom_scheduler
    made = given(1 if steps is None else steps)  # type: ignore[misc]
    if not callable(made):
        return given  # it gave a rate, so it is a schedule
    if steps is None:
        raise ConfigError(
            "custom_scheduler: expected to know how many steps there are, to make the schedule "
            "with; give max_steps"
        )
    return made
