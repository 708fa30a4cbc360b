"""What the page on Keras says is compared with Keras; a program, which `test_keras.py` runs.

Keras reads its backend from the environment when it is imported, so this is not a module of tests.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras import callbacks, layers, optimizers
from tests.clients.course import TEST, TRAIN, score

import stepfold as sf

SGD = lambda **options: optimizers.SGD(0.5, **options)


def make(optimizer, *, dtype=None, regularizer=None, extras=()):
    keras.utils.set_random_seed(0)
    first = layers.Dense(32, activation="silu", dtype=dtype, kernel_regularizer=regularizer)
    last = layers.Dense(10, dtype=dtype)
    model = keras.Sequential([keras.Input((64,)), first, *extras, last])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def theirs(model, epochs=3, *used, batch_size=100, shuffle=False):
    return model.fit(
        TRAIN["image"],
        TRAIN["label"],
        batch_size=batch_size,
        epochs=epochs,
        shuffle=shuffle,
        verbose=0,
        validation_data=(TEST["image"], TEST["label"]),
        callbacks=list(used),
    )


def test_batches():
    return sf.batches(TEST, 128, epochs=1, remainder="pad")


def make_losses(model):
    def run(params, batch, rest, *, training):
        logits, rest, terms = model.stateless_call(
            params, rest, batch["image"], training=training, return_losses=True
        )
        nll, metrics = score(logits, batch)
        return ({"nll": nll, "added": sum(terms)} if terms else nll), metrics, rest

    def loss_fn(params, batch, key, rest):
        return run(params, batch, rest, training=True)

    def eval_fn(params, batch, key, rest):
        return *run(params, batch, rest, training=False)[:2], rest

    return loss_fn, eval_fn


def initial(model, tx):
    trained = [variable.value for variable in model.trainable_variables]
    rest = [variable.value for variable in model.non_trainable_variables]
    return sf.init_state((trained, rest), tx, jax.random.key(0), stateful=True)


def ours(model, tx, epochs=3, *, batch_size=100, accumulate=1, hooks=(), **options):
    loss_fn, eval_fn = make_losses(model)
    batches = sf.batches(TRAIN, batch_size, remainder="pad")
    return sf.fit(
        sf.make_train_step(loss_fn, tx, stateful=True, accumulate=accumulate),
        initial(model, tx),
        batches,
        epochs=epochs,
        log_every=batches.steps_per_epoch,
        evaluation=sf.Evaluation(
            sf.make_eval_step(eval_fn, stateful=True), test_batches, every_epochs=1
        ),
        hooks=[sf.progress("none"), *hooks],
        **options,
    )


def difference(model, params, names="trainable_variables"):
    pairs = zip(getattr(model, names), params, strict=True)
    return max(float(np.abs(variable.value - leaf).max()) for variable, leaf in pairs)


def check_equal(optimizer, tx, *, batch_size=100, accumulate=1, **options):
    """Compare losses by epoch, evaluations and weights; return the model and the result."""
    model = make(optimizer, **options)
    result = ours(model, tx, batch_size=batch_size * accumulate, accumulate=accumulate)
    history = theirs(model, batch_size=batch_size).history
    for here, there in (("eval/loss", "val_loss"), ("eval/accuracy", "val_accuracy")):
        np.testing.assert_allclose(result.history[here], history[there], atol=1e-5)
    np.testing.assert_allclose(result.history["train/loss"], history["loss"], atol=1e-4)
    if optimizer.use_ema is False:
        assert difference(model, result.state.params) < 1e-4
    return model, result


def adam(rate, **options):
    """Add epsilon before the correction of the bias, as Keras does."""
    epsilon = lambda count: 1e-7 / jnp.sqrt(1 - 0.999 ** (count + 1))
    return optax.inject_hyperparams(optax.adam)(rate, eps=epsilon, **options)


def check_optimizers():
    each = lambda g, _: g * jnp.minimum(1, 0.1 / jnp.linalg.norm(g))
    check_equal(SGD(), optax.sgd(0.5))
    check_equal(SGD(), optax.sgd(0.5), batch_size=128)  # with a smaller last batch
    by_norm = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    check_equal(SGD(global_clipnorm=0.1), by_norm)
    by_leaf = optax.chain(optax.stateless_with_tree_map(each), optax.sgd(0.5))
    check_equal(SGD(clipnorm=0.1), by_leaf)
    check_equal(SGD(clipvalue=0.01), optax.chain(optax.clip(0.01), optax.sgd(0.5)))
    check_equal(SGD(gradient_accumulation_steps=3), optax.sgd(0.5), accumulate=3)
    check_equal(optimizers.Adam(3e-3), adam(3e-3))
    # A schedule of Keras counts batches, and its last one chooses the rate of an update.
    rate = optimizers.schedules.CosineDecay(0.5, 45)
    accumulated = optimizers.SGD(rate, gradient_accumulation_steps=3)
    here = optax.cosine_decay_schedule(0.5, 45)
    check_equal(accumulated, optax.sgd(lambda count: here(3 * count + 2)), accumulate=3)
    averaged = SGD(use_ema=True, ema_momentum=0.9)
    # The average starts with the weights after the first step.
    decay = lambda count: jnp.where(count == 0, 0.0, 0.9)
    model, result = check_equal(averaged, sf.ema_params(optax.sgd(0.5), decay))
    assert difference(model, sf.get_ema(result.state)) < 1e-4  # `fit` of Keras assigns it


def check_the_loss():
    extras = [layers.BatchNormalization(momentum=0.9), layers.Dropout(0.2)]
    regularizer = keras.regularizers.L2(1e-2)
    model, result = check_equal(SGD(), optax.sgd(0.5), extras=extras, regularizer=regularizer)
    rest = result.state.model_state  # the statistics, and the seed of dropout
    assert difference(model, rest, "non_trainable_variables") < 1e-4
    model = make(SGD())
    images, labels = TRAIN["image"][:100], TRAIN["label"][:100]
    nll = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
    weights = np.linspace(0.1, 3, 100, dtype="float32")
    loss = model.test_on_batch(images, labels, sample_weight=weights)[0]
    np.testing.assert_allclose(loss, sf.mean(nll * weights).compute(), rtol=1e-5)
    assert abs(loss - sf.mean(nll, weights).compute()) > 0.1


def check_the_dtype_is_that_of_the_layers():
    batch = {**{name: rows[:100] for name, rows in TRAIN.items()}, "mask": np.ones(100, bool)}

    def dtypes(dtype, precision):
        model, tx = make(SGD(), dtype=dtype), optax.sgd(0.5)
        step = sf.make_train_step(make_losses(model)[0], tx, stateful=True, precision=precision)
        program = str(jax.make_jaxpr(step)(initial(model, tx), batch))
        return {*re.findall(r":(\w+)\[[\d,]*\] = dot_general", program)}

    assert dtypes(None, "bf16") == {"f32"}
    assert dtypes("mixed_bfloat16", None) == {"bf16"}


def check_saves():
    """Compare what is saved and restored where evaluations and saves meet, and where not."""
    rate = 2.5
    model = make(optimizers.SGD(rate))
    stop = callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    save = callbacks.ModelCheckpoint("{epoch}.keras", monitor="val_loss", save_best_only=True)
    checkpoints = sf.Checkpoints(best="eval/loss", keep_best=99)
    early = sf.hooks.stop_early("eval/loss", patience=2, keep_state=True)
    options = {"hooks": [early], "checkpoints": checkpoints, "run_dir": "best"}
    result = ours(model, optax.sgd(rate), 40, **options)
    step, state = result.hooks["stop_early eval/loss"]["_best_state"]
    losses = theirs(model, 40, stop, save).history["val_loss"]
    assert result.steps == 15 * len(losses)
    assert result.best == step == 15 * (1 + int(np.argmin(losses)))
    best = [n for n, loss in enumerate(losses, 1) if loss == min(losses[:n])]
    assert {int(path.stem) for path in Path().glob("*.keras")} == {*best}
    assert {15 * n for n in best} <= {*checkpoints.open("best/checkpoints").steps()}
    assert difference(model, state.params) < 1e-2
    # Between evaluations Keras has no value to rank by, warns, and saves.
    save = callbacks.ModelCheckpoint(
        "batch-{batch}.keras", monitor="val_loss", save_best_only=True, save_freq=5
    )
    theirs(make(SGD()), 1, save)
    assert len([*Path().glob("batch-*.keras")]) == 3


def check_a_resume():
    class Cut(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise OSError

    def train(name, *used, shuffle, cut):
        if cut:
            try:
                backup = callbacks.BackupAndRestore(name)
                theirs(make(SGD()), 4, backup, Cut(), *used, shuffle=shuffle)
            except OSError:
                pass
        model = make(SGD())
        backup = [callbacks.BackupAndRestore(name)] * cut
        return model, theirs(model, 4, *backup, *used, shuffle=shuffle)

    def weights(model):
        return [variable.value for variable in model.trainable_variables]

    whole, resumed = (train("a", shuffle=False, cut=cut) for cut in (False, True))
    assert difference(whole[0], weights(resumed[0])) == 0
    assert [*resumed[1].epoch] == [2, 3]  # its history begins at the resume
    whole, resumed = (train("b", shuffle=True, cut=cut) for cut in (False, True))
    assert difference(whole[0], weights(resumed[0])) > 1e-3


def check_predictions():
    model, tx = make(SGD()), optax.sgd(0.5)
    state = initial(model, tx)
    call = lambda s, b: model.stateless_call(s.params, s.model_state, b["image"])[0]
    found = sf.predict(call, state, test_batches())
    np.testing.assert_allclose(found, model.predict(TEST["image"], verbose=0), atol=1e-4)
    measure = sf.make_eval_step(make_losses(model)[1], stateful=True)
    metrics = sf.evaluate(measure, state, test_batches())
    expected = model.evaluate(TEST["image"], TEST["label"], verbose=0)
    np.testing.assert_allclose([metrics["loss"], metrics["accuracy"]], expected, rtol=1e-5)


if __name__ == "__main__":
    check_optimizers()
    check_the_loss()
    check_the_dtype_is_that_of_the_layers()
    check_saves()
    check_a_resume()
    check_predictions()
