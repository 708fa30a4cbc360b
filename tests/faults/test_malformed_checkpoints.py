"""Checkpoints whose checksums fit, but whose manifests or files are malformed, are an error.

Checksums are for damage: whoever computes them again can also write other values. What is covered
is that nothing hangs, no raw error escapes, and no path outside of the directory is used. Each case
copies two good steps, changes the second, and computes its checksums again.
"""

import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import stat
import threading
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint.__main__ import main
from stepfold.checkpoint.leaves import find_arrays

TX = optax.sgd(0.1)
DATA = {"x": np.arange(24, dtype=np.float32).reshape(24, 1)}
SECONDS = 120
DEEP = b"[" * 100_000 + b"]" * 100_000


def make_state():
    mesh = sf.make_mesh()
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    params = {
        "split": jax.device_put(jnp.arange(64.0).reshape(16, 4), split),
        "whole": jax.device_put(jnp.ones(3, jnp.bfloat16), whole),
        "empty": jax.device_put(jnp.zeros((0, 3)), whole),
    }
    state = sf.init_state(params, TX, jax.random.key(0))
    return state._replace(key=jax.device_put(state.key, whole))


def loss_fn(params, batch, key):
    noise = jax.random.normal(key, (16, 4))
    return sf.mean((params["split"] * noise - batch["x"].mean()) ** 2), {
        "seen": sf.mean(batch["x"])
    }


STEP = jax.jit(sf.make_train_step(loss_fn, TX))


class Buffer:
    """Hold the last losses in arrays, as a hook with a replay buffer."""

    def __init__(self):
        self.arrays = {"full": np.zeros((2, 3)), "half": np.zeros(4, jnp.bfloat16)}

    def __call__(self, event):
        self.arrays["full"] += event.metrics["train/loss"]

    def get_state(self):
        return self.arrays

    def set_state(self, state):
        self.arrays = state


