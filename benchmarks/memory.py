"""The predicted peak memory is what a step uses, and a sharded state takes 1/n per device.

Each model takes one step in a process of its own. If the backend counts its memory, that number is
compared; on CPU it is the largest growth of the process since before the state was created. The
table also shows the state on one of 8 virtual devices under `sf.sharding.fsdp()`, relative to an
eighth.
"""

import argparse
import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import init, loss_fn, make_batch
from measure import Claim, most_resident, resident, show

import stepfold as sf

# Layers, width and examples of the decoder, and the options of the step.
DECODERS = {
    "decoder": (4, 256, 64, {}),
    "decoder, 4 microbatches": (4, 256, 64, {"accumulate": 4}),
    "decoder, remat": (4, 256, 64, {"remat": True}),
    "decoder, bf16": (4, 256, 64, {"precision": "bf16"}),
    "decoder, large state": (12, 512, 8, {}),
}
WIDE = "one wide layer"


def make(name):
    """Return the step of a model, a function that makes its state, and a batch."""
    tx = optax.adamw(1e-3)
    if name == WIDE:
        start, batch = _wide_init, np.ones((256, 4096), np.float32)
        step = sf.make_train_step(_wide_loss, tx)
    else:
        layers, width, size, options = DECODERS[name]
        start = partial(init, layers=layers, width=width)
        batch, step = make_batch(size), sf.make_train_step(loss_fn, tx, **options)

    def zeros():  # random numbers would need more memory than the step
        shape = jax.eval_shape(start, jax.random.key(0))
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
        return sf.init_state(params, tx, jax.random.key(0))

    return step, zeros, batch


def _wide_init(key):
    return {"w": jax.random.normal(key, (4096, 4096))}


def _wide_loss(params, batch, key):
    del key
    return sf.mean((batch @ params["w"]) ** 2)


def in_process(name):
    """Take one step, and return the predicted and the used memory in bytes."""
    step, zeros, batch = make(name)
    device = jax.devices()[0]
    make_state = jax.jit(zeros).lower().compile()
    compiled = sf.compile_step(step, jax.eval_shape(zeros), batch)
    memory = sf.describe(compiled, None, None).memory
    before, counted = resident(), device.memory_stats()
    state = make_state()
    made = jax.block_until_ready(compiled(state, batch))
    if counted:
        taken = device.memory_stats()["peak_bytes_in_use"] - counted["bytes_in_use"]
    else:
        taken = most_resident() - before
    del made
    parts = {"state": memory.state, "temporaries": memory.temporaries, "peak": memory.peak}
    return parts | {"taken": taken}


def shard(name):
    """Return the bytes of a sharded state on a device, relative to an even share."""
    _, zeros, _ = make(name)
    mesh, shape = sf.make_mesh((1, -1, 1, 1)), jax.eval_shape(zeros)
    plan = sf.make_sharding(shape, mesh)
    state = jax.jit(zeros, out_shardings=plan)()
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / (sum(leaf.nbytes for leaf in leaves) / mesh.size)


def measure(quick):
    """Run each model in a process of its own."""
    rows = []
    for name in ["decoder", WIDE] if quick else [*DECODERS, WIDE]:
        command = [sys.executable, __file__, f"--model={name}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found, share = json.loads(done.stdout)
        mib = {f"{key} MiB": count / 2**20 for key, count in found.items()}
        ratio = found["taken"] / found["peak"]
        rows.append({"model": name, **mib, "taken/peak": ratio, "state/ideal": share})
    return rows


def judge(rows):
    """Return the claims about the rows."""
    most = {key: max(row[key] for row in rows) for key in ("taken/peak", "state/ideal")}
    least = min(row["taken/peak"] for row in rows)
    claims = {
        "memory taken, over the predicted peak, at most": (most["taken/peak"], 1.15),
        "predicted peak, over the memory taken, at most": (1 / least, 1.15),
        "bytes of state on each of 8 devices, over an eighth": (most["state/ideal"], 1.02),
    }
    return [Claim(what, *numbers, clock=False) for what, numbers in claims.items()]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--model", help="measure one model in this process, as JSON")
    options = parser.parse_args(argv)
    if options.model:
        jax.config.update("jax_num_cpu_devices", 8)
        print(json.dumps([in_process(options.model), shard(options.model)]))
        return None
    rows = measure(options.quick)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
