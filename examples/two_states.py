"""Train an actor and a critic: two states in one step.

Run it with `python examples/two_states.py`; it takes about ten seconds on two cores. A step is any
function `(state, batch) -> (state, metrics)` and a state is any pytree, so a step of two states is
a function that calls two steps. The actor learns to balance a pole on a cart for at most 200 time
steps. The critic learns the expected return.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

GAMES, LENGTH, STEPS, DISCOUNT = 32, 200, 120, 0.98


def init(key):
    """Initialize a network with one hidden layer that returns zero at first."""
    return {
        "hidden": jax.random.normal(key, (4, 64)),
        "bias": jnp.zeros(64),
        "output": jnp.zeros(64),
    }


def network(params, position):
    """Return the logit of a push to the right, or the value of a position."""
    return jnp.tanh(position @ params["hidden"] + params["bias"]) @ params["output"]


def push(position, right):
    """Simulate one push of the cart-pole of Barto, Sutton and Anderson (1983)."""
    _, speed, angle, turning = jnp.moveaxis(position, -1, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    force = (jnp.where(right, 10.0, -10.0) + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = jnp.stack([speed, force - 0.05 * turn * cos / 1.1, turning, turn], -1)
    return position + 0.02 * change


def play(params, start, key):
    """Play episodes from their start positions, and mask the time after a fall."""

    def time_step(carry, key):
        position, up = carry
        right = jax.random.bernoulli(key, jax.nn.sigmoid(network(params, position)))
        moved = push(position, right)
        still_up = up & (abs(moved[..., 0]) < 2.4) & (abs(moved[..., 2]) < 0.21)
        return (moved, still_up), {"position": position, "right": right, "mask": up}

    carry = start, jnp.ones(len(start), bool)
    (end, up), episode = jax.lax.scan(time_step, carry, jax.random.split(key, LENGTH))
    return episode, end, up


def actor_loss(params, batch, _key):
    """Compute the policy gradient loss with the advantage over the critic."""
    logits = network(params, batch["position"])
    nll = optax.sigmoid_binary_cross_entropy(logits, batch["right"])
    return sf.mean(nll * batch["advantage"], batch["mask"])


def critic_loss(params, batch, _key):
    """Return the mean squared error of the expected return."""
    return sf.mean((network(params, batch["position"]) - batch["return"]) ** 2, batch["mask"])


def make_step(actor_step, critic_step):
    """Compose the steps of two states into one step."""

    def step(state, start):
        actor, critic = state["actor"], state["critic"]
        episode, end, up = play(actor.params, start, jax.random.fold_in(actor.key, actor.step))

        def discount(later, up):
            value = up * (1 + DISCOUNT * later)
            return value, value

        last = up * network(critic.params, end)
        _, returns = jax.lax.scan(discount, last, episode["mask"], reverse=True)
        advantage = returns - network(critic.params, episode["position"])
        advantage /= jnp.std(advantage, where=episode["mask"])

        actor, metrics = actor_step(actor, episode | {"advantage": advantage})
        critic, critic_metrics = critic_step(critic, episode | {"return": returns})
        metrics |= {f"critic_{name}": metric for name, metric in critic_metrics.items()}
        metrics["length"] = sf.mean(episode["mask"].sum(0))
        return {"actor": actor, "critic": critic}, metrics

    return step


def print_length(event):
    """Print how long the pole stays up."""
    length, loss = (event.metrics[f"train/{name}"] for name in ("length", "critic_loss"))
    print(f"step {event.step:3}  episode length {length:5.1f}  critic loss {loss:6.1f}")


def main(steps=STEPS):
    """Train both. The batches are the start positions of the episodes."""
    tx = optax.adam(1e-2)
    step = make_step(sf.make_train_step(actor_loss, tx), sf.make_train_step(critic_loss, tx))
    names, keys = ("actor", "critic"), jax.random.split(jax.random.key(0))
    state = {name: sf.init_state(init, tx, key) for name, key in zip(names, keys, strict=True)}
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (4096, 4)).astype(np.float32)
    batches = sf.batches(starts, GAMES, seed=0)
    result = sf.fit(step, state, batches, steps=steps, hooks=[print_length], log_every=10)
    print(result.stop_reason)


if __name__ == "__main__":
    main()
