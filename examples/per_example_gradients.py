"""Train with the gradient of each example: clip each one, add noise (DP-SGD), measure the noise.

Run it with `python examples/per_example_gradients.py`; it takes some seconds on two cores. A step
takes another way to a gradient by `grad=`, a function from a loss function to a `GradFn`. This one
maps `sf.make_grad` over the examples, and returns their gradients along a leading axis, as
`optax.contrib.differentially_private_aggregate` and `dpsgd` expect them. These clip each one, sum
them, and add noise. An accountant, such as Google's `dp_accounting`, computes the privacy.
"""

import jax
import numpy as np
import optax
from clu.metrics import Average
from sklearn.datasets import load_digits

import stepfold as sf

HIDDEN, BATCH, EPOCHS, TRAIN = 32, 100, 15, 1500
BOUND, NOISE = 1.0, 0.6
TX = optax.chain(
    optax.contrib.differentially_private_aggregate(BOUND, NOISE, key=0),
    optax.sgd(0.3, momentum=0.9),
)


def init(key):
    """Make the parameters of a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {"hidden": glorot(keys[0], (64, HIDDEN)), "output": glorot(keys[1], (HIDDEN, 10))}


def loss_fn(params, batch, _key):
    """Take the mean of the cross-entropy, and the accuracy."""
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["output"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch.get("mask")), {"accuracy": sf.mean(hit, batch.get("mask"))}


def per_example(loss_fn):
    """Return the gradient of each example, with two metrics of them."""
    of_one = sf.make_grad(loss_fn)

    def grad_fn(params, batch, key, model_state):
        rows = jax.tree.map(lambda x: x[:, None], batch)  # batches of one example
        keys = jax.random.split(key, len(batch["label"]))
        over_rows = jax.vmap(of_one, in_axes=(None, 0, 0, None))
        grads, terms, metrics, _ = over_rows(params, rows, keys, model_state)
        terms, metrics = (
            {name: metric.reduce() for name, metric in group.items()} for group in (terms, metrics)
        )
        norms = jax.vmap(optax.tree.norm)(grads)
        metrics["clipped"] = sf.mean(norms > BOUND)
        metrics["noise_scale"] = noise_scale(grads, norms)
        return grads, terms, metrics, model_state

    return grad_fn


def noise_scale(grads, norms):
    """Estimate the batch size above which larger batches help little (McCandlish et al., 2018).

    It is the variance of the examples' gradients over the squared norm of their mean. As a total
    and a weight, both are averaged over the steps before they are divided.
    """
    count = len(norms)
    of_mean = optax.tree.norm(jax.tree.map(lambda g: g.mean(0), grads), squared=True)
    variance = ((norms**2).mean() - of_mean) * count / (count - 1)
    return Average(total=variance, count=of_mean - variance / count)


def main(epochs=EPOCHS):
    """Train on digits, and print the curves."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [TRAIN])
    train, test = ({name: values[some] for name, values in data.items()} for some in rows)

    evaluation = sf.Evaluation(
        sf.make_eval_step(loss_fn),
        lambda: sf.batches(test, 256, epochs=1, remainder="pad"),
        every_epochs=3,
    )
    result = sf.fit(
        sf.make_train_step(loss_fn, TX, grad=per_example),
        sf.init_state(init, TX, jax.random.key(0)),
        sf.batches(train, BATCH, seed=0),
        epochs=epochs,
        log_every=3 * TRAIN // BATCH,
        evaluation=evaluation,
    )
    names = ("train/loss", "train/clipped", "train/noise_scale", "eval/accuracy")
    for step, *values in zip(
        result.history["train/loss"].steps, *(result.history[name] for name in names), strict=True
    ):
        loss, clipped, scale, accuracy = values
        print(
            f"step {step:3d}  loss {loss:.3f}  clipped {clipped:4.0%}  "
            f"noise scale {scale:4.0f}  test accuracy {accuracy:.3f}"
        )


if __name__ == "__main__":
    main()
