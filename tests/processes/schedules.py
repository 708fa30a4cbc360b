"""Random schedules of what may happen to a run, whose hosts each have a directory of their own.

A run consists of lives. In each, processes train exact integers until one of them is killed, which
ends all, as a launcher does. Between two lives, directories may be lost or damaged, and other hosts
may take part. The last life has to end with the values of an undisturbed run, and each life has to
begin at the step that an independent reading of the files finds.
"""

import json
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import zlib
from pathlib import Path

import jax
import numpy as np

import stepfold as sf
from stepfold.checkpoint import steps, tier, transport
from stepfold.core.processes import KeyValues

from . import launch

STEPS, EVERY, PERMANENT = 40, 2, 14
SHAPES = {
    "a": ((48, 24), "uint32"), "b": ((16, 9), "uint32"), "c": ((7,), "uint32"),
    "d": ((), "uint32"), "e": ((0, 3), "uint32"), "f": ((8, 48), "uint16"),
    "g": ((96,), "uint8"), "key": ((2,), "uint32"),
}  # fmt: skip

# Where a process may kill itself: a method or a function, before or after one of its calls.
POINTS = {
    "commit": (tier.TierSave, "commit"),
    "write": (tier.TierStore, "write"),
    "sync": (tier, "sync"),  # between the bytes of a file and its name
    "send": (tier.TierStore, "send"),
    "receive": (tier.TierStore, "_receive"),
    "note": (tier.TierStore, "note"),
    "delete": (tier.TierStore, "_remove_file"),
    "tables": (tier.TierStore, "_read_tables"),
    "fetch": (tier.TierStore, "fetch"),
    "fill": (transport.Connection, "fill"),
    "connect": (tier.TierStore, "connect"),
    "restore": (sf.checkpoint.Series, "restore"),
    "permanent": (steps, "sync"),
}


def set_crash(point, number, is_after):
    """Kill this process at a call of one of the points."""
    owner, name = POINTS[point]
    original, left = getattr(owner, name), [number]

    def crashing(*args, **options):
        left[0] -= 1
        if left[0] == 0 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, crashing)


def value(name, step):
    """Return what a step adds to a leaf, before the type of the leaf cuts it off."""
    shape, _ = SHAPES[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), step])
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def expected(name, step):
    """Return a leaf after some steps."""
    dtype = SHAPES[name][1]
    whole = value(name, 0).astype(dtype)
    for number in range(1, step + 1):
        whole = whole * np.asarray(5, dtype) + value(name, number).astype(dtype)
    return whole


def shardings(processes, is_replicated):
    """Return the sharding of each leaf, by the first axis that can be divided."""
    devices = np.array(jax.devices())
    copies = 2 if is_replicated and processes % 2 == 0 else 1
    mesh = jax.sharding.Mesh(devices.reshape(copies, -1), ("data", "fsdp"))
    size = mesh.shape["fsdp"]

    def spec(shape):
        axis = next((i for i, length in enumerate(shape) if length and length % size == 0), None)
        return jax.P() if axis is None else jax.P(*[None] * axis, "fsdp")

    return {
        name: jax.sharding.NamedSharding(mesh, jax.P() if name == "key" else spec(shape))
        for name, (shape, _) in SHAPES.items()
    }


