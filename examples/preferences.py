"""Teach a model of text a preference by DPO, which is a loss function and two columns of the data.

Run it with `python examples/preferences.py`; it takes some ten seconds on two cores. The model has
learnt Python's manual, half of it in capitals, and goes on as a text begins. Now capitals are
preferred. How likely the texts of a pair were to the model before, its reference, is computed once
and becomes a part of the data: the step knows of no second model, and is donated its state as ever.
How far the model moves away otherwise is measured on what it writes.
"""

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

CONTEXT, WIDTH, HIDDEN, LENGTH, BETA, STEPS = 6, 16, 128, 38, 0.1, 60


def init(key):
    """Draw the parameters of a network that sees a few bytes."""
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (256, WIDTH)),
        "hidden": jax.random.normal(keys[1], (CONTEXT * WIDTH, HIDDEN)) / 10,
        "output": jax.random.normal(keys[2], (HIDDEN, 256)) / 10,
    }


def model(params, text):
    """Give the log probabilities of what comes after each few bytes."""
    count = text.shape[1] - CONTEXT + 1
    seen = jnp.stack([text[:, i : i + count] for i in range(CONTEXT)], -1)
    x = params["embed"][seen].reshape(len(text), count, CONTEXT * WIDTH)
    return jax.nn.log_softmax(jax.nn.relu(x @ params["hidden"]) @ params["output"])


def said(params, text):
    """Give the log probability of each text, after the few bytes with which it begins."""
    targets = text[:, CONTEXT:, None].astype(int)
    return jnp.take_along_axis(model(params, text[:, :-1]), targets, -1).sum((1, 2))


def text_loss(params, batch, _key):
    """Take the mean over all bytes."""
    return sf.mean(-said(params, batch) / (LENGTH - CONTEXT))


def preference_loss(params, batch, _key):
    """Raise what is preferred above what is not, by more than the reference does."""
    chosen = said(params, batch["chosen"]) - batch["chosen before"]
    rejected = said(params, batch["rejected"]) - batch["rejected before"]
    margin = BETA * (chosen - rejected)
    metrics = {"accuracy": sf.mean(margin > 0), "margin": sf.mean(margin)}
    return sf.mean(-jax.nn.log_sigmoid(margin)), metrics


@jax.jit
def write(params, begun, key):
    """Go on with texts that have begun."""

    def one(window, key):
        byte = jax.random.categorical(key, model(params, window)[:, 0]).astype(window.dtype)
        return jnp.append(window[:, 1:], byte[:, None], -1), byte

    keys = jax.random.split(key, LENGTH - CONTEXT)
    return jnp.append(begun, jax.lax.scan(one, begun, keys)[1].T, -1)


def pairs_of(low, high, reference):
    """Pair texts that begin alike, in either way, and say how likely they are to the reference."""
    begun = np.where(np.arange(len(low))[:, None] % 2, low, high)[:, :CONTEXT]
    rest = {"chosen": high[:, CONTEXT:], "rejected": low[:, CONTEXT:]}
    pairs = {name: np.append(begun, text, -1) for name, text in rest.items()}
    return pairs | {f"{name} before": np.array(said(reference, x)) for name, x in pairs.items()}


def look(state, reference, begun):
    """Measure what a model writes: its capitals, and how far it is from its reference."""
    text = write(state.params, begun, jax.random.key(1))
    new, old = (model(params, text[:, :-1]) for params in (state.params, reference))
    capital, small = ((text >= first) & (text < first + 26) for first in b"Aa")
    divergence = (jnp.exp(new) * (new - old)).sum(-1).mean()
    return {"capitals": capital.sum() / (capital | small).sum(), "divergence": divergence}


def main():
    """Learn to write, then what to prefer."""
    text = "".join(topics.topics.values()).encode("ascii", "ignore")[: 5500 * LENGTH]
    rows = lambda text: np.frombuffer(text, np.uint8).reshape(-1, LENGTH)
    low, high = rows(text.lower()), rows(text.upper())
    differ = (low != high)[:, CONTEXT:].any(1)  # some are nothing but dashes
    low, high = low[differ], high[differ]

    tx = optax.adam(3e-3)
    state = sf.init_state(init, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(text_loss, tx), donate_argnums=0)
    for batch in sf.batches(np.append(low[:4000], high[:4000], 0), 128, seed=0, epochs=3):
        state, metrics = step(state, batch)
    reference = state.params
    print(f"the reference: loss {float(metrics['loss'].compute()):.2f}")

    train = pairs_of(low[:4000], high[:4000], reference)
    test = pairs_of(low[4000:], high[4000:], reference)
    tx = optax.adam(3e-4)
    state = sf.init_state(reference, tx, jax.random.key(1))  # a copy, to be donated
    step = jax.jit(sf.make_train_step(preference_loss, tx), donate_argnums=0)
    check = jax.jit(sf.make_eval_step(preference_loss))
    for number, batch in zip(range(STEPS + 1), sf.batches(train, 64, seed=0), strict=False):
        if number % 15 == 0:
            found = sf.evaluate(check, state, sf.batches(test, 100, epochs=1))
            found |= look(state, reference, test["chosen"][:, :CONTEXT])
            print(f"step {number:2}", *[f"{name} {float(x):.3f}" for name, x in found.items()])
        state, _ = step(state, batch)


if __name__ == "__main__":
    main()
