"""orbax's v1 API, the default of orbax 1.0, reads the checkpoints without stepfold."""

import json
import logging

import jax
import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1

import stepfold as sf
from stepfold.tree import named_leaves

from .sameness import bits

TX = optax.adamw(1e-2)


def new_state():
    params = {
        "w": jax.random.normal(jax.random.key(1), (8, 3)),
        "layers": [jnp.ones(2), jnp.ones(4)],
        "half": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
    }
    return sf.init_state(params, TX, jax.random.key(7))


@pytest.fixture
def folder(tmp_path):
    with sf.Checkpoints(tmp_path, keep=None) as series:
        for step in (4, 8):
            state = new_state()._replace(step=jnp.asarray(step, jnp.int32))
            series.save(state, step=step, metrics={"eval/loss": 1 / step})
    return tmp_path


@pytest.fixture(autouse=True)
def no_complaints(caplog):
    """Let any warning that orbax logs fail the test."""
    yield
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not messages


def named(state):
    """Return the arrays of a state by path, keys as their data."""
    return {
        name: jax.random.key_data(leaf) if name == "key" else leaf
        for name, leaf in named_leaves(state)
    }


def check_equal(found, state):
    """Compare the bits of a nested dict with those of a state."""
    flat = dict(named_leaves(found))
    wanted = named(state)
    assert flat.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert flat[name].dtype == leaf.dtype, name
        assert bits(flat[name]) == bits(leaf), name


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
def test_a_step_is_loaded_as_it_was_saved(folder):
    assert v1.is_orbax_checkpoint(folder / "8")
    check_equal(v1.load(folder / "8"), new_state()._replace(step=jnp.asarray(8, jnp.int32)))


def abstract(state, sharding=None):
    """Return the abstract nested dict that orbax loads into: leaves by the keys of their paths."""
    found = {}
    for name, leaf in named(state).items():
        *branches, last = name.split("/")
        node = found
        for branch in branches:
            node = node.setdefault(branch, {})
        node[last] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return found


def test_a_series_is_opened(folder):
    with v1.training.Checkpointer(folder) as series:
        assert [found.step for found in series.checkpoints] == [4, 8]
        assert series.latest.step == 8
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = series.load(4, abstract(new_state(), sharding))
        assert series.metadata(8).metadata.keys() == abstract(new_state()).keys()
    check_equal(found, new_state()._replace(step=jnp.asarray(4, jnp.int32)))
    assert sf.checkpoint.verify(folder) == {4: [], 8: []}


def test_a_step_names_a_handler_that_orbax_knows(folder):
    """Steps that stepfold saved before name its own, of which orbax warns; both are restored."""
    path = folder / "8" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    assert metadata["item_handlers"] == {"state": handler}
    path.write_text(
        json.dumps(metadata | {"item_handlers": {"state": "stepfold.checkpoint.writer._Handler"}})
    )
    assert sf.restore(folder, new_state()).step == 8
