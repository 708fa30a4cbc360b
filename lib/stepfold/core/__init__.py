"""States, losses, gradients and steps, and how processes agree on a value.

`loss.py` has the losses, as totals and weights. `gradients.py` and `step.py` make a step of it, and
`precision.py` has its dtypes and the loss scale. `processes.py` broadcasts values of process 0.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.core.gradients import GradFn, make_grad
    from stepfold.core.loss import LossFn, mean, mean_by, perplexity
    from stepfold.core.precision import Precision, dynamic_loss_scale
    from stepfold.core.state import TrainState, init_state
    from stepfold.core.step import EvalFn, StepFn, make_eval_step, make_train_step, observe

__all__ = [
    "EvalFn",
    "GradFn",
    "LossFn",
    "Precision",
    "StepFn",
    "TrainState",
    "dynamic_loss_scale",
    "init_state",
    "make_eval_step",
    "make_grad",
    "make_train_step",
    "mean",
    "mean_by",
    "observe",
    "perplexity",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "core.gradients": "GradFn make_grad",
        "core.loss": "LossFn mean mean_by perplexity",
        "core.precision": "Precision dynamic_loss_scale",
        "core.state": "TrainState init_state",
        "core.step": "EvalFn StepFn make_eval_step make_train_step observe",
    },
)
