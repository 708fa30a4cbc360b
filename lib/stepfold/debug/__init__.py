"""Find out what went wrong: compare runs, replay the steps of a capsule, check a step.

`diff.py` compares the files of two runs, and `lockstep.py` runs their steps side by side.
`rerun.py` replays a capsule, `bisect.py` finds its bad rows, and `origin.py` the operation that
made the first NaN or inf. `check.py` runs a step twice.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.debug.check import check_step
    from stepfold.debug.diff import diff
    from stepfold.debug.rerun import Replay, replay
    from stepfold.debug.result import Cause, RunDiff
    from stepfold.runs.capsule import Capsule, read_capsule

__all__ = [
    "Capsule",
    "Cause",
    "Replay",
    "RunDiff",
    "check_step",
    "diff",
    "read_capsule",
    "replay",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "debug.check": "check_step",
        "debug.diff": "diff",
        "debug.rerun": "Replay replay",
        "debug.result": "Cause RunDiff",
        "runs.capsule": "Capsule read_capsule",
    },
)
