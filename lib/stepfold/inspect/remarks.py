"""What looks like a mistake in a step, in words."""

from collections.abc import Sequence
from typing import Any

import jax

from stepfold.inspect.collectives import Collective
from stepfold.inspect.memory import held
from stepfold.inspect.products import Product
from stepfold.table import size


def about_leaves(what: str, leaves: Sequence[tuple[str, int]]) -> list[str]:
    """Name the largest of some leaves, with what they take together."""
    if sum(count for _, count in leaves) < 1024:  # nothing that anyone would miss
        return []
    largest = sorted(leaves, key=lambda leaf: -leaf[1])
    names = ", ".join(f"{name} ({size(count)})" for name, count in largest[:3])
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return [f"{size(sum(count for _, count in leaves))} {what}: {names}{more}"]


_NARROW = ("bfloat16", "float16", "float8")


def about_products(found: Sequence[Product]) -> list[str]:
    """Point at products that are wider than most: float64, and float32 among narrower ones."""
    found = [one for one in found if one.flops]  # an empty batch makes products of nothing
    total = sum(one.flops for one in found)
    mixed = any(one.dtype.startswith(_NARROW) for one in found)
    odd = [one for one in found if one.dtype == "float64" or (mixed and one.dtype == "float32")]
    if not odd:
        return []
    where = ", ".join(f"{one.where} ({one.dtype}, {one.flops / total:.0%})" for one in odd[:3])
    return [f"{sum(one.flops for one in odd) / total:.0%} of products in wider dtypes: {where}"]


def about_sums(trained: Any, found: Sequence[Collective]) -> list[str]:
    """Say where a CPU's compiler sends more of gradients than others would."""
    leaves = jax.tree.leaves(trained)
    cut = [leaf for leaf in leaves if leaf.sharding.shard_shape(leaf.shape) != leaf.shape]
    on_cpu = all(device.platform == "cpu" for leaf in cut for device in leaf.sharding.device_set)
    summed = sum(one.bytes for one in found if one.kind == "all-reduce")
    if not on_cpu or not cut or summed < held(cut):
        return []
    return [
        "compiled for a CPU, which sums gradients of cut parameters whole (all-reduce); a GPU or "
        "TPU keeps a share each (reduce-scatter), and sends half of it"
    ]
