"""`diff` finds where two runs part, and names what was changed on purpose."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.debug.diff import diff
from stepfold.errors import ConfigError

ROWS = 96
DATA = {
    "x": np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=ROWS).astype(np.float32),
}


def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return sf.mean(error**2)


def other_loss_fn(params, batch, key):
    return loss_fn(params, batch, key), {"size": sf.mean(jnp.abs(params["w"]))}


def scaled_loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return sf.mean(error**2 + 1e-3 * error**4)


class Change(NamedTuple):
    """What differs from the first run."""

    rate: float = 1e-2
    loss: Any = loss_fn
    data: Any = DATA
    seed: int = 0
    batch_size: int = 8
    key: int = 0
    hooks: Any = ()
    log_every: int = 10
    mesh: Any = None
    config: Any = None


def train(folder: Path, steps: int = 60, *, every: int = 20, **changes: Any) -> Path:
    change = Change(**changes)
    tx = optax.adam(change.rate)
    plan = None

    def make() -> Any:
        params = {"w": jnp.ones(4), "b": jnp.zeros(())}
        return sf.init_state(params, tx, jax.random.key(change.key), sharding=plan)

    if change.mesh is not None:
        plan = sf.make_sharding(jax.eval_shape(make), change.mesh)
    sf.fit(
        sf.make_train_step(change.loss, tx),
        make,
        sf.batches(change.data, change.batch_size, seed=change.seed),
        steps=steps,
        run_dir=sf.RunDirectory(
            folder,
            config=change.config or {"adam": {"rate": change.rate}},
            compilation_cache=False,
        ),
        checkpoints=sf.Checkpoints(every=every, keep=None),
        hooks=[sf.progress("none"), *change.hooks],
        log_every=change.log_every,
    )
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def copy(first, tmp_path):
    return Path(shutil.copytree(first, tmp_path / "copy"))


def kinds(found) -> set[str]:
    return {cause.kind for cause in found.causes}


def replace_at(step):
    def hook(event):
        if event.step == step:
            halved = jax.tree.map(lambda leaf: leaf / 2, event.state.params)
            return sf.Replace(event.state._replace(params=halved), "halved")
        return None

    hook.needs_exact_state = True
    return hook


class FlippedBit:
    """Change one bit of a parameter after a step, as a fault of the memory does."""

    name = "a fault"

    def __init__(self, step):
        self.step, self.is_done = step, False

    def next(self, run):
        return self.step if run.step < self.step else float("inf")

    def is_due(self, run):
        return run.step == self.step and not self.is_done

    def __call__(self, run):
        self.is_done = True
        bits = np.array(run.state.params["w"]).view(np.uint32)
        bits[2] ^= 1 << 12
        params = {**run.state.params, "w": jnp.asarray(bits.view(np.float32))}
        return run._replace(state=run.state._replace(params=params))


def changed(row, value):
    data = {name: array.copy() for name, array in DATA.items()}
    data["y"][row] = value
    return data


def swapped(one, other):
    data = {name: array.copy() for name, array in DATA.items()}
    for array in data.values():
        array[[one, other]] = array[[other, one]]
    return data


def first_use(row):
    """Return the step whose batch is the first to have a row."""
    numbers = sf.batches({"row": np.arange(ROWS)}, 8, seed=0)
    return next(step for step in range(1, 60) if row in next(numbers)["row"])


def test_equal_runs_have_no_difference(first, tmp_path):
    found = diff(first, train(tmp_path / "b"))
    assert (found.differs_at, found.equal_until, found.missing) == (None, 60, [])
    assert {"config", "batches", "seed", "version", "device", "program"} <= {*found.equal}
    assert str(found).startswith("no difference up to step 60 of 60")


CAUSES = {
    "hyper-parameter": ({"rate": 2e-2}, "config: adam/rate 0.01 -> 0.02"),
    "loss": ({"loss": scaled_loss_fn}, "program: of the step"),
    "seed of the batches": ({"seed": 1}, "seed: batches 0 -> 1"),
    "batch size": ({"batch_size": 6}, "batches: batch_size 8 -> 6"),
    "length of the data": (
        {"data": {name: array[:80] for name, array in DATA.items()}},
        "batches: length 96 -> 80",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_and_parts_the_runs_at_once(first, tmp_path, name):
    changes, cause = CAUSES[name]
    found = diff(first, train(tmp_path / "b", **changes))
    assert cause in map(str, found.causes)
    assert found.equal_until == 0 < found.differs_at <= 10
    assert found.checkpoint == 20
    assert "params/w" in found.leaves


@pytest.mark.parametrize("row", [3, 50])
@pytest.mark.parametrize("change", ["value", "swap"])
def test_contents_of_the_data_are_what_is_left(first, tmp_path, row, change):
    data = changed(row, 3.0) if change == "value" else swapped(row, (row + 7) % ROWS)
    uses = [first_use(row)] if change == "value" else [first_use(row), first_use((row + 7) % ROWS)]
    found = diff(first, train(tmp_path / "b", data=data))
    assert kinds(found) == {"unknown"}
    assert "contents of the data" in str(found.causes[0])
    assert found.equal_until < min(uses) <= found.differs_at <= -(-min(uses) // 10) * 10


@pytest.mark.parametrize("step", [13, 27])
def test_a_flipped_bit_is_bounded_by_rows_and_checkpoints(first, tmp_path, step):
    found = diff(first, train(tmp_path / "b", hooks=[FlippedBit(step)]))
    assert kinds(found) == {"unknown"}
    assert "fault of the hardware" in str(found.causes[0])
    assert found.equal_until <= step < found.differs_at <= step + 10


def test_a_setting_of_jax_changes_the_program(first, tmp_path):
    with jax.default_matmul_precision("float32"):  # it changes no bit on a CPU
        found = diff(first, train(tmp_path / "b"))
    assert found.differs_at is None
    assert "program: of the step" in found.others


def test_a_replaced_state_is_a_note_at_its_step(first, tmp_path):
    found = diff(first, train(tmp_path / "b", hooks=[replace_at(30)]))
    assert next(cause for cause in found.causes if cause.kind == "note").since == 30
    assert "halved" in str(found)
    assert 30 <= found.equal_until < found.differs_at <= 40


def test_a_resume_with_another_rate_is_named_with_its_step(first, tmp_path):
    train(tmp_path / "b", 40)
    with pytest.warns(UserWarning, match="config: changed"):
        train(tmp_path / "b", rate=2e-2)
    found = diff(first, tmp_path / "b")
    (cause,) = (each for each in found.causes if each.kind == "config")
    assert cause.since == 40
    assert f"adam/rate 0.01 -> 0.02, from the resume at step 40 of {tmp_path / 'b'}" in cause.what
    assert 40 <= found.equal_until < found.differs_at <= 50


def test_a_resume_that_changes_nothing_makes_no_difference(first, tmp_path):
    train(tmp_path / "b", 40)
    train(tmp_path / "b")
    found = diff(first, tmp_path / "b")
    assert (found.differs_at, found.equal_until) == (None, 60)


def test_another_version_is_named(copy, first):
    info = json.loads((copy / "run.json").read_text())
    info["versions"]["jax"] = "0.0.1"
    (copy / "run.json").write_text(json.dumps(info))
    found = diff(first, copy)
    assert found.differs_at is None
    assert any("jax" in other for other in found.others)


@pytest.mark.full
def test_runs_on_other_meshes_compare_rows(first, tmp_path):
    found = diff(first, train(tmp_path / "b", mesh=sf.make_mesh((-1,), ("data",))))
    assert any(cause.kind == "device" for cause in found.causes) or found.differs_at is None
    assert diff(first, tmp_path / "b", rtol=1e-3).differs_at is None


def test_other_log_points_and_hooks_compare_by_what_they_share(first, tmp_path):
    found = diff(first, train(tmp_path / "b", log_every=7, hooks=[sf.throughput()]))
    assert (found.differs_at, found.equal_until) == (None, 60)  # by checkpoints
    assert any("log_every" in other for other in found.others)


def test_rtol_finds_the_first_step_beyond_it_and_the_growth(first, tmp_path):
    other = train(tmp_path / "b", rate=1.0001e-2)
    exact, close = diff(first, other), diff(first, other, rtol=1e-4)
    assert exact.differs_at <= 20
    assert close.differs_at is None or close.differs_at > exact.differs_at
    assert all(0 <= value < 1e-2 for value in exact.growth.values())
    assert close.checkpoint is None
    with pytest.raises(ConfigError, match="rtol"):
        diff(first, other, rtol=-1.0)


def test_another_order_of_arguments_says_the_same(first, tmp_path):
    other = train(tmp_path / "b", seed=3)
    forward, backward = diff(first, other), diff(other, first)
    assert forward.differs_at == backward.differs_at
    assert [*forward.leaves] == [*backward.leaves]
    assert "seed: batches 3 -> 0" in map(str, backward.causes)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "checkpoints"])
def test_what_is_absent_is_said_and_the_rest_compared(copy, first, name):
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = diff(first, copy)
    assert found.differs_at is None
    assert found.equal_until == 60
    assert any(str(copy) in text for text in found.missing)


def test_damage_is_said_and_the_rest_compared(copy, first):
    manifest = copy / "checkpoints" / "40" / "state" / "leaves-0.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"params/w", b"params/v"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("not JSON\n")
    (copy / "run.json").write_text("{")
    found = diff(first, copy)
    assert (found.differs_at, found.equal_until) == (None, 60)
    assert len(found.missing) >= 3


def test_a_leaf_in_one_run_alone_differs(first, tmp_path):
    def loss(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    tx = optax.adam(1e-2)
    state = sf.init_state({"w": jnp.ones(4)}, tx, jax.random.key(0))
    sf.fit(
        sf.make_train_step(loss, tx), state, sf.batches(DATA, 8, seed=0), steps=20,
        run_dir=tmp_path / "b", checkpoints=sf.Checkpoints(every=20), hooks=sf.progress("none"),
    )  # fmt: skip
    found = diff(first, tmp_path / "b")
    assert "params/b" in found.leaves
    assert any(cause.kind == "state" for cause in found.causes)


@pytest.mark.parametrize("path", ["nothing", "file"])
def test_what_is_no_run_is_refused(first, tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        diff(first, tmp_path / path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither"):
        diff(first, tmp_path / "empty")


def test_the_command_prints_and_returns_one_for_a_difference(first, copy, tmp_path):
    run = lambda *paths: subprocess.run(
        [sys.executable, "-m", "stepfold", "diff", *map(str, paths)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    same, absent = run(first, copy), run(first, tmp_path / "absent")
    assert (same.returncode, absent.returncode) == (0, 2)
    assert "no difference up to step 60 of 60" in same.stdout
    assert "check the path" in absent.stderr


# With the program of the runs


def program(rate=1e-2, loss=loss_fn, data=DATA, seed=0, batch_size=8):
    step = sf.make_train_step(loss, optax.adam(rate))
    return step, sf.batches(data, batch_size, seed=seed)


def new_state():
    params = {"w": jnp.ones(4), "b": jnp.zeros(())}
    return sf.init_state(params, optax.adam(1e-2), jax.random.key(0))


def diff_again(first, other, **changes):
    (step, batches), (step_b, batches_b) = program(), program(**changes)
    given = {"step": step, "batches": batches, "state": new_state()}
    if changes:
        given |= {"step_b": step_b, "batches_b": batches_b}
    return diff(first, other, **given).replayed


@pytest.mark.parametrize("row", [11, 70])
def test_a_changed_value_is_found_in_its_step_and_row(first, tmp_path, row):
    data = changed(row, 3.0)
    found = diff_again(first, train(tmp_path / "b", data=data), data=data)
    assert found.step == first_use(row)
    assert found.inputs == ["batch"]
    batches = sf.batches({"row": np.arange(ROWS)}, 8, seed=0)
    rows = [next(batches)["row"] for _ in range(found.step)][-1]
    assert found.batch == [f"y: row {[*rows].index(row)}".join(["batch/", ""])]


def test_another_line_of_the_loss_is_named(first, tmp_path):
    other = train(tmp_path / "b", loss=scaled_loss_fn)
    found = diff_again(first, other, loss=scaled_loss_fn)
    assert (found.step, found.inputs) == (1, ["program"])
    line = scaled_loss_fn.__code__.co_firstlineno + 2
    assert f"test_diff.py:{line} (scaled_loss_fn)" in found.where


@pytest.mark.full
def test_another_constant_of_the_optimizer_is_named(first, tmp_path):
    found = diff_again(first, train(tmp_path / "b", rate=2e-2), rate=2e-2)
    assert (found.step, found.inputs) == (1, ["program"])
    assert "mul at" in found.where


@pytest.mark.full
def test_more_metrics_are_no_difference_of_the_program(first, tmp_path):
    other = train(tmp_path / "b", loss=other_loss_fn)
    found = diff(first, other)
    assert found.differs_at is None
    assert any("program" in each for each in found.others)


@pytest.mark.parametrize("step", [27, 33])
def test_a_fault_is_of_the_run_that_has_it(first, tmp_path, step):
    other = train(tmp_path / "b", hooks=[FlippedBit(step)])
    found = diff_again(first, other)
    assert (found.step, [*found.faulty]) == (None, [str(other)])
    assert found.replays == 40  # of both runs, from step 20 to 40
    assert [*diff_again(other, first).faulty] == [str(other)]


@pytest.mark.full
def test_another_key_is_named(first, tmp_path):
    assert diff_again(first, train(tmp_path / "b", key=1)).inputs == ["key"]


def test_batches_return_to_their_position(first, tmp_path):
    other = train(tmp_path / "b", hooks=[FlippedBit(33)])
    step, batches = program()
    next(batches)
    before = batches.get_state()
    found = diff(first, other, step=step, batches=batches, state=new_state())
    assert [*found.replayed.faulty] == [str(other)]
    assert batches.get_state() == before


def test_batches_of_runs_without_a_shared_checkpoint_have_to_be_new(first, tmp_path):
    other = train(tmp_path / "b", seed=1)
    (step, batches), (_, batches_b) = program(), program(seed=1)
    given = {"step": step, "batches_b": batches_b, "state": new_state()}
    found = diff(first, other, batches=batches, **given)
    assert (found.replayed.step, found.replayed.inputs) == (1, ["batch"])
    next(batches)
    with pytest.raises(ConfigError, match="expected those of a run at step 0, got some at step 1"):
        diff(first, other, batches=batches, **given)


def test_parts_of_the_program_are_asked_for(first, copy):
    step, batches = program()
    for given, name in (
        ({"batches": batches}, "step"),
        ({"step": step, "batches": batches}, "state"),
        ({"step": step, "state": new_state()}, "batches"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}:"):
            diff(first, copy, **given)
