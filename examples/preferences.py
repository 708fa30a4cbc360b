"""Train a language model on preferences with DPO: a loss function and two columns of the data.

Run it with `python examples/preferences.py`; it takes about ten seconds on two cores. The model
has learned Python's manual, half of it in capitals, and continues a text in the case of its start.
Then capitals are preferred. The log probabilities under the reference model are computed once and
stored with the data, so the step holds no second model and donates its state as usual.
"""

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

CONTEXT, WIDTH, HIDDEN, LENGTH, BETA, STEPS = 6, 16, 128, 38, 0.1, 60


def init(key):
    """Initialize a network that reads a few bytes."""
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (256, WIDTH)),
        "hidden": jax.random.normal(keys[1], (CONTEXT * WIDTH, HIDDEN)) / 10,
        "output": jax.random.normal(keys[2], (HIDDEN, 256)) / 10,
    }


def model(params, text):
    """Return the log probabilities of the byte after each context."""
    count = text.shape[1] - CONTEXT + 1
    contexts = jnp.stack([text[:, i : i + count] for i in range(CONTEXT)], -1)
    x = params["embed"][contexts].reshape(len(text), count, CONTEXT * WIDTH)
    return jax.nn.log_softmax(jax.nn.relu(x @ params["hidden"]) @ params["output"])


def log_prob(params, text):
    """Return the log probability of each text after its first context."""
    targets = text[:, CONTEXT:, None].astype(int)
    return jnp.take_along_axis(model(params, text[:, :-1]), targets, -1).sum((1, 2))


def text_loss(params, batch, _key):
    """Return the mean cross-entropy over all bytes."""
    return sf.mean(-log_prob(params, batch) / (LENGTH - CONTEXT))


def preference_loss(params, batch, _key):
    """Compute the DPO loss: raise the margin of the chosen text over that of the reference."""
    chosen = log_prob(params, batch["chosen"]) - batch["chosen_reference"]
    rejected = log_prob(params, batch["rejected"]) - batch["rejected_reference"]
    margin = BETA * (chosen - rejected)
    metrics = {"accuracy": sf.mean(margin > 0), "margin": sf.mean(margin)}
    return sf.mean(-jax.nn.log_sigmoid(margin)), metrics


@jax.jit
def generate(params, prompts, key):
    """Continue texts from their first context."""

    def sample(window, key):
        byte = jax.random.categorical(key, model(params, window)[:, 0]).astype(window.dtype)
        return jnp.append(window[:, 1:], byte[:, None], -1), byte

    keys = jax.random.split(key, LENGTH - CONTEXT)
    return jnp.append(prompts, jax.lax.scan(sample, prompts, keys)[1].T, -1)


def make_pairs(low, high, reference):
    """Pair texts with the same prompt, and add their log probabilities under the reference."""
    prompts = np.where(np.arange(len(low))[:, None] % 2, low, high)[:, :CONTEXT]
    answers = {"chosen": high[:, CONTEXT:], "rejected": low[:, CONTEXT:]}
    pairs = {name: np.append(prompts, text, -1) for name, text in answers.items()}
    log_probs = {name: np.array(log_prob(reference, text)) for name, text in pairs.items()}
    return pairs | {f"{name}_reference": values for name, values in log_probs.items()}


def evaluate_text(state, reference, prompts):
    """Measure generated text: its share of capitals, and the divergence from the reference."""
    text = generate(state.params, prompts, jax.random.key(1))
    new, old = (model(params, text[:, :-1]) for params in (state.params, reference))
    capital, small = ((text >= first) & (text < first + 26) for first in b"Aa")
    divergence = (jnp.exp(new) * (new - old)).sum(-1).mean()
    return {"capitals": capital.sum() / (capital | small).sum(), "divergence": divergence}


def main():
    """Train the reference model, then train on preferences."""
    text = "".join(topics.topics.values()).encode("ascii", "ignore")[: 5500 * LENGTH]
    split = lambda text: np.frombuffer(text, np.uint8).reshape(-1, LENGTH)
    low, high = split(text.lower()), split(text.upper())
    differ = (low != high)[:, CONTEXT:].any(1)  # some rows have no letters
    low, high = low[differ], high[differ]

    tx = optax.adam(3e-3)
    state = sf.init_state(init, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(text_loss, tx), donate_argnums=0)
    for batch in sf.batches(np.append(low[:4000], high[:4000], 0), 128, seed=0, epochs=3):
        state, metrics = step(state, batch)
    reference = state.params
    print(f"the reference: loss {float(metrics['loss'].compute()):.2f}")

    train = make_pairs(low[:4000], high[:4000], reference)
    test = make_pairs(low[4000:], high[4000:], reference)
    tx = optax.adam(3e-4)
    state = sf.init_state(reference, tx, jax.random.key(1))  # a copy, to be donated
    step = jax.jit(sf.make_train_step(preference_loss, tx), donate_argnums=0)
    eval_step = jax.jit(sf.make_eval_step(preference_loss))
    for number, batch in zip(range(STEPS + 1), sf.batches(train, 64, seed=0), strict=False):
        if number % 15 == 0:
            metrics = sf.evaluate(eval_step, state, sf.batches(test, 100, epochs=1))
            metrics |= evaluate_text(state, reference, test["chosen"][:, :CONTEXT])
            print(f"step {number:2}", *[f"{name} {float(x):.3f}" for name, x in metrics.items()])
        state, _ = step(state, batch)


if __name__ == "__main__":
    main()
