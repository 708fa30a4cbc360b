"""What an elastic run costs while no process dies, and how long it pauses when one does.

All processes are on this machine and share its cores, so that eight of them wait for each other
longer than eight hosts would. Steps with and without `Elastic` take turns in one job. A restart is
that of all processes: start, import, connect, restore and compile, with the checkpoint in memory
(`/dev/shm`), and without a scheduler, which makes a restart take minutes elsewhere.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import Claim, show

STEPS, BATCH = 60, 64


def start(kind, count, *args, file=__file__):
    """Run `kind` of a file in several processes, and return what process 0 printed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    head = [sys.executable, file, "--process", kind, f"localhost:{port}", str(count)]
    tail = [json.dumps(args)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*head, str(rank), *tail], **pipe) for rank in range(count)]
    ends = [process.communicate() for process in running]
    codes = [process.returncode for process in running]
    if codes[0] != 0:
        sys.exit(f"{kind} of {count}: exit codes {codes}\n{ends[0][1]}")
    return json.loads(ends[0][0].splitlines()[-1])


# In each process


def join(coordinator, count, rank, heartbeat=100):
    """Connect this process to the others, with one CPU device each."""
    import jax

    import stepfold as sf

    jax.config.update("jax_num_cpu_devices", 1)
    if count > 1:
        sf.start_distributed(coordinator, count, rank, heartbeat=heartbeat, elastic=True)


def make_parts(width, axis, *, ordered=False):
    """Return a function that makes an `Elastic`, and one that makes a state for it."""
    import jax
    import jax.numpy as jnp
    import optax

    import stepfold as sf

    tx, names = optax.adamw(1e-3), "abcd"

    def init(key):
        return {name: jax.random.normal(key, (width, width)) / width**0.5 for name in names}

    def loss_fn(params, batch, key):  # noqa: ARG001
        hidden = batch["x"]
        for name in names:
            hidden = jnp.tanh(hidden @ params[name])
        return sf.mean(hidden.mean(-1))

    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))

    def build(devices):
        count = 1 << len(devices).bit_length() - 1
        dims = (count, 1, 1, 1) if axis == "dp" else (1, count, 1, 1)
        mesh = sf.make_mesh(dims, devices=devices[:count])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        options = {"grad": sf.ordered(plan)} if ordered else {}
        return sf.make_train_step(loss_fn, tx, **options), plan

    make_state = lambda plan: sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    return lambda **options: sf.Elastic(build, **options), make_state


def make_batches(width):
    """Return an endless shuffle of random rows."""
    import numpy as np

    import stepfold as sf

    return sf.batches({"x": np.ones((16 * BATCH, width), np.float32)}, BATCH, seed=0)


def cost(coordinator, count, rank, width, log_every, rounds):
    """Time steps with and without `Elastic` in turns."""
    import jax

    import stepfold as sf
    from stepfold.loop.elastic import Segments

    join(coordinator, count, rank)
    make_elastic, make_state = make_parts(width, "dp")
    elastic, agreed = make_elastic(), []
    agree = Segments.agree

    def timed(self, state, step):
        jax.block_until_ready(state)
        begun = time.perf_counter()
        agree(self, state, step)
        agreed.append(time.perf_counter() - begun)

    Segments.agree = timed
    times = {"plain": [], "elastic": []}
    for number in range(rounds + 1):
        for kind in ("plain", "elastic") if number % 2 else ("elastic", "plain"):
            seen = []
            sf.fit(
                elastic if kind == "elastic" else elastic.step, make_state(elastic.plan),
                make_batches(width), steps=STEPS, log_every=log_every,
                hooks=lambda event, seen=seen: seen.append(time.perf_counter()),
            )  # fmt: skip
            if number:
                times[kind].append((seen[-1] - seen[0]) / (STEPS - log_every))
    plain, with_it = (statistics.median(times[kind]) for kind in ("plain", "elastic"))
    pairs = zip(times["elastic"], times["plain"], strict=True)
    return {
        "processes": count,
        "width": width,
        "ms not elastic": 1e3 * plain,
        "ms elastic": 1e3 * with_it,
        "ratio": statistics.median(a / b for a, b in pairs),
        "ms to agree": 1e3 * statistics.median(agreed) if agreed else 0.0,
        "s between": log_every * with_it,
    }


