"""Train on the nodes of a Ray cluster; when one is lost, continue on the rest with the same bits.

    pip install ray && python examples/ray_run.py

Ray gives actors no index: the driver does. When one dies, the driver ends all and starts them again
on the nodes that are left. Here, `ray.cluster_utils` plays three nodes on one machine.
"""

import hashlib
import socket
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import stepfold as sf


@ray.remote(num_cpus=1)
class Process:
    """A process of the run."""

    def address(self):
        """Return an address at which the others reach this process."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def train(self, coordinator, processes, process, run_dir):
        """Join the others and train; return the step from which the run was resumed."""
        sf.start_distributed(coordinator, processes, process)
        tx, params = optax.adam(1e-2), {"w": np.zeros(64, np.float32)}
        x = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")
        batches = sf.batches({"x": x, "y": np.sin(x.sum(1))}, 64, seed=0)
        loss_fn = lambda params, batch, _: sf.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
        plan = sf.make_sharding(shape, sf.make_mesh(), sf.sharding.fsdp(min_size=1))
        ordered = sf.sharding.ordered(plan)  # gradients with the bits of any mesh
        step = sf.make_train_step(loss_fn, tx, grad=ordered)
        state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
        options = {"steps": 1000, "log_every": 10, "checkpoints": sf.Checkpoints(every=50)}
        return sf.fit(step, state, batches, run_dir=run_dir, **options).resumed


def run(run_dir, watch):
    """Train on as many nodes as there are, until the run has ended."""
    for tries_left in reversed(range(10)):
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        count = 1 << len(nodes).bit_length() - 1  # the largest power of two; the rest are spare
        group = placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD")
        places = [PlacementGroupSchedulingStrategy(group, i) for i in range(count)]
        actors = [Process.options(scheduling_strategy=place).remote() for place in places]
        try:
            address = ray.get(actors[0].address.remote(), timeout=40)  # the nodes may be lost
            ends = [x.train.remote(address, count, i, run_dir) for i, x in enumerate(actors)]
            while ends:
                done, ends = ray.wait(ends, timeout=0.1)
                for resumed in ray.get(done):  # raises the error of a process
                    print(f"a process has ended, of {count}, resumed from step {resumed}")
                watch(group)
        except ray.exceptions.RayError:  # of a lost process, or of another that misses it
            if not tries_left:
                raise
            print(f"lost a process of {count}, starting again")
        else:
            return
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)


def main():
    """Train twice, lose the node of process 0 in the second run, and compare their rows."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(3))}
    ray.init(cluster.address, log_to_driver=False)
    left = 3 - int(sys.argv[1] if len(sys.argv) > 1 else 1)

    def kill(group):
        saved = Path("runs/lost/checkpoints").glob("?00")  # the last three are kept
        if len(nodes) > left and any(path.name >= f"{4 - len(nodes)}00" for path in saved):
            node = nodes.pop(placement_group_table(group)["bundles_to_node_id"][0])
            cluster.remove_node(node, allow_graceful=False)

    for name, watch in (("whole", lambda _: None), ("lost", kill)):
        run(str(Path("runs", name).absolute()), watch)
        rows = Path("runs", name, "metrics.jsonl").read_bytes()
        print(f"{name}: {rows.count(b'step')} rows, {hashlib.sha256(rows).hexdigest()[:16]}")
    ray.shutdown()  # before its cluster
    cluster.shutdown()


if __name__ == "__main__":
    main()
