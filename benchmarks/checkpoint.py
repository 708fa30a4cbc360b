"""A save costs the run little more than a copy of the state, and verifies what it writes.

A state of random numbers is saved and restored: by stepfold in the background and synchronously,
with and without checksums, by orbax with its defaults, and by numpy into a file with fsync. All
take turns in one process; memory is measured in separate processes.

What a loop loses for a save is the time of the call, and by how much the steps after it get slower:
a call that returns at once may take its time from them. It is claimed for a loop whose steps leave
a core of the host free, as those on an accelerator do: XLA's threads are kept off one core, and
most of a step computes in the caches. So that a busy machine does not decide about it, the call is
the fastest of all rounds, and the steps are measured by the CPU time of their own threads, those of
XLA and of the loop.

Where the steps keep all cores busy, they lose the time of the save on those cores as well, whoever
writes it. This shows by the clock alone, and is not claimed: copying, checksums and writing are CPU
time, of which a synchronous save to a RAM disk consists.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from measure import Claim, most_resident, resident, show

import stepfold as sf
from stepfold.checkpoint import manifest

MIB = 2**20
LOOPS = ("one is free", "all are busy")  # what steps do with the cores of the host


def make_state(mebibytes):
    """Make 24 arrays of random numbers, which compress as badly as moments of Adam."""
    rows = max(1, mebibytes * MIB // 24 // 4 // 1024)
    keys = jax.random.split(jax.random.key(0), 24)
    tree = {f"layer{i}": jax.random.normal(keys[i], (rows, 1024)) for i in range(24)}
    return jax.block_until_ready(tree)


def bytes_of(state):
    """Return the size of a tree in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def timed(run):
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Folder:
    """A folder that holds only the newest step."""

    def __init__(self, path):
        self.path, self.step = Path(path), 0

    def next(self):
        """Empty the folder, and return the number of the next step."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self.step += 1
        return self.step


def saves(state, place):
    """List functions that save, each of which returns seconds by name."""
    ours, bare, plain = (Folder(place / name) for name in ("ours", "orbax", "numpy"))

    def save():
        step = ours.next()
        with sf.Checkpoints(ours.path, keep=None) as series:
            stopped = timed(lambda: series.save(state, step=step))
            return {"stopped": stopped, "save": stopped + timed(series.wait)}

    def unchecked():
        checksum, manifest.checksum = manifest.checksum, lambda array: 0
        try:
            return {"unchecked": save()["save"]}
        finally:
            manifest.checksum = checksum

    def sync():
        step = ours.next()
        with sf.Checkpoints(ours.path, keep=None, async_=False) as series:
            return {"sync": timed(lambda: series.save(state, step=step))}

    def orbax():
        step = bare.next()
        with ocp.StandardCheckpointer() as checkpointer:

            def run():
                checkpointer.save(bare.path / str(step), state)
                checkpointer.wait_until_finished()

            return {"orbax": timed(run)}

    def numpy():
        plain.next()

        def run():
            with (plain.path / "state").open("wb") as file:
                for leaf in state.values():
                    np.save(file, np.asarray(leaf))
                file.flush()
                os.fsync(file.fileno())

        return {"numpy": timed(run)}

    def memcpy():
        return {"memcpy": timed(lambda: [np.array(leaf) for leaf in state.values()])}

    return [save, unchecked, sync, orbax, numpy, memcpy], (ours, bare, plain)


def restores(state, folders):
    """List functions that restore the last save, each of which returns seconds by name."""
    ours, bare, plain = folders
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )

    def ready(run):
        return timed(lambda: jax.block_until_ready(run()))

    def stepfold():
        return {"restore": ready(lambda: sf.restore(ours.path, like).state)}

    def orbax():
        with ocp.StandardCheckpointer() as checkpointer:
            path = bare.path / str(bare.step)
            return {"orbax restore": ready(lambda: checkpointer.restore(path, placed))}

    def numpy():
        def run():
            with (plain.path / "state").open("rb") as file:
                return [jnp.array(np.load(file)) for _ in state]

        return {"numpy load": ready(run)}

    return [stepfold, orbax, numpy]


def take_turns(runs, rounds):
    """Run all functions in each round in a random order, and collect their seconds by name."""
    found, order = {}, random.Random(0)
    for _ in range(rounds + 1):
        for run in order.sample(runs, len(runs)):
            for name, seconds in run().items():
                found.setdefault(name, []).append(seconds)
    return {name: times[1:] for name, times in found.items()}  # the first warms up


def over(times, these, those):
    """Return the median over rounds of the ratio of two times."""
    return statistics.median(a / b for a, b in zip(times[these], times[those], strict=True))


def timing(mebibytes, rounds, place):
    """Measure a state of one size."""
    state = make_state(mebibytes)
    runs, folders = saves(state, place)
    times = take_turns(runs, rounds)
    for run in runs:
        run()
    times |= take_turns(restores(state, folders), rounds)
    return {
        "MiB": mebibytes,
        "save s": statistics.median(times["save"]),
        "stopped/sync": over(times, "stopped", "sync"),
        "stopped/memcpy": over(times, "stopped", "memcpy"),
        "save/numpy": over(times, "save", "numpy"),
        "save/orbax": over(times, "save", "orbax"),
        "checked/not": over(times, "save", "unchecked"),
        "restore/numpy": over(times, "restore", "numpy load"),
        "restore/orbax": over(times, "restore", "orbax restore"),
    }


def leave_a_core():
    """Keep the threads of XLA off one core; this comes before any use of a device."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
        jax.devices()  # starts the threads, which keep this
        os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts


