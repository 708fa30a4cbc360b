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
    """Give the log probability of each byte but the first few, with which a text begins."""
    targets = text[:, CONTEXT:, None].astype(int)
    return jnp.take_along_axis(model(params, text[:, :-1]), targets, -1)[..., 0]


def text_loss(params, batch, key):
    """Take the mean over all bytes."""
    del key
    return sf.mean(-said(params, batch))


def preference_loss(params, batch, key):
    """Raise what is preferred above what is not, by more than the reference does."""
    del key
    gained = {
        name: said(params, batch[name]).sum(-1) - batch[f"{name} before"]
        for name in ("chosen", "rejected")
    }
    margin = BETA * (gained["chosen"] - gained["rejected"])
    measured = {"accuracy": sf.mean(margin > 0), "margin": sf.mean(margin)}
    return sf.mean(-jax.nn.log_sigmoid(margin)), measured


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
    chosen, rejected = (np.append(begun, text[:, CONTEXT:], -1) for text in (high, low))
    pairs = {"begun": begun, "chosen": chosen, "rejected": rejected}
    for name in ("chosen", "rejected"):
        pairs[f"{name} before"] = np.array(said(reference, pairs[name]).sum(-1))
    return pairs


def main():
    """Learn to write, then what to prefer."""
    text = "".join(topics.topics.values()).encode("ascii", "ignore")[: 5000 * LENGTH]
    cut = lambda text: np.frombuffer(text, np.uint8).reshape(-1, LENGTH)
    low, high = cut(text.lower()), cut(text.upper())

    tx = optax.adam(3e-3)
    state = sf.init_state(init, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(text_loss, tx), donate_argnums=0)
    both = np.concatenate([low[:4000], high[:4000]])
    for batch in sf.batches(both, 128, seed=0, epochs=3):
        state, metrics = step(state, batch)
    print(f"the reference: loss {float(metrics['loss'].compute()):.2f}")

    reference = state.params
    train = pairs_of(low[:4000], high[:4000], reference)
    test = pairs_of(low[4000:], high[4000:], reference)

    def measured(state):
        """Measure what a model prefers, what it writes, and how far that is from the reference."""
        found = sf.evaluate(check, state, sf.batches(test, 250, epochs=1))
        text = write(state.params, test["begun"], jax.random.key(1))
        new, old = (model(params, text[:, :-1]) for params in (state.params, reference))
        capital, small = ((text >= first) & (text < first + 26) for first in b"Aa")
        found["capitals"] = capital.sum() / (capital | small).sum()
        return found | {"divergence": (jnp.exp(new) * (new - old)).sum(-1).mean()}

    tx = optax.adam(3e-4)
    check = jax.jit(sf.make_eval_step(preference_loss))
    step = jax.jit(sf.make_train_step(preference_loss, tx), donate_argnums=0)
    state, batches = sf.init_state(reference, tx, jax.random.key(1)), sf.batches(train, 64, seed=0)
    for number in range(STEPS + 1):
        if number % 15 == 0:
            found = [f"{name} {float(value):.3f}" for name, value in measured(state).items()]
            print(f"step {number:2}", *found, sep="  ")
        state, _ = step(state, next(batches))


if __name__ == "__main__":
    main()
