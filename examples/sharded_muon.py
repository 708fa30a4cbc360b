"""Share out Muon's matrices over the devices, so that each one is orthogonalized only once.

Run it with `python examples/sharded_muon.py`; it takes some seconds on two cores. Muon multiplies
each matrix of momentum fifteen times. If parameters are replicated, every device repeats all of
these products, and with FSDP, devices communicate in each of them. `sf.optim.at_home` sends each
matrix to one device, which computes the function, and sends the result back. It has no state:
momentum is in `optax.trace` before it, with the shardings of the parameters.
"""

from functools import partial

import jax
import numpy as np
import optax
from jax.tree_util import tree_map_with_path
from sklearn.datasets import load_digits

import stepfold as sf

DEVICES, LAYERS, WIDTH, HIDDEN, BATCH, STEPS = 4, 4, 64, 256, 128, 3


def each_leaf(function):
    """Apply a function to each leaf, where its devices are."""
    return optax.stateless(lambda updates, _: jax.tree.map(function, updates))


def optimizer(orthogonal):
    """Use Muon for the matrices of the layers, and Adam for all others."""
    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        orthogonal,
        optax.add_decayed_weights(0.01),
        optax.scale_by_learning_rate(0.01),
    )
    label = lambda path, _: "muon" if path[0].key == "layers" else "adam"
    by_label = {"muon": muon, "adam": optax.adam(3e-3)}
    return optax.partition(by_label, partial(tree_map_with_path, label))


def init(key):
    """Initialize residual layers and a head."""
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


def train(params, mesh, is_at_home):
    """Train a few steps; return the parameters, the report of a step, and XLA's FLOPs."""
    rules = [sf.sharding.fsdp()]
    home = sf.optim.at_home(sf.optim.orthogonalize, sf.make_sharding(params, mesh, rules))
    tx = optimizer(home if is_at_home else each_leaf(sf.optim.orthogonalize))
    make_state = partial(sf.init_state, params, tx, jax.random.key(0))
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
    """Compare Muon on each leaf and at home, with two layouts of the parameters."""
    if jax.config.jax_num_cpu_devices < DEVICES:
        jax.config.update("jax_num_cpu_devices", DEVICES)  # has an effect only on CPU
    params = jax.device_get(jax.jit(init)(jax.random.key(0)))
    print("layout  muon     FLOPs on a device       sent  differs by")
    for name, dims in {"dp": (-1, 1), "fsdp": (1, -1)}.items():
        mesh = sf.make_mesh(dims, ("dp", "fsdp"), devices=jax.devices()[:DEVICES])
        results = {kind: train(params, mesh, kind == "at home") for kind in ("plain", "at home")}
        for kind, (got, report, flops) in results.items():
            errors = jax.tree.map(lambda x, y: abs(x - y).max(), got, results["plain"][0])
            row = f"{name:6}  {kind:7}  {flops:17,.0f}  {report.moved:9,}"
            print(f"{row}  {max(jax.tree.leaves(errors)):10.1e}")


if __name__ == "__main__":
    main()
