"""The dtypes in which a step computes.

Parameters and optimizer state keep the dtypes that they were created with. A `Precision` casts
parameters and batch on entry to the loss function, so the gradients come back in the parameters'
dtypes. Losses, means and, by default, accumulated gradients are at least float32.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.core.loss import LossFn
from stepfold.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """The dtype in which a loss function computes.

    The names "f32", "bf16" and "f16" stand for `Precision(jnp.float32)` and so on. Floating leaves
    of the parameters and the batch are cast. Integers, booleans, keys and the model state are not.
    "f32" casts narrower dtypes up and leaves float64 unchanged.

    Attributes:
      compute: a floating dtype.
      keep: a regular expression, searched in the leaf paths (`params/norm/scale`, `batch/target`).
        Leaves that match are not cast, for example to keep norms or routers in float32.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> seen = {}
    >>> def loss_fn(params, batch, key):
    ...     seen.update(jax.tree.map(lambda x: x.dtype.name, params))
    ...     return sf.mean(batch @ params["w"])
    >>> params = {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    >>> state = sf.init_state(params, optax.sgd(0.1), jax.random.key(0))
    >>> mixed = sf.Precision(jnp.bfloat16, keep="norm")
    >>> step = sf.make_train_step(loss_fn, optax.sgd(0.1), precision=mixed)
    >>> state, _ = step(state, jnp.ones((4, 2)))
    >>> seen["w"], seen["norm"], state.params["w"].dtype.name
    ('bfloat16', 'float32', 'float32')
    """

    compute: DTypeLike = jnp.float32
    keep: str | None = None

    def __post_init__(self) -> None:
        dtype = tree.floating(self.compute)
        if dtype is None:
            raise ConfigError(f"Precision.compute: expected a floating dtype, got {self.compute!r}")
        object.__setattr__(self, "compute", dtype)
        try:
            re.compile(self.keep or "")
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"Precision.keep: expected a regular expression, got {self.keep!r}: {error}"
            ) from None

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients underflow: the exponent range is smaller than float32's."""
        return bool(jnp.finfo(self.compute).minexp > jnp.finfo(jnp.float32).minexp)

    def applied_to(self, loss_fn: LossFn) -> LossFn:
        """Wrap a loss function to cast its parameters and its batch."""

        def cast_loss(params: Any, batch: Any, *rest: Any) -> Any:
            params = tree.cast_floats(params, self.compute, self.keep, "params")
            batch = tree.cast_floats(batch, self.compute, self.keep, "batch")
            return loss_fn(params, batch, *rest)

        return cast_loss


_NAMES = {
    "f32": Precision(jnp.float32),
    "bf16": Precision(jnp.bfloat16),
    "f16": Precision(jnp.float16),
}


def as_precision(precision: str | Precision) -> Precision:
    """Look up a precision by its name; return a `Precision` unchanged."""
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in _NAMES:
        raise ConfigError(
            f"precision: expected one of {', '.join(_NAMES)} or a Precision, got {precision!r}"
        )
    return _NAMES[precision]