def train(start, folder, hosts, options):
    """Train exact integers to the end, and print where it began and whether it ended well."""
    job = start(heartbeat=10, shutdown=10, timeout=60)
    if crash := options["crash"].get(str(job.process)):
        set_crash(*crash)
    plan = shardings(job.processes, options["is_replicated"])
    data = {name: each for name, each in plan.items() if name != "key"}

    def place(name, whole):
        return jax.make_array_from_callback(whole.shape, plan[name], lambda index: whole[index])

    def with_key(arrays):
        return arrays | {"key": jax.random.wrap_key_data(arrays["key"])}

    def update(name, array, step):
        shards = []
        for shard in array.addressable_shards:
            dtype = array.dtype
            added = value(name, step).astype(dtype)[shard.index]
            new = np.asarray(np.asarray(shard.data) * np.asarray(5, dtype) + added)
            shards.append(jax.device_put(new, shard.device))
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    def raw(state):
        return state | {"key": jax.random.key_data(state["key"])}

    state = with_key({name: place(name, expected(name, 0)) for name in SHAPES})
    temporary = sf.Temporary(hosts[job.process], every=EVERY, replicas=options["replicas"])
    described = sf.Checkpoints(f"{folder}/permanent", every=PERMANENT, temporary=temporary)
    lockstep, step, rows = KeyValues("lockstep"), 0, 0
    with described as series:
        has_any = lockstep.gather(series.has_checkpoint(), "a look")[0]
        if has_any:
            restored = series.restore(state)
            state, step, rows = restored.state, restored.step, restored.data["rows"]
            assert restored.extra["rows"].tolist() == [rows]
        print(f"START {step}")
        while step < STEPS:
            lockstep.gather(step, "a step")
            step += 1
            rows += 3 * step
            arrays = raw(state)
            state = with_key({name: update(name, arrays[name], step) for name in SHAPES})
            print(f"AT {step}")
            if series.due(step):
                extra = {"rows": np.array([rows])}
                series.save(state, step=step, data={"rows": rows}, extra=extra)
            time.sleep(options["pause"])
    is_good = rows == 3 * STEPS * (STEPS + 1) // 2
    for name, array in raw(state).items():
        whole = expected(name, STEPS)
        for shard in array.addressable_shards:
            is_good &= np.array_equal(np.asarray(shard.data), whole[shard.index])
    assert data.keys() < raw(state).keys()
    print(f"END {is_good}")
    lockstep.gather(True, "the end")


def restorable(folders):
    """Return the newest step of which the files in these folders have everything, or 0."""
    saves = {}
    for path in (path for folder in folders for path in Path(folder).glob("series-*/*-*.*-*.*")):
        if path.suffix not in (".slices", ".copy"):
            continue
        content = path.read_bytes()
        size, crc, magic = (
            struct.unpack("<QI8s", content[-20:]) if len(content) > 20 else (0, 0, b"")
        )
        text = content[-20 - size : -20]
        if magic != b"stepfold" or zlib.crc32(text) != crc:
            continue
        step, save, process = path.stem.split("-")
        table = json.loads(text)
        good = saves.setdefault((int(step), save), {"leaves": table["leaves"], "parts": {}})
        good["processes"] = table["processes"]
        offset = 0
        for name, index, checksum in table["shards"]:
            elements = int(np.prod([stop - start for start, stop in index]))
            length = elements * np.dtype(table["leaves"][name][1]).itemsize
            if zlib.crc32(content[offset : offset + length]) == checksum:
                good["parts"][name, str(index)] = elements
            offset += length
        arrays = content[offset : len(content) - 20 - size]
        is_good, offset = True, 0
        for shape, dtype, checksum in table["arrays"]:
            length = int(np.prod(shape)) * np.dtype(dtype).itemsize
            is_good &= zlib.crc32(arrays[offset : offset + length]) == checksum
            offset += length
        if is_good:
            good.setdefault("positions", set()).add(process)
    newest = 0
    for (step, _), good in saves.items():
        covered = dict.fromkeys(good["leaves"], 0)
        for (name, _), elements in good["parts"].items():
            covered[name] += elements
        wanted = {name: int(np.prod(shape)) for name, (shape, *_) in good["leaves"].items()}
        if covered == wanted and len(good.get("positions", ())) == good["processes"]:
            newest = max(newest, step)
    return newest


class Life:
    """The processes of one start."""

    def __init__(self, folder, hosts, options):
        self._folder = Path(tempfile.mkdtemp(dir=folder, prefix="life-"))
        args = (str(folder), [str(folder / host) for host in hosts], options)
        self._running = launch.start_forks(self._folder, train, len(hosts), "explicit", args)

    def text(self, rank):
        """Return what a process has printed."""
        return launch.read(f"{self._folder}/{rank}.out")

    def errors(self):
        """Return what all processes wrote to stderr."""
        ranks = range(len(self._running))
        return "\n".join(
            f"--- {rank}\n" + launch.read(f"{self._folder}/{rank}.err") for rank in ranks
        )

    def step(self):
        """Return how far it is; -1 before it has restored."""
        lines = [line.split() for line in self.text(0).splitlines()]
        return max((int(number) for word, number in lines if word in ("START", "AT")), default=-1)

    def began(self):
        """Return the steps at which processes began."""
        lines = [
            line for rank in range(len(self._running)) for line in self.text(rank).splitlines()
        ]
        return {int(line.split()[1]) for line in lines if line.startswith("START")}

    def send(self, ranks, number):
        for rank in ranks:
            if self._running[rank].poll() is None:
                os.kill(self._running[rank].pid, number)

    def watch(self, events, limit=120):
        """Run until all end well, one dies, or the time is over; tell which.

        `events` are pairs of a condition and an action, each of which is done once.
        """
        deadline = time.monotonic() + limit
        try:
            while True:
                codes = [process.poll() for process in self._running]
                if all(code == 0 for code in codes):
                    return "ended"
                if any(code not in (None, 0) for code in codes):
                    return "died"
                if time.monotonic() > deadline:
                    launch.end(self._running)  # aborts them, so that they show their stacks
                    return "hangs"
                for event in [*events]:
                    is_due, action = event
                    if is_due(self):
                        events.remove(event)
                        action(self)
                time.sleep(0.01)
        finally:
            for process in self._running:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()


