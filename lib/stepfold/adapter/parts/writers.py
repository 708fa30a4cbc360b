"""What metrics are written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from stepfold.adapter.arguments.setting import is_changed
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import ConfigError
from stepfold.loop.writers.asynchronous import async_writer
from stepfold.loop.writers.console import console_writer
from stepfold.loop.writers.csv import csv_writer
from stepfold.loop.writers.jsonl import jsonl_writer
from stepfold.loop.writers.multi import multi_writer
from stepfold.loop.writers.protocol import Writer
from stepfold.loop.writers.tensorboard import tensorboard_writer
from stepfold.loop.writers.wandb import wandb_writer


def writes_everywhere(arguments: TrainingArguments) -> bool:
    """Tell whether every process writes, or the first alone.

    >>> from stepfold.adapter import TrainingArguments, writes_everywhere
    >>> writes_everywhere(TrainingArguments(log_all_workers=True))
    True
    """
    return arguments.log_all_workers or not arguments.process_zero_is_admin


def writers(arguments: TrainingArguments, directory: str | Path | None = None) -> Writer | None:
    """Make one writer of all that metrics are written to, or none.

    Files go to `directory` / `logs_dir`, and where every process writes, to a folder there for
    each. All of it is written in the background.

    Args:
      arguments: the arguments.
      directory: where a run keeps what it writes; `output_dir` by default. Without any there are
        no files.

    Raises:
      ConfigError: if something that is asked for is not installed, or has nowhere to go.

    >>> from stepfold.adapter import TrainingArguments, writers
    >>> writers(TrainingArguments(report_metrics=False)) is None
    True
    """
    if arguments.performance_mode or not arguments.report_metrics:
        return None
    place = arguments.output_dir if directory is None else directory
    if place is None and is_changed(arguments, "report_to") and arguments.report_to:
        raise ConfigError(
            f"report_to={arguments.report_to}: expected to know where files go; give output_dir, "
            "or a directory to writers"
        )
    found: list[Any] = [] if place is None else _files(arguments, Path(place))
    if arguments.use_wandb:
        found.append(wandb_writer(**wandb_options(arguments, place)))
    if arguments.verbose:
        found.append(console_writer())
    return async_writer(multi_writer(*found)) if found else None


def _files(arguments: TrainingArguments, place: Path) -> list[Any]:
    folder = place / arguments.logs_dir
    if writes_everywhere(arguments):
        folder = folder / f"process_{jax.process_index()}"
    make: dict[str, Callable[[], Any]] = {
        "jsonl": lambda: jsonl_writer(folder / "metrics.jsonl"),
        "csv": lambda: csv_writer(folder / "metrics.csv"),
        "tensorboard": lambda: tensorboard_writer(folder / "tensorboard"),
    }
    return [make[kind]() for kind in dict.fromkeys(arguments.report_to)]


def wandb_options(arguments: TrainingArguments, place: Any = None) -> dict[str, Any]:
    """Give what `wandb.init` is called with.

    >>> from stepfold.adapter import TrainingArguments, wandb_options
    >>> wandb_options(TrainingArguments(use_wandb=True, trainer_prefix="sft", model_name="tiny"))
    {'project': 'sft-tiny'}
    """
    project = "-".join(filter(None, (arguments.trainer_prefix, arguments.model_name)))
    options = {"entity": arguments.wandb_entity, "name": arguments.wandb_name, "dir": place}
    given = {key: str(value) for key, value in options.items() if value is not None}
    return {"project": project, **given}
