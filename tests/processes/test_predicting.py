"""Two processes predict what one does, in the order of the data, and write one folder."""

import errno
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stepfold as sf
from stepfold.runs import prediction_files

COUNT = 46


def examples():
    rng = np.random.default_rng(0)
    return {"x": rng.integers(-9, 9, (COUNT, 3)).astype(np.float32), "id": np.arange(COUNT)}


def wanted():
    return {"score": examples()["x"].sum(-1).tolist(), "id": [*range(COUNT)]}


def step(params, batch):
    return {"score": batch["x"] @ params["w"], "id": batch["id"]}


def state_on(mesh):
    return sf.sharding.place({"w": np.ones(3, np.float32)}, NamedSharding(mesh, PartitionSpec()))


def make_batches(**options):
    return sf.batches(examples(), 8, epochs=1, remainder="pad", **options)


def read(folder):
    files = sorted(Path(folder).glob("rows-*"))
    arrays = [np.load(file) for file in files]
    return {name: np.concatenate([each[name] for each in arrays]).tolist() for name in arrays[0]}


def predicts(start, form, folder):
    """Predict on a mesh; print what is returned, as lists."""
    start()
    devices = jax.devices()
    mesh = sf.make_mesh(devices=devices[::-1] if form == "reversed" else devices)
    if form == "tensor":  # every process has all rows
        mesh = sf.make_mesh((1, 1, -1, 1))
        batches = make_batches(process_index=0, process_count=1)
    else:
        batches = make_batches()
    if form == "prefetched":
        batches = sf.prefetch(batches, sharding=lambda batch: sf.shard_batch(batch, mesh))
    elif form == "generator":  # of which the number is not known
        batches = (batch for batch in make_batches())
    if folder:
        files = sf.predict(step, state_on(mesh), batches, to=folder, shard_rows=5)
        print(json.dumps([file.name for file in files]))
    else:
        found = sf.predict(step, state_on(mesh), batches)
        print(json.dumps({name: array.tolist() for name, array in found.items()}))


@pytest.mark.parametrize("form", ["plain", "reversed", "tensor", "prefetched", "generator"])
def test_both_get_all_rows_in_the_order_of_the_data(processes, form):
    assert [json.loads(output) for output in processes.run(predicts, form, "")] == [wanted()] * 2


@pytest.mark.parametrize("form", ["plain", "generator"])
def test_one_of_them_writes(processes, form, tmp_path):
    both = processes.run(predicts, form, str(tmp_path / "new"))
    names = sorted(path.name for path in (tmp_path / "new").glob("rows-*"))
    assert [json.loads(output) for output in both] == [names] * 2
    assert len(names) == 10
    assert read(tmp_path / "new") == wanted()


def continues(start, form, folder):
    """Fail on the way, and call it again; print how many batches the second call computes."""
    start()
    mesh, calls = sf.make_mesh(), []
    inner = jax.jit(step)

    class Counted:
        lower = None

        def __call__(self, params, batch):
            calls.append(1)
            return inner(params, batch)

    def cut():
        for number, batch in enumerate(make_batches()):
            if number == 5:
                raise KeyboardInterrupt
            yield batch

    class Failing:
        def __len__(self):
            return COUNT

        def __getitem__(self, index):
            if index >= 40:
                raise KeyboardInterrupt
            return {name: x[index] for name, x in examples().items()}

    whole = lambda: (batch for batch in make_batches()) if form == "generator" else make_batches()
    failing = cut() if form == "generator" else sf.batches(Failing(), 8, epochs=1, remainder="pad")
    try:
        sf.predict(step, state_on(mesh), failing, to=folder, shard_rows=5)
    except KeyboardInterrupt:
        print(len([name for name in os.listdir(folder) if name.startswith("rows")]), end=" ")
    sf.predict(Counted(), state_on(mesh), whole(), to=folder, shard_rows=5)
    print(len(calls))


# The files after the first call, and the batches that the second computes, of 6. The number of
# batches of a generator is not known, so one more is pulled ahead.
@pytest.mark.parametrize(("form", "printed"), [("source", "6 3\n"), ("generator", "4 4\n")])
def test_they_continue_together(processes, form, printed, tmp_path):
    assert processes.run(continues, form, str(tmp_path)) == [printed] * 2
    assert read(tmp_path) == wanted()


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuses(start, kind, folder):
    """Call it with what one process cannot serve; print the error."""
    start()
    mesh, me = sf.make_mesh(), jax.process_index()
    state, batches = state_on(mesh), make_batches()
    if kind == "local":
        state = {"w": np.ones(3, np.float32)}
    elif kind == "counts":
        batches = list(make_batches())[: 6 - me]
    elif kind == "state":
        sf.predict(step, state, batches, to=folder)
        state, batches = jax.tree.map(lambda x: 2 * x, state), make_batches()
    write = prediction_files._write_arrays
    if kind == "disk" and me == 0:
        prediction_files._write_arrays = fail
    try:
        sf.predict(step, state, batches, to=folder, shard_rows=5)
    except sf.StepfoldError as error:
        print(type(error).__name__, error)
    finally:
        prediction_files._write_arrays = write


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("local", "ConfigError to: expected a state on a mesh of all 2 processes, for one folder"),
        ("counts", "DataError predict: expected the same number of batches in every process, got"),
        (
            "state",
            "to: expected a folder of predictions of the same state, got one whose state/w differ",
        ),
        ("disk", "0005.npz: cannot be written: No space left on"),
    ],
)
def test_what_one_refuses_both_refuse(processes, kind, words, tmp_path):
    assert all(words in output for output in processes.run(refuses, kind, str(tmp_path)))


def predicts_alone(start):
    """Predict own rows with a state that the other process does not share."""
    start()
    found = sf.predict(step, {"w": np.ones(3, np.float32)}, make_batches())
    print(json.dumps(found["id"].tolist()))


def test_with_a_state_of_its_own_each_predicts_its_own_rows(processes):
    ids = [json.loads(output) for output in processes.run(predicts_alone)]
    own = lambda me: [row for row in range(COUNT) if row % 8 // 4 == me]
    assert ids == [own(0), own(1)]
