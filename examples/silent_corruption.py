"""Find a device that computes wrong numbers: its neighbour computes its rows again.

Run it with `python examples/silent_corruption.py`; it takes some seconds on two cores. Sometimes a
processor computes a wrong number. `sf.debug.check_step` runs a step twice and finds an error that
comes and goes, but not one that is always the same. So here each device computes the gradient of
its own rows and of those of the next device, and compares bits. A device that is always wrong fails
twice: at its own rows, which its neighbour checks, and at the rows that it checks. Device 3 is made
wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu.metrics import Average
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import stepfold as sf

DEVICES, STEPS, BATCH, WRONG = 8, 10, 256, 3
TX = optax.adamw(1e-2)


def init(key):
    """Make the parameters of a linear classifier."""
    return {"w": jax.random.normal(key, (64, 10)) / 8, "b": jnp.zeros(10)}


def loss_fn(params, batch, _key):
    """Take the mean of the cross-entropy."""
    logits = batch["image"] @ params["w"] + params["b"]
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def checked_by_neighbours(mesh, wrong=None):
    """Return a `grad=` in which the devices check each other. `wrong` is a device that errs."""
    devices = mesh.shape["dp"]
    ring = [((i + 1) % devices, i) for i in range(devices)]  # each one gets what the next one has
    back = [(receiver, sender) for sender, receiver in ring]

    def grad(loss_fn):
        of_rows = sf.make_grad(loss_fn)

        def on_one_device(params, batch, key):
            device = lax.axis_index("dp")

            def compute(rows_and_index):
                rows, index = rows_and_index
                result = of_rows(params, rows, jax.random.fold_in(key, index), ())
                is_wrong = (device == wrong) if wrong is not None else False
                err = lambda g: g.at[0].set(jnp.where(is_wrong, jnp.nextafter(g[0], 9.0), g[0]))
                return jax.tree.map(err, result[0]), *result[1:3]

            # In one loop, so that both gradients come from the same instructions.
            pairs = jax.tree.map(lambda x: jnp.stack([x, lax.ppermute(x, "dp", ring)]), batch)
            indices = jnp.stack([device, (device + 1) % devices])
            results = lax.map(compute, (pairs, indices))
            sums = checksums(results[0])
            differs = (sums[0] != lax.ppermute(sums[1], "dp", back)).any()
            grads, terms, metrics = lax.psum(jax.tree.map(lambda x: x[0], results), "dp")
            suspects = lax.all_gather(differs.astype(jnp.float32), "dp")
            metrics["suspect"] = Average(total=suspects, count=jnp.ones(devices))
            return jax.tree.map(lambda g: g / devices, grads), terms, metrics

        def grad_fn(params, batch, key, model_state):
            one, rows = PartitionSpec(), PartitionSpec("dp")
            over_devices = jax.shard_map(
                on_one_device, mesh=mesh, in_specs=(one, rows, one), out_specs=one, check_vma=False
            )
            return *over_devices(params, batch, key), model_state

        return grad_fn

    return grad


def checksums(grads):
    """Add up the bits of each leaf of both gradients."""
    bits = [lax.bitcast_convert_type(g, jnp.uint32) for g in jax.tree.leaves(grads)]
    return jnp.stack([b.reshape(2, -1).sum(1, dtype=jnp.uint32) for b in bits], 1)


def main(steps=STEPS):
    """Train on digits with and without the wrong device, and print whose rows are suspect."""
    if jax.config.jax_num_cpu_devices < DEVICES:
        jax.config.update("jax_num_cpu_devices", DEVICES)  # has an effect only on CPU
    mesh = sf.make_mesh((DEVICES,), ("dp",))
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    for wrong in (None, WRONG):
        plan = NamedSharding(mesh, PartitionSpec())
        state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
        step = sf.make_train_step(loss_fn, TX, grad=checked_by_neighbours(mesh, wrong))
        step = sf.debug.check_step(step, every=2)
        result = sf.fit(step, state, sf.batches(data, BATCH, seed=0), steps=steps)
        history = result.history
        suspects = [i for i in range(DEVICES) if history[f"train/suspect/{i}"][-1]]
        print(f"device {wrong} is wrong: loss {history['train/loss'][-1]:.3f}, ", end="")
        print(f"corrupt {history['train/corrupt'][-1]:.0f}, suspect rows {suspects}")


if __name__ == "__main__":
    main()
