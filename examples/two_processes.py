"""One script for one process and for many: alone, under mpirun, or under SLURM.

    python examples/two_processes.py
    mpirun -n 2 python examples/two_processes.py
    srun -n 2 python examples/two_processes.py

Each process brings its own rows, the state is cut over the devices of all, and the losses printed
are the same however many there are, to rounding.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

BATCH, STEPS = 256, 30


def init(key):
    """Draw the parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 512)) / 8,
        "output": jax.random.normal(second, (512, 10)) / 22,
    }


def loss_fn(params, batch, key):
    """Take the mean cross-entropy, and what is right as the accuracy."""
    del key
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["output"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll), {"accuracy": sf.mean(logits.argmax(-1) == batch["label"])}


def rows_of_this_process(i):
    """Draw the rows of batch i, alike in every process, and keep this one's share of them."""
    digits = load_digits()
    rows = np.random.default_rng(i).integers(len(digits.target), size=BATCH)
    rows = np.split(rows, jax.process_count())[jax.process_index()]
    return {"image": np.float32(digits.data[rows] / 16), "label": np.int32(digits.target[rows])}


def main():
    """Join the other processes, if there are any, and train with them."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", 2)  # where there is nothing but a CPU
    print(sf.start_distributed())  # before anything else asks for devices

    mesh, tx = sf.make_mesh(), optax.adam(3e-3)
    shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh)
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    batch = sf.shard_batch(rows_of_this_process(0), mesh)
    step = sf.compile_step(sf.make_train_step(loss_fn, tx), state, batch)

    for i in range(STEPS):
        state, metrics = step(state, sf.shard_batch(rows_of_this_process(i), mesh))
        loss, accuracy = (float(metrics[name].compute()) for name in ("loss", "accuracy"))
        if jax.process_index() == 0 and (i % 10 == 0 or i == STEPS - 1):
            print(f"step {i:2}  loss {loss:.4f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
