"""What a saved position has to be, for batches to go on from there."""

from collections.abc import Mapping
from typing import Any

from stepfold import tree
from stepfold.errors import DataError


def check_position(
    state: Any, like: Mapping[str, Any], otherwise: str = "make them as they were"
) -> None:
    """Refuse a position that is none, or one in other batches.

    Args:
      state: what was saved.
      like: a position in the batches that are to go on; under "pipeline" it says what the meaning
        of a position hangs on, and nothing else, so that what may change does not stand in the way.
      otherwise: what to do with one in other batches; `{step}` is the step that was saved.

    Raises:
      DataError: if it does not fit, with what was saved and what is.

    >>> saved = {"step": 3, "pipeline": {"seed": 0}}
    >>> check_position(saved, like={"step": 0, "pipeline": {"seed": 0}})
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
