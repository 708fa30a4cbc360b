"""The kernel: a fold of a step over batches, with hooks, sinks, evaluations and saves.

`fold.py` is the loop, from top to bottom, and `run.py` the value that it folds. `schedule.py` says
what is due after a step. `metrics.py` merges the metrics of steps and devices. `hook.py` calls
hooks and sinks. `saves.py` decides about checkpoints. `inbox.py` has all requests from outside, and
handles SIGINT and SIGTERM.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.loop.evaluate import Evaluation, evaluate
    from stepfold.loop.events import Event, Stop
    from stepfold.loop.fold import iterate
    from stepfold.loop.hook import Hook, Sink

__all__ = [
    "Evaluation",
    "Event",
    "Hook",
    "Sink",
    "Stop",
    "evaluate",
    "iterate",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "loop.evaluate": "Evaluation evaluate",
        "loop.events": "Event Stop",
        "loop.fold": "iterate",
        "loop.hook": "Hook Sink",
    },
)
