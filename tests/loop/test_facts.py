import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf
from stepfold.loop.asked import Asked
from stepfold.loop.facts import facts_of
from stepfold.loop.feed import Feed
from stepfold.loop.stepper import Stepper

DATA = {"x": np.arange(24, dtype=np.float32)}


def facts(state=None, batches=(), *, evaluations=(), checkpoints=None, hooks=(), steps=None):
    step = Stepper(lambda state, batch: (state, {}))
    asked = Asked(step, Feed([]), steps, list(evaluations), list(hooks), 10, 1, [])
    state = {"w": jnp.ones(3)} if state is None else state
    found = facts_of(state, batches, asked, checkpoints, None, None)
    assert json.loads(json.dumps(found)) == found
    return found


def test_arguments_are_told():
    found = facts(
        batches=sf.batches(DATA, 4, seed=7),
        evaluations=[sf.Evaluation(lambda state: {}, every=5, name="test")],
        checkpoints=sf.Checkpoints(every=7, best="test/loss"),
        hooks=[sf.stop_early("test/loss", patience=3), sf.throughput(), facts],
        steps=20,
    )["arguments"]
    assert found["steps"] == 20
    assert found["batches"]["kind"] == "Batches"
    assert (found["batches"]["batch_size"], found["batches"]["length"]) == (4, 24)
    assert found["evaluations"] == [{"name": "test", "every": 5, "every_epochs": None}]
    said = found["checkpoints"]
    assert (said["every"], said["keep"], said["best"]) == (7, 3, "test/loss")
    assert found["hooks"] == ["stop_early", "throughput", "facts"]


def test_a_directory_of_checkpoints_is_told_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = facts(checkpoints=sf.Checkpoints("kept", every=7))["arguments"]["checkpoints"]
    assert said["directory"] == str(tmp_path / "kept")


def test_seeds_are_told():
    state = sf.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(5))
    found = facts(state, sf.prefetch(sf.batches(DATA, 4, seed=7)))
    words = np.asarray(jax.random.key_data(state.key)).tolist()
    assert found["seed"] == {"batches": 7, "key": words}
    assert facts()["seed"] == {"batches": None, "key": None}


def test_others_batches_are_not_asked_for_their_state():
    class Costly:
        def get_state(self):
            raise AssertionError("asked")

    assert facts(batches=Costly())["arguments"]["batches"] == {"kind": "Costly"}


def test_parameters_are_told_and_nothing_of_the_optimizer():
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": {"c": jnp.ones(())}, "name": "none"}
    state = sf.TrainState(0, params, {"m": jnp.ones(50)}, (), jax.random.key(0))
    found = facts(state)["parameters"]
    assert (found["count"], found["bytes"]) == (7, 16)
    assert found["leaves"] == [["a", [2, 3], "bfloat16", 6], ["b/c", [], "float32", 1]]


def test_of_two_states_the_parameters_of_both_are_told():
    state = sf.TrainState(0, {"w": jnp.ones(3)}, {"m": jnp.ones(50)}, (), jax.random.key(0))
    leaves = facts({"actor": state, "critic": state})["parameters"]["leaves"]
    assert leaves == [["actor/w", [3], "float32", 3], ["critic/w", [3], "float32", 3]]


def test_the_mesh_and_the_devices_are_told():
    mesh = sf.make_mesh((1, 8), ("dp", "fsdp"))
    params = {"w": jnp.ones((16, 1024))}
    plan = sf.make_sharding(params, mesh, sf.fsdp(min_size=1))
    found = facts(jax.device_put(params, plan))
    assert found["mesh"] == {"dp": 1, "fsdp": 8}
    assert found["devices"]["count"] == jax.device_count()
    assert (found["devices"]["platform"], found["devices"]["processes"]) == ("cpu", 1)
    assert facts()["mesh"] is None


def test_versions_are_told():
    found = facts()["versions"]
    assert found["jax"].startswith(".".join(jax.__version__.split(".")[:2]))
    assert (found["numpy"], found["stepfold"]) == (np.__version__, sf.__version__)


def test_nothing_that_may_be_secret_is_told(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--key=hush-argument"])
    monkeypatch.setitem(os.environ, "API_KEY", "hush-environment")
    found = facts()
    assert found["program"] == "train.py"
    assert "hush" not in json.dumps(found)