def at_step(step):
    return lambda life: life.step() >= step


def after(seconds):
    end = time.monotonic() + seconds
    return lambda life: time.monotonic() >= end


def draw_events(chance, hosts, began):
    """Draw what is done to a life; return the events, the crash points, and a description."""
    ranks = range(len(hosts))
    when = after(chance.uniform(0, 3))
    last = min(STEPS - 1, began + 14)
    if chance.random() < 0.85 and began < last:
        when = at_step(chance.randint(began, last))
    one = [chance.choice(ranks)]
    kind = chance.choice(["kill", "kill", "all", "stop", "crash", "crash", "crash"])
    if kind == "crash":
        names = [*POINTS]
        crash = chance.choice(names), chance.randint(1, 20), chance.random() < 0.5
        later = at_step(last)
        kill = lambda life: life.send(one, signal.SIGKILL)
        return [(later, kill)], {str(one[0]): crash}, f"{crash} in {one}"
    if kind == "stop":

        def stop(life):
            life.send(one, signal.SIGSTOP)
            events.append(
                (after(chance.uniform(0, 2)), lambda life: life.send(one, signal.SIGKILL))
            )

        events = [(when, stop)]
        return events, {}, f"stop {one}"
    killed = list(ranks) if kind == "all" else one
    return [(when, lambda life: life.send(killed, signal.SIGKILL))], {}, f"kill {killed}"


def flip(chance, folder, hosts):
    """Flip a bit of one file of temporary steps, if there is any."""
    paths = [path for host in hosts for path in sorted((folder / host).glob("series-*/*-*.*-*.*"))]
    if not paths:
        return ""
    path = chance.choice(paths)
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"flip {path.relative_to(folder)}"


def run_schedule(folder, seed, sizes=(1, 2, 3, 4)):
    """Run a random schedule to its end, and return what happened."""
    chance = random.Random(seed)
    everyone = [f"host{i}" for i in range(max(sizes))]
    hosts = chance.sample(everyone, chance.choice([size for size in sizes if size > 1]))
    deaths, story, lives = chance.randint(1, 3), [], 0
    while True:
        before = max(
            restorable(folder / host for host in hosts),
            sf.checkpoint.latest_step(folder / "permanent") or 0,
        )
        options = {
            "crash": {}, "is_replicated": chance.random() < 0.4, "replicas": 1,
            "pause": chance.choice([0.0, 0.02]),
        }  # fmt: skip
        events = []
        if lives < deaths:
            events, options["crash"], what = draw_events(chance, hosts, before)
            story.append(f"{len(hosts)} from {before}: {what}")
        else:
            story.append(f"{len(hosts)} from {before}: to the end")
        life = Life(folder, hosts, options)
        how = life.watch(events)
        lives += 1
        began = life.began()
        told = "\n".join([f"seed {seed}", *story, f"began at {began}", life.errors()])
        assert how != "hangs", told
        assert began <= {before}, told
        if how == "ended":
            ends = [life.text(rank).splitlines()[-1] for rank in range(len(hosts))]
            assert ends == ["END True"] * len(hosts), told
            return story
        assert lives < deaths + 3, told
        if chance.random() < 0.3:
            lost = chance.choice(hosts)
            shutil.rmtree(folder / lost, ignore_errors=True)
            story.append(f"wipe {lost}")
        if chance.random() < 0.3:
            story.append(flip(chance, folder, hosts))
        if chance.random() < 0.5:
            hosts = chance.sample(everyone, chance.choice(sizes))
