"""Writers of metrics: files, the console and trackers."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.writers.base import Writer, console
    from stepfold.writers.combinators import async_writer, log_to, multi_writer
    from stepfold.writers.jsonl import jsonl
    from stepfold.writers.tensorboard import tensorboard
    from stepfold.writers.wandb import wandb

__all__ = [
    "Writer",
    "async_writer",
    "console",
    "jsonl",
    "log_to",
    "multi_writer",
    "tensorboard",
    "wandb",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "writers.base": "Writer console",
        "writers.combinators": "async_writer log_to multi_writer",
        "writers.jsonl": "jsonl",
        "writers.tensorboard": "tensorboard",
        "writers.wandb": "wandb",
    },
)
