"""Validation of saved positions."""

from collections.abc import Mapping
from typing import Any

from stepfold import tree
from stepfold.errors import DataError


def check_position(
    state: Any, like: Mapping[str, Any], otherwise: str = "make them as they were"
) -> None:
    """Raise if `state` is not a position, or was saved by a different pipeline.

    `like` is a position of the current batches. Its "pipeline" holds only the settings that a
    position depends on, so that all others may change. `otherwise` is the advice in the error if
    they differ; `{step}` in it is replaced by the saved step.
    """
    known = isinstance(state, dict) and state.keys() == like.keys()
    if not known or not isinstance(state["pipeline"], dict):
        raise DataError(
            "batches: expected a state that get_state() of such batches gave, with "
            f"{', '.join(like)}, got {tree.spell(state)}; it was saved by another kind of iterator"
        )
    saved, now = state["pipeline"], like["pipeline"]
    differing = [
        f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
        for name in {**now, **saved}
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise DataError(
            "batches: expected the batches that the position was saved in, got others: "
            f"{'; '.join(differing)}; {otherwise.format(step=state['step'])}"
        )
