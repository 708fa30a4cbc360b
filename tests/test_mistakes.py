"""Likely mistakes of users of other libraries, and the errors that they get."""

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from tests.small import ones

import stepfold as sf
from stepfold.adapter import TrainingArguments

pytestmark = pytest.mark.not_optimized
DATA = {"x": np.ones((16, 4), np.float32), "y": np.zeros(16, np.int32)}
BATCH = {"x": DATA["x"][:8], "y": DATA["y"][:8]}
PARAMS = {"w": ones((4, 3)), "b": ones(3)}
TX = optax.adam(1e-3)
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))


def predict(params, x):
    return x @ params["w"] + params["b"]


def loss_fn(params, batch, key):
    logits = predict(params, batch["x"])
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def state():
    return sf.init_state(PARAMS, TX, KEY)


def batches(**options):
    return sf.batches(DATA, 8, **{"seed": 0, **options})


def fit(loss_fn=loss_fn, state_=None, batches_=None, **options):
    step = sf.make_train_step(loss_fn, TX)
    options = {"steps": 2, **options}
    return sf.fit(step, state_ or state(), batches_ or batches(), **options)


def trace(loss_fn, batch=BATCH):
    jax.eval_shape(sf.make_train_step(loss_fn, TX), state(), batch)


def normed_over_axis(params, batch, key):
    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
    variables = norm.init(key, batch["x"])
    return (
        norm.apply(variables, batch["x"], mutable=["batch_stats"])[0] * params["w"][0, 0]
    ).mean()


def evaluation(measure=None, data=lambda: batches(epochs=1)):
    return sf.Evaluation(measure or sf.make_eval_step(loss_fn), data, every=1)


def dpsgd_on_the_batch():
    aggregate = optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0)
    tx = optax.chain(aggregate, optax.sgd(0.1))
    jax.eval_shape(sf.make_train_step(loss_fn, tx), sf.init_state(PARAMS, tx, KEY), BATCH)


def donated():
    given = state()
    jax.jit(lambda state: state, donate_argnums=0)(given)
    return given


