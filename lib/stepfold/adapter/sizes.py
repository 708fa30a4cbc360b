"""Sizes and intervals of a run, computed from `TrainingArguments`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.fields import seconds
from stepfold.errors import refuse


class Sizes(NamedTuple):
    """The sizes and intervals of a run. None is unknown, or not set.

    >>> arguments = TrainingArguments(per_device_train_batch_size=4, num_train_epochs=2)
    >>> sizes = compute_sizes(arguments, train_examples=100, devices=8)
    >>> sizes.train_batch, sizes.epoch_steps, sizes.steps
    (32, 3, 6)
    """

    train_batch: int  # examples per step, over all devices and microbatches
    eval_batch: int  # examples per evaluation batch, over all devices
    accumulate: int  # microbatches per step
    epoch_steps: int | None  # steps per epoch
    steps: int | None  # steps of the run, including those before step_start_point
    eval_steps: int | None  # batches per evaluation
    evaluates: bool  # whether there are evaluations; without an interval, only at the end
    evaluation_every: int | None  # steps between evaluations
    evaluation_every_epochs: int | None  # epochs between evaluations
    save_steps: int | None  # steps between checkpoints
    save_epochs: int | None  # epochs between checkpoints
    log_every: int  # steps between the log points of `fit`, which include those of the next two
    log_steps: int  # steps between updates of the progress bar
    report_steps: int  # steps between writes
    seconds: float | None  # the time limit


def compute_sizes(
    arguments: TrainingArguments,
    train_examples: int | None = None,
    eval_examples: int | None = None,
    devices: int | Sequence[jax.Device] | None = None,
) -> Sizes:
    """Compute the sizes and intervals of a run.

    Sizes per device are multiplied by `devices`, or their number; by default all devices of jax.
    Numbers that do not fit together, or fractions of an unknown number, are a ConfigError.

    >>> arguments = TrainingArguments(total_batch_size=32, num_train_epochs=3, log_steps=0.1)
    >>> sizes = compute_sizes(arguments, train_examples=1_000)
    >>> sizes.epoch_steps, sizes.steps, sizes.log_steps
    (31, 93, 9)
    """
    if devices is None:
        devices = jax.device_count()
    num_devices = devices if isinstance(devices, int) else len(devices)
    if num_devices < 1:
        refuse("devices", "at least one", repr(devices))
    train_batch, accumulate = _train_batch(arguments, num_devices)
    eval_batch = arguments.eval_batch_size or train_batch
    if arguments.per_device_eval_batch_size is not None:
        eval_batch = arguments.per_device_eval_batch_size * num_devices
        if arguments.eval_batch_size not in (None, eval_batch):
            per_device = f"per_device_eval_batch_size={arguments.per_device_eval_batch_size}"
            expected = f"{per_device} times {num_devices} devices, {eval_batch}"
            refuse("eval_batch_size", expected, f"{arguments.eval_batch_size}", "give one of them")

    epoch_steps = arguments.per_epoch_training_steps
    if epoch_steps is None and train_examples is not None:
        epoch_steps = train_examples // train_batch
        if not epoch_steps:
            expected = f"at most the {train_examples} training examples"
            advice = "give a smaller one, or more examples"
            refuse("total_batch_size", expected, f"{train_batch}", advice)
    steps = None if epoch_steps is None else arguments.num_train_epochs * epoch_steps
    if arguments.max_steps is not None:
        steps = _to_steps(arguments, "max_steps", steps)
    check_within(arguments, "warmup_steps", steps)
    check_within(arguments, "step_start_point", steps)
    log_steps = _to_steps(arguments, "log_steps", steps)
    report_steps = arguments.report_steps or log_steps
    limit = arguments.training_time_limit
    return Sizes(
        train_batch=train_batch,
        eval_batch=eval_batch,
        accumulate=accumulate,
        epoch_steps=epoch_steps,
        steps=steps,
        **_evaluations(arguments, eval_examples, eval_batch),
        **_saves(arguments, steps),
        # Even in performance_mode, which writes nothing, since log points detect a NaN.
        log_every=math.gcd(log_steps, report_steps),
        log_steps=log_steps,
        report_steps=report_steps,
        seconds=None if limit is None else seconds(limit),
    )


def _train_batch(arguments: TrainingArguments, num_devices: int) -> tuple[int, int]:
    """Return the examples and the microbatches per step."""
    total, per_device = arguments.total_batch_size, arguments.per_device_train_batch_size
    name, accumulate = "gradient_accumulation_steps", arguments.gradient_accumulation_steps
    if total is None:
        total = 32 if per_device is None else per_device * num_devices
    elif per_device is not None:  # the maximum per microbatch
        minimum = math.ceil(total / (per_device * num_devices))
        if accumulate == 1:
            accumulate = next(n for n in range(minimum, total + 1) if total % n == 0)
        elif accumulate < minimum:
            expected = (
                f"at least {minimum}, so that each of {num_devices} devices takes at most "
                f"per_device_train_batch_size={per_device} of total_batch_size={total} at once"
            )
            refuse(name, expected, f"{accumulate}", "leave out one of the three")
    if total % accumulate:
        divisors = [str(n) for n in range(1, min(total, 64) + 1) if total % n == 0]
        expected = f"a divisor of the batch of {total} examples"
        refuse(name, expected, f"{accumulate}", f"give one of {', '.join(divisors)}")
    return total, accumulate


def _epoch(arguments: TrainingArguments) -> tuple[int | None, int | None]:
    """Return the steps or the epochs from the end of one epoch to the next.

    An epoch of per_epoch_training_steps may end before or after the data, so it is due by steps.
    """
    steps = arguments.per_epoch_training_steps
    return (None, 1) if steps is None else (steps, None)


def _evaluations(
    arguments: TrainingArguments, num_examples: int | None, batch_size: int
) -> dict[str, Any]:
    """Return when there are evaluations, and the batches of each."""
    evaluates = arguments.do_eval and arguments.evaluation_strategy != "no"
    by_epoch = evaluates and arguments.evaluation_strategy == "epoch"
    every, every_epochs = _epoch(arguments) if by_epoch else (arguments.eval_steps, None)
    available = None if num_examples is None else math.ceil(num_examples / batch_size)
    limits = (available, arguments.max_evaluation_steps, arguments.per_epoch_evaluation_steps)
    steps = min((limit for limit in limits if limit is not None), default=None)
    return {
        "eval_steps": steps if evaluates else None,
        "evaluates": evaluates,
        "evaluation_every": every,
        "evaluation_every_epochs": every_epochs,
    }


def _saves(arguments: TrainingArguments, steps: int | None) -> dict[str, Any]:
    """Return when there are checkpoints."""
    every = None if arguments.save_steps is None else _to_steps(arguments, "save_steps", steps)
    if arguments.save_strategy != "epoch":
        return {"save_steps": every, "save_epochs": None}
    epoch_steps, epochs = _epoch(arguments)
    if None not in (every, epoch_steps) and every != epoch_steps:
        expected = f"per_epoch_training_steps={epoch_steps}, for save_strategy='epoch'"
        refuse("save_steps", expected, f"{arguments.save_steps}", "leave out one of the three")
    return {"save_steps": every or epoch_steps, "save_epochs": epochs}


def _to_steps(arguments: TrainingArguments, name: str, steps: int | None) -> int:
    """Return a field, which may be a fraction of all steps, as a number of steps."""
    value: int | float = getattr(arguments, name)
    if isinstance(value, int):
        return value
    if steps is None:
        expected = "an integer, because the number of steps is unknown"
        refuse(name, expected, repr(value), "give max_steps, or a dataset with a length")
    return max(1, round(value * steps))


def check_within(arguments: TrainingArguments, name: str, steps: int | None) -> None:
    """Refuse a field that is not below the number of steps."""
    value = getattr(arguments, name)
    if steps is not None and value >= steps:
        expected = f"fewer than the {steps} steps of the run"
        refuse(name, expected, repr(value), "give a lower one, or more steps")
