"""What metrics are written to."""

from pathlib import Path
from typing import Any

import jax

from stepfold.adapter.arguments.setting import is_changed
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import ConfigError
from stepfold.loop.writers.base import Writer
from stepfold.loop.writers.combinators import async_writer, multi_writer
from stepfold.loop.writers.console import console_writer
from stepfold.loop.writers.jsonl import csv_writer, jsonl_writer
from stepfold.loop.writers.tensorboard import tensorboard_writer
from stepfold.loop.writers.wandb import wandb_writer


def writes_everywhere(arguments: TrainingArguments) -> bool:
    """Tell whether every process writes, or the first alone.

    >>> from stepfold.adapter import TrainingArguments, writes_everywhere
    >>> writes_everywhere(TrainingArguments(log_all_workers=True))
    True
    """
    return arguments.log_all_workers or not arguments.process_zero_is_admin


def logs_of(arguments: TrainingArguments) -> Path:
    """Give the folder of the files: `output_dir` / `logs_dir`, with one in there for each process.

    >>> from stepfold.adapter import TrainingArguments, logs_of
    >>> logs_of(TrainingArguments(output_dir="runs/a"))
    PosixPath('runs/a/logs')
    """
    folder = Path(arguments.output_dir or ".") / arguments.logs_dir
    return folder / f"process_{jax.process_index()}" if writes_everywhere(arguments) else folder


def writers(arguments: TrainingArguments) -> Writer | None:
    """Make one writer of all that metrics are written to, or none.

    Files go to `logs_of`, and without an `output_dir` there are none. All of it is written in the
    background.

    Args:
      arguments: the arguments.

    Raises:
      ConfigError: if something that is asked for is not installed, or has nowhere to go.

    >>> from stepfold.adapter import TrainingArguments, writers
    >>> writers(TrainingArguments(report_metrics=False)) is None
    True
    """
    if arguments.performance_mode or not arguments.report_metrics:
        return None
    if arguments.output_dir is None and is_changed(arguments, "report_to") and arguments.report_to:
        raise ConfigError(
            f"report_to={arguments.report_to}: expected to know where files go; give output_dir"
        )
    found: list[Any] = [] if arguments.output_dir is None else _files(arguments)
    if arguments.use_wandb:
        found.append(wandb_writer(**wandb_options(arguments)))
    if arguments.verbose:
        found.append(console_writer())
    return async_writer(multi_writer(*found)) if found else None


def _files(arguments: TrainingArguments) -> list[Any]:
    make: dict[str, tuple[Any, str]] = {
        "jsonl": (jsonl_writer, "metrics.jsonl"),
        "csv": (csv_writer, "metrics.csv"),
        "tensorboard": (tensorboard_writer, "tensorboard"),
    }
    chosen = [make[kind] for kind in dict.fromkeys(arguments.report_to)]
    return [writer(logs_of(arguments) / name) for writer, name in chosen]


def wandb_options(arguments: TrainingArguments) -> dict[str, Any]:
    """Give what `wandb.init` is called with.

    >>> from stepfold.adapter import TrainingArguments, wandb_options
    >>> wandb_options(TrainingArguments(use_wandb=True, trainer_prefix="sft", model_name="tiny"))
    {'project': 'sft-tiny'}
    """
    project = "-".join(filter(None, (arguments.trainer_prefix, arguments.model_name)))
    options = {
        "entity": arguments.wandb_entity,
        "name": arguments.wandb_name,
        "dir": arguments.output_dir,
    }
    return {"project": project, **{key: x for key, x in options.items() if x is not None}}