MISTAKES = {
    "a loss of two arguments": (
        lambda: sf.make_train_step(lambda params, batch: 0.0, TX),
        sf.errors.LossError,
        r"expected loss_fn\(params, batch, key\), got <lambda>\(params, batch\)",
    ),
    "a loss for each example": (
        lambda: trace(lambda p, b, key: (predict(p, b["x"]) ** 2).mean(-1)),
        sf.errors.LossError,
        r"loss: expected a scalar, got float32\[8\]; return sf.mean\(values, mask\)",
    ),
    "a loss that is a Python number": (
        lambda: trace(lambda p, b, key: predict(p, b["x"]).mean().item()),
        jax.errors.ConcretizationTypeError,
        r"loss_fn: it is traced, .* return arrays without float\(\) or .item\(\)",
    ),
    "two means that are added": (
        lambda: trace(lambda p, b, key: sf.mean(predict(p, b["x"])) + 0.1 * sf.mean(p["w"] ** 2)),
        TypeError,
        r'loss_fn: sf.mean gives a total and a weight, .* return several as {"a": sf.mean',
    ),
    "metrics that are arrays": (
        lambda: trace(lambda p, b, key: (predict(p, b["x"]).mean(), {"top": b["x"].mean(0)})),
        sf.errors.LossError,
        r"metrics/top: expected a number or a clu.metrics.Metric, got float32\[4\]; wrap values as",
    ),
    "metrics before the loss": (
        lambda: trace(lambda p, b, key: ({"top": sf.mean(b["x"])}, predict(p, b["x"]).mean())),
        sf.errors.LossError,
        r"metrics: expected a dict .*, got float32\[\]; return \(loss, metrics\) in this order",
    ),
    "a mask that nobody made": (
        lambda: trace(lambda p, b, key: sf.mean(predict(p, b["x"]).mean(-1), b["mask"])),
        KeyError,
        r'called with batch/x float32\[8,4\], batch/y int32\[8\]; .*remainder="pad"\) .*add a mask',
    ),
    "a data loader's pairs": (
        lambda: trace(loss_fn, (BATCH["x"], BATCH["y"])),
        TypeError,
        r"loss_fn was called with batch/0 float32\[8,4\], batch/1 int32\[8\]",
    ),
    "a schedule for an optimizer": (
        lambda: sf.make_train_step(loss_fn, optax.cosine_decay_schedule(1e-3, 100)),
        sf.errors.ConfigError,
        r"tx: expected an optax transformation, .* is it the rate, as in optax.adam\(schedule\)",
    ),
    "an optimizer's state for an optimizer": (
        lambda: sf.make_train_step(loss_fn, TX.init(PARAMS)),
        sf.errors.ConfigError,
        r"tx: .* got tuple .*; give the optimizer itself, such as .* init_state makes its state",
    ),
    "a flax module for parameters": (
        lambda: sf.init_state(nn.Dense(3), TX, KEY),
        sf.errors.ConfigError,
        r"init: Dense makes its parameters from an example; give model.init\(key, example\)",
    ),
    "a whole module of equinox": (
        lambda: sf.init_state(eqx.nn.MLP(2, 3, 4, 1, key=KEY), TX, KEY),
        sf.errors.ConfigError,
        r"params: .* got MLP, a whole module of equinox; .* eqx.partition\(model, eqx.is_inexact",
    ),
    "a module of equinox that init makes": (
        lambda: sf.init_state(lambda key: [eqx.nn.Dropout(0.5)], TX, KEY),
        sf.errors.ConfigError,
        r"params/0: .* got Dropout, a whole module of equinox; .* eqx.combine\(params, static\)",
    ),
    "a whole module of flax.nnx": (
        lambda: sf.init_state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), TX, KEY),
        sf.errors.ConfigError,
        r"params: .* got Linear, a whole module of flax.nnx; .* nnx.split\(model, nnx.Param, ...\)",
    ),
    "a module of flax.nnx that init makes": (
        lambda: sf.init_state(lambda key: {"a": nnx.Linear(2, 3, rngs=nnx.Rngs(key))}, TX, KEY),
        sf.errors.ConfigError,
        r"params/a: .* got Linear, a whole module of flax.nnx; .* nnx.merge\(graphdef, params, re",
    ),
    "a batch norm over an axis that is not mapped": (
        lambda: trace(normed_over_axis),
        sf.errors.LossError,
        r"loss_fn: .* got axis 'batch', .* under jit leave it out \(axis_name=None in a BatchNorm",
    ),
    "a mean over devices, as under pmap": (
        lambda: trace(lambda p, b, key: jax.lax.pmean(predict(p, b["x"]).mean(), "devices")),
        sf.errors.LossError,
        r"loss_fn: .* got axis 'devices', which is not mapped; .* or run the step in jax.shard_map",
    ),
    "a loss of something else than the parameters": (
        lambda: trace(lambda params, b, key: sf.mean(predict(PARAMS, b["x"]))),
        sf.errors.LossError,
        r"loss: expected a function of the parameters, got one whose gradient is zero for every",
    ),
    "private gradients without examples": (
        dpsgd_on_the_batch,
        sf.errors.ConfigError,
        r"tx: .* expects the gradient of each example, .* make_train_step\(…, grad=…\) a function",
    ),
    "flax's state": (
        lambda: sf.make_train_step(loss_fn, TX)(
            TrainState.create(apply_fn=None, params=PARAMS, tx=TX), BATCH
        ),
        sf.errors.ConfigError,
        r"expected a TrainState, got flax.training.train_state.TrainState; sf.init_state makes",
    ),
    "a loss for a step": (
        lambda: sf.fit(loss_fn, state(), batches(), steps=2),
        sf.errors.ConfigError,
        r"step: expected .* got loss_fn\(params, batch, key\); sf.make_train_step",
    ),
    "a state that was given away": (
        lambda: sf.evaluate(sf.make_eval_step(loss_fn), donated(), batches(epochs=1)),
        sf.errors.ConfigError,
        r"^state/step, …: the arrays were donated to an earlier call .* the state that it returned",
    ),
    "no end in sight": (
        lambda: fit(steps=None),
        sf.errors.ConfigError,
        r"steps, epochs: expected one .*; give steps=… or epochs=… \(an epoch has 2 steps\)",
    ),
    "an evaluation without end": (
        lambda: evaluation(data=batches)(state()),
        sf.errors.ConfigError,
        r"evaluate: expected batches that end, .* give sf.batches\(data, 256, epochs=1, remainder=",
    ),
    "batches that an evaluation uses up": (
        lambda: evaluation(data=iter([*batches(epochs=1)])),
        sf.errors.ConfigError,
        r"batches: expected some that can be read again for each .* give a list, sf.batches\(…, e",
    ),
    "another library's name of a metric": (
        lambda: fit(hooks=[sf.hooks.stop_early("val_loss", patience=2)], evaluation=evaluation()),
        sf.errors.ConfigError,
        r"hooks: expected one of train/…, eval/…, got val_loss; did you mean 'eval/loss'\?$",
    ),
    "a shorter last batch": (
        lambda: fit(batches_=[BATCH, jax.tree.map(lambda leaf: leaf[:4], BATCH)]),
        sf.errors.RetraceError,
        r'(?s)batch/x: expected float32\[8,4\], got float32\[4,4\].*remainder="drop" or "pad"',
    ),
    "an argument misspelt": (
        lambda: TrainingArguments(learnig_rate=1e-3),
        sf.errors.ConfigError,
        r"learnig_rate: TrainingArguments has no such field; did you mean 'learning_rate'\?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_names_the_mistake_and_the_fix(mistake):
    make, kind, said = MISTAKES[mistake]
    with pytest.raises(kind, match=said):
        make()


def test_corrected_call_works():
    result = fit(evaluation=evaluation(), hooks=[sf.hooks.stop_early("eval/loss", patience=2)])
    assert result.steps == 2
