"""Train an actor and a critic: two states in one fold, each seeing the other through its batch.

Run it with `python examples/two_states.py`; it takes some ten seconds on two cores. A step is any
function `(state, batch) -> (state, metrics)`, and a state any tree: so a step of two states is a
function that calls two steps. The actor learns to balance a pole on a cart, for 200 moments at
most; the critic learns how long the actor will last from where it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

GAMES, MOMENTS, STEPS, DISCOUNT = 32, 200, 120, 0.98


def init(key):
    """Draw the parameters of a network with one hidden layer, which gives zero at first."""
    return {
        "hidden": jax.random.normal(key, (4, 64)),
        "bias": jnp.zeros(64),
        "output": jnp.zeros(64),
    }


def network(params, position):
    """Give the logit of a push to the right, or what a position is worth."""
    return jnp.tanh(position @ params["hidden"] + params["bias"]) @ params["output"]


def push(position, right):
    """Push a cart with a pole on it left or right, as Barto, Sutton and Anderson have it."""
    _, speed, angle, turning = jnp.moveaxis(position, -1, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    force = (jnp.where(right, 10.0, -10.0) + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = jnp.stack([speed, force - 0.05 * turn * cos / 1.1, turning, turn], -1)
    return position + 0.02 * change


def play(params, start, key):
    """Play games from where they start; what comes after a fall does not count."""

    def moment(now, key):
        position, up = now
        right = jax.random.bernoulli(key, jax.nn.sigmoid(network(params, position)))
        moved = push(position, right)
        still_up = up & (abs(moved[..., 0]) < 2.4) & (abs(moved[..., 2]) < 0.21)
        return (moved, still_up), {"position": position, "right": right, "mask": up}

    begin = start, jnp.ones(len(start), bool)
    (end, up), seen = jax.lax.scan(moment, begin, jax.random.split(key, MOMENTS))
    return seen, end, up


def actor_loss(params, batch, _key):
    """Make likelier what turned out better than the critic thought."""
    logits = network(params, batch["position"])
    nll = optax.sigmoid_binary_cross_entropy(logits, batch["right"])
    return sf.mean(nll * batch["advantage"], batch["mask"])


def critic_loss(params, batch, _key):
    """Take the squared error of what is expected."""
    return sf.mean((network(params, batch["position"]) - batch["return"]) ** 2, batch["mask"])


def make_step(actor_step, critic_step):
    """Compose the steps of two states into one of both."""

    def step(state, start):
        actor, critic = state["actor"], state["critic"]
        seen, end, up = play(actor.params, start, jax.random.fold_in(actor.key, actor.step))

        def back(later, up):
            worth = up * (1 + DISCOUNT * later)
            return worth, worth

        last = up * network(critic.params, end)
        _, returns = jax.lax.scan(back, last, seen["mask"], reverse=True)
        advantage = returns - network(critic.params, seen["position"])
        advantage /= jnp.std(advantage, where=seen["mask"])

        actor, metrics = actor_step(actor, seen | {"advantage": advantage})
        critic, of_critic = critic_step(critic, seen | {"return": returns})
        metrics |= {f"critic_{name}": metric for name, metric in of_critic.items()}
        metrics["moments"] = sf.mean(seen["mask"].sum(0))
        return {"actor": actor, "critic": critic}, metrics

    return step


def tell(event):
    """Print how long the pole stays up."""
    moments, loss = (event.metrics[f"train/{name}"] for name in ("moments", "critic_loss"))
    print(f"step {event.step:3}  it lasts {moments:5.1f} moments  critic loss {loss:6.1f}")


def main():
    """Train both; where the games start is a batch like any other."""
    tx = optax.adam(1e-2)
    step = make_step(sf.make_train_step(actor_loss, tx), sf.make_train_step(critic_loss, tx))
    names, keys = ("actor", "critic"), jax.random.split(jax.random.key(0))
    state = {name: sf.init_state(init, tx, key) for name, key in zip(names, keys, strict=True)}
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (4096, 4)).astype(np.float32)
    batches = sf.batches(starts, GAMES, seed=0)
    result = sf.fit(step, state, batches, steps=STEPS, hooks=[tell], log_every=10)
    print(result.stop_reason)


if __name__ == "__main__":
    main()
