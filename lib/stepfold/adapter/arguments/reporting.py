"""Fields: what a run shows and writes of itself."""

from dataclasses import dataclass
from typing import Literal, get_args

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.readers import (
    amount,
    flag,
    integer,
    one_of,
    optional,
    pattern,
    several,
    text,
)
from stepfold.adapter.arguments.setting import setting

Bar = Literal["tqdm", "rich", "json", "none"]
File = Literal["jsonl", "csv", "tensorboard"]


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What a run shows and writes of itself."""

    log_steps: int | float = setting(
        10, amount, "The steps from one showing of metrics to the next; a fraction is of all steps."
    )
    logging_steps = OtherName("log_steps")
    report_steps: int | None = setting(
        None, optional(integer(1)), "The steps from one writing to the next; log_steps by default."
    )
    report_metrics: bool = setting(True, flag, "Whether metrics are written at all.")
    report_to: tuple[File, ...] = setting(
        ("jsonl", "csv"),
        several(one_of(*get_args(File)), "names of kinds of files"),
        "The files metrics are written to; beside jsonl there is report.html, which shows them.",
    )
    logs_dir: str = setting("logs", text, "The folder of those files in output_dir.")
    log_all_workers: bool = setting(
        False, flag, "Whether every process writes metrics, each to a folder of its own."
    )
    process_zero_is_admin: bool = setting(
        True, flag, "Whether the first process alone writes; False is as log_all_workers."
    )
    log_grad_norms: bool = setting(True, flag, "Whether the norm of the gradients is written.")
    progress_bar_type: Bar = setting(
        "tqdm", one_of(*get_args(Bar)), "How progress is shown: a bar, lines of JSON, or not."
    )
    metrics_to_show_in_rich_pbar: tuple[str, ...] | None = setting(
        None,
        optional(several(text, "names of metrics, as ('eval/*',)")),
        "The metrics that the bar shows, tqdm's too; patterns as eval/* will do.",
    )
    verbose: bool = setting(False, flag, "Whether what is written is printed, too.")
    performance_mode: bool = setting(
        False, flag, "Whether to show and to write nothing, for the most steps a second."
    )
    track_memory: bool = setting(False, flag, "Whether the memory in use is measured.")
    weight_distribution_pattern: str | None = setting(
        None, optional(pattern), "Parameters whose distribution is measured, by path; all, if None."
    )
    weight_distribution_log_steps: int | None = setting(
        None, optional(integer(1), none=(0,)), "The steps from one such measurement to the next."
    )
    use_wandb: bool = setting(False, flag, "Whether to write to Weights & Biases.")
    wandb_entity: str | None = setting(None, optional(text), "The user or team the run is of.")
    wandb_name: str | None = setting(None, optional(text), "What W&B calls the run.")
    trainer_prefix: str | None = setting(
        None, optional(text), "What W&B's project is called by, before the model_name."
    )
