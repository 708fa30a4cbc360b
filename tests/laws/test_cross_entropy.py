"""Cross-entropy by blocks equals the plain one, on any mesh; what is nearly right fails."""

import dataclasses
import functools
import inspect
import math
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf
from stepfold.optim import cross_entropy

pytestmark = pytest.mark.not_optimized  # results are equal up to rounding

SIZE, VOCABULARY, IGNORED = 8, 16, -100
MESHES = {
    "one device": (1, 1, 1, 1),
    "dp 8": (8, 1, 1, 1),
    "fsdp 8": (1, 8, 1, 1),
    "tp 8": (1, 1, 8, 1),
    "fsdp 4 x tp 2": (1, 4, 2, 1),
    "dp 2 x fsdp 2 x tp 2": (2, 2, 2, 1),
    "fsdp 2 x tp 2 x sp 2": (1, 2, 2, 2),
}
# For a kernel [size, vocabulary].
KERNELS = (
    P(),
    P("fsdp", "tp"),
    P("tp", "fsdp"),
    P(None, ("fsdp", "tp")),
    P(None, ("tp", "fsdp")),
    P(("fsdp", "tp")),
)
BY_TOKEN = P(("dp", "fsdp"), "sp")
WEIGHTS = {
    "none": lambda rng, shape: None,
    "mask": lambda rng, shape: rng.random(shape) < 0.6,
    "mask of examples": lambda rng, shape: rng.random(shape[:1]) < 0.6,
    "all masked": lambda rng, shape: np.zeros(shape, bool),
    "integers": lambda rng, shape: rng.integers(0, 3, shape),
    "floats": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.7),
}


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (8, 5)
    block_size: int = 3
    weights: str = "floats"
    ignores: bool = False
    transposed: bool = False
    has_bias: bool = True
    label_smoothing: float = 0.1
    z_loss: float = 0.1
    soft_cap: float | None = 2.0
    mesh: str = "fsdp 4 x tp 2"
    kernel: P = P("fsdp", "tp")  # noqa: RUF009
    rows: P | None = None


cases = st.builds(
    Case,
    shape=st.sampled_from([(8,), (16,), (8, 1), (8, 6), (16, 2, 2)]),
    block_size=st.sampled_from([1, 2, 3, 7, 1000]),
    weights=st.sampled_from([*WEIGHTS]),
    ignores=st.booleans(),
    transposed=st.booleans(),
    has_bias=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    soft_cap=st.sampled_from([None, 2.0]),
    mesh=st.sampled_from([*MESHES]),
    kernel=st.sampled_from(KERNELS),
)


def draw(case, seed):
    """Draw the differentiable arguments, and the labels."""
    rng = np.random.default_rng(seed)
    kernel = (VOCABULARY, SIZE) if case.transposed else (SIZE, VOCABULARY)
    arguments = {
        "features": rng.normal(size=(*case.shape, SIZE)),
        "kernel": 3 * rng.normal(size=kernel),
    }
    if case.has_bias:
        arguments["bias"] = rng.normal(size=VOCABULARY)
    weights = WEIGHTS[case.weights](rng, case.shape)
    labels = rng.integers(0, VOCABULARY, case.shape)
    if case.ignores:
        labels = np.where(rng.random(case.shape) < 0.3, IGNORED, labels)
    return arguments, weights, labels


def plain(case, arguments, weights, labels):
    """Return the total, the weight, and the hits by their definitions."""
    kernel = arguments["kernel"].T if case.transposed else arguments["kernel"]
    logits = arguments["features"] @ kernel + arguments.get("bias", 0.0)
    if case.soft_cap:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    target = jax.nn.one_hot(labels, VOCABULARY, dtype=logits.dtype)
    target = (1 - case.label_smoothing) * target + case.label_smoothing / VOCABULARY
    losses = -(target * jax.nn.log_softmax(logits)).sum(-1)
    losses += case.z_loss * jax.nn.logsumexp(logits, -1) ** 2
    hits = jnp.where(logits.argmax(-1) == labels, weights, 0.0)
    return (losses * weights).sum(), (weights.sum(), hits.sum())


@functools.cache  # many mutants share a case
def expected(case, seed):
    """Return the weights in full, and the outcome of `plain` with its gradients."""
    arguments, weights, labels = draw(case, seed)
    full = np.ones(case.shape) if weights is None else np.float64(weights)
    full = full.reshape(full.shape + (1,) * (len(case.shape) - full.ndim))
    full = np.broadcast_to(full, case.shape) * (labels != IGNORED)
    by_definition = jax.value_and_grad(functools.partial(plain, case), (0, 1), has_aux=True)
    return full, jax.jit(by_definition)(arguments, full, np.maximum(labels, 0))


