"""A process that is alive but stuck ends, and the others continue without it.

The others wait for it until their collective times out after a heartbeat. It is stuck if nothing
then moves for some seconds, and counts as dead a heartbeat after it has ended.
"""

import json
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from . import launch

HEARTBEAT, PATIENCE = 8, 5  # seconds


def trains(start, folder, hangs=(), patience=None, leave_behind=True, heartbeat=8, stops=None):
    """Train 40 steps, and print what they led to; each hang is a triple (moment, process, how)."""
    import ctypes
    import hashlib
    import json
    import os
    import time
    import warnings
    from pathlib import Path

    import jax
    import numpy as np
    import optax

    import stepfold as sf
    from stepfold.checkpoint import manifest

    start(elastic=True, heartbeat=heartbeat, timeout=20)
    me = jax.process_index()
    moments = {moment: how for moment, process, how in hangs if process in (me, "all")}

    def at(moment):
        if moment not in moments:
            return
        if moments[moment] == "GIL":
            ctypes.PyDLL(None).sleep(1000)
        if moments[moment] == "sleep":
            time.sleep(1000)
        if moments[moment] == "slow":
            time.sleep(heartbeat / 2)
        if moments[moment] == "tell":
            Path(folder, "pid").write_text(str(os.getpid()))
            time.sleep(1)

    def loss_fn(params, batch, key):
        hidden = jax.numpy.tanh(batch["x"] @ params["in"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(8, 64)), "out": rng.normal(size=64)}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    init = lambda key: jax.tree.map(jax.numpy.asarray, params)
    tx = optax.adamw(1e-2)
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))

    def build(devices):
        """Use a power of two of the devices, as many of each process as possible."""
        by_process = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        ranked = [(rank, d) for own in by_process.values() for rank, d in enumerate(own)]
        count = 1 << len(devices).bit_length() - 1
        chosen = {d for _, d in sorted(ranked, key=lambda pair: (pair[0], pair[1].id))[:count]}
        mesh = sf.make_mesh((count, 1, 1, 1), devices=[d for d in devices if d in chosen])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        return sf.make_train_step(loss_fn, tx, grad=sf.ordered(plan, blocks=8)), plan

    class Examples:
        """Examples that hang when one of them is read for the n-th time."""

        def __init__(self, moment, count):
            rng = np.random.default_rng(count)
            self.moment, self.x, self.y, self.pulls = moment, rng.normal(size=(count, 8)), [], 0
            self.x = self.x.astype(np.float32)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            self.pulls += 1
            at(f"{self.moment} {self.pulls}")
            return {"x": self.x[index], "y": self.x[index].sum()}

    seen = []

    def watch(event):
        seen.append([event.kind, event.step])
        at(f"{event.kind} {event.step}")

    write_leaves = manifest.write_leaves

    def write(folder, metadata, *args):
        at(f"save {metadata.step}")
        write_leaves(folder, metadata, *args)

    manifest.write_leaves = write
    elastic = sf.Elastic(build, patience=patience, leave_behind=leave_behind)
    state = sf.init_state(init, tx, jax.random.key(0), sharding=elastic.plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = sf.fit(
            elastic, state, sf.batches(Examples("batch", 320), 32, seed=0), steps=40, log_every=10,
            run_dir=folder, hooks=watch, checkpoints=sf.Checkpoints(every=20),
            evaluation=sf.Evaluation(
                sf.make_eval_step(loss_fn),
                lambda: sf.batches(Examples("eval batch", 48), 16, epochs=1), every=20,
            ),
        )  # fmt: skip
    mesh = result.state.step.sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = jax.jit(lambda tree: tree, out_shardings=everywhere)(result.state.params)
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole))
    rows = Path(folder, "metrics.jsonl").read_text().splitlines() if me == 0 else []
    print(
        json.dumps(
            {
                "bits": hashlib.sha256(bits).hexdigest(),
                "seen": seen,
                "rows": [[row["step"], row.get("train/loss")] for row in map(json.loads, rows)],
                "checkpoints": sf.Checkpoints(f"{folder}/checkpoints").steps(),
                "died": [str(w.message) for w in caught if "died" in str(w.message)],
            }
        )
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run without a stuck process leads to; it is of one process."""
    folder = str(tmp_path_factory.mktemp("whole"))
    (output,) = launch.run_processes(trains, 1, args=(folder,))
    return json.loads(output)


def run(folder, hangs, n=3, timeout=150, **options):
    args = (str(folder), hangs, PATIENCE, options.get("leave_behind", True), HEARTBEAT)
    return launch.ends_of_processes(trains, n, timeout=timeout, args=args)


def check(ends, whole, stuck=2):
    """Check that all but one process ended with the bits of a whole run."""
    codes = [end.code for end in ends]
    assert codes == [int(process == stuck) for process in range(len(ends))], launch.report(ends)
    for process, end in enumerate(ends):
        if process != stuck:
            result = json.loads(end.output)
            assert {name: result[name] for name in ("bits", "seen")} == {
                name: whole[name] for name in ("bits", "seen")
            }
            assert not process or result["rows"] == [] or result["rows"] == whole["rows"]
            assert result["checkpoints"][-1] == 40
            assert result["died"][0].startswith(f"process {stuck} died")
