"""`diff` finds where two runs part, and names what was changed on purpose."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.s3 import shared_server, use_credentials

import stepfold as sf
from stepfold.__main__ import main
from stepfold.checkpoint.checksums import add_checksum, without_checksum
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
    url: Any = None


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
            upload=change.url,
            config=change.config or {"adam": {"rate": change.rate}},
            compilation_cache=False,
        ),
        checkpoints=sf.Checkpoints(change.url, every=every, keep=None),
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


def counts(found):
    """Return the rows, the checkpoints and the leaves that were compared, and the last step."""
    names = ("rows", "checkpoints", "leaves")
    return *(found.compared[name] for name in names), found.compared_until


def replace_at(step):
    def hook(event):
        if event.step == step:
            halved = jax.tree.map(lambda leaf: leaf / 2, event.state.params)
            return sf.hooks.Replace(event.state._replace(params=halved), "halved")
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
    assert (found.step, found.equal_until, found.missing) == (None, 60, [])
    assert {"config", "batches", "seed", "versions", "devices", "program"} <= {*found.equal}
    assert counts(found) == (6, 3, 9, 60)
    assert str(found).startswith("equal up to step 60, the last of both\n")
    assert "compared  6 rows of metrics, 3 checkpoints of 9 leaves" in str(found)


def test_a_difference_without_an_effect_is_no_cause(first, tmp_path):
    """A label of a config differs from the start on, and the states part after a checkpoint."""
    hooks = [FlippedBit(27)]
    found = diff(first, train(tmp_path / "b", hooks=hooks, config={"label": "b"}))
    assert kinds(found) == {"data", "hardware", "compiler"}
    assert "config: label nothing -> b" in found.others


def test_a_setting_of_jax_changes_the_program(first, tmp_path):
    with jax.default_matmul_precision("float32"):  # it changes no bit on a CPU
        found = diff(first, train(tmp_path / "b"))
    assert found.is_equal
    assert "program: of the step" in found.others


def test_a_resume_that_changes_nothing_makes_no_difference(first, tmp_path):
    train(tmp_path / "b", 40)
    train(tmp_path / "b")
    found = diff(first, tmp_path / "b")
    assert (found.step, found.equal_until) == (None, 60)


def test_another_version_is_named(copy, first):
    info = json.loads((copy / "run.json").read_text())
    info["versions"]["jax"] = "0.0.1"
    (copy / "run.json").write_text(json.dumps(info))
    found = diff(first, copy)
    assert found.is_equal
    assert any("versions: jax" in other for other in found.others)


def test_leaves_with_other_shards_are_not_compared(copy, first):
    for path in (copy / "checkpoints").glob("*/state/leaves-0.json"):
        manifest = json.loads(without_checksum(path.read_bytes()))
        other = [
            [name, [[0, 2]], 1] for name, region, _ in manifest["shards"] if region == [[0, 4]]
        ]
        kept = [shard for shard in manifest["shards"] if shard[1] != [[0, 4]]]
        path.write_bytes(add_checksum(json.dumps(manifest | {"shards": kept + other}).encode()))
    found = diff(first, copy)
    assert (found.is_equal, counts(found)) == (True, (6, 3, 6, 60))
    assert found.missing == ["checkpoints: 3 of 9 leaves have other shards"]


@pytest.mark.full
def test_runs_on_other_meshes_compare_rows(first, tmp_path):
    found = diff(first, train(tmp_path / "b", mesh=sf.make_mesh((-1,), ("data",))))
    assert any(cause.kind == "mesh" for cause in found.causes) or found.step is None
    assert diff(first, tmp_path / "b", rtol=1e-3).step is None


def test_other_log_points_and_hooks_compare_by_what_they_share(first, tmp_path):
    found = diff(first, train(tmp_path / "b", log_every=7, hooks=[sf.hooks.throughput()]))
    assert (found.step, found.equal_until) == (None, 60)  # by checkpoints
    assert any("log_every" in other for other in found.others)


def test_rtol_finds_the_first_step_beyond_it_and_the_growth(first, tmp_path):
    other = train(tmp_path / "b", rate=1.0001e-2)
    exact, close = diff(first, other), diff(first, other, rtol=1e-4)
    assert exact.step <= 20
    assert close.step is None or close.step > exact.step
    assert all(0 <= value < 1e-2 for value in exact.growth.values())
    assert close.checkpoint is None
    assert any("as rtol asks" in each for each in close.missing)
    with pytest.raises(ConfigError, match="rtol"):
        diff(first, other, rtol=-1.0)


def test_another_order_of_arguments_says_the_same(first, tmp_path):
    other = train(tmp_path / "b", seed=3)
    forward, backward = diff(first, other), diff(other, first)
    assert forward.step == backward.step
    assert [*forward.leaves] == [*backward.leaves]
    assert "batches: seed 3 -> 0" in map(str, backward.causes)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "checkpoints"])
def test_what_is_absent_is_said_and_the_rest_compared(copy, first, name):
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = diff(first, copy)
    assert (found.is_equal, found.compared_until) == (True, 60)
    assert any(f"{copy}: {name}" in text for text in found.missing)
    assert (found.compared["rows"] == 0) == (name == "metrics.jsonl")
    assert (found.compared["checkpoints"] == 0) == (name == "checkpoints")
    assert (found.equal == []) == (name == "run.json")


def test_damage_is_said_and_the_rest_compared(copy, first):
    manifest = copy / "checkpoints" / "40" / "state" / "leaves-0.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"params/w", b"params/v"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("not JSON\n")
    (copy / "run.json").write_text("{")
    found = diff(first, copy)
    assert (found.is_equal, found.equal_until) == (True, 60)
    assert [text.removeprefix(f"{copy}: ").partition(":")[0] for text in found.missing] == [
        "run.json", "metrics.jsonl", "checkpoint of step 40"
    ]  # fmt: skip
    assert found.compared["checkpoints"] == 2


JSON_OF_ANOTHER_FORM = ["[]", '{"attempts": 3}', '{"attempts": [{}]}', '{"rollbacks": [[1]]}', "3"]


@pytest.mark.parametrize("content", JSON_OF_ANOTHER_FORM)
def test_a_run_json_of_another_form_is_damaged(copy, first, content):
    (copy / "run.json").write_text(content)
    found = diff(first, copy)
    assert found.is_equal
    assert [f"{copy}: run.json: it is damaged" in text for text in found.missing] == [True]


def test_runs_that_share_nothing_are_not_equal(copy, first):
    """With other rows and no checkpoints, there is nothing to compare."""
    shutil.rmtree(copy / "checkpoints")
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "step": row["step"] - 5}) for row in rows]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = diff(first, copy)
    assert (found.is_equal, found.exit_code, found.step) == (None, 2, None)
    assert found.compared["rows"] == 0
    assert str(found).startswith("no difference up to step 0, and no more to compare")


@pytest.mark.parametrize("with_rtol", [False, True])
def test_a_run_that_ends_earlier_is_not_equal(first, tmp_path, with_rtol):
    found = diff(first, train(tmp_path / "b", 40), rtol=1e-3 * with_rtol)
    assert (found.is_equal, found.exit_code, found.steps) == (None, 2, (60, 40))
    assert "no difference up to step 40" in str(found)


def test_rows_without_the_last_step_are_not_equal(copy, first):
    shutil.rmtree(copy / "checkpoints")
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(rows[:-1]))
    assert diff(first, copy).is_equal is None


def test_a_run_that_is_running_is_compared_up_to_there(copy, first):
    info = json.loads((copy / "run.json").read_text())
    info["attempts"][-1] |= {"ended": None, "to": 60}
    (copy / "run.json").write_text(json.dumps(info))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "train/lo')
    found = diff(first, copy)
    assert found.step is None
    assert any("it is running, or was killed" in text for text in found.missing)


def test_metrics_that_differ_alone_say_so(copy, first):
    path = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["train/loss"] += 0.5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = diff(first, copy)
    assert (found.step, found.checkpoint, found.equal_until) == (20, None, 60)
    assert kinds(found) == {"metric"}
    old, new = found.rows["train/loss"]
    assert new == old + 0.5
    assert "the states are equal up to step 60" in str(found)


def test_the_directory_of_a_series_is_compared_by_itself(first, copy):
    found = diff(first / "checkpoints", copy / "checkpoints")
    assert found.is_equal
    assert counts(found) == (0, 3, 9, 60)


def test_checkpoints_elsewhere_are_found(first, copy, tmp_path):
    for directory in (str(tmp_path / "moved"), "../renamed"):
        place = copy / directory
        (copy / "checkpoints").rename(place)
        info = json.loads((copy / "run.json").read_text())
        info["arguments"]["checkpoints"]["directory"] = directory
        (copy / "run.json").write_text(json.dumps(info))
        assert counts(diff(first, copy)) == (6, 3, 9, 60)
        place.rename(copy / "checkpoints")


def place_of(kind, folder, monkeypatch):
    if kind == "file":
        return f"file://{folder}"
    use_credentials(monkeypatch)
    return shared_server().url(folder.name)


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.full)])
def test_a_run_in_object_storage_is_compared(first, tmp_path, monkeypatch, kind):
    url = place_of(kind, tmp_path / "bucket", monkeypatch)
    equal, other = train(tmp_path / "b", url=url), train(tmp_path / "c", rate=2e-2)
    found = diff(first, url)
    assert (found.is_equal, found.missing) == (True, [])
    assert counts(found) == (6, 3, 9, 60)
    assert diff(equal, url).is_equal  # its run.json names the bucket of the checkpoints
    found = diff(url, other)
    assert (found.checkpoint, found.cause.what) == (20, "adam/rate 0.01 -> 0.02")


WITHOUT_JAX = """
import sys
sys.modules["jax"] = None  # so that its import fails
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from stepfold.__main__ import main
from stepfold.checkpoint.checksums import add_checksum, without_checksum
code = main(["diff", *sys.argv[1:]])
assert not [path for path in opened if "/d/" in path or "ocdbt" in path], opened
sys.exit(code)
"""


def test_files_are_compared_without_jax_and_without_arrays(first, tmp_path):
    other = train(tmp_path / "b", rate=2e-2)
    command = [sys.executable, "-c", WITHOUT_JAX, str(first), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.strip() == str(diff(first, other))


def test_long_runs_take_seconds(first, tmp_path):
    """10,000 rows and 100 checkpoints."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for step in range(100, 10_001, 100):
            state = tmp_path / name / "checkpoints" / str(step) / "state"
            state.mkdir(parents=True)
            shutil.copy(first / "checkpoints/60/state/leaves-0.json", state)
        with (tmp_path / name / "metrics.jsonl").open("w") as file:
            for step in range(1, 10_001):
                file.write(json.dumps({"step": step, "train/loss": 1 / step}) + "\n")
    start = time.process_time()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert time.process_time() - start < 5
    assert found.is_equal
    assert counts(found) == (10_000, 100, 9, 10_000)


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
    assert any(cause.kind == "parameters" for cause in found.causes)


