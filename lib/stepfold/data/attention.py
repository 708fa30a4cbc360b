"""What may attend to what, where several sequences share a row."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from stepfold.errors import DataError


def block_diagonal_mask(segment_ids: Any, *, causal: bool = False) -> Any:
    """Make the attention mask that keeps every token of packed rows within its own example.

    A token attends to those of the same segment; what is padding, segment 0, attends to itself
    alone, so that no softmax is over nothing, and nothing else attends to it.

    Args:
      segment_ids: integers of shape (…, length), as `pack` makes them.
      causal: attend to oneself and to what came before alone.

    Returns:
      Booleans of shape (…, length, length), true where the first of the two positions attends to
      the second; numpy's for an array of numpy's, otherwise jax's. With several heads, write
      `mask[:, None]`, which is what `jax.nn.dot_product_attention` takes.

    >>> import numpy as np
    >>> import stepfold as sf
    >>> sf.block_diagonal_mask(np.array([1, 1, 2, 0]), causal=True).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 0, 1]])
    """
    xp: Any = np if isinstance(segment_ids, np.ndarray) else jnp
    ids = xp.asarray(segment_ids)
    if ids.ndim == 0 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise DataError(
            "block_diagonal_mask: expected integers of shape (…, length), got "
            f"{ids.dtype}{list(ids.shape)}; give the segment_ids that pack adds"
        )
    length = ids.shape[-1]
    within = (ids[..., :, None] == ids[..., None, :]) & (ids != 0)[..., None]
    if causal:
        within = within & xp.tri(length, dtype=bool)
    return within | xp.eye(length, dtype=bool)
