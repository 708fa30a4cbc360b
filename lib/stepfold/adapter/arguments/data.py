"""Fields: what examples are made of, and how they are read."""

from dataclasses import dataclass
from typing import Literal, get_args

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.readers import (
    flag,
    integer,
    one_of,
    optional,
    seed,
    several,
    text,
)
from stepfold.adapter.arguments.setting import setting

Truncation = Literal["keep_end", "keep_start"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What examples are made of, and how they are read."""

    max_length: int | None = setting(
        None, optional(integer(1)), "To what length sequences are padded and cut; None does not."
    )
    max_sequence_length = OtherName("max_length")
    truncation_mode: Truncation = setting(
        "keep_end", one_of(*get_args(Truncation)), "Which end of a sequence is kept."
    )
    shuffle_train_dataset: bool = setting(True, flag, "Whether each epoch has an order of its own.")
    dataloader_shuffle = OtherName("shuffle_train_dataset")
    shuffle_seed_train: int | None = setting(
        None, optional(integer(0)), "What the orders follow from; by default seed."
    )
    seed: int = setting(42, seed, "What all that is random in a run follows from.")
    use_grain: bool = setting(False, flag, "Whether data are read by grain.")
    grain_shard_index: int | None = setting(
        None, optional(integer(0)), "Which share of the data this process reads; jax's by default."
    )
    grain_shard_count: int | None = setting(
        None, optional(integer(1)), "How many shares there are; jax's processes by default."
    )
    dataloader_num_workers: int = setting(
        0, integer(0), "How many batches, or workers of grain, are ahead of the step; 0 for none."
    )
    num_dataloader_workers = OtherName("dataloader_num_workers")
    ids_to_pop_from_dataset: tuple[str, ...] = setting(
        (), several(text, "names of columns"), "Columns that are left out of each example."
    )
    remove_unused_columns: bool = setting(
        False, flag, "Whether to leave out columns that no step can take: texts, None, and objects."
    )
