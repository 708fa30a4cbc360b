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

WORKERS, STEPS, BATCH, ROUNDS, TRAIN = 8, 10, 16, 12, 1500
INNER = optax.adamw(3e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Outer(NamedTuple):
    """The state between rounds."""

    step: jax.Array
    params: Any
    opt_state: Any
    workers: sf.TrainState  # with a leading axis


def init_outer(state, tx, workers):
    """Make the state of all workers from that of one."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(state.key, jnp.arange(workers))
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), state)
    return Outer(state.step, state.params, tx.init(state.params), many._replace(key=keys))


def make_round(step, tx, steps):
    """Make a round of DiLoCo of a step; its batch has the rows of all steps of all workers."""

    def one_round(outer, batch):
        count = len(outer.workers.step)
        rows = jax.tree.map(lambda x: x.reshape(count, steps, -1, *x.shape[1:]), batch)
        train = lambda state, rows: lax.scan(step, state, rows)
        states, metrics = jax.vmap(train, spmd_axis_name="dp")(outer.workers, rows)
        change = jax.tree.map(lambda p, many: p - many.mean(0), outer.params, states.params)
        updates, opt_state = tx.update(change, outer.opt_state, outer.params)
        params = optax.apply_updates(outer.params, updates)
        copies = jax.tree.map(lambda p, many: jnp.broadcast_to(p, many.shape), params, states.params)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), metrics)
        metrics = {name: metric.reduce() for name, metric in flat.items()}
        return Outer(outer.step + 1, params, opt_state, states._replace(params=copies)), metrics

    return one_round
