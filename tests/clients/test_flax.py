"""What the page on flax and clu says is compared with them."""

import re
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics, parameter_overview
from flax import linen as nn
from flax import nnx
from flax.training import checkpoints, train_state
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import stepfold as sf

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[2] / "examples/guide/coming-from/flax.md"
DIGITS = load_digits()
DATA = {"image": np.float32(DIGITS.data / 16), "label": DIGITS.target}
TX = optax.adam(1e-2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x))
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x)


@pytest.fixture(autouse=True)
def _promotion():
    """Let flax and optax promote integers, as jax does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def close(first, second):
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(check, first, second)


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def test_the_loop_of_the_page_has_the_same_steps():
    """Run the code for flax that the page shows, and stepfold from the same parameters and key."""
    (code,) = re.findall(
        r"flax and clu\n\n```{code-block} python\n(.*?)\nwriter = ", PAGE.read_text(), re.DOTALL
    )
    net, key, batches = Net(), jax.random.key(1), list(sf.batches(DATA, 128, seed=0, epochs=1))
    names: dict[str, Any] = dict(globals(), net=net, key=key, images=DATA["image"])
    exec(code, names)
    theirs, losses, accuracies = names["state"], [], []
    variables = {"params": theirs.params, "batch_stats": theirs.batch_stats}
    initial = jax.device_get(variables)
    state = sf.init_state((initial["params"], initial["batch_stats"]), TX, key, stateful=True)
    # That of the state is not the one that `init` gets.
    theirs = theirs.replace(key=jnp.copy(state.key))
    for batch in batches:
        theirs, update = names["train_step"](theirs, batch)
        losses.append(update.compute()["loss"])
        accuracies.append(update.compute()["accuracy"])

    def loss_fn(params, batch, key, batch_stats):
        logits, updates = net.apply(
            {"params": params, "batch_stats": batch_stats},
            batch["image"],
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        hit = logits.argmax(-1) == batch["label"]
        loss = sf.mean(cross_entropy(logits, batch["label"]))
        return loss, {"accuracy": sf.mean(hit)}, updates["batch_stats"]

    step = sf.make_train_step(loss_fn, TX, stateful=True)
    result = sf.fit(step, state, batches, log_every=1)
    close(theirs.params, result.state.params)
    close(theirs.batch_stats, result.state.model_state)
    np.testing.assert_allclose(losses, result.history["train/loss"], rtol=1e-3)
    np.testing.assert_allclose(accuracies, result.history["train/accuracy"], atol=0.01)


def test_nnx_has_the_same_steps_and_leaves_the_module():
    module = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(module, nnx.Param)
    before = jax.device_get(module.kernel[...])

    def loss_fn(params, batch, _key):
        logits = nnx.merge(graphdef, params)(batch["image"])
        return sf.mean(cross_entropy(logits, batch["label"]))

    batches = list(sf.batches(DATA, 128, seed=0, epochs=1))
    state = sf.init_state(params, TX, jax.random.key(0))
    result = sf.fit(sf.make_train_step(loss_fn, TX), state, batches)
    assert np.array_equal(before, module.kernel[...])

    optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)

    @nnx.jit
    def train_step(module, optimizer, batch):
        loss = lambda module: cross_entropy(module(batch["image"]), batch["label"]).mean()
        optimizer.update(module, nnx.grad(loss)(module))

    for batch in batches:
        train_step(module, optimizer, batch)
    close(nnx.state(module, nnx.Param), result.state.params)


def test_multi_steps_weights_microbatches_alike_and_accumulate_examples():
    x, mask = jnp.arange(8.0), jnp.array([1, 1, 1, 1, 1, 0, 0, 0])
    loss = lambda w, x, mask: ((w - x) ** 2 * mask).sum() / mask.sum()
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    w, opt_state = jnp.zeros(()), tx.init(jnp.zeros(()))
    for part in (slice(0, 4), slice(4, 8)):
        updates, opt_state = tx.update(jax.grad(loss)(w, x[part], mask[part]), opt_state, w)
        w = optax.apply_updates(w, updates)
    assert int(opt_state.gradient_step) == 1  # a schedule counts updates
    assert np.isclose(w, 0.2 * (1.5 + 4) / 2)

    loss_fn = lambda w, batch, key: sf.mean((w - batch["x"]) ** 2, batch["mask"])
    step = sf.make_train_step(loss_fn, optax.sgd(0.1), accumulate=2)
    state = sf.init_state(jnp.zeros(()), optax.sgd(0.1), jax.random.key(0))
    state, _ = step(state, {"x": x, "mask": mask})
    assert np.isclose(state.params, 0.2 * 2)
    assert int(state.step) == 1


def test_metrics_of_clu_are_metrics_of_a_loss_function():
    @flax.struct.dataclass
    class Metrics(metrics.Collection):
        accuracy: metrics.Accuracy
        loss: metrics.Average.from_output("loss")

    def loss_fn(params, batch, _key):
        logits = batch["image"] @ params
        loss = cross_entropy(logits, batch["label"])
        outputs = {"loss": loss, "logits": logits, "labels": batch["label"]}
        return sf.mean(loss), Metrics.single_from_model_output(**outputs)

    params = 0.1 * jax.random.normal(jax.random.key(0), (64, 10))
    state = sf.init_state(params, TX, jax.random.key(0))
    step = sf.make_eval_step(loss_fn)
    found = sf.evaluate(step, state, sf.batches(DATA, 300, epochs=1, remainder="keep"))
    logits = DATA["image"] @ params
    expected = cross_entropy(logits, DATA["label"]).mean()
    assert np.isclose(found["loss"], expected, rtol=1e-5)
    assert np.isclose(found["accuracy"], (logits.argmax(-1) == DATA["label"]).mean())


def test_boxes_are_rules():
    init = nn.with_partitioning(nn.initializers.zeros, (None, "tp"))
    boxed = nn.Dense(16, kernel_init=init)
    shapes = jax.eval_shape(
        lambda key: boxed.init(key, jnp.ones((1, 8)))["params"], jax.random.key(0)
    )
    assert nn.get_partition_spec(shapes)["kernel"] == P(None, "tp")
    mesh = sf.make_mesh((jax.device_count(),), ("tp",))
    plan = sf.make_sharding(shapes, mesh, [sf.sharding.fsdp()])
    (kernel,) = jax.tree.leaves(plan["kernel"])
    assert kernel.spec == nn.get_sharding(shapes, mesh)["kernel"].spec


def test_the_names_of_the_page_are_there():
    assert callable(checkpoints.save_checkpoint)
    assert callable(parameter_overview.log_parameter_overview)
    assert callable(train_state.TrainState.create)


@pytest.mark.tensorflow
def test_the_writers_and_actions_of_clu_need_tensorflow():
    pytest.importorskip("tensorflow")
    from clu import metric_writers, periodic_actions

    assert callable(metric_writers.create_default_writer)
    for name in ("ReportProgress", "Profile", "PeriodicCallback"):
        assert callable(getattr(periodic_actions, name))
