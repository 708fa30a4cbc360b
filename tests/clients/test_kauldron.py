"""What the page on kauldron says is compared with kauldron, where it is installed.

It brings TensorFlow along, and needs half of Google's cloud packages for nothing that runs here:
`pip install --no-deps kauldron lark altair mediapy scikit-image graphviz tabulate` is enough.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import stepfold as sf

pytest.importorskip("tensorflow")
kd = pytest.importorskip("kauldron.kd")
kontext = pytest.importorskip("kauldron.kontext")

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]
DIGITS = load_digits()
DATA = {"image": np.float32(DIGITS.data / 16), "label": np.int32(DIGITS.target)[:, None]}
TRAIN = {name: values[:1500] for name, values in DATA.items()}
TEST = {name: values[1500:1692] for name, values in DATA.items()}
TX, SIZE = optax.sgd(0.5), 96


class Net(nn.Module):
    image: kontext.Key = kontext.REQUIRED

    @nn.compact
    def __call__(self, image):
        return {"logits": nn.Dense(10)(image)}


class Evaluator(kd.evals.Evaluator):
    def evaluate(self, state, step):
        result = super().evaluate(state, step)
        EVALUATED.append((step, float(result.compute(flatten=False).loss_values["xent"])))
        return result


EVALUATED = []
NET = Net(image="batch.image")
XENT = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.label")


def source(data, **options):
    return kd.data.InMemoryPipeline(loader=lambda: data, batch_size=SIZE, **options)


def trainer(folder, steps, **options):
    evaluator = Evaluator(run=kd.evals.EveryNSteps(10), ds=source(TEST, num_epochs=1))
    return kd.train.Trainer(
        workdir=folder,
        train_ds=source(TRAIN),
        model=NET,
        num_train_steps=steps,
        log_metrics_every=5,
        train_losses={"xent": XENT},
        optimizer=TX,
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=10, max_to_keep=3),
        evals={"eval": evaluator},
        **options,
    )


def loss_fn(params, batch, _key):
    logits = NET.apply({"params": params}, batch["image"])["logits"]
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"][:, 0]))


def fit(state, steps, **options):
    step = sf.make_train_step(loss_fn, TX)
    return sf.fit(step, state, sf.batches(TRAIN, SIZE), more_steps=steps, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kauldron")
    EVALUATED.clear()
    config = trainer(folder, 20)
    initial = jax.device_get(config.init_state().params)
    return folder, initial, *config.train()


def close(first, second):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), first, second)


def test_it_does_one_step_more_and_evaluates_before_the_first(trained):
    _, initial, state, aux = trained
    evaluation = sf.Evaluation(
        sf.make_eval_step(loss_fn), lambda: sf.batches(TEST, SIZE, epochs=1), every=10
    )
    start = sf.init_state(initial, TX, jax.random.key(0))
    first = sf.evaluate(sf.make_eval_step(loss_fn), start, sf.batches(TEST, SIZE, epochs=1))
    result = fit(start, 21, log_every=1, evaluation=evaluation)
    assert (int(state.step), result.steps) == (21, 21)
    close(state.params, result.state.params)
    steps, losses = zip(*EVALUATED, strict=True)
    assert steps == (0, 10, 20)
    evaluated = result.history["eval/loss"]
    assert evaluated.steps[:2] == [10, 20]
    np.testing.assert_allclose(losses, [first["loss"], *evaluated[:2]], rtol=1e-4)
    # The metric of the last step alone, with the parameters before its update.
    last = float(aux.compute(flatten=False).loss_values["xent"])
    np.testing.assert_allclose(last, result.history["train/loss"][-1], rtol=1e-4)


def test_it_saves_step_0_and_not_the_last_update(trained):
    folder, _, _, _ = trained
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "ckpt_0",
        "ckpt_10",
        "ckpt_20",
    }


def test_a_pipeline_in_memory_starts_again_after_a_resume(trained, tmp_path):
    _, initial, _, _ = trained
    trainer(tmp_path, 7).train()
    state, _ = trainer(tmp_path, 12).train()  # from the checkpoint of step 0
    assert int(state.step) == 13
    close(state.params, fit(sf.init_state(initial, TX, jax.random.key(0)), 13).state.params)
    other, _ = trainer(tmp_path, 14).train()  # from that of step 10
    ten = fit(sf.init_state(initial, TX, jax.random.key(0)), 10).state
    close(other.params, fit(ten, 5).state.params)


@pytest.mark.parametrize("normalize_by", ["mask", "values"])
def test_what_a_loss_divides_by(normalize_by):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(8, 10)).astype("float32"), rng.integers(0, 10, (8, 1))
    mask = np.float32(np.arange(8) < 5)[:, None]
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(normalize_by=normalize_by, weight=2.0)
    theirs = loss.get_state(logits=logits, labels=labels, mask=mask).compute()
    values = 2.0 * optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 0])
    here = {"mask": sf.mean(values, mask[:, 0]), "values": sf.mean(values * mask[:, 0])}
    np.testing.assert_allclose(theirs, here[normalize_by].compute(), rtol=1e-5)


def test_which_arrays_are_sharded():
    shapes = {"small": (1024, 1024), "large": (1024, 1032), "odd": (1025, 1031)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    theirs = kd.sharding.FSDPSharding()(params)
    devices = jax.device_count()
    mesh = sf.make_mesh((devices,), ("fsdp",))
    here = sf.make_sharding(params, mesh, sf.sharding.fsdp(min_size=2**20 + 1))
    renamed = {
        name: P(*("fsdp" if axis == "devices" else axis for axis in sharding.spec))
        for name, sharding in theirs.items()
    }
    assert renamed["small"] == P()
    if devices > 1:
        assert renamed == {name: sharding.spec for name, sharding in here.items()}


def test_partial_updates_freeze_the_rest_and_masked_does_not():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    mask = {"a": True, "b": False}
    labels = {"a": "train", "b": "freeze"}
    same = optax.multi_transform({"train": TX, "freeze": optax.set_to_zero()}, labels)
    updates = {}
    for name, tx in {
        "theirs": kd.optim.partial_updates(TX, mask),
        "same": same,
        "masked": optax.masked(TX, mask),
    }.items():
        updates[name], _ = tx.update(params, tx.init(params), params)
    close(updates["theirs"], updates["same"])
    assert updates["theirs"]["b"].tolist() == [0, 0]
    assert updates["masked"]["b"].tolist() == [1, 1]


def test_a_module_is_called_without_keys():
    variables = NET.init(jax.random.key(0), TRAIN["image"][:2])
    assert NET.apply(variables, TRAIN["image"][:2])["logits"].shape == (2, 10)
    dropped = kd.nn.Dropout(0.5)
    rngs = {"dropout": jax.random.key(0)}
    ones = jnp.ones((1, 100))
    train = dropped.apply({}, ones, rngs=rngs, is_training_property=True)
    assert {*np.unique(train)} == {0.0, 2.0}
    assert dropped.apply({}, ones, is_training_property=False).tolist() == ones.tolist()
    with pytest.raises(ValueError, match="`is_training_property=` kwargs was not set"):
        dropped.apply({}, ones)


def test_a_metric_of_kauldron_is_refused():
    def with_metric(params, batch, key):
        logits = NET.apply({"params": params}, batch["image"])["logits"]
        metric = kd.metrics.Accuracy(logits="preds.logits", labels="batch.label")
        accuracy = metric.get_state(logits=logits, labels=batch["label"])
        return loss_fn(params, batch, key), {"accuracy": accuracy}

    params = NET.init(jax.random.key(0), TRAIN["image"][:2])["params"]
    state = sf.init_state(params, TX, jax.random.key(0))
    problem = r"metrics/accuracy: expected a number or a clu\.metrics\.Metric, got State Accuracy\."
    with pytest.raises(sf.errors.LossError, match=problem):
        sf.evaluate(sf.make_eval_step(with_metric), state, sf.batches(TEST, SIZE, epochs=1))


def test_defaults():
    checkpointer = kd.ckpts.Checkpointer(save_interval_steps=10)
    assert (checkpointer.best_mode, checkpointer.max_to_keep) == ("max", 3)
    names = [name for name in kd.train.TrainState.__dataclass_fields__ if name != "_"]
    assert names == ["step", "params", "collections", "opt_state"]
    first, second = (kd.random.PRNGKey(0).fold_in("dropout").fold_in(i) for i in (0, 1))
    streams = kd.train.RngStreams(seed=0)
    for step, key in enumerate((first, second)):
        close(streams.train_rngs(step)["dropout"], key.fold_in("train"))
