"""Fields: what is done at all, the loss, and when it is evaluated."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from stepfold.adapter.arguments.names import OtherName
from stepfold.adapter.arguments.readers import flag, integer, mapping, one_of, optional, text
from stepfold.adapter.arguments.setting import setting

Strategy = Literal["no", "steps", "epoch"]


@dataclass(frozen=True, kw_only=True)
class Evaluating:
    """What is done at all, the loss, and when it is evaluated."""

    do_train: bool = setting(True, flag, "Whether train() trains.")
    do_eval: bool = setting(True, flag, "Whether there are evaluations, if there are data for any.")
    do_evaluate = OtherName("do_eval")
    evaluation_strategy: Strategy | None = setting(
        None,
        optional(one_of(*get_args(Strategy))),
        "When to evaluate besides the end: each eval_steps, each epoch; no is never. By default "
        "each eval_steps if they are given, else at the end alone.",
    )
    eval_steps: int | None = setting(
        None, optional(integer(1)), "The steps from one evaluation to the next."
    )
    evaluation_steps = OtherName("eval_steps")
    max_evaluation_steps: int | None = setting(
        None, optional(integer(1)), "How many batches of the data an evaluation takes at most."
    )
    per_epoch_evaluation_steps: int | None = setting(
        None, optional(integer(1)), "How many batches there are, where the data do not know."
    )
    metric_for_best_model: str | None = setting(
        None,
        optional(text),
        "The metric by which a checkpoint is the best: train.x or evaluation.x; x is the latter, "
        "and name/x is that of another evaluation.",
    )
    greater_is_better: bool | None = setting(
        None, optional(flag), "Whether more of it is better; by default less of what is a loss."
    )
    early_stopping_patience: int | None = setting(
        None, optional(integer(1)), "After how many evaluations without a better one to stop."
    )
    patience = OtherName("early_stopping_patience")
    aux_loss_enabled: bool = setting(
        True, flag, "Whether terms of the loss whose names begin with aux are a part of it."
    )
    loss_config: dict[str, Any] = setting(
        {}, mapping, "What the loss function is given besides, by keyword."
    )
