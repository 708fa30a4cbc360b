"""A small network with batch norm and dropout in each model library, as its own manual has it."""

import jax
import jax.numpy as jnp

from .course import TRAIN, Client, score

HIDDEN, DROPPED = 48, 0.1
SOME = TRAIN["image"][:2]


def of_linen():
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.Dense(HIDDEN)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            return linen.Dense(10)(linen.Dropout(DROPPED, deterministic=not train)(x))

    net = Net()

    def init(key):
        variables = net.init(key, SOME, train=False)
        return variables["params"], variables["batch_stats"]

    def loss(params, batch, key, stats):
        variables = {"params": params, "batch_stats": stats}
        logits, updates = net.apply(
            variables, batch["image"], train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return *score(logits, batch), updates["batch_stats"]

    def measure(params, batch, key, stats):
        logits = net.apply({"params": params, "batch_stats": stats}, batch["image"], train=False)
        return *score(logits, batch), stats

    return Client(init, loss, measure)


def of_nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, HIDDEN, rngs=rngs)
            self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(DROPPED, rngs=rngs)
            self.last = nnx.Linear(HIDDEN, 10, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    # Beside the statistics the dropout's own stream of keys is in what is left.
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch, key, rest):
        net = nnx.merge(graphdef, params, rest, copy=True)
        logits = net(batch["image"])
        return *score(logits, batch), nnx.split(net, nnx.Param, ...)[2]

    def measure(params, batch, key, rest):
        net = nnx.merge(graphdef, params, rest, copy=True)
        net.eval()
        return *score(net(batch["image"]), batch), rest

    return Client((params, rest), loss, measure)


def of_equinox():
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(64, HIDDEN, key=one)
            self.norm = eqx.nn.BatchNorm(HIDDEN, axis_name="batch", momentum=0.9, mode="batch")
            self.dropout = eqx.nn.Dropout(DROPPED)
            self.last = eqx.nn.Linear(HIDDEN, 10, key=two)

        def __call__(self, x, stats, key):
            x, stats = self.norm(self.first(x), stats)
            return self.last(self.dropout(jax.nn.relu(x), key=key)), stats

    net, stats = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def logits_of(net, batch, key, stats):
        keys = jax.random.split(key, len(batch["image"]))
        over = jax.vmap(net, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return over(batch["image"], stats, keys)

    def loss(params, batch, key, stats):
        logits, stats = logits_of(eqx.combine(params, static), batch, key, stats)
        return *score(logits, batch), stats

    def measure(params, batch, key, stats):
        net = eqx.nn.inference_mode(eqx.combine(params, static))
        logits, _ = logits_of(net, batch, key, stats)
        return *score(logits, batch), stats

    return Client((params, stats), loss, measure)


def of_haiku():
    import haiku as hk

    @hk.transform_with_state
    def net(x, train):
        x = hk.Linear(HIDDEN)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training=train))
        return hk.Linear(10)(hk.dropout(hk.next_rng_key(), DROPPED, x) if train else x)

    def loss(params, batch, key, stats):
        logits, stats = net.apply(params, stats, key, batch["image"], train=True)
        return *score(logits, batch), stats

    def measure(params, batch, key, stats):
        logits, _ = net.apply(params, stats, None, batch["image"], train=False)
        return *score(logits, batch), stats

    return Client(lambda key: net.init(key, SOME, train=True), loss, measure)


def of_keras():
    import keras

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(HIDDEN),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dropout(DROPPED),
            keras.layers.Dense(10),
        ]
    )
    # Beside the statistics the dropout's own seed is among what is not trained.
    trained = [variable.value for variable in net.trainable_variables]
    rest = [variable.value for variable in net.non_trainable_variables]

    def loss(params, batch, key, rest):
        logits, rest = net.stateless_call(params, rest, batch["image"], training=True)
        return *score(logits, batch), rest

    def measure(params, batch, key, rest):
        logits, _ = net.stateless_call(params, rest, batch["image"], training=False)
        return *score(logits, batch), rest

    return Client((trained, rest), loss, measure)


def of_no_library():
    """Tuples, lists and None are trees too."""

    def init(key):
        one, two = jax.random.split(key)
        first = jax.random.normal(one, (64, HIDDEN)) / 8, None  # the norm has a bias
        last = jax.random.normal(two, (HIDDEN, 10)) / 7, jnp.zeros(10)
        return [first, (jnp.ones(HIDDEN), jnp.zeros(HIDDEN)), last], [jnp.zeros(HIDDEN)] * 2

    def logits_of(params, x, stats, keep):
        (kernel, _), (scale, shift), (out, bias) = params
        x = x @ kernel
        centre, spread = stats if keep is None else (x.mean(0), x.var(0))
        x = jax.nn.relu((x - centre) / jnp.sqrt(spread + 1e-5) * scale + shift)
        if keep is not None:
            x = jnp.where(keep, x / (1 - DROPPED), 0)
        return x @ out + bias, [centre, spread]

    def loss(params, batch, key, stats):
        keep = jax.random.bernoulli(key, 1 - DROPPED, (len(batch["image"]), HIDDEN))
        logits, seen = logits_of(params, batch["image"], stats, keep)
        stats = [0.9 * old + 0.1 * new for old, new in zip(stats, seen, strict=True)]
        return *score(logits, batch), stats

    def measure(params, batch, key, stats):
        return *score(logits_of(params, batch["image"], stats, None)[0], batch), stats

    return Client(init, loss, measure)
