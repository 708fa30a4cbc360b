"""Writers of metrics: files, the console and trackers."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.writers.base import Writer, console_writer
    from stepfold.writers.combinators import async_writer, log_to, multi_writer
    from stepfold.writers.jsonl import csv_writer, jsonl_writer
    from stepfold.writers.tensorboard import tensorboard_writer
    from stepfold.writers.wandb import trackio_writer, wandb_writer

__all__ = [
    "Writer",
    "async_writer",
    "console_writer",
    "csv_writer",
    "jsonl_writer",
    "log_to",
    "multi_writer",
    "tensorboard_writer",
    "trackio_writer",
    "wandb_writer",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "writers.base": "Writer console_writer",
        "writers.combinators": "async_writer log_to multi_writer",
        "writers.jsonl": "csv_writer jsonl_writer",
        "writers.tensorboard": "tensorboard_writer",
        "writers.wandb": "trackio_writer wandb_writer",
    },
)
