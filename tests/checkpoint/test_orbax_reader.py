"""`restore` reads what orbax saved without stepfold: all of it, parts, and onto any devices."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import stepfold as sf

PARAMS = jax.device_put(
    {
        "layers": [
            {"w": np.arange(8, dtype=np.float32).reshape(4, 2)},
            {"w": -np.ones((4, 2), jnp.bfloat16)},
        ]
    }
)
NOT_VERIFIED = pytest.mark.filterwarnings("ignore:.*orbax saved it without stepfold")


def adam_state():
    """A state as a loop by hand has it: a dict, with the optimizer's own containers."""
    return {"params": PARAMS, "opt_state": optax.adam(1e-3).init(PARAMS), "step": jnp.int32(7)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save one tree at step 1 and step 7, as orbax's guide does."""
    folder = tmp_path_factory.mktemp("orbax")
    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 7):
            saved = adam_state() | {"step": jnp.int32(step)}
            manager.save(step, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
    return folder


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.map(jnp.result_type, one) == jax.tree.map(jnp.result_type, other)


def test_the_newest_step_is_read_with_a_warning_that_it_is_not_verified(folder):
    with pytest.warns(RuntimeWarning, match="7: orbax saved it without stepfold") as caught:
        restored = sf.restore(folder, jax.eval_shape(adam_state))
    assert [warning.filename for warning in caught] == [__file__]
    assert restored.step == 7
    assert (restored.data, restored.extra, restored.metrics) == (None, None, {})
    equal(restored.state, adam_state())


@NOT_VERIFIED
def test_parts_renames_and_casts_are_those_of_other_checkpoints(folder):
    like = {"model": jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), PARAMS), "new": 1}
    options = {"rename": {"params": "model"}, "cast": True, "partial": True}
    restored = sf.restore(folder, like, step=1, **options)
    assert restored.loaded["model/layers/1/w"] == "params/layers/1/w"
    assert restored.state["new"] == 1
    np.testing.assert_array_equal(restored.state["model"]["layers"][1]["w"], -np.ones((4, 2)))
    with pytest.raises(sf.errors.TreeMismatchError, match="new *nothing *int64"):
        sf.restore(folder, like, parts=("new",))


@NOT_VERIFIED
def test_onto_a_mesh(folder):
    mesh = sf.make_mesh((1, 4, 1, 1), devices=jax.devices()[:4])
    abstract = jax.eval_shape(lambda: {"params": PARAMS})
    plan = sf.make_sharding(abstract, mesh, sf.sharding.fsdp(min_size=1))
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract, plan,
    )  # fmt: skip
    state = sf.restore(folder, like, parts=("params",), partial=True).state
    equal(state, {"params": PARAMS})
    assert state["params"]["layers"][0]["w"].sharding.spec[0] == "fsdp"


@NOT_VERIFIED
def test_several_items_are_branches(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        items = {
            name: ocp.args.StandardSave(adam_state()[name]) for name in ("params", "opt_state")
        }
        manager.save(3, args=ocp.args.Composite(**items, note=ocp.args.JsonSave({"a": 1})))
        manager.wait_until_finished()
    like = {name: adam_state()[name] for name in ("params", "opt_state")}
    equal(sf.restore(tmp_path, jax.tree.map(jnp.zeros_like, like)).state, like)


@NOT_VERIFIED
def test_a_checkpointer_without_a_manager(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "5", PARAMS)
    equal(sf.restore(tmp_path, PARAMS).state, PARAMS)


@NOT_VERIFIED
def test_an_older_step_replaces_one_that_orbax_cannot_read(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    description = copy / "7" / "default" / "_METADATA"
    description.write_bytes(description.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match="step 7 is damaged, and an older one is taken"):
        restored = sf.restore(copy, adam_state())
    assert restored.step == 1
    with pytest.raises(sf.errors.CheckpointError, match="7/default: orbax cannot read it"):
        sf.restore(copy, adam_state(), step=7)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "4").mkdir()
    with pytest.raises(
        sf.errors.CheckpointError, match="expected a checkpoint that stepfold saved"
    ):
        sf.restore(tmp_path, PARAMS)


def test_a_run_does_not_resume_from_it(folder, tmp_path):
    """It has no position of the data. The steps of the run are saved between its steps."""
    folder = shutil.copytree(folder, tmp_path / "copy")
    tx = optax.sgd(0.1)
    state = sf.init_state(PARAMS["layers"][0], tx, jax.random.key(0))
    step = sf.make_train_step(lambda params, batch, key: sf.mean((params["w"]) ** 2), tx)
    with pytest.warns(UserWarning, match=r"has steps 1, 7 of another .* starts from the beg"):
        result = sf.fit(
            step,
            state,
            sf.batches(np.zeros(4, np.float32), 2),
            steps=3,
            checkpoints=sf.Checkpoints(folder),
        )
    assert result.steps == 3
