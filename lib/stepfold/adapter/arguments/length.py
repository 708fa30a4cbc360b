"""Fields: how long a run is, and how large its batches are."""

from dataclasses import dataclass

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.readers import amount, duration, integer, optional
from stepfold.adapter.arguments.setting import setting


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is, and how large its batches are; `plan` works out the numbers."""

    num_train_epochs: int = setting(
        1, integer(1), "How often to go through the data, unless max_steps says how many steps."
    )
    num_epochs = OtherName("num_train_epochs")
    max_steps: int | float | None = setting(
        None,
        optional(amount, none=(-1, 0)),
        "How many steps to train, whatever num_train_epochs says; a fraction is of the epochs' "
        "steps; None or -1 is all of them.",
    )
    max_training_steps = OtherName("max_steps")
    per_epoch_training_steps: int | None = setting(
        None,
        optional(integer(1)),
        "How many steps make an epoch, where it is not the whole of the data.",
    )
    step_start_point: int = setting(
        0, integer(0), "The step to begin at: of the state's count, the schedule and the data."
    )
    training_time_limit: float | str | None = setting(
        None, optional(duration), "When to stop: seconds, or a text as '1h30m'."
    )
    total_batch_size: int | None = setting(
        None,
        optional(integer(1)),
        "The examples of a step, over all devices and microbatches; 32 unless a size is given.",
    )
    batch_size = OtherName("total_batch_size")
    per_device_train_batch_size: int | None = setting(
        None,
        optional(integer(1)),
        "The examples of a device: times the devices they are the batch; beside total_batch_size "
        "the most that a device takes at once, and the rest is accumulated.",
    )
    gradient_accumulation_steps: int = setting(
        1, integer(1), "Into how many microbatches the batch of a step is cut; the result is equal."
    )
    eval_batch_size: int | None = setting(
        None,
        optional(integer(1)),
        "The examples of a batch of the evaluation, over all devices; by default the step's.",
    )
    per_device_eval_batch_size: int | None = setting(
        None, optional(integer(1)), "The examples of a device in the evaluation, instead."
    )
