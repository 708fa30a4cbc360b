"""Share out Muon's matrices over the devices, so that each one is orthogonalized only once.

Run it with `python examples/sharded_muon.py`; it takes some seconds on two cores. Muon multiplies
each matrix of momentum fifteen times. If parameters are replicated, every device repeats all of
these products, and with FSDP, devices communicate in each of them. Here matrices of one shape are
stacked, and the stack is sharded along its leading axis. Each device computes a share, and keeps a
share of the momentum. It is a wrapper of `optax.contrib.scale_by_muon`, with the same updates.

There are two traps. A stack changes its layout only as a whole, by a constraint before and after:
otherwise the compiler sends its matrices one by one, to all devices. And weight decay belongs
outside of the wrapper: it needs the parameters, which would have to be sent as well.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_flatten_with_path, tree_map_with_path
from sklearn.datasets import load_digits

import stepfold as sf

DEVICES, LAYERS, WIDTH, HIDDEN, BATCH, STEPS = 4, 4, 64, 256, 128, 3
LAST_TWO = partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers(-2, -1))
MUON = optax.contrib.scale_by_muon(weight_dimension_numbers=LAST_TWO)  # also of stacks


def stacked(tx, plan):
    """Apply a transformation of matrices to stacks, sharded along their leading axis.

    `plan` has the shardings of all parameters. Matrices of one shape must have the same.
    """
    shardings = dict(tree_flatten_with_path(plan)[0])
    mesh = next(iter(shardings.values())).mesh
    constrain = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    name = lambda x: "x".join(map(str, x.shape))
    specs = lambda leaves: {name(x): shardings[path].spec for path, x in leaves}

    def stack(tree):
        leaves, stacks = tree_flatten_with_path(tree)[0], {}
        for shape, spec in specs(leaves).items():
            x = constrain(jnp.stack([x for _, x in leaves if name(x) == shape]), None, *spec)
            x = jnp.pad(x, [(0, -len(x) % mesh.size), (0, 0), (0, 0)])
            stacks[shape] = constrain(x, mesh.axis_names)
        return stacks

    def update(updates, state, params=None):
        del params
        stacks, state = tx.update(stack(updates), state)
        leaves, structure = tree_flatten_with_path(updates)
        whole = {n: iter(constrain(stacks[n], None, *spec)) for n, spec in specs(leaves).items()}
        return structure.unflatten([next(whole[name(x)]) for _, x in leaves]), state

    return optax.GradientTransformation(lambda params: tx.init(stack(params)), update)


def optimizer(muon):
    """Use Muon for the matrices of the layers, and Adam for all others."""
    label = lambda path, _: "muon" if path[0].key == "layers" else "adam"
    muon = optax.chain(muon, optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(0.01))
    by_label = {"muon": muon, "adam": optax.adam(3e-3)}
    return optax.partition(by_label, partial(tree_map_with_path, label))


def init(key):
    """Initialize residual layers and a head. The layers are not stacked."""
    keys = iter(jax.random.split(key, 2 * LAYERS + 1))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** 0.5
    layers = [{"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)} for _ in range(LAYERS)]
    return {"layers": layers, "head": normal(WIDTH, 10)}


def loss_fn(params, batch, _key):
    """Return the mean of the cross-entropy."""
    x = batch["image"]
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    nll = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["label"])
    return sf.mean(nll)


def train(params, mesh, is_stacked):
    """Train a few steps; return the parameters, the report of a step, and XLA's FLOPs."""
    plan = sf.make_sharding(params, mesh)
    tx = optimizer(stacked(MUON, plan) if is_stacked else MUON)
    make_state = partial(sf.init_state, params, tx, jax.random.key(0))
    rules = [("mu/[0-9]+x[0-9]+$", P(mesh.axis_names))] * is_stacked + [sf.sharding.fsdp()]
    state = make_state(sharding=sf.make_sharding(jax.eval_shape(make_state), mesh, rules))
    data = {"image": np.float32(load_digits().data / 16), "label": load_digits().target}
    batch = sf.batches(data, BATCH, seed=0).at(0)
    step = sf.compile_step(sf.make_train_step(loss_fn, tx), state, batch)
    for _ in range(STEPS):
        state, _ = step(state, sf.shard_batch(batch, mesh))
        jax.block_until_ready(state)  # virtual devices share few threads
    flops = step.compiled.cost_analysis()["flops"]  # also of products that devices repeat
    return jax.device_get(state.params), sf.describe(step, state, batch), flops


def main():
    """Compare plain and stacked Muon with two layouts of the parameters."""
    if jax.config.jax_num_cpu_devices < DEVICES:
        jax.config.update("jax_num_cpu_devices", DEVICES)  # has an effect only on CPU
    params = jax.device_get(jax.jit(init)(jax.random.key(0)))
    print("layout  muon     FLOPs on a device       sent  optimizer state  differs by")
    for name, dims in {"dp": (-1, 1), "fsdp": (1, -1)}.items():
        mesh = sf.make_mesh(dims, ("dp", "fsdp"), devices=jax.devices()[:DEVICES])
        results = {kind: train(params, mesh, kind == "stacked") for kind in ("plain", "stacked")}
        for kind, (got, report, flops) in results.items():
            errors = jax.tree.map(lambda x, y: abs(x - y).max(), got, results["plain"][0])
            row = f"{name:6}  {kind:7}  {flops:17,.0f}  {report.moved:9,}"
            print(f"{row}  {report.memory.opt_state:15,}  {max(jax.tree.leaves(errors)):10.1e}")


if __name__ == "__main__":
    main()