@pytest.mark.parametrize("path", ["nothing", "file"])
def test_what_is_no_run_is_refused(first, tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        diff(first, tmp_path / path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="got none of them; give a run_dir of fit"):
        diff(first, tmp_path / "empty")


SCRIPT = """
import jax, jax.numpy as jnp, optax, stepfold as sf
from tests.debug.test_diff import new_state, program

def make(config):
    return new_state(), *program(rate=config["adam"]["rate"])
"""


def test_the_command_has_three_exit_codes(first, copy, tmp_path, capsys):
    other = train(tmp_path / "b", rate=2e-2)
    shutil.rmtree(copy / "checkpoints")
    command = lambda *arguments: main(["diff", *map(str, arguments)])
    assert command(first, copy) == 0
    assert capsys.readouterr().out.startswith("equal up to step 60, the last of both\n")
    assert command(first, other, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["is_equal"]) == (10, False)
    assert found["causes"][0] == {"kind": "config", "what": "adam/rate 0.01 -> 0.02", "since": 0}
    assert command(first, tmp_path / "absent") == 2
    assert "check the path" in capsys.readouterr().err
    (copy / "metrics.jsonl").unlink()
    assert command(first, copy) == 2


@pytest.mark.full
def test_the_command_runs_the_steps_of_a_script_again(first, tmp_path, capsys):
    other = train(tmp_path / "b", rate=2e-2)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["diff", str(first), str(other), "--replay", f"{tmp_path}/train.py:make"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("first difference: step 1 of 60\n")
    assert "  cause     program: mul at " in printed
    assert main(["diff", str(first), str(other), "--replay", f"{tmp_path}/train.py:made"]) == 2
    assert "did you mean 'make'?" in capsys.readouterr().err


def test_values_that_are_not_finite_are_text_in_json(copy, first):
    path = copy / "metrics.jsonl"
    text = path.read_text().splitlines()
    text[3] = json.dumps(json.loads(text[3]) | {"train/loss": float("nan")})
    path.write_text("\n".join(text) + "\n")
    found = diff(first, copy)
    assert np.isnan(found.rows["train/loss"][1])
    assert found.as_json()["rows"]["train/loss"][1] == "NaN"


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
    return diff(first, other, **given)


def faulty(found):
    """Return the runs that have not saved what their programs compute."""
    return [each.what.partition(" has not ")[0] for each in found.causes if each.kind == "fault"]


@pytest.mark.parametrize("row", [11, 70])
def test_a_changed_value_is_found_in_its_step_and_row(first, tmp_path, row):
    data = changed(row, 3.0)
    found = diff_again(first, train(tmp_path / "b", data=data), data=data)
    assert found.step == first_use(row)
    batches = sf.batches({"row": np.arange(ROWS)}, 8, seed=0)
    rows = [next(batches)["row"] for _ in range(found.step)][-1]
    assert [*map(str, found.causes)] == [f"batch: batch/y: row {[*rows].index(row)}"]
    assert (found.equal_until, found.replays) == (found.step - 1, 2 * found.step % 40 or 40)
    assert str(found).startswith(f"first difference: step {found.step} of 60\n")


def test_batches_may_be_arrays(tmp_path):
    """A batch without names, and a step that is given once."""
    x, tx = np.linspace(-1, 1, 32, dtype=np.float32), optax.sgd(0.1)
    step = sf.make_train_step(lambda params, batch, key: sf.mean((params - batch) ** 2), tx)
    make = lambda: sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    other = np.where(np.arange(32) == 17, np.float32(5), x)
    for name, data in (("a", x), ("b", other)):
        sf.fit(
            step, make(), sf.batches(data, 4, seed=0), steps=8, run_dir=tmp_path / name,
            hooks=sf.progress("none"), log_every=4,
        )  # fmt: skip
    batches = [sf.batches(data, 4, seed=0) for data in (x, other)]
    found = diff(
        tmp_path / "a", tmp_path / "b", step=step, state=make(),
        batches=batches[0], batches_b=batches[1],
    )  # fmt: skip
    numbers = sf.batches(np.arange(32), 4, seed=0)
    places = [np.flatnonzero(next(numbers) == 17) for _ in range(8)]
    first_use = next(number for number, place in enumerate(places, 1) if len(place))
    assert found.step == first_use
    assert str(found.cause) == f"batch: batch: row {places[first_use - 1][0]}"


def test_another_line_of_the_loss_is_named(first, tmp_path):
    other = train(tmp_path / "b", loss=scaled_loss_fn)
    found = diff_again(first, other, loss=scaled_loss_fn)
    assert (found.step, found.cause.kind) == (1, "program")
    line = scaled_loss_fn.__code__.co_firstlineno + 2
    assert f"test_diff.py:{line} (scaled_loss_fn)" in found.cause.what


@pytest.mark.full
def test_another_constant_of_the_optimizer_is_named(first, tmp_path):
    found = diff_again(first, train(tmp_path / "b", rate=2e-2), rate=2e-2)
    assert (found.step, found.cause.kind) == (1, "program")
    assert "mul at" in found.cause.what


@pytest.mark.full
def test_more_metrics_are_no_difference_of_the_program(first, tmp_path):
    other = train(tmp_path / "b", loss=other_loss_fn)
    found = diff(first, other)
    assert found.step is None
    assert any("program" in each for each in found.others)


@pytest.mark.parametrize("step", [27, 33])
def test_a_fault_is_of_the_run_that_has_it(first, tmp_path, step):
    other = train(tmp_path / "b", hooks=[FlippedBit(step)])
    found = diff_again(first, other)
    assert faulty(found) == [str(other)]
    assert found.replays == 40  # of both runs, from step 20 to 40
    assert faulty(diff_again(other, first)) == [str(other)]


@pytest.mark.full
def test_another_key_is_named(first, tmp_path):
    found = diff_again(first, train(tmp_path / "b", key=1))
    assert (found.cause.kind, found.step) == ("key", 1)


def test_batches_return_to_their_position(first, tmp_path):
    other = train(tmp_path / "b", hooks=[FlippedBit(33)])
    step, batches = program()
    next(batches)
    before = batches.get_state()
    found = diff(first, other, step=step, batches=batches, state=new_state())
    assert faulty(found) == [str(other)]
    assert batches.get_state() == before


def test_batches_of_runs_without_a_shared_checkpoint_have_to_be_new(first, tmp_path):
    other = train(tmp_path / "b", seed=1)
    (step, batches), (_, batches_b) = program(), program(seed=1)
    given = {"step": step, "batches_b": batches_b, "state": new_state()}
    found = diff(first, other, batches=batches, **given)
    assert (found.step, found.cause.kind) == (1, "batch")
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
