"""Norms of groups of parameters are those of their gradients and updates, however computed."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold.core import step as step_module

pytestmark = pytest.mark.not_optimized

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
MASK = RNG.uniform(size=16) < 0.6
BATCH = {"x": X, "mask": MASK}
PATTERN = "layers/[0-9]+|^head"
GROUPS = {
    "layers/0": ["layers/0/b", "layers/0/w"],
    "layers/1": ["layers/1/b", "layers/1/w"],
    "head": ["head/w"],
}


def init(key):
    keys = jax.random.split(key, 4)
    make = lambda key, *shape: jax.random.normal(key, shape) / 2
    layers = [{"w": make(keys[i], 8, 8), "b": make(keys[i], 8)} for i in range(2)]
    return {"layers": layers, "head": {"w": make(keys[2], 8)}, "scale": jnp.ones(())}


def loss_fn(params, batch, key):
    x = batch["x"].astype(params["scale"].dtype)
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return sf.mean((params["scale"] * x @ params["head"]["w"] - 1) ** 2, batch["mask"])


def frozen(tx):
    labels = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "off" if sf.tree.path_name(path) == "head/w" else "on", params
    )
    return optax.multi_transform({"on": tx, "off": optax.set_to_zero()}, labels)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))


def new_state(tx, plan=None):
    return sf.init_state(init, tx, jax.random.key(0), sharding=plan)


@functools.cache
def shapes(tx):
    return jax.eval_shape(lambda: new_state(tx))


@functools.cache
def expected_of(tx, is_masked=True):
    """Compute the norms of a first step in float64, from what optax returns."""
    state, batch = new_state(tx), BATCH if is_masked else {"x": X, "mask": np.ones(16, bool)}

    @jax.jit
    def grads_and_updates(params):
        grads = jax.grad(lambda params: loss_fn(params, batch, None).compute())(params)
        with jax.numpy_dtype_promotion("standard"):
            return grads, tx.update(grads, state.opt_state, params)[0]

    grads, updates = grads_and_updates(state.params)
    norms = {}
    for name, arrays in (("grad_norm", grads), ("update_norm", updates)):
        leaves = {path: np.asarray(x, np.float64) for path, x in sf.tree.named_leaves(arrays)}
        norm = lambda paths, leaves=leaves: sum((leaves[path] ** 2).sum() for path in paths) ** 0.5
        norms[name] = norm(leaves)
        norms |= {f"{name}/{group}": norm(paths) for group, paths in GROUPS.items()}
    return norms


def values(metrics):
    return {name: float(metrics[name].compute()) for name in metrics if "norm" in name}


def on_mesh(tx, kind, devices=8):
    mesh = sf.make_mesh((devices,), (kind,), devices=jax.devices()[:devices])
    plan = sf.make_sharding(shapes(tx), mesh, sf.sharding.fsdp(min_size=1))
    return plan, new_state(tx, plan), sf.shard_batch(BATCH, mesh)


def first_step(tx, layout, loss=loss_fn, **options):
    state, batch = new_state(tx), BATCH
    if layout in ("dp", "fsdp"):
        _, state, batch = on_mesh(tx, layout)
    if layout == "reduce_once":
        plan, state, batch = on_mesh(tx, "dp")
        options["grad"] = sf.sharding.reduce_once(plan)
    if layout.startswith("ordered"):
        plan, state, batch = on_mesh(tx, "fsdp", int(layout[7:]))
        options["grad"] = sf.sharding.ordered(plan)
    return jax.jit(sf.make_train_step(loss, tx, norms=PATTERN, **options))(state, batch)


def check(tx, layout, rel=1e-5, **options):
    _, metrics = first_step(tx, layout, **options)
    assert values(metrics) == pytest.approx(expected_of(tx), rel=rel)


LAYOUTS = [
    ("one", {}),
    ("one", {"accumulate": 4}),
    ("dp", {"accumulate": 2}),
    ("fsdp", {}),
    ("reduce_once", {"accumulate": 2}),
    ("ordered8", {"skip_nonfinite": True}),
]


@pytest.mark.parametrize(("layout", "options"), full_but([("fsdp", {})], LAYOUTS))
def test_norms_are_those_of_the_whole_batch(layout, options):
    check(CLIPPED, layout, **options)


@pytest.mark.full
def test_updates_of_frozen_parameters_are_zero():
    tx = frozen(optax.sgd(0.1))
    check(tx, "one")
    assert expected_of(tx)["update_norm/head"] == 0


@pytest.mark.parametrize("layout", full_but(["one"], ["one", "ordered8"]))
def test_norms_of_each_leaf_added_up_fail_the_same_law(layout, monkeypatch):
    def summed(name, arrays, pattern, norm_of):
        alone = lambda leaves: sum(norm_of([leaf]) for leaf in jax.tree.leaves(leaves))
        return own(name, arrays, pattern, alone)

    own = step_module._norms
    monkeypatch.setattr(step_module, "_norms", summed)
    with pytest.raises(AssertionError):
        check(CLIPPED, layout)


@pytest.mark.full
def test_norms_are_unscaled():
    tx = sf.dynamic_loss_scale(CLIPPED)
    _, metrics = first_step(tx, "one", accumulate=4)
    assert values(metrics) == pytest.approx(expected_of(CLIPPED), rel=1e-5)


@pytest.mark.full
def test_ordered_norms_have_the_same_bits_on_any_mesh():
    bits = [values(first_step(optax.adam(0.1), f"ordered{count}")[1]) for count in (1, 8)]
    assert bits[0] == bits[1]


@pytest.mark.full
def test_gradients_of_examples_are_averaged():
    without_noise = optax.contrib.differentially_private_aggregate(1e6, 0.0, key=0)
    tx = optax.chain(without_noise, optax.sgd(0.1))
    mapped = jax.vmap(
        jax.value_and_grad(lambda params, x: loss_fn(params, x, None).compute()), (None, 0)
    )

    def grad(loss_fn):
        def grad_fn(params, batch, key, model_state):
            rows = jax.tree.map(lambda x: x[:, None], batch)
            losses, grads = mapped(params, rows)
            return grads, losses.mean(), {}, model_state

        return grad_fn

    batch = {"x": X, "mask": np.ones(16, bool)}
    step = sf.make_train_step(loss_fn, tx, norms=PATTERN, grad=grad)
    _, metrics = jax.jit(step)(new_state(tx), batch)
    found, expected = values(metrics), expected_of(optax.sgd(0.1), is_masked=False)
    for name in ("grad_norm", *(f"grad_norm/{group}" for group in GROUPS)):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.full
def test_a_skipped_step_does_not_count():
    step = jax.jit(sf.make_train_step(loss_fn, CLIPPED, norms=PATTERN, skip_nonfinite=True))
    state, good = step(new_state(CLIPPED), BATCH)
    _, bad = step(state, {**BATCH, "x": np.full_like(X, np.nan)})
    merged = {name: good[name].merge(bad[name]) for name in good}
    assert values(merged) == values(good)


@pytest.mark.full
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_run_reports_the_mean_over_its_steps_resumed_or_not(tmp_path, steps_per_call):
    data = {"x": RNG.normal(size=(128, 8)).astype(np.float32), "mask": RNG.uniform(size=128) < 0.6}
    batches = lambda: sf.batches(data, 16, epochs=1)
    state, step = new_state(CLIPPED), jax.jit(sf.make_train_step(loss_fn, CLIPPED, norms=PATTERN))
    by_step = []
    for batch in batches():
        state, metrics = step(state, batch)
        by_step.append(values(metrics))
    cuts = [8]

    def hook(event):
        if cuts and event.step >= 4:
            raise RuntimeError(f"cut at {cuts.pop()}")

    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            result = sf.fit(
                sf.make_train_step(loss_fn, CLIPPED, norms=PATTERN), new_state(CLIPPED), batches(),
                steps=8, run_dir=tmp_path, checkpoints=sf.Checkpoints(every=3), hooks=hook,
                log_every=4, steps_per_call=steps_per_call,
            )  # fmt: skip
    assert result.resumed is not None
    for name in by_step[0]:
        means = [np.mean([row[name] for row in by_step[i : i + 4]]) for i in (0, 4)]
        assert result.history[f"train/{name}"] == pytest.approx(means, rel=1e-4)


def test_without_a_pattern_nothing_is_added():
    names = lambda step: sorted(jax.eval_shape(step, new_state(CLIPPED), BATCH)[1])
    assert names(sf.make_train_step(loss_fn, CLIPPED)) == ["grad_norm", "loss"]
    step = sf.make_train_step(loss_fn, CLIPPED, norms="^layers/|")  # the rest is in no group
    groups = [f"{name}/layers" for name in ("grad_norm", "update_norm")]
    assert names(step) == sorted(["grad_norm", "update_norm", *groups, "loss"])


@pytest.mark.parametrize(
    ("norms", "says"),
    [
        ("(", r"norms: expected a regular expression, got '\('"),
        (True, "norms: expected a regular expression, got True"),
        ("kernel", "norms: expected a pattern that matches .* got 'kernel'; the paths are head/w,"),
    ],
)
def test_invalid_patterns_are_refused(norms, says):
    step = lambda *inputs: sf.make_train_step(loss_fn, CLIPPED, norms=norms)(*inputs)
    with pytest.raises(sf.errors.ConfigError, match=says):
        jax.eval_shape(step, new_state(CLIPPED), BATCH)


def test_a_name_that_the_step_reports_is_refused():
    own = lambda *args: (loss_fn(*args), {"update_norm/head": 1.0})
    with pytest.raises(sf.errors.LossError, match="metrics/update_norm/head: the name is taken"):
        jax.eval_shape(sf.make_train_step(own, CLIPPED, norms="head"), new_state(CLIPPED), BATCH)