def check(case, seed=0, function=sf.linear_cross_entropy):
    with jax.enable_x64(True):
        arguments, weights, labels = draw(case, seed)
        full, want = expected(case, seed)

        count = math.prod(MESHES[case.mesh])
        mesh = sf.make_mesh(MESHES[case.mesh], devices=jax.devices()[:count])
        entries = [*case.kernel, None, None][:2]
        kernel = NamedSharding(mesh, P(*(entries[::-1] if case.transposed else entries)))

        def total(arguments, weights):
            names = ("block_size", "transposed", "label_smoothing", "z_loss", "soft_cap", "rows")
            loss, hits = function(
                arguments["features"],
                arguments["kernel"],
                labels,
                weights,
                bias=arguments.get("bias"),
                ignore_index=IGNORED if case.ignores else None,
                accuracy=True,
                sharding=None if case.mesh == "one device" else kernel,
                **{name: getattr(case, name) for name in names},
            )
            return -3 * loss.total, (loss.count, hits.total.astype(float), hits.count.astype(float))

        # What has no weight may be anything.
        given = dict(
            arguments, features=np.where(full[..., None] == 0, np.nan, arguments["features"])
        )
        differentiated = jax.value_and_grad(total, (0, 1), has_aux=True, allow_int=True)
        (value, (weight, hits, hit_weight)), grads = jax.jit(differentiated)(given, weights)

        chex.assert_trees_all_close(value, -3 * want[0][0], rtol=1e-11, atol=1e-11)
        chex.assert_trees_all_close((weight, hits), want[0][1], rtol=1e-11, atol=1e-11)
        chex.assert_trees_all_close(hit_weight, weight, rtol=1e-11, atol=1e-11)
        wanted, by_weight = jax.tree.map(lambda x: -3 * x, want[1])
        chex.assert_trees_all_close(grads[0], wanted, rtol=1e-10, atol=1e-11)
        if case.weights == "floats":
            by_weight = np.where(full == 0, 0, by_weight)
            chex.assert_trees_all_close(grads[1], by_weight, rtol=1e-11, atol=1e-11)


def test_blocks_equal_the_plain_loss(count):
    @settings(max_examples=count(3, 60))
    @given(cases, st.integers(0, 2**31 - 1))
    def law(case, seed):
        check(case, seed)

    law()


@pytest.mark.parametrize("mesh", full_but(["dp 2 x fsdp 2 x tp 2"], MESHES))
def test_every_mesh_equals_the_plain_loss(mesh):
    check(Case(mesh=mesh, kernel=P(None, ("fsdp", "tp"))))


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (BY_TOKEN, (4, 10)),
        pytest.param(P(None, ("sp", "fsdp")), (3, 8), marks=pytest.mark.full),
        pytest.param(P("tp"), (4,), marks=pytest.mark.full),  # so that it is gathered
    ],
)
def test_tokens_may_be_sharded_along_the_sequence_too(rows, shape):
    check(Case(mesh="fsdp 2 x tp 2 x sp 2", rows=rows, shape=shape))


SUM = "lax.psum(jnp.stack(sums), axes)"
MUTANTS = {
    "mask of another block": (
        "jax.tree.map(cut, (features, weights, labels))",
        "jax.tree.map(cut, (features, weights.reshape(-1)[::-1].reshape(weights.shape), labels))",
        Case(),
    ),
    "padded rows count": ("(x.ndim - 1))", "(x.ndim - 1), constant_values=1)", Case()),
    "rows of weight zero count": (
        "jnp.where(weight[:, None] != 0, x,",
        "jnp.where(True, x,",
        Case(),
    ),
    "weights are a mask": (
        "grad *= weight[:, None]",
        "grad *= (weight != 0).astype(wide)[:, None]",
        Case(),
    ),
    "only the last block": (
        "jax.tree.map(jnp.add, layer_grad, block_grad)",
        "block_grad",
        Case(),
    ),
    "no maximum across tp": ("lax.pmax(logits.max(1), axes)", "logits.max(1)", Case()),
    "no sum across tp": (SUM, "jnp.stack(sums)", Case()),
    "features' gradient of one shard": (
        'lax.psum(product(f"nv,{v}->nd", grad, layer["kernel"]), options.split_axes)',
        'product(f"nv,{v}->nd", grad, layer["kernel"])',
        Case(),
    ),
    "gradient reduced twice": (
        "lax.psum(grad, tuple(sorted(rest)))",
        "lax.psum(lax.psum(grad, tuple(sorted(rest))), tuple(sorted(rest)))",
        Case(mesh="dp 8"),
    ),
    "gradient reduced in part": (
        "rest -= set(names)",
        "rest = set()",
        Case(mesh="dp 2 x fsdp 2 x tp 2"),
    ),
    "total of one device": ("lax.psum(total, options.row_axes)", "total", Case()),
    "vocabulary in another order": (
        "lax.dynamic_slice_in_dim(ids, lax.axis_index(name), 1, dim)",
        "lax.dynamic_slice_in_dim(ids.reshape(ids.shape[::-1]).T if ids.ndim == 2 else "
        "ids.swapaxes(0, 1).reshape(ids.shape), lax.axis_index(name), 1, dim)",
        Case(kernel=P(None, ("fsdp", "tp"))),
    ),
    "smoothing over a shard": (
        "grad -= smoothing / options.vocabulary",
        "grad -= smoothing / logits.shape[1]",
        Case(),
    ),
    "no slope of the cap": ("grad *= slope", "grad *= 1.0", Case()),
    "no slope of the z-loss": ("(1 + 2 * options.z_loss * log_z)", "(1 + 0 * log_z)", Case()),
    "hits of a shard": ("lax.pmin(candidates.min(1), axes)", "candidates.min(1)", Case()),
    "no cotangent": ("* cotangents[0], gradients", "* 1.0, gradients", Case()),
    "ignored rows keep their weight": (
        "jnp.zeros_like(weights), weights)",
        "weights, weights)",
        Case(ignores=True),
    ),
}


# One each for weights, the vocabulary and the gradients over devices, and the loss.
DEFAULT_MUTANTS = [
    *("ignored rows keep their weight", "no sum across tp"),
    *("gradient reduced twice", "no slope of the cap"),
]
check_once = functools.cache(check)


@pytest.mark.parametrize("name", full_but(DEFAULT_MUTANTS, MUTANTS))
def test_what_is_nearly_right_fails_the_same_law(name):
    old, new, case = MUTANTS[name]
    source = inspect.getsource(cross_entropy)
    assert source.count(old) == 1
    check_once(case)
    mutant = types.ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    with pytest.raises(AssertionError):
        check(case, function=mutant.linear_cross_entropy)
