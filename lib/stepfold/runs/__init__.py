"""Runs: fit, the directory of a run with its report, evaluation by another process, predictions.

`fit.py` puts a run together. `resume.py` continues from a checkpoint, and skips the batches that
`rollback.py` has noted. `files.py` opens what a run directory holds, and `upload.py` copies it.
`evaluator.py` evaluates checkpoints in another process, and `remote.py` reads its results.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.runs.directory import RunDirectory
    from stepfold.runs.evaluator import RunEvaluation, evaluate_run
    from stepfold.runs.fit import FitResult, fit
    from stepfold.runs.predict import predict

__all__ = [
    "FitResult",
    "RunDirectory",
    "RunEvaluation",
    "evaluate_run",
    "fit",
    "predict",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "runs.directory": "RunDirectory",
        "runs.evaluator": "RunEvaluation evaluate_run",
        "runs.fit": "FitResult fit",
        "runs.predict": "predict",
    },
)
