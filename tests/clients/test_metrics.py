"""Metrics of other libraries: collections of clu, and metrax."""

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import metrax
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 2)).astype(np.float32)}
DATA = {
    "x": RNG.normal(size=(24, 4)).astype(np.float32),
    "label": RNG.integers(0, 2, 24).astype(np.int32),
    "weight": RNG.uniform(size=24).astype(np.float32),
}


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    accuracy: clu.metrics.Accuracy
    loss_std: clu.metrics.LastValue.from_output("spread")


def of_clu(logits, batch):
    return Metrics.single_from_model_output(
        logits=logits, labels=batch["label"], spread=jnp.float32(3.0)
    )


def of_metrax(logits, batch):
    share, label = jax.nn.softmax(logits)[:, 1], batch["label"]
    kinds = {
        "precision": metrax.Precision,
        "recall": metrax.Recall,
        "auc": metrax.AUCROC,
        "rmse": metrax.RMSE,
        "r2": metrax.RSQUARED,
    }
    found = {
        name: kind.from_model_output(predictions=share, labels=label)
        for name, kind in kinds.items()
    }
    weighted = metrax.MSE.from_model_output(
        predictions=share, labels=label, sample_weights=batch["weight"]
    )
    perplexity = metrax.Perplexity.from_model_output(
        predictions=jax.nn.softmax(logits)[:, None], labels=label[:, None]
    )
    hit = metrax.Accuracy.from_model_output(predictions=logits.argmax(-1), labels=label)
    return found | {"accuracy": hit, "weighted": weighted, "perplexity": perplexity}


def loss_with(metrics_of):
    def loss_fn(params, batch, key):
        logits = batch["x"] @ params["w"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return sf.mean(nll), metrics_of(logits, batch)

    return loss_fn


@pytest.mark.parametrize("metrics_of", full_but([of_clu], [of_clu, of_metrax]))
def test_they_merge_exactly_over_microbatches_and_evaluation_batches(metrics_of):
    loss_fn, tx = loss_with(metrics_of), optax.sgd(0.1)
    whole = jax.jit(metrics_of)(DATA["x"] @ PARAMS["w"], DATA)
    whole = whole if isinstance(whole, dict) else {"accuracy": whole.accuracy}
    wanted = {name: float(metric.compute()) for name, metric in whole.items()}
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    for n in (1, 3):
        metrics = jax.jit(sf.make_train_step(loss_fn, tx, accumulate=n))(state, DATA)[1]
        found = {name: float(metrics[name].compute()) for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-5)
    batches = sf.batches(DATA, 7, epochs=1, remainder="keep")
    found = sf.evaluate(sf.make_eval_step(loss_fn), state, batches)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_the_members_of_a_collection_are_metrics_of_their_names():
    step = sf.make_train_step(loss_with(of_clu), optax.sgd(0.1), accumulate=2)
    state = sf.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0))
    result = sf.fit(step, state, sf.batches(DATA, 12, seed=0), steps=4, log_every=2)
    assert {"train/accuracy", "train/loss_std"} <= result.history.keys()
    assert result.history["train/loss_std"] == [3.0, 3.0]
