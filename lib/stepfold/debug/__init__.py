"""Find out what went wrong in a run: `diff` says where two runs part, and why."""

from stepfold.debug.diff import Cause, RunDiff, diff
from stepfold.debug.lockstep import StepDiff

__all__ = ["Cause", "RunDiff", "StepDiff", "diff"]