def train_step(state, noise):
    """Update a state in place, and compute with little memory for longer than that."""
    noise = jax.lax.fori_loop(0, 24, lambda _, noise: jnp.tanh(noise @ noise), noise)
    shift = 0.001 * noise[0, 0]
    return jax.tree.map(lambda leaf: leaf * 0.999 + shift, state), noise


def losses(mebibytes, rounds, place, cores, steps=12):
    """Return what a loop loses for a save in the background, over a synchronous one.

    It donates its state to each step. Temporary steps are in the memory of the host, if it has a
    RAM disk. The columns "by clock" are medians of wall time.
    """
    held = [make_state(mebibytes), jax.random.normal(jax.random.key(1), (512, 512))]
    step = jax.jit(train_step, donate_argnums=(0, 1))
    held[:] = jax.block_until_ready(step(*held))
    threads = [*Path("/proc/self/task").glob("*")]  # of XLA, and this one
    memory_disk = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)

    def own_seconds():
        """Return the CPU time of the loop's own threads, or the time where it is unknown."""
        spent = [int((path / "schedstat").read_text().split()[0]) for path in threads]
        return sum(spent) / 1e9 if spent else time.perf_counter()

    def open_series(kind, is_async):
        temporary = None
        if kind == "temporary":
            temporary = sf.Temporary(f"{memory_disk.name}/{is_async}", every=1)
        folder = place / f"lost-{kind}-{is_async}"
        return sf.Checkpoints(folder, keep=1, async_=is_async, temporary=temporary).open()

    def go(name, series):
        number = 0

        def run():
            nonlocal number
            times, own = {}, 0.0
            for i in range(steps):
                start = own_seconds(), time.perf_counter()
                held[:] = jax.block_until_ready(step(*held))
                times[name, i] = time.perf_counter() - start[1]
                own += own_seconds() - start[0] if i > 1 else 0.0
                if i == 1 and series is not None:
                    number += 1
                    series.due(number)
                    save = partial(series.save, held[0], step=number)
                    times[name, "call"] = timed(save)
            if series is not None:  # what is left of it delays no step
                series.wait()
            return {**times, (name, "own"): own}

        return run

    opened = {
        f"{kind} {is_async}": open_series(kind, is_async)
        for kind in ("permanent", "temporary")
        for is_async in (False, True)
    }
    with memory_disk:
        times = take_turns(
            [go(name, each) for name, each in {"none": None, **opened}.items()], rounds
        )
        for series in opened.values():
            series.close()
    median = {name: statistics.median(each) for name, each in times.items()}
    lost, by_clock = {}, {}
    for name in opened:
        later = median[name, "own"] - median["none", "own"]
        lost[name] = min(times[name, "call"]), max(0.0, later)
        later = sum(median[name, i] - median["none", i] for i in range(2, steps))
        by_clock[name] = median[name, "call"] + later
    row = {
        "loop MiB": mebibytes,
        "cores": cores,
        "step s": statistics.median(median["none", i] for i in range(steps)),
    }
    for kind in ("permanent", "temporary"):
        sync, (call, later) = sum(lost[f"{kind} False"]), lost[f"{kind} True"]
        row |= {
            f"{kind} sync s": sync,
            f"{kind} call s": call,
            f"{kind} steps s": later,
            f"{kind}/sync": (call + later) / sync,
            f"{kind}/sync by clock": by_clock[f"{kind} True"] / by_clock[f"{kind} False"],
        }
    return row


