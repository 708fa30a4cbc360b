"""One script for one process and for many: alone, under mpirun, or under SLURM.

    python examples/two_processes.py
    mpirun -n 2 python examples/two_processes.py
    srun -n 2 python examples/two_processes.py

Each process loads its own rows, and the state is sharded over the devices of all processes. The
printed losses do not depend on the number of processes, up to rounding.

A batch script for SLURM, which sends SIGTERM two minutes before the time is up, so that a run with
checkpoints saves and can be requeued:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --signal=TERM@120 --requeue
    srun python examples/two_processes.py

A Kubernetes job, whose pods jax finds (with `pip install jax[k8s]`, and a service account that may
read jobs, pods and services):

    apiVersion: v1
    kind: Service
    metadata: {name: two-processes}
    spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {job-name: two-processes}}
    ---
    apiVersion: batch/v1
    kind: Job
    metadata: {name: two-processes}
    spec:
      completionMode: Indexed
      completions: 2
      parallelism: 2
      template:
        spec:
          subdomain: two-processes
          serviceAccountName: jax
          restartPolicy: Never
          terminationGracePeriodSeconds: 120
          containers:
            - {name: train, image: IMAGE, command: [python, examples/two_processes.py]}
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

BATCH, STEPS = 256, 30


def init(key):
    """Initialize a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 512)) / 8,
        "output": jax.random.normal(second, (512, 10)) / 22,
    }


def loss_fn(params, batch, key):
    """Return the mean cross-entropy, with the accuracy as a metric."""
    del key
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["output"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll), {"accuracy": sf.mean(logits.argmax(-1) == batch["label"])}


def local_rows(i):
    """Draw the rows of batch i, the same in every process, and keep the share of this process."""
    digits = load_digits()
    rows = np.random.default_rng(i).integers(len(digits.target), size=BATCH)
    rows = np.split(rows, jax.process_count())[jax.process_index()]
    return {"image": np.float32(digits.data[rows] / 16), "label": np.int32(digits.target[rows])}


def main():
    """Join the other processes, if there are any, and train."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", 2)  # has an effect only on CPU
    print(sf.start_distributed())  # before jax initializes its devices

    mesh, tx = sf.make_mesh(), optax.adam(3e-3)
    shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh)
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    batch = sf.shard_batch(local_rows(0), mesh)
    step = sf.compile_step(sf.make_train_step(loss_fn, tx), state, batch)

    for i in range(STEPS):
        state, metrics = step(state, sf.shard_batch(local_rows(i), mesh))
        loss, accuracy = (float(metrics[name].compute()) for name in ("loss", "accuracy"))
        if jax.process_index() == 0 and (i % 10 == 0 or i == STEPS - 1):
            print(f"step {i:2}  loss {loss:.4f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
