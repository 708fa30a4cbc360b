"""Where a state stands in its data."""

from typing import Any

from stepfold import tree
from stepfold.errors import CheckpointError


def go_to_step(loader: Any, data: Any, step: int) -> None:
    """Send batches to where a state stands.

    Args:
      loader: the batches. Those that cannot be sent anywhere go on from where they are.
      data: the position that was saved. If it is None, it is the state's step, where batches are a
        function of that.
      step: the state's step.

    Raises:
      CheckpointError: if a position was saved, and they cannot be sent there.
    """
    if not (hasattr(loader, "get_state") and hasattr(loader, "set_state")):
        if data is not None:
            raise CheckpointError(
                f"ckpt_path: expected batches that can go to step {step}, got {tree.spell(loader)},"
                " which have no get_state and set_state; give a dataset with len and [i]"
            )
        return
    now = loader.get_state()
    if data is None and isinstance(now, dict) and now.keys() == {"step", "pipeline"}:
        data = {**now, "step": step}
    if data is not None and data != now:
        loader.set_state(data)


def position_of(loader: Any, step: int) -> Any:
    """Give the position of a state in its data, or None where they have none."""
    if not hasattr(loader, "get_state"):
        return None
    now = loader.get_state()
    known = isinstance(now, dict) and now.keys() == {"step", "pipeline"}
    return {**now, "step": step} if known else now
