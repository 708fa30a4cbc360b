"""Fields: where a run keeps what, and when."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.readers import (
    amount,
    flag,
    integer,
    number,
    one_of,
    optional,
    path,
    refuse,
    text,
)
from stepfold.adapter.arguments.setting import setting
from stepfold.errors import ConfigError

SaveStrategy = Literal["no", "steps", "epoch"]


def with_optimizer(name: str, value: Any) -> bool:
    """Refuse to save a state that could not be gone on with."""
    if flag(name, value):
        return True
    raise ConfigError(
        f"{name}=False: a checkpoint holds the whole state, or a run could not go on from it; "
        "leave the field out, and write the parameters alone with save_pretrained or "
        "sf.export_params"
    )


def never_removed(name: str, value: Any) -> bool:
    """Refuse to delete what a killed run would go on from."""
    if not flag(name, value):
        return False
    raise ConfigError(
        f"{name}=True: a checkpoint that was loaded is the only one until the next is on the disk; "
        "write save_total_limit=1, which deletes it then"
    )


def resumed(name: str, value: Any) -> bool | str | None:
    """Take True, False, or a path."""
    if value is None or isinstance(value, bool):
        return value
    try:
        return path(name, value)
    except ConfigError:
        raise refuse(name, "True, False, or the path of a checkpoint", value) from None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where a run keeps what, and when; `checkpoints` makes the `sf.Checkpoints`."""

    model_name: str = setting("model", text, "What the model is called, in the card and by W&B.")
    output_dir: str | None = setting(
        None, optional(path), "Where a run keeps all that it writes; None keeps nothing."
    )
    save_directory = OtherName("output_dir")
    save_dir = OtherName("output_dir")
    checkpoints_dir: str = setting("checkpoints", text, "The folder of the checkpoints in there.")
    save_strategy: SaveStrategy | None = setting(
        None,
        optional(one_of(*get_args(SaveStrategy))),
        "When to save besides the end: each save_steps, each epoch (and each save_steps, if "
        "given); no is never. By default each save_steps, if given.",
    )
    save_steps: int | float | None = setting(
        None,
        optional(amount, none=(0,)),
        "The steps from one checkpoint to the next; a fraction is of all steps.",
    )
    save_interval_minutes: float | None = setting(
        None, optional(number(above=0)), "The minutes from one checkpoint to the next, besides."
    )
    save_total_limit: int | None = setting(
        None, optional(integer(1)), "How many of the last checkpoints are kept; None keeps all."
    )
    save_optimizer_state: bool = setting(
        True, with_optimizer, "Always so: a checkpoint holds the whole state. False is refused."
    )
    do_last_save: bool = setting(
        True, flag, "Whether to save at the end; False only where nothing else is saved."
    )
    remove_ckpt_after_load: bool = setting(
        False, never_removed, "Never so: True is refused, save_total_limit deletes old ones."
    )
    resume_if_possible: bool = setting(
        True, flag, "Whether to go on from a checkpoint of output_dir, where there is one."
    )
    resume_from_checkpoint: bool | str | None = setting(
        None, resumed, "True goes on as resume_if_possible, False begins anew; or the path of one."
    )
    init_weights_from: str | None = setting(
        None, optional(path), "Where parameters alone are read from to begin with."
    )
