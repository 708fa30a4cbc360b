"""Train with DiLoCo: workers take ten steps each on their own, then exchange their parameters once.

Run it with `python examples/diloco.py`; it takes some seconds on two cores. A round of DiLoCo
(Douillard et al., 2023) is a step like any other, `(state, batch) -> (state, metrics)`, so `fit`,
`describe` and checkpoints accept it. The workers are `TrainState`s along a leading axis, sharded
over "dp": `jax.vmap` maps over them, and `lax.scan` folds an ordinary step over the batches of a
worker. An outer optimizer takes the mean change of the workers' parameters for a gradient.

There are three traps. Each worker needs a key of its own, or all draw the same dropout. Only the
parameters are exchanged: each worker keeps its optimizer state, for which it needs memory. And the
workers' mean weighs workers, not examples, so that a worker with masked examples counts in full.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import stepfold as sf

WORKERS, STEPS, BATCH, ROUNDS, TRAIN = 8, 10, 16, 8, 1500
INNER = optax.adamw(3e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Outer(NamedTuple):
    """The state between rounds; `workers` has a leading axis."""

    step: jax.Array
    params: Any
    opt_state: Any
    workers: sf.TrainState


def init_outer(state, tx, workers):
    """Make the state of all workers from that of one."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(state.key, jnp.arange(workers))
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), state)
    return Outer(state.step, state.params, tx.init(state.params), copies._replace(key=keys))


def make_round(step, tx, steps):
    """Make a round of DiLoCo from a step. Its batch has the rows of all steps of all workers."""

    def one_round(outer, batch):
        workers = len(outer.workers.step)
        split = lambda x: x.reshape(workers, steps, -1, *x.shape[1:])

        def train(state, batches):
            state, metrics = lax.scan(step, state, batches)
            return state, {name: metric.reduce() for name, metric in metrics.items()}

        trained, metrics = jax.vmap(train, spmd_axis_name="dp")(
            outer.workers, jax.tree.map(split, batch)
        )
        change = jax.tree.map(lambda p, many: p - many.mean(0), outer.params, trained.params)
        updates, opt_state = tx.update(change, outer.opt_state, outer.params)
        params = optax.apply_updates(outer.params, updates)
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (workers, *p.shape)), params)
        metrics = {name: metric.reduce() for name, metric in metrics.items()}
        return Outer(outer.step + 1, params, opt_state, trained._replace(params=copies)), metrics

    return one_round


def init(key):
    """Initialize a network with one hidden layer."""
    keys, glorot = jax.random.split(key), jax.nn.initializers.glorot_uniform()
    return {"hidden": glorot(keys[0], (64, 256)), "output": glorot(keys[1], (256, 10))}


def loss_fn(params, batch, _key):
    """Return the mean of the cross-entropy, and the accuracy."""
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["output"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll), {"accuracy": sf.mean(logits.argmax(-1) == batch["label"])}


def prepare(mesh, inner=INNER, outer=OUTER, steps=STEPS):
    """Return a step of data parallelism with its state, and a round with its state."""
    step, key = sf.make_train_step(loss_fn, inner), jax.random.key(0)
    alone = sf.init_state(init, inner, key, sharding=NamedSharding(mesh, P()))
    state = init_outer(sf.init_state(init, inner, key), outer, mesh.shape["dp"])
    plan = sf.make_sharding(state, mesh, [("^workers/", P("dp")), ("", P())])
    return (step, alone), (make_round(step, outer, steps), sf.sharding.place(state, plan))


def main():
    """Compare bytes sent, memory and accuracy with data parallelism."""
    if jax.config.jax_num_cpu_devices < WORKERS:
        jax.config.update("jax_num_cpu_devices", WORKERS)  # has an effect only on CPU
    mesh, digits = sf.make_mesh((WORKERS,), ("dp",)), load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [TRAIN])
    train, test = ({name: values[split] for name, values in data.items()} for split in rows)
    print("               sent a step  state on a device  test accuracy")
    for (step, state), steps in zip(prepare(mesh), (1, STEPS), strict=True):
        name = "data parallel" if steps == 1 else f"{steps} inner steps"
        batches = sf.batches(train, WORKERS * BATCH * steps, seed=0)
        report = sf.describe(step, state, batches.at(0))
        result = sf.fit(step, state, batches, steps=ROUNDS * STEPS // steps)
        params = jax.device_get(result.state.params)
        accuracy = loss_fn(params, test, None)[1]["accuracy"].compute()
        sizes = f"{report.moved / steps:11,.0f}  {report.memory.state:17,}"
        print(f"{name:14} {sizes}  {accuracy:13.3f}")


if __name__ == "__main__":
    main()
