"""PPO on CartPole as in purejaxrl, for `results`: environment, agent and run are one jax program.

Rollouts, advantages, network and numbers are those of purejaxrl's `ppo.py`: 4 environments of 128
time steps, 4 epochs of 4 minibatches, 500,000 time steps. The environment is CartPole-v1, whose
episodes end after 500 time steps, so 500 is the largest return. A gradient step is made by
`make_train_step`; an update scans over 16 of them. The same update runs under `scan` and in `fit`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

LONGEST = 500
GAMES, TIMES, EPOCHS, MINIBATCHES, UPDATES = 4, 128, 4, 4, 500_000 // (4 * 128)
RATE, DISCOUNT, LAMBDA, CLIP, ENTROPY, VALUE = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5


class Game(NamedTuple):
    """The position of each cart with its pole, and the time steps since the episode began."""

    position: jax.Array
    time: jax.Array


class Agent(NamedTuple):
    """The state of the run: of the training, and of the environments."""

    train: sf.TrainState
    game: Game


class Moment(NamedTuple):
    """What PPO knows of one time step."""

    position: Any
    action: Any
    log_prob: Any
    value: Any
    ended: Any


# The environment


def reset(key, games=GAMES):
    """Begin episodes near the upright position."""
    position = jax.random.uniform(key, (games, 4), minval=-0.05, maxval=0.05)
    return Game(position, jnp.zeros(games, jnp.int32))


def play(game, action, key):
    """Push each cart to the left (0) or right (1); start again where an episode ended."""
    _, speed, angle, spin = jnp.moveaxis(game.position, -1, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = jnp.stack([speed, push - 0.05 * turn * cos / 1.1, spin, turn], -1)
    position, time = game.position + 0.02 * change, game.time + 1
    fell = (abs(position[:, 0]) > 2.4) | (abs(position[:, 2]) > 12 * np.pi / 180)
    ended = fell | (time == LONGEST)
    new = reset(key, len(time))
    again = Game(jnp.where(ended[:, None], new.position, position), jnp.where(ended, 0, time))
    return again, ended, time


# The agent


def init(key):
    """Initialize a network for the actor and one for the critic, with orthogonal weights."""
    orthogonal = jax.nn.initializers.orthogonal

    def network(key, out, scale):
        sizes = [(4, 64, 2**0.5), (64, 64, 2**0.5), (64, out, scale)]
        return [
            {"w": orthogonal(gain)(k, (wide, to)), "b": jnp.zeros(to)}
            for k, (wide, to, gain) in zip(jax.random.split(key, 3), sizes, strict=True)
        ]

    actor, critic = jax.random.split(key)
    return {"actor": network(actor, 2, 0.01), "critic": network(critic, 1, 1.0)}


def network(layers, x):
    """Apply a network with two hidden layers."""
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def log_probs(params, position):
    """Return the log probabilities of both actions."""
    return jax.nn.log_softmax(network(params["actor"], position))


def values(params, position):
    """Return the value of each position."""
    return network(params["critic"], position)[..., 0]


def of_action(log_probs, action):
    """Select the log probability of the action that was taken."""
    return jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0]


def loss_fn(params, batch, _key):
    """Return the clipped loss of the policy, that of the value, and the bonus for entropy."""
    moment, advantage, target = batch
    logs = log_probs(params, moment.position)
    ratio = jnp.exp(of_action(logs, moment.action) - moment.log_prob)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain
    value = values(params, moment.position)
    near = moment.value + jnp.clip(value - moment.value, -CLIP, CLIP)
    squares = jnp.maximum((value - target) ** 2, (near - target) ** 2)
    return {
        "policy": sf.mean(-jnp.minimum(ratio * gain, clipped)),
        "value": sf.mean(VALUE * 0.5 * squares),
        "entropy": sf.mean(ENTROPY * (jnp.exp(logs) * logs).sum(-1)),
    }


def optimizer(updates=UPDATES):
    """Make Adam with clipping, and a learning rate that falls to zero by updates."""
    steps = EPOCHS * MINIBATCHES
    rate = lambda count: RATE * (1 - (count // steps) / updates)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))


# The run


def rollout(params, game, key):
    """Play some time steps with the policy; also return the returns of episodes that ended."""

    def time_step(game, key):
        choice, start = jax.random.split(key)
        logs = log_probs(params, game.position)
        action = jax.random.categorical(choice, logs)
        value = values(params, game.position)
        following, ended, time = play(game, action, start)
        moment = Moment(game.position, action, of_action(logs, action), value, ended)
        return following, (moment, sf.mean(time, ended))

    game, (moments, returns) = jax.lax.scan(time_step, game, jax.random.split(key, TIMES))
    return game, moments, returns.reduce()


def advantages(moments, last):
    """Estimate how much better each action was than the value of its position."""

    def back(carry, moment):
        later, following = carry
        goes_on = 1 - moment.ended
        error = 1 + DISCOUNT * following * goes_on - moment.value
        later = error + DISCOUNT * LAMBDA * goes_on * later
        return (later, moment.value), later

    return jax.lax.scan(back, (jnp.zeros_like(last), last), moments, reverse=True)[1]


def make_update(train_step):
    """Make a step of the whole run: play, then take the gradient steps of all epochs."""

    def update(agent, number):
        state, game = agent
        key = jax.random.fold_in(state.key, number[0])
        acting, *orders = jax.random.split(key, 1 + EPOCHS)
        game, moments, returns = rollout(state.params, game, acting)
        gain = advantages(moments, values(state.params, game.position))
        data = (moments, gain, gain + moments.value)
        rows = jax.tree.map(lambda x: x.reshape(GAMES * TIMES, *x.shape[2:]), data)
        order = jax.vmap(lambda key: jax.random.permutation(key, GAMES * TIMES))(jnp.stack(orders))
        order = order.reshape(EPOCHS * MINIBATCHES, -1)
        take = lambda state, rows_of: train_step(state, jax.tree.map(lambda x: x[rows_of], rows))
        state, metrics = jax.lax.scan(take, state, order)
        metrics = {name: metric.reduce() for name, metric in metrics.items()}
        return Agent(state, game), metrics | {"return": returns}

    return update


def make_agent(seed, tx):
    """Initialize the agent and its environments."""
    learning, playing = jax.random.split(jax.random.key(seed))
    return Agent(sf.init_state(init, tx, learning), reset(playing))


def best_actions(params, games=100):
    """Return the mean return of episodes in which the agent takes the likelier action."""

    def time_step(carry, key):
        game, up, count = carry
        action = log_probs(params, game.position).argmax(-1)
        game, ended, _ = play(game, action, key)
        return (game, up & ~ended, count + up), None

    keys = jax.random.split(jax.random.key(1), LONGEST + 1)
    start = reset(keys[0], games), jnp.ones(games, bool), jnp.zeros(games)
    return jax.lax.scan(time_step, start, keys[1:])[0][2].mean()


def with_scan(seed, updates=UPDATES):
    """Train under one `scan`, which is compiled as one program."""
    tx = optimizer(updates)
    update = make_update(sf.make_train_step(loss_fn, tx))
    run = jax.jit(partial(jax.lax.scan, update), donate_argnums=0)
    agent, metrics = run(make_agent(seed, tx), jnp.arange(updates)[:, None])
    returns = metrics["return"]
    return summary(agent, returns.total / returns.count)


def with_fit(seed, updates=UPDATES):
    """Train in `fit`; the batches are the numbers of the updates."""
    tx = optimizer(updates)
    result = sf.fit(
        make_update(sf.make_train_step(loss_fn, tx)),
        make_agent(seed, tx),
        sf.batches(np.arange(updates), 1, epochs=1),
        log_every=1,
    )
    return summary(result.state, result.history["train/return"])


def summary(agent, returns):
    """Return the returns of the end: while training, and of the likelier actions."""
    returns = np.asarray(returns, np.float64)
    last = returns[-max(len(returns) // 10, 1) :]
    means = [float(np.nanmean(part)) for part in np.array_split(returns, min(40, len(returns)))]
    return {
        "trained": float(np.nanmean(last)),
        "likelier actions": float(jax.jit(best_actions)(agent.train.params)),
        "returns": means,
    }


WAYS = {"scan": with_scan, "fit": with_fit}
