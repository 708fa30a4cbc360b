"""An error in one process of a run ends all of them with that error, within seconds."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import stepfold as sf
from stepfold.checkpoint.store import DirectoryStore

from . import launch

AT = 10  # the step of the error, or soon after it
# Where a process raises. In the first ones, it can still take part in the steps of the others.
DEFERRED = ("log", "evaluated", "epoch", "sink", "save")
AT_ONCE = ("data", "part", "measure", "held-out")
BUSY = ("data", "log", "evaluated", "measure", "held-out", "save", "part")


def fails(start, folder, where, process, others, kind):
    """Fit with steps of 20 ms; one process raises, the others are slow at another place."""
    me = start(heartbeat=100, shutdown=100).process
    failed, slow, pulled = Path(folder, "failed"), [], itertools.count()

    def happens(place, step=AT):
        """Raise in one process; be slow in the others, at the first such place afterwards."""
        if me == process and place == where and step >= AT and not failed.exists():
            failed.touch()
            # An error of the system in a temporary save does not end a run.
            raise (ValueError if kind == "temporary" else OSError)("cut here")
        if me != process and place == others and failed.exists() and not slow:
            slow.append(place)
            time.sleep(2)

    def loss_fn(params, batch, key):
        return sf.mean(((batch["x"] - params["w"]) ** 2).mean(-1))

    def row():
        return {"x": np.ones((4, 8), np.float32)}

    def rows(count):
        for _ in range(count):
            time.sleep(0.02)
            happens("data", next(pulled))
            yield row()

    class Known(list):
        def __iter__(self):
            return rows(len(self))

    def held_out():
        for _ in range(3):
            happens("held-out")
            yield row()

    def measure(state):
        happens("measure", int(state.step))
        return {"norm": float(optax.tree.norm(state.params))}

    class Hook:
        step = 0

        def __call__(self, event):
            self.step = event.step
            happens("log" if event.kind == "train" else "evaluated", event.step)

        if kind != "generator":  # which has no epochs

            def end_epoch(self, epoch):
                happens("epoch")

        def flush(self):
            happens("save", self.step)

    class Sink(sf.writers.Writer):
        def write_scalars(self, step, scalars):
            happens("sink", step)

    class Part:
        name, done = "a part", 0

        def next(self, run):
            return run.step + 5 - run.step % 5

        def is_due(self, run):
            return run.step % 5 == 0 and run.step != self.done

        def __call__(self, run):
            self.done = run.step
            happens("part", run.step)
            return run

    is_last, delete = "last" in kind, DirectoryStore.delete
    checkpoints = sf.Checkpoints(
        Path(f"{folder}-bucket").as_uri() if "bucket" in kind else None,
        every=60 if is_last or kind == "temporary" else 12, at_start=True, keep=1,
        temporary=sf.Temporary(f"{folder}-tier", every=4) if kind == "temporary" else None,
    )  # fmt: skip
    DirectoryStore.delete = lambda store, step: (happens("delete"), delete(store, step))

    async def write_arrays(handler, *args, **options):
        if me != process and others == "arrays":
            time.sleep(2)
        if me == process and where == "arrays":  # orbax itself writes nothing then
            return [ThreadPoolExecutor(1).submit(lambda: (time.sleep(1), happens("arrays")))]
        return await async_save(handler, *args, **options)

    async_save = ocp.PyTreeCheckpointHandler.async_save
    ocp.PyTreeCheckpointHandler.async_save = write_arrays

    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    plan = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=plan)
    batches = rows(400) if kind == "generator" else Known([None] * (8 if kind == "epochs" else 400))
    sf.fit(
        sf.make_train_step(loss_fn, tx), state, batches, log_every=5, run_dir=folder,
        hooks=[Hook(), Part(), sf.log_to(Sink())], checkpoints=checkpoints,
        evaluation=[
            sf.Evaluation(measure, every=10, name="measured"),
            sf.Evaluation(sf.make_eval_step(loss_fn), held_out, every=11),
        ],
        **({"epochs": 50} if kind == "epochs" else {"steps": 25 if is_last else 400}),
    )  # fmt: skip


def check(folder, where, process, others, kind="list"):
    Path(folder, "run").mkdir()
    began = time.monotonic()
    args = (str(Path(folder, "run")), where, process, others, kind)
    ends = launch.ends_of_processes(fails, 2, args=args, timeout=80)
    seconds = time.monotonic() - began
    for end in ends:
        assert end.code == 1, launch.report(ends)
        error = "ValueError" if kind == "temporary" else "OSError"
        assert f"{error}: cut here" in end.errors, launch.report(ends)
    assert seconds < 60, launch.report(ends)
    return ends


def test_an_error_of_a_hook_ends_all_after_a_save(tmp_path):
    first, second = check(tmp_path, "log", 1, "evaluated")
    saved = sf.checkpoint.latest_step(tmp_path / "run" / "checkpoints")
    words = f"process 1 raised an error, so all processes stopped at step {saved}; see its log: OSE"
    assert f"StepfoldError: {words}" in first.errors
    assert AT <= saved < 200
    assert "stepfold: process" not in first.errors + second.errors  # none was ended by a timer


def test_an_error_of_the_data_ends_all(tmp_path):
    _, second = check(tmp_path, "data", 0, None)
    assert "stepfold: process 0 raised OSError: cut here; this process ends too, " in second.errors


@pytest.mark.full
@pytest.mark.parametrize("others", [None, *BUSY])
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("where", [*DEFERRED, *AT_ONCE])
def test_an_error_at_each_place_ends_all_wherever_they_are(tmp_path, where, process, others):
    if where != "sink" or process == 0:  # only process 0 has one
        check(tmp_path, where, process, others, "epochs" if where == "epoch" else "list")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        *itertools.product(["temporary", "bucket"], [None, "measure", "held-out", "save"]),
        *itertools.product(["last", "last in a bucket"], [None, "save"]),
    ],
)
@pytest.mark.parametrize("process", [0, 1])
def test_so_does_one_in_the_background_of_each_kind_of_save(tmp_path, kind, process, others):
    check(tmp_path, "save", process, others, kind)


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "process", "others"),
    [("arrays", 0, None), ("arrays", 1, None), ("save", 0, "arrays")],
)
def test_so_does_one_while_arrays_are_written(tmp_path, where, process, others):
    check(tmp_path, where, process, others)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["list", "last"])
def test_so_does_one_of_process_0_after_a_save(tmp_path, kind):
    check(tmp_path, "delete", 0, None, kind)


@pytest.mark.full
@pytest.mark.parametrize("where", ["log", "data"])
def test_so_does_one_where_processes_vote_on_each_batch(tmp_path, where):
    check(tmp_path, where, 1, "log", "generator")