def memory(kind, mebibytes, place):
    """Return the memory beyond the state, relative to the state."""
    state = make_state(mebibytes)
    whole = bytes_of(state)
    if kind == "orbax":
        checkpointer = ocp.StandardCheckpointer()
        before = resident()
        checkpointer.save(place / "1", state)
        checkpointer.wait_until_finished()
        return (most_resident() - before) / whole
    with sf.Checkpoints(place, keep=2) as series:
        series.save({"w": jnp.ones(3)}, step=1)  # loads the packages
        series.wait()
        series.restore({"w": jnp.ones(3)})
        if kind == "fifty saves":
            for step in range(2, 7):
                series.save(state, step=step)
            series.wait()
            before = resident()
            for step in range(7, 57):
                series.save(state, step=step)
            series.wait()
            return (resident() - before) / before
        before = resident()
        series.save(state, step=2)
        series.wait()
        if kind == "save":
            return (most_resident() - before) / whole
        del state
        like = jax.eval_shape(partial(make_like, mebibytes))
        before = resident()
        made = series.restore(like).state
        taken = (most_resident() - before) / whole
        del made
        return taken - 1


def make_like(mebibytes):
    """Make zeros like the state, for `jax.eval_shape`."""
    rows = max(1, mebibytes * MIB // 24 // 4 // 1024)
    return {f"layer{i}": jnp.zeros((rows, 1024)) for i in range(24)}


def in_child(kind, mebibytes):
    """Measure the memory of one operation, or a loop, in a process of its own."""
    command = [sys.executable, __file__, f"--kind={kind}", f"--mebibytes={mebibytes}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def judge(rows):
    """Return the claims about the rows."""
    claims = [
        Claim(f"{what}, at {row['MiB']} MiB", row[column], limit)
        for row in rows
        if "MiB" in row
        for what, column, limit in (
            ("a save, over orbax's with its defaults", "save/orbax", 1.0),
            ("a restore, over orbax's with its defaults", "restore/orbax", 1.0),
            ("a save with checksums, over one without", "checked/not", 1.1),
        )
    ]
    claims += [
        Claim(
            f"what a loop that leaves a core free loses for a {kind} save in the background, over "
            f"a synchronous one, at {row['loop MiB']} MiB",
            row[f"{kind}/sync"],
            0.2,
        )
        for row in rows
        if row.get("cores") == "one is free"
        for kind in ("permanent", "temporary")
    ]
    taken = {row["memory"]: row["taken"] for row in rows if "memory" in row}
    limits = {"save": 1.1, "restore": 0.5, "fifty saves": 0.05}
    # How much of a restore is in memory at once depends on the timing of threads.
    return claims + [
        Claim(f"memory beyond the state: {kind}", taken[kind], limit, clock=kind == "restore")
        for kind, limit in limits.items()
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small state and one round")
    parser.add_argument("--full", action="store_true", help="1.6 GB too")
    parser.add_argument("--kind", help="measure one kind of memory or loop in this process")
    parser.add_argument("--mebibytes", type=int, default=100)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        if options.kind:
            if options.kind in LOOPS:
                if options.kind == LOOPS[0]:
                    leave_a_core()
                rounds = 9 if options.mebibytes > 8 else 1
                found = losses(options.mebibytes, rounds, Path(place), options.kind)
            else:
                found = memory(options.kind, options.mebibytes, Path(place))
            print(json.dumps(found))
            return None
        sizes = {8: 1} if options.quick else {100: 9, 1600: 3} if options.full else {100: 9}
        rows = [timing(size, rounds, Path(place)) for size, rounds in sizes.items()]
    rows += [in_child(kind, 8 if options.quick else 200) for kind in LOOPS]
    if options.quick:
        kinds = {"save": 64, "restore": 100, "fifty saves": 2}
    else:
        kinds = dict.fromkeys(("save", "restore", "fifty saves", "orbax"), 200)
    rows += [{"memory": kind, "taken": in_child(kind, size)} for kind, size in kinds.items()]
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
