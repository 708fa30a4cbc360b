import jax
import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.inspect.collectives import Collective
from stepfold.inspect.flops import Product
from stepfold.inspect.report import gradient_remarks, leaf_remarks, product_remarks


def test_of_many_leaves_the_largest_are_named():
    leaves = [("a", 1 << 10), ("b", 1 << 20), ("c", 1 << 12), ("d", 1 << 11)]
    assert leaf_remarks("whole", leaves) == [
        "1.01 MiB whole: b (1.00 MiB), c (4.00 KiB), d (2.00 KiB) and 1 more"
    ]
    assert leaf_remarks("whole", leaves[:1]) == ["1.00 KiB whole: a (1.00 KiB)"]


@pytest.mark.parametrize("leaves", [[], [("count", 4), ("key", 1019)]])
def test_small_leaves_are_not_mentioned(leaves):
    assert leaf_remarks("whole", leaves) == []


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float64", "float32"], "50% of products in wider dtypes: x (float64, 50%)"),
        (["float32", "bfloat16"], "50% of products in wider dtypes: x (float32, 50%)"),
        (["float32", "float8_e4m3fn"], "50% of products in wider dtypes: x (float32, 50%)"),
        (["float32", "float32"], None),
        (["bfloat16"], None),
        ([], None),
    ],
)
def test_wider_products_are_mentioned(dtypes, expected):
    found = [Product(dtype, 100, "x") for dtype in dtypes]
    assert product_remarks(found) == ([] if expected is None else [expected])


def test_products_of_empty_batches_are_not_mentioned():
    assert product_remarks([Product("float64", 0, "x")]) == []


@pytest.mark.parametrize(("share", "kind", "expected"), [
    (1, "all-reduce", True), (0.5, "all-reduce", False), (1, "all-gather", False)
])  # fmt: skip
def test_all_reduces_of_sharded_parameters_on_a_cpu_are_mentioned(share, kind, expected):
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    mesh = sf.make_mesh()
    own = 64 * 64 * 4 // 8
    found = [Collective(kind, 1, int(share * own), 0, ("fsdp",), 8, "f32", "")]

    def sums(rules):
        plan = sf.make_sharding(params, mesh, rules)
        placed = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), params, plan)
        return gradient_remarks(placed, found)

    assert bool(sums(sf.fsdp(min_size=1))) == expected
    assert sums(sf.fsdp(min_size=1 << 20)) == []
