"""The series of checkpoints."""

from pathlib import Path

from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.planning import Plan
from stepfold.checkpoint.checkpoints import Checkpoints

_PREFIXES = {
    "evaluation.": "eval/",
    "evaluation/": "eval/",
    "eval.": "eval/",
    "eval/": "eval/",
    "eval_": "eval/",
    "train.": "train/",
    "train/": "train/",
}


def best_metric(arguments: TrainingArguments) -> str | None:
    """Give the metric by which a checkpoint is the best, as it is called here.

    One of an evaluation with a name of its own, as `generated/cer`, is called by that.

    >>> from stepfold.adapter import TrainingArguments, best_metric
    >>> best_metric(TrainingArguments(metric_for_best_model="evaluation.f1"))
    'eval/f1'
    >>> best_metric(TrainingArguments(metric_for_best_model="cer"))
    'eval/cer'
    """
    metric = arguments.metric_for_best_model
    for prefix, ours in _PREFIXES.items():
        if metric is not None and metric.startswith(prefix):
            return ours + metric.removeprefix(prefix)
    return metric if metric is None or "/" in metric else f"eval/{metric}"


def best_mode(arguments: TrainingArguments) -> str | None:
    """Give whether the least or the greatest of it is the best; None leaves it to its name.

    >>> from stepfold.adapter import TrainingArguments, best_mode
    >>> best_mode(TrainingArguments(metric_for_best_model="cer", greater_is_better=False))
    'min'
    """
    greater = arguments.greater_is_better
    return None if greater is None else "max" if greater else "min"


def checkpoints(arguments: TrainingArguments, plan: Plan) -> Checkpoints | None:
    """Make the series of checkpoints, in `output_dir` / `checkpoints_dir`.

    None where nothing is to be saved: without an `output_dir`, or with `do_last_save=False` and
    nothing saved between. Wherever there is one, what a run ends with is saved too.

    >>> from stepfold.adapter import TrainingArguments, checkpoints, plan
    >>> arguments = TrainingArguments(output_dir="runs/a", max_steps=200, save_steps=0.25)
    >>> checkpoints(arguments, plan(arguments)).every
    50
    """
    if arguments.output_dir is None or not arguments.do_last_save:
        return None
    best = best_metric(arguments)
    return Checkpoints(
        Path(arguments.output_dir) / arguments.checkpoints_dir,
        every=plan.save_steps,
        every_epochs=plan.save_epochs,
        every_minutes=arguments.save_interval_minutes,
        keep=arguments.save_total_limit,
        best=best,
        mode=best_mode(arguments) if best is not None else None,
    )
