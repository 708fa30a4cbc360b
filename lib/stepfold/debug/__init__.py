"""Find out what went wrong in a run: `diff` says where two runs part, and why."""

from stepfold.debug.diff import diff
from stepfold.debug.result import Cause, RunDiff

__all__ = ["Cause", "RunDiff", "diff"]
