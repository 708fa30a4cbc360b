"""Loops of other libraries over the model of `fit_overhead`, as in their documentation.

Libraries that are not installed are skipped.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec

import flax.struct
import jax
import jax.numpy as jnp
import optax
from clu import metrics as clu
from flax.training.train_state import TrainState


@flax.struct.dataclass
class Metrics(clu.Collection):
    """The metrics of a step, merged by the loop."""

    accuracy: clu.Accuracy
    loss: clu.Average.from_output("loss")


def flax_and_clu(init, batches):
    """Train as in the tutorials of flax: a jitted step, and metrics merged after each."""

    def apply_fn(params, x):
        return jax.nn.relu(x @ params["a"]) @ params["b"]

    @jax.jit
    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn(params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        update = Metrics.single_from_model_output(logits=logits, labels=batch["y"], loss=loss)
        return state.apply_gradients(grads=grads), update

    params = init(jax.random.key(0))
    state = TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(1e-3))
    metrics = Metrics.empty()
    for number, batch in enumerate(batches, 1):
        state, update = train_step(state, batch)
        metrics = metrics.merge(update)
        if number % 10 == 0:
            metrics.compute()
            metrics = Metrics.empty()
    jax.block_until_ready(state)


def keras_on_jax(init, batches):
    """Train with `fit` of Keras, without its progress bar."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    dense = keras.layers.Dense
    model = keras.Sequential(
        [keras.Input((64,)), dense(64, "relu", use_bias=False), dense(10, use_bias=False)]
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True,
    )
    weights = init(jax.random.key(0))
    model.set_weights([jnp.asarray(weights["a"]), jnp.asarray(weights["b"])])
    pairs = ((batch["x"], batch["y"]) for batch in batches)
    model.fit(pairs, steps_per_epoch=batches.steps, verbose=0)


def installed():
    """Return the loops of installed libraries by name and version."""
    found = {f"flax {version('flax')} + clu": flax_and_clu}
    if find_spec("keras") is not None:
        found[f"Keras {version('keras')}"] = keras_on_jax
    return found
