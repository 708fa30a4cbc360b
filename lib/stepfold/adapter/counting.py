"""How large a model is, and how much a step computes."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.inspect import hlo
from stepfold.inspect.flops import count, estimate


def count_parameters(params: Any) -> int:
    """Count the numbers in a tree: of arrays, abstract ones too, whatever else there is.

    Random keys are none, nor are functions and settings.

    >>> count_parameters({"w": jnp.ones((3, 2)), "b": jax.ShapeDtypeStruct((2,), "f4"), "f": max})
    8
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if _is_number(leaf))


def _is_number(leaf: Any) -> bool:
    return tree.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def total_flops(params: Any, tokens: int, compiled: Any = None, *, training: bool = True) -> int:
    """Count the operations of one step on all devices.

    Args:
      params: the parameters.
      tokens: how many tokens, or examples, a batch has; for an estimate.
      compiled: the step as it was compiled, as `jax.stages.Compiled`; it is counted, if given.
      training: whether it is a step of training, for an estimate.

    >>> params = {"w": jnp.ones((3, 2))}
    >>> total_flops(params, 10), total_flops(params, 10, training=False)
    (360, 120)
    """
    if compiled is None:
        return estimate(count_parameters(params), tokens, training=training)
    places = jax.tree.leaves(compiled.input_shardings)
    devices = max((len(place.device_set) for place in places), default=1)
    return devices * count(hlo.parse(compiled.as_text())).dots