def loses(coordinator, count, rank, width, axis, replicas, heartbeat, folder):
    """Train; the last process is killed after step 30, unless it was before."""
    import jax

    import stepfold as sf
    from stepfold.loop.elastic import Segments

    join(coordinator, count, rank, heartbeat)
    make_elastic, make_state = make_parts(width, axis, ordered=True)
    elastic, killed = make_elastic(replicas=replicas), Path(folder, "killed")
    is_restart, marks, sent = killed.exists(), {}, []
    leave, repeat, keep = Segments.leave, Segments.repeat, Segments.keep

    def timed_leave(self, error):
        died = leave(self, error)
        marks["noticed"] = time.time()
        return died

    def timed_repeat(self, *args):
        repeat(self, *args)
        marks["rebuilt"] = time.time()

    def timed_keep(self, state, step):
        jax.block_until_ready(state)
        begun = time.perf_counter()
        keep(self, state, step)
        replicas = self._replicas and self._replicas.bytes
        sent.append((replicas or 0, time.perf_counter() - begun))

    Segments.leave, Segments.repeat, Segments.keep = timed_leave, timed_repeat, timed_keep

    def hook(event):
        if "rebuilt" in marks or is_restart:
            marks.setdefault("next", time.time())
        if event.step == 30 and rank == count - 1 and not is_restart:
            threading.Timer(0.01, die).start()

    def die():
        killed.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    sf.fit(
        elastic, make_state(elastic.plan), make_batches(width), steps=STEPS, log_every=5,
        hooks=hook, run_dir=folder if is_restart or heartbeat > 60 else None,
        checkpoints=sf.Checkpoints(f"{folder}/checkpoints", every=30),
    )  # fmt: skip
    death, before = float(killed.read_text()), sent[:5] or [(0, 0.0)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(make_state(elastic.plan)[1:2]))
    return {
        "marks": {name: at - death for name, at in marks.items()},
        "bytes": before[-1][0],
        "seconds": statistics.median(seconds for _, seconds in before),
        "state": state_bytes,
    }


KINDS = {"cost": cost, "loses": loses}


# Tables


def pauses(count, heartbeat, width):
    """Time from a death to the next finished step: on the rest, and after a restart of all."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        went_on = start("loses", count, width, "dp", 0, heartbeat, folder)["marks"]
        for _ in Path(folder, "checkpoints").glob("60"):
            subprocess.run(["rm", "-r", str(_)], check=True)
        Path(folder, "killed").write_text(repr(time.time()))
        restart = start("loses", count, width, "dp", 0, heartbeat, folder)["marks"]["next"]
    return {
        "processes": count,
        "heartbeat s": heartbeat,
        "noticed after s": went_on["noticed"],
        "rebuilt after s": went_on["rebuilt"],
        "next step after s": went_on["next"],
        "restart of all, s": restart,
    }


def copies(count, width, axis, replicas):
    """Report what a copy at the end of a segment costs, and a recovery from it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        told = start("loses", count, width, axis, replicas, 5, folder)
    return {
        "processes": count,
        "state": axis,
        "replicas": replicas,
        "MiB sent by each": told["bytes"] / 2**20,
        "ms for a copy": 1e3 * told["seconds"],
        "s to rebuild": told["marks"]["rebuilt"] - told["marks"]["noticed"],
    }


def main(argv=None):
    """Measure, print the tables, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two processes, once")
    parser.add_argument("--process", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.process:
        kind, coordinator, count, rank, args = options.process
        row = KINDS[kind](coordinator, int(count), int(rank), *json.loads(args))
        print(json.dumps(row))
        return []
    quick = options.quick
    rows = [start("cost", n, 256, 20, 1 if quick else 5) for n in ((2,) if quick else (1, 2, 4, 8))]
    if not quick:
        rows += [start("cost", n, 1024, 20, 5) for n in (2, 4)]
        rows += [pauses(n, heartbeat, 256) for n, heartbeat in ((2, 5), (4, 5), (4, 10))]
        rows += [copies(4, 1024, "dp", 0), copies(4, 1024, "fsdp", 1), copies(4, 2048, "fsdp", 1)]
    show(rows, judge(rows))
    return rows


def judge(rows):
    """Return the claims about the rows."""
    claims = [
        Claim(
            f"time of an elastic step, {row['processes']} processes, width {row['width']}",
            row["ratio"],
            1.1,
        )
        for row in rows
        if row.get("processes", 1) > 1 and "ratio" in row
    ]
    return claims + [
        Claim(
            f"time from a death to the next step, {row['processes']} processes, heartbeat of "
            f"{row['heartbeat s']} s, relative to the heartbeat and a restart",
            row["next step after s"] / (row["heartbeat s"] + row["restart of all, s"]),
            1.0,
        )
        for row in rows
        if "heartbeat s" in row
    ]


if __name__ == "__main__":
    main()
