"""Attention masks for packed rows."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from stepfold.errors import DataError


def block_diagonal_mask(segment_ids: Any, *, causal: bool = False) -> Any:
    """Make the attention mask that keeps the examples of packed rows apart.

    A token attends to the tokens of its own segment. Padding, segment 0, attends only to itself, so
    that no softmax is empty, and no other token attends to it.

    Args:
      segment_ids: integers of shape (…, length), as from `pack`.
      causal: whether a token attends only to itself and to earlier tokens.

    Returns:
      Booleans of shape (…, length, length), where `mask[…, i, j]` is true if position i attends to
      position j. A numpy array if `segment_ids` is one, otherwise a JAX array. Add an axis for the
      heads with `mask[:, None]`, as `jax.nn.dot_product_attention` expects.

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