def train(folder, steps):
    """Train, or resume, with a checkpoint at every step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sf.fit(
            STEP,
            make_state(),
            sf.batches(DATA, 8, seed=0),
            steps=steps,
            log_every=1,
            hooks=Buffer(),
            checkpoints=sf.Checkpoints(folder, every=1, keep=None, best="train/loss"),
        )


def bits(tree):
    """Return the dtype, shape and bytes of all leaves."""
    data = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(data)]


class Saved(NamedTuple):
    """The directory of two good steps, the bits of each, and the result of three steps."""

    folder: Path
    right: dict
    last: list


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    train(folder, 2)
    restored = {step: sf.restore(folder, make_state(), step=step) for step in (1, 2)}
    right = {step: bits(found.state) for step, found in restored.items()}
    assert right[1] != right[2]
    return Saved(folder, right, bits(train(tmp_path_factory.mktemp("whole"), 3).state))


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved.folder, tmp_path / "copy"))


def write(path, text):
    """Write text with the line of its checksum."""
    path.write_bytes(b"stepfold crc32 %08x\n" % zlib.crc32(text) + text)


def read(path):
    return json.loads(path.read_bytes().partition(b"\n")[2])


def rewrite(folder, change, name="leaves-0.json"):
    """Change the content of a manifest; `change` may return another one, or its bytes."""
    path = folder / "2" / "state" / name
    content = read(path)
    content = content if (new := change(content)) is None else new
    write(path, content if isinstance(content, bytes) else json.dumps(content).encode())
    if name != "files.json":
        record_sizes(folder)


def record_sizes(folder):
    """Record the sizes of all regular files, as a save does."""
    state = folder / "2" / "state"
    files = {
        path.relative_to(state).as_posix(): path.stat().st_size
        for path in state.rglob("*")
        if path.is_file() and path.name not in ("files.json", "later.json")
    }
    write(state / "files.json", json.dumps(files).encode())


def bounded(function):
    """Call a function in a thread with limits of time and memory; return its error."""
    found = []

    def call():
        try:
            function()
        except BaseException as error:  # noqa: BLE001  compared by the caller
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 31), limit[1]))
    try:
        thread.start()
        thread.join(SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert not thread.is_alive(), f"still running after {SECONDS} s"
    return found[0] if found else None


def use(saved, copy, *, resume=True):
    """Use the directory in every way, and return the result or the error of each.

    Every call has to raise a `StepfoldError`, or return what was saved.
    """
    results = {}

    def attempt(name, function):
        def call():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name] = function()

        error = bounded(call)
        if error is not None:
            assert isinstance(error, sf.StepfoldError), (name, repr(error))
            results[name] = error

    attempt("verify", lambda: sf.checkpoint.verify(copy))
    attempt("latest", lambda: sf.checkpoint.latest_step(copy))
    attempt("contents", lambda: sf.checkpoint.contents(copy))
    attempt("exact", lambda: sf.restore(copy, make_state(), step=2))
    attempt("series", lambda: sf.Checkpoints(copy, best="train/loss").best_step())
    for arguments in (["ls"], ["show"], ["show", "2"], ["verify"], ["diff", "1", "2"]):
        name = " ".join(["cli", *arguments])
        output = io.TextIOWrapper(io.BytesIO(), "utf-8")  # as strict as a terminal
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            attempt(name, lambda given=arguments: main([given[0], str(copy), *given[1:]]))
        output.seek(0)
        results[name] = results[name], output.read()
    if resume:
        other = copy.with_name("resumed")
        shutil.copytree(copy, other, symlinks=True, copy_function=clone)
        attempt("fit", lambda: train(other, 3))
    attempt("restore", lambda: sf.restore(copy, make_state()))
    for name in ("exact", "restore"):
        found = results[name]
        if isinstance(found, sf.checkpoint.Restored):
            assert bits(found.state) == saved.right[found.step], name
    return results


def clone(source, target):
    """Copy a file; make a pipe of a pipe, and a sparse file of one that takes no space."""
    status = Path(source).lstat()
    if not stat.S_ISREG(status.st_mode):
        os.mkfifo(target)
    elif status.st_size > 1 << 30:
        Path(target).touch()
        os.truncate(target, status.st_size)
    else:
        shutil.copy2(source, target)
    return target


def leaf(content, name="params/split"):
    return content["leaves"][name]


def shards(content, name="params/split"):
    """List the records of the shards of a leaf: name, region, checksum."""
    return [record for record in content["shards"] if record[0] == name]


def setting(*path, to):
    """Return a change that sets an item of the content."""

    def change(content):
        *parents, key = path
        for parent in parents:
            content = content[parent]
        content[key] = to

    return change


def overlapping(content):
    """Record the first shard for the second as well: half is covered twice, a part never."""
    first, second, *_ = shards(content)
    second[1:] = first[1:]


def holes(content):
    """Record shards whose sizes sum up to that of the leaf, but which overlap."""
    records = shards(content)
    content["shards"] = [record for record in content["shards"] if record not in records]
    content["shards"] += [
        ["params/split", [[0, 16], [0, 2]], 0],
        ["params/split", [[0, 8], [0, 4]], 0],
    ]


def outside(content):
    """Shift the last shard beyond the end of the leaf."""
    *_, last = shards(content)
    last[1] = [
        [start + 2, stop + 2] if i == 0 else [start, stop]
        for i, (start, stop) in enumerate(last[1])
    ]


def backwards(content):
    """Swap start and stop on two axes: the negative sizes multiply to a positive one."""
    record = shards(content)[0]
    record[1] = [[stop, start] for start, stop in record[1]]


def repeated(content):
    content["shards"].append(list(shards(content)[0]))


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


W, LEAVES, ARRAY = "metadata", "leaves", "number of an array"
CHANGES = {
    # the document
    "no json": lambda c: b"{",
    "no utf-8": lambda c: b"\xff\xfe{}",
    "deep inside": lambda c: b'{"format": 2, "metadata": ' + DEEP + b"}",
    "a number of 5,000 digits": lambda c: b"1" * 5000,
    # the format and the processes
    "a fractional format": setting("format", to=0.5),
    "a format that is NaN": setting("format", to=math.nan),
    "a billion processes": setting("processes", to=10**9),
    "half a process": setting("processes", to=1.5),
    # the metadata
    "metadata is null": setting(W, to=None),
    "no data": lambda c: c[W].pop("data") and None,
    "a metric of text": setting(W, "metrics", to={"train/loss": "low"}),
    "a metric of 400 digits": setting(W, "metrics", to={"train/loss": 10**400}),
    "a metric with a surrogate": setting(W, "metrics", to={"\ud800": 0.5}),
    "best of one": setting(W, "best", to=["train/loss"]),
    "bytes not in base64": setting(W, "data", to={"bytes in base64": "a"}),
    "deep data": setting(W, "data", to=nested(600)),
    # the arrays in the metadata
    "an array that is huge": setting("arrays", 0, 0, to=[2**30, 2**20]),
    "an array of negative shape": setting("arrays", 0, 0, to=[-2, -3]),
    "an array of objects": setting("arrays", 0, 1, to="object"),
    "an array of number []": setting(W, "data", to={ARRAY: []}),
    "an array in many places": setting(W, "data", to=[{ARRAY: 0}] * 1000),
    # the leaves
    "no leaves": setting(LEAVES, to={}),
    "a leaf of text": setting(LEAVES, "params/split", to="abc"),
    "a shape of booleans": setting(LEAVES, "key", 0, to=[True, 2]),
    "a huge shape": setting(LEAVES, "params/split", 0, to=[10**30, 4]),
    "a huge empty shape": setting(LEAVES, "params/empty", 0, to=[0, 10**30]),
    "an unknown dtype": setting(LEAVES, "params/split", 1, to="float31"),
    "a key of another size": setting(LEAVES, "key", 2, to="rbg"),
    "a name with a surrogate": lambda c: c[LEAVES].update({"\ud800": [[0], "float32", None]}),
    # the shards
    "a shard of an unknown leaf": setting("shards", 0, 0, to="params/other"),
    "a negative region": lambda c: shards(c)[0].__setitem__(1, [[-2, 0], [0, 4]]),
    "a huge checksum": lambda c: shards(c)[0].__setitem__(2, 10**400),
    "a missing shard": lambda c: c["shards"].remove(shards(c)[0]),
    "overlapping shards": overlapping,
    "shards with holes": holes,
    "a shard outside": outside,
    "a shard backwards": backwards,
    "a repeated shard": repeated,
}  # fmt: skip


def damaged(saved, copy, results):
    """Assert that everything reports the step as damaged, and takes the one before."""
    assert results["verify"][1] == []
    assert results["verify"][2]
    assert results["latest"] == results["contents"].step == 1
    assert isinstance(results["exact"], sf.errors.CheckpointError)
    assert results["restore"].step == 1
    assert list(results["restore"].damaged) == [2]
    assert len(find_arrays(results["restore"].extra, "extra")) == 2
    assert [results[f"cli {name}"][0] for name in ("ls", "show", "show 2", "verify")] == [
        0,
        0,
        1,
        1,
    ]
    assert results["cli show"][1].startswith("step 1,")
    assert "2: damaged" in results["cli verify"][1]
    if "fit" in results:
        assert results["fit"].resumed == 1
        assert bits(results["fit"].state) == saved.last


def choose(names, usual):
    """Parametrize over all names, of which only the usual ones run without --full."""
    assert usual <= set(names)
    slow = pytest.mark.full
    return [pytest.param(name, marks=() if name in usual else slow) for name in names]


USUAL_CHANGES = {  # one for each check of a manifest
    *("no json", "deep inside", "a fractional format", "a billion processes", "metadata is null"),
    *("no data", "a metric of text", "best of one", "bytes not in base64", "no leaves"),
    *("a leaf of text", "a huge shape", "an unknown dtype", "a key of another size"),
    *("a shard of an unknown leaf", "a missing shard", "overlapping shards", "shards with holes"),
    *("a shard outside", "an array that is huge", "an array of objects", "an array of number []"),
}


@pytest.mark.parametrize("change", choose(CHANGES, USUAL_CHANGES))
def test_step_with_a_malformed_manifest_is_damaged(saved, copy, change):
    rewrite(copy, CHANGES[change])
    damaged(saved, copy, use(saved, copy, resume=list(CHANGES).index(change) % 8 == 0))


def replace(name, make):
    """Return a change that puts something else in the place of a file of the step."""

    def change(folder):
        path = next((folder / "2" / "state").glob(name), folder / "2" / "state" / name)
        path.unlink(missing_ok=True)
        make(path)

    return change


def sparse(path):
    path.touch()
    os.truncate(path, 1 << 40)


def recorded(*names):
    """Return a change that makes files sparse and records their sizes."""

    def change(folder):
        for name in names:
            replace(name, sparse)(folder)
        record_sizes(folder)

    return change


def unrecorded(change):
    """Return a change after which the sizes of the regular files are recorded again."""

    def changed(folder):
        change(folder)
        record_sizes(folder)

    return changed


def sizes(change):
    return lambda folder: rewrite(folder, change, "files.json")


def later(content):
    return replace("later.json", lambda path: write(path, json.dumps(content).encode()))


def second_process(change):
    """Return a change that claims two processes, and writes the manifest of the second."""

    def changed(folder):
        path = folder / "2" / "state" / "leaves-0.json"
        second = read(path) | {"processes": 2, "leaves": {}, "shards": []}
        second["metadata"] = {name: second["metadata"][name] for name in ("step", "data")}
        second = change(second) or second
        write(path.with_name("leaves-1.json"), json.dumps(second).encode())
        rewrite(folder, setting("processes", to=2))

    return changed


def repeating(content):
    content["shards"] = [["params/split", [[0, 2], [0, 4]], 0]]


def linked_folder(folder):
    """Move a directory of the step elsewhere, put a pipe into it, and leave a link to it."""
    path = folder / "2" / "state" / "d"
    target = path.rename(folder / "elsewhere")
    data = next(target.iterdir())
    data.unlink()
    os.mkfifo(data)
    path.symlink_to(target)
    record_sizes(folder)


def huge_chunks(folder):
    """Write metadata of an array whose chunks do not fit into any memory."""
    base = {"driver": "file", "path": f"{folder}/2/state/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    name = b"params.split/.zarray"
    metadata = json.loads(store.read(name).result().value)
    metadata["chunks"] = [1 << 40, 1 << 20]
    store.write(name, json.dumps(metadata).encode()).result()
    record_sizes(folder)


SPECIAL = {"a pipe": os.mkfifo, **{
    f"a link to {name}": lambda path, name=name: path.symlink_to(name)
    for name in ("/dev/full", "/dev/zero", "/dev/random", "nothing", ".")
}}  # fmt: skip
SPECIAL["a link to itself"] = lambda path: path.symlink_to(path.name)
SPECIAL["a directory"] = Path.mkdir
LATER = "later.json"
HUGE = [[2**30, 2**20], "float64", 0]
LATER_ARRAYS = {"metrics": {}, "extra": {ARRAY: 0}, "stream": 1, "arrays": [HUGE]}
READ = ("files.json", "leaves-0.json", "arrays-0.bin", "manifest.ocdbt", "d/*", LATER)
FILES = {
    **{
        f"{kind} for {name}": replace(name, make)
        for kind, make in SPECIAL.items()
        for name in READ
        # No metadata was added later: a link to nothing is none either.
        if (kind, name) not in {("a link to nothing", LATER), ("a link to itself", LATER)}
    },
    "an unrecorded device for data": unrecorded(replace("d/*", SPECIAL["a link to /dev/zero"])),
    "a link to a folder with a pipe": linked_folder,
    "a terabyte of files.json": replace("files.json", sparse),
    "a terabyte of leaves-0.json": recorded("leaves-0.json"),
    "a terabyte of manifest.ocdbt": recorded("manifest.ocdbt"),
    "a negative size": sizes(lambda c: c | {"_METADATA": -1}),
    "a path outside": sizes(lambda c: c | {"../../1/state/leaves-0.json": 10}),
    "an absolute path": sizes(lambda c: c | {"/dev/zero": 0}),
    "a path with a null": sizes(lambda c: c | {"\0": 0}),
    "a long path": sizes(lambda c: c | {"a" * 5000: 0}),
    "later metrics of text": later({"metrics": "low", "extra": None}),
    "later extra that is deep": later({"metrics": {}, "extra": nested(600)}),
    "later arrays that are not there": later(LATER_ARRAYS),
    "later arrays elsewhere": later(LATER_ARRAYS | {"stream": "../../1/state/arrays-0"}),
    "later arrays in a pipe": lambda folder: [
        later(LATER_ARRAYS)(folder),
        replace("later-1.bin", os.mkfifo)(folder),
    ],
    "a second process that repeats": second_process(repeating),
    "a second process of another count": second_process(setting("processes", to=3)),
    "a second process of another step": second_process(setting(W, "step", to=1)),
    "a second process without data": second_process(lambda c: c[W].pop("data") and None),
    "a second process with deep data": second_process(setting(W, "data", to=nested(600))),
}


USUAL_FILES = {  # one for each kind of file, and one for each that is read
    *("a pipe for d/*", "a link to /dev/zero for leaves-0.json", "a directory for later.json"),
    *("a link to nothing for manifest.ocdbt", "a link to itself for files.json", "a path outside"),
    *("a terabyte of leaves-0.json", "later metrics of text", "later arrays elsewhere"),
    *("a second process that repeats", "a link to /dev/zero for arrays-0.bin"),
}


@pytest.mark.parametrize("change", choose(FILES, USUAL_FILES))
def test_step_with_a_malformed_file_is_damaged(saved, copy, change):
    FILES[change](copy)
    damaged(saved, copy, use(saved, copy, resume=list(FILES).index(change) % 8 == 0))


VALUES = {
    "terabytes of data": recorded("d/*"),
    "huge chunks": huge_chunks,
    "another array": lambda folder: rewrite(folder, setting("arrays", 0, 2, to=1)),
}


@pytest.mark.parametrize("change", VALUES)
def test_step_with_malformed_arrays_is_not_restored(saved, copy, change):
    VALUES[change](copy)
    results = use(saved, copy)
    assert results["verify"][1] == []
    assert results["verify"][2]
    assert isinstance(results["exact"], sf.errors.CheckpointError)
    assert results["restore"].step == 1
    assert results["fit"].resumed == 1


@pytest.mark.parametrize(
    "change",
    [setting("format", to=3), setting("format", to=10**18), setting(W, "newer", to=1)],
    ids=["format", "huge format", "unknown metadata"],
)
def test_step_of_a_newer_version_is_an_error(saved, copy, change):
    rewrite(copy, change)
    results = use(saved, copy)
    assert results["verify"][1] == []
    assert "newer stepfold: upgrade" in results["verify"][2][0]
    for name in ("latest", "contents", "exact", "restore", "fit"):
        assert isinstance(results[name], sf.errors.CheckpointError), name
    assert results["cli verify"][0] == 1
    # A series that saves nonetheless deletes nothing of the newer version.
    with contextlib.suppress(sf.errors.CheckpointError), sf.Checkpoints(copy, keep=1) as series:
        series.save(make_state(), step=3)
    assert (copy / "2").is_dir()


def positions(value, path=()):
    """List the paths of everything in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from positions(item, (*path, key))


JUNK = (None, True, -1, 0, 3, 0.5, math.nan, 10**25, "", "x", "\ud800", [], [[]], {}, [0], {"a": 1})
NAMES = ("leaves-0.json", "files.json")


@pytest.mark.parametrize("part", full_but([0], range(4)))
def test_random_changes_are_errors_or_immaterial(saved, tmp_path, part, count):
    for seed in range(part, count(12, 400), 4):
        copy = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
        change_at_random(copy, random.Random(seed))
        use(saved, copy, resume=seed % 8 == part)
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)


def change_at_random(folder, draw):
    def change(content):
        for _ in range(draw.randint(1, 3)):
            *parents, key = draw.choice(list(positions(content)))
            parent = content
            for name in parents:
                parent = parent[name]
            kind = draw.randrange(4)
            if kind == 0:
                del parent[key]
            elif kind == 1:  # something from elsewhere in the document
                other = content
                for name in draw.choice(list(positions(content))):
                    other = other[name]
                parent[key] = json.loads(json.dumps(other))
            else:
                parent[key] = draw.choice(JUNK)
            if not content:
                return

    rewrite(folder, change, draw.choice(NAMES))
