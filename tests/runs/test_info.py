"""`run.json`: what a run writes about itself, and what is refused when it is read."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import small

import stepfold as sf
from stepfold.runs.info import read_run_info, run_metadata, write_run_info

DATA = {"x": np.arange(24, dtype=np.float32)}
LOSS = {"lost": "process 1 died", "processes": [0], "at": 4, "from": 2, "source": "memory"}
LOSS |= {"seconds": 0.5, "time": 1e9}
ATTEMPT = {"began": "2026-03-01T10:00:00+00:00", "from": 0, "to": 3}


def metadata(state=None, batches=(), *, evaluations=(), checkpoints=None, hooks=(), **arguments):
    state = {"w": jnp.ones(3)} if state is None else state
    info = run_metadata(state, batches, arguments, evaluations, checkpoints, hooks=hooks)
    assert json.loads(json.dumps(info)) == info
    return info


def test_arguments_are_described(tmp_path, monkeypatch):
    class Expensive:
        def get_state(self):
            raise AssertionError("called")

    monkeypatch.chdir(tmp_path)
    arguments = metadata(
        batches=sf.batches(DATA, 4, seed=7),
        evaluations=[
            sf.Evaluation(lambda state: {}, every=5, name="test"),
            sf.Evaluation(lambda state: {}, every=5, name="ema", at_start=True, ema=True),
        ],
        checkpoints=sf.Checkpoints("kept", every=7, best="test/loss"),
        hooks=["stop_early", "throughput", "metadata"],
        steps=20,
    )["arguments"]
    assert arguments["steps"] == 20
    assert arguments["batches"]["kind"] == "Batches"
    assert (arguments["batches"]["batch_size"], arguments["batches"]["length"]) == (4, 24)
    schedule = {"every": 5, "every_epochs": None}
    assert arguments["evaluations"] == [
        {"name": "test", **schedule},
        {"name": "ema", **schedule, "at_start": True, "ema": True},
    ]
    plan = arguments["checkpoints"]
    assert (plan["every"], plan["keep"], plan["best"]) == (7, 3, "test/loss")
    assert plan["directory"] == str(tmp_path / "kept")
    assert arguments["hooks"] == ["stop_early", "throughput", "metadata"]
    assert metadata(batches=Expensive())["arguments"]["batches"] == {"kind": "Expensive"}


def test_seeds_are_described():
    state = sf.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(5))
    info = metadata(state, sf.prefetch(sf.workers(sf.batches(DATA, 4, seed=7), 2)))
    assert metadata(batches=sf.workers(sf.batches(DATA, 4, seed=7), 2))["seed"]["batches"] == 7
    words = np.asarray(jax.random.key_data(state.key)).tolist()
    assert info["seed"] == {"batches": 7, "key": words}
    assert metadata()["seed"] == {"batches": None, "key": None}


def test_parameters_are_described_without_the_optimizer():
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": {"c": jnp.ones(())}, "name": "none"}
    state = sf.TrainState(0, params, {"m": jnp.ones(50)}, (), jax.random.key(0))
    info = metadata(state)["parameters"]
    assert (info["count"], info["bytes"]) == (7, 16)
    assert info["leaves"] == [["a", [2, 3], "bfloat16", 6], ["b/c", [], "float32", 1]]
    of_two = metadata({"actor": state._replace(params={"w": jnp.ones(3)}), "critic": state})
    names = [name for name, *_ in of_two["parameters"]["leaves"]]
    assert names == ["actor/w", "critic/a", "critic/b/c"]


def test_the_mesh_the_devices_and_the_versions_are_described():
    mesh = sf.make_mesh((1, 8), ("dp", "fsdp"))
    params = {"w": jnp.ones((16, 1024))}
    plan = sf.make_sharding(params, mesh, sf.sharding.fsdp(min_size=1))
    info = metadata(jax.device_put(params, plan))
    assert info["mesh"] == {"dp": 1, "fsdp": 8}
    assert info["devices"]["count"] == jax.device_count()
    assert (info["devices"]["platform"], info["devices"]["processes"]) == ("cpu", 1)
    assert metadata()["mesh"] is None
    versions = info["versions"]
    assert versions["jax"].startswith(".".join(jax.__version__.split(".")[:2]))
    assert (versions["numpy"], versions["stepfold"]) == (np.__version__, sf.__version__)


def test_nothing_that_may_be_secret_is_kept(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--key=hush-argument"])
    monkeypatch.setitem(os.environ, "API_KEY", "hush-environment")
    info = metadata()
    assert info["program"] == "train.py"
    assert "hush" not in json.dumps(info)


def test_what_is_written_is_read(tmp_path):
    assert read_run_info(tmp_path) == {}
    write_run_info(tmp_path, {"attempts": [ATTEMPT], "mesh": None})
    assert read_run_info(tmp_path) == {"format": 2, "attempts": [ATTEMPT], "mesh": None}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("ending", "stop"),
    [
        (
            {"stopped": "all experts collapsed", "error": None},
            {"kind": "unknown", "message": "all experts collapsed"},
        ),
        (
            {"stopped": None, "error": {"type": "OSError", "message": "gone"}},
            {"kind": "error", "message": "OSError: gone"},
        ),
        (
            {"error": {"type": "KeyboardInterrupt", "message": ""}},
            {"kind": "error", "message": "KeyboardInterrupt"},
        ),
        ({"ended": None}, None),
    ],
)
def test_format_1_is_converted(tmp_path, ending, stop):
    (tmp_path / "run.json").write_text(
        json.dumps({"format": 1, "mesh": None, "attempts": [ATTEMPT | ending]})
    )
    info = read_run_info(tmp_path)
    (attempt,) = info["attempts"]
    assert info["format"] == 2
    assert {name: attempt[name] for name in ATTEMPT} == ATTEMPT
    assert attempt["stop"] == stop
    write_run_info(tmp_path, info)
    assert read_run_info(tmp_path) == info


def entries(**entries):
    return json.dumps({"format": 2, "attempts": [], **entries})


def an_attempt(**entries):
    return json.dumps({"format": 2, "attempts": [ATTEMPT, ATTEMPT | entries]})


DAMAGED = "expected JSON, got a damaged file: .*; move"
OTHER = "expected a run.json that fit wrote, got oth"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 3, "tries": {}}', "format 2 or earlier, got 3, of a later stepfold; upgr"),
        *((text, DAMAGED) for text in ("", '{"format": 2, "att', "\x00\x01")),
        *((text, OTHER) for text in ("[]", "{}", '{"format": "1", "attempts": []}')),
        (entries(attempts=None), OTHER),
        (entries(attempts=[{"began": ""}]), OTHER),
        (an_attempt(began="2026-03-01"), OTHER),
        (an_attempt(to=-1), OTHER),
        (an_attempt(clock=[[0, 0]]), OTHER),
        (an_attempt(pause=1e999), OTHER),
        (an_attempt(stop={}), OTHER),
        (an_attempt(stop="done"), OTHER),
        (an_attempt(config_changes={"rate": 3}), OTHER),
        (an_attempt(config_changes=[1]), OTHER),
        (entries(losses=3), OTHER),
        (entries(losses=[LOSS | {"at": None}]), OTHER),
        (entries(losses=[LOSS | {"time": 1e299}]), OTHER),
        (entries(losses=[LOSS | {"processes": ["a"]}]), OTHER),
        (entries(arguments=3), OTHER),
        (entries(arguments={"checkpoints": {"mode": "up"}}), OTHER),
    ],
)
def test_what_is_no_run_info_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(sf.errors.DataError, match=f"run.json: .*{message}"):
        read_run_info(tmp_path)


def test_unknown_entries_may_be_missing_or_null(tmp_path):
    changed = ATTEMPT | {"total": None, "stop": None, "config_changes": {"rate": [0.1, None]}}
    info = {"format": 2, "attempts": [changed], "devices": None, "losses": [LOSS]}
    (tmp_path / "run.json").write_text(json.dumps(info))
    assert read_run_info(tmp_path) == info


@pytest.mark.parametrize(
    "options",
    [
        {"steps": np.int64(4)},
        {"epochs": np.int32(1)},
        {"more_steps": np.uint8(4)},
        {"steps": 4, "log_every": np.int64(2)},
        {"steps": 4, "steps_per_call": np.int64(2)},
        {"steps": 4, "evaluation": sf.Evaluation(lambda state: {"a": 1.0}, every=np.int64(2))},
        {"steps": 4, "checkpoints": ("every", "keep")},
    ],
    ids=lambda options: [*options][-1],
)
def test_integers_of_numpy_are_written_as_those_of_python(tmp_path, options):
    if "checkpoints" in options:
        two = np.int64(2)
        temporary = sf.Temporary(tmp_path / "local", every=np.int64(1), keep=two)
        checkpoints = sf.Checkpoints(every=two, keep=two, keep_every=two, temporary=temporary)
        options = {**options, "checkpoints": checkpoints}
    run = tmp_path / "run"
    sf.fit(small.STEP, small.start(), small.batches(), run_dir=run, **options)
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["to"] == 4
