"""The numbers of a run, worked out in one place from arguments, data and devices."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from stepfold.adapter.arguments.readers import seconds
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import ConfigError

_BATCH = 32


class Plan(NamedTuple):
    """The numbers of a run; None is what is not known, or not asked for.

    Attributes:
      train_batch: the examples of a step: over all devices, and all microbatches together.
      eval_batch: the examples of a batch of the evaluation, over all devices.
      accumulate: into how many microbatches the batch of a step is cut.
      epoch_steps: the steps of an epoch.
      steps: the steps of the run, those before step_start_point too.
      eval_steps: the batches of one evaluation.
      evaluates: whether there are evaluations.
      evaluation_every: the steps from one to the next; with None here and below, at the end alone.
      evaluation_every_epochs: the epochs from one to the next.
      save_steps: the steps from one checkpoint to the next.
      save_epochs: the epochs from one checkpoint to the next.
      log_every: the steps from one log point of `fit` to the next: what both below are made of.
      log_steps: the steps from one showing to the next.
      report_steps: the steps from one writing to the next.
      seconds: when the run stops, at the latest.

    >>> from stepfold.adapter import TrainingArguments, plan
    >>> arguments = TrainingArguments(total_batch_size=32, num_train_epochs=3, log_steps=0.1)
    >>> found = plan(arguments, train_examples=1_000)
    >>> found.epoch_steps, found.steps, found.log_steps
    (31, 93, 9)
    """

    train_batch: int
    eval_batch: int
    accumulate: int
    epoch_steps: int | None
    steps: int | None
    eval_steps: int | None
    evaluates: bool
    evaluation_every: int | None
    evaluation_every_epochs: int | None
    save_steps: int | None
    save_epochs: int | None
    log_every: int
    log_steps: int
    report_steps: int
    seconds: float | None


def plan(
    arguments: TrainingArguments,
    train_examples: int | None = None,
    eval_examples: int | None = None,
    devices: int | Sequence[jax.Device] | None = None,
) -> Plan:
    """Work out the numbers of a run.

    Args:
      arguments: the arguments.
      train_examples: how many examples there are to train on, if that is known.
      eval_examples: how many there are to evaluate on.
      devices: the devices, or how many; by default all of jax's. Sizes "per device" are times that.

    Raises:
      ConfigError: if numbers do not fit together, or one cannot be known.

    >>> from stepfold.adapter import TrainingArguments, plan
    >>> arguments = TrainingArguments(per_device_train_batch_size=4, num_train_epochs=2)
    >>> found = plan(arguments, train_examples=100, devices=8)
    >>> found.train_batch, found.epoch_steps, found.steps
    (32, 3, 6)
    """
    count = _count(devices)
    batch, accumulate = _batch(arguments, count)
    epoch_steps = _epoch_steps(arguments, batch, train_examples)
    steps = _steps(arguments, epoch_steps)
    _check_span(arguments, steps)
    log_steps = _share("log_steps", arguments.log_steps, steps) or 1
    report_steps = arguments.report_steps or log_steps
    eval_batch = _eval_batch(arguments, batch, count)
    evaluates = arguments.do_eval and arguments.evaluation_strategy != "no"
    by_epoch = arguments.evaluation_strategy == "epoch" and evaluates
    in_steps = arguments.per_epoch_training_steps  # of an epoch that is not all of the data
    save_steps, save_epochs = _saves(arguments, steps)
    return Plan(
        train_batch=batch,
        eval_batch=eval_batch,
        accumulate=accumulate,
        epoch_steps=epoch_steps,
        steps=steps,
        eval_steps=_eval_steps(arguments, eval_batch, eval_examples) if evaluates else None,
        evaluates=evaluates,
        evaluation_every=in_steps if by_epoch else arguments.eval_steps,
        evaluation_every_epochs=1 if by_epoch and not in_steps else None,
        save_steps=save_steps,
        save_epochs=save_epochs,
        log_every=math.gcd(log_steps, report_steps),
        log_steps=log_steps,
        report_steps=report_steps,
        seconds=_seconds(arguments),
    )


def _count(devices: Any) -> int:
    count = jax.device_count() if devices is None else devices
    count = count if isinstance(count, int) else len(count)
    if count < 1:
        raise ConfigError(f"devices: expected at least one, got {devices!r}")
    return count


def _batch(a: TrainingArguments, devices: int) -> tuple[int, int]:
    """Give the examples of a step, and into how many microbatches they are cut."""
    whole, each, accumulate = (
        a.total_batch_size,
        a.per_device_train_batch_size,
        a.gradient_accumulation_steps,
    )
    if whole is None:
        whole = _BATCH if each is None else each * devices
    elif each is not None:
        least = math.ceil(whole / (each * devices))
        if accumulate == 1:
            accumulate = least
        elif accumulate < least:
            raise ConfigError(
                f"total_batch_size={whole}, gradient_accumulation_steps={accumulate}: that is "
                f"{math.ceil(whole / accumulate / devices)} examples at once for each of {devices} "
                f"devices, and per_device_train_batch_size={each}; accumulate {least}, or leave "
                "one out"
            )
    if whole % accumulate:
        raise ConfigError(
            f"gradient_accumulation_steps: expected to cut the batch of {whole} examples evenly, "
            f"got {accumulate}; give one of "
            f"{', '.join(str(n) for n in range(1, min(whole, 64) + 1) if whole % n == 0)}"
        )
    return whole, accumulate


def _eval_batch(a: TrainingArguments, batch: int, devices: int) -> int:
    whole, each = a.eval_batch_size, a.per_device_eval_batch_size
    if whole is None:
        return batch if each is None else each * devices
    if each is not None and each * devices != whole:
        raise ConfigError(
            f"eval_batch_size={whole}, per_device_eval_batch_size={each}: on {devices} devices "
            f"these are {whole} and {each * devices} examples; give one of them"
        )
    return whole


def _epoch_steps(a: TrainingArguments, batch: int, examples: int | None) -> int | None:
    if a.per_epoch_training_steps is not None:
        return a.per_epoch_training_steps
    if examples is None:
        return None
    if examples < batch:
        raise ConfigError(
            f"total_batch_size: expected at most the {examples} examples there are to train on, "
            f"got batches of {batch}"
        )
    return examples // batch


def _steps(a: TrainingArguments, epoch_steps: int | None) -> int | None:
    if type(a.max_steps) is int:
        return a.max_steps
    whole = None if epoch_steps is None else a.num_train_epochs * epoch_steps
    return whole if a.max_steps is None else _share("max_steps", a.max_steps, whole)


def _share(name: str, amount: int | float | None, steps: int | None) -> int | None:
    """Give a count as it is, and a fraction as that of all steps, one at least."""
    if amount is None or isinstance(amount, int):
        return amount
    if steps is None:
        raise ConfigError(
            f"{name}: expected a count where nobody knows how many steps there are, got {amount}; "
            "give max_steps, or data that know their length"
        )
    return max(1, int(amount * steps))


def _check_span(a: TrainingArguments, steps: int | None) -> None:
    for name in ("warmup_steps", "step_start_point"):
        if steps is not None and getattr(a, name) >= steps:
            raise ConfigError(
                f"{name}: expected fewer than the {steps} steps of the run, got {getattr(a, name)}"
            )


def _eval_steps(a: TrainingArguments, batch: int, examples: int | None) -> int | None:
    known = [] if examples is None else [math.ceil(examples / batch)]
    known += [n for n in (a.max_evaluation_steps, a.per_epoch_evaluation_steps) if n is not None]
    return min(known, default=None)


def _saves(a: TrainingArguments, steps: int | None) -> tuple[int | None, int | None]:
    every = _share("save_steps", a.save_steps, steps)
    if a.save_strategy != "epoch":
        return every, None
    in_steps = a.per_epoch_training_steps
    if in_steps is None:
        return every, 1
    if every is not None and every != in_steps:
        raise ConfigError(
            f"save_strategy='epoch', save_steps={a.save_steps}, per_epoch_training_steps="
            f"{in_steps}: expected one distance from save to save; leave out one of them"
        )
    return in_steps, None


def _seconds(a: TrainingArguments) -> float | None:
    limit = a.training_time_limit
    return None if limit is None else seconds("training_time_limit", limit)
