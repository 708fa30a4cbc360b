"""Outputs of a trainer are pytrees, and come back from JSON."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
    Unserializable,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("stepfold"), inner)
    ),
    max_leaves=12,
)


def round_trip(config):
    """Write a value as JSON and read it back."""
    text = TrainerConfigureModelOutput(None, config=config).to_json()
    again = TrainerConfigureModelOutput.from_json(text)
    assert again.to_json() == text
    return again.config


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf.dtype, np.asarray(leaf).tobytes()


@pytest.fixture
def state(key):
    tx = optax.adam(optax.linear_schedule(1.0, 0.0, 10))
    params = {"w": jnp.full((2, 3), 1 / 3, jnp.bfloat16), "b": jnp.array([jnp.nan, -0.0])}
    return sf.init_state(params, tx, key)


# Pytrees


def test_arrays_are_children_and_all_else_is_structure(state):
    output = TrainerOutput(state, sf.make_mesh(), "10", "runs/10")
    assert len(jax.tree.leaves(output)) == len(jax.tree.leaves(state))
    count = jax.jit(
        lambda output: output.replace(state=output.state._replace(step=output.state.step + 1))
    )
    again = count(output)
    assert (int(again.state.step), again.mesh, again.checkpoint_path) == (
        1,
        output.mesh,
        "runs/10",
    )
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(output)]
    assert names[0] == ".state.step"


def test_iterators_are_structure():
    output = TrainerConfigureDataloaderOutput(iter([1, 2]), dataloader_eval={"x": np.ones(2)})
    doubled = jax.tree.map(lambda leaf: 2 * leaf, output)
    assert doubled.dataloader_train is output.dataloader_train
    assert doubled.dataloader_eval["x"].tolist() == [2.0, 2.0]


# Fields


def test_steps_have_two_names():
    output = TrainerConfigureFunctionOutput(max, None, None, min)
    assert (output.train_step_fn, output.eval_step_fn) == (max, min)
    assert TrainerConfigureFunctionOutput(train_step_fn=max).sharded_training_step_function is max
    assert TrainerConfigureFunctionOutput(max, train_step_fn=max).train_step_fn is max
    with pytest.raises(
        sf.errors.ConfigError,
        match="train_step_fn: expected the same step as by its long name, .*max.*, got .*min.*; gi",
    ):
        TrainerConfigureFunctionOutput(max, train_step_fn=min)
    with pytest.raises(
        sf.errors.ConfigError, match=r"expected a step \(state, batch\) -> .* got None"
    ):
        TrainerConfigureFunctionOutput()


def test_an_unknown_field_is_refused():
    output = TrainerConfigureDataloaderOutput([1])
    with pytest.raises(
        sf.errors.ConfigError, match="no 'dataloader_tran'; did you mean 'dataloader_trai"
    ):
        output.replace(dataloader_tran=[2])
    with pytest.raises(
        sf.errors.ConfigError, match="TrainerOutput: there is no 'model'; there are state"
    ):
        TrainerOutput.from_dict({"model": 1})


# The state, by its checkpoint


@shows(
    "API reference",
    "TrainerOutput",
    {
        "`from_json`": "with `like=state`, restores the state from its checkpoint",
        "`to_json`": "`checkpoint_path` stands for the state",
    },
)
def test_json_gives_the_state_back_bit_for_bit(tmp_path, state):
    sf.save(tmp_path, state)
    mesh, path = sf.make_mesh(), str(tmp_path / "0")
    output = TrainerOutput(state, mesh, "0", path, stopped="all 10 steps were done")
    text = output.to_json(indent=2)
    assert len(text) < 2000
    for like in (state, jax.eval_shape(lambda: state)):
        again = TrainerOutput.from_json(text, like=like)
        assert jax.tree.structure(again) == jax.tree.structure(output)
        assert list(map(bits, jax.tree.leaves(again))) == list(map(bits, jax.tree.leaves(output)))
        assert again.replace(state=None).to_dict() == output.replace(state=None).to_dict()


def test_without_like_the_state_says_where_it_is(state):
    output = TrainerOutput(state, None, "0", "runs/a/0")
    again = TrainerOutput.from_json(output.to_json())
    for use in (
        lambda state: state.params,
        lambda state: state["params"],
        lambda state: state(1),
        list,
        next,
    ):
        with pytest.raises(
            sf.errors.ConfigError,
            match=r"state: it is in the checkpoint runs/a/0; load it with TrainerOutput.from_json\("
            r"text, like\) or|state: .*sf.restore\('runs/a', like, step=0\)",
        ):
            use(again.state)
    assert again.to_json() == output.to_json()
    assert again.replace(checkpoint_path="b/0").checkpoint_path == "b/0"
    assert "b/0" in again.replace(checkpoint_path="b/0").to_json()
    assert "runs" not in again.replace(checkpoint_path="b/0").to_json()
    assert jax.tree.leaves(again) == []


def test_a_state_without_its_checkpoint_has_no_json(tmp_path, state):
    output = TrainerOutput(state, None)
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"checkpoint_path: expected '<directory>/<step>', since JSON does not hold the "
        r"arrays of the state, got None; save the state with save_pretrained or sf.save, and give "
        r"replace\(checkpoint_path=",
    ):
        output.to_json()
    with pytest.raises(sf.errors.ConfigError, match="expected '<directory>/<step>'.* got 'runs/a'"):
        output.replace(checkpoint_path="runs/a").to_json()
    later = output.replace(state=state._replace(step=state.step + 3), checkpoint_path="runs/0")
    with pytest.raises(
        sf.errors.ConfigError,
        match="checkpoint_path: expected the checkpoint of the state, of step 3, got 'runs/0'; sa",
    ):
        later.to_json()
    with pytest.raises(sf.errors.ConfigError, match="expected '<directory>/<step>', .* got None"):
        TrainerOutput.from_json(TrainerOutput(None).to_json(), like=state)
    missing = output.replace(checkpoint_path=str(tmp_path / "0")).to_json()
    with pytest.raises(sf.errors.CheckpointError, match=str(tmp_path)):
        TrainerOutput.from_json(missing, like=state)


@shows(
    "API reference",
    "TrainerConfigureModelOutput",
    {"`to_json`": "refused with arrays, such as those of a state: write `replace(state=None)`"},
)
@pytest.mark.parametrize("field", ["model", "state", "config"])
def test_arrays_are_refused(field, state):
    output = TrainerConfigureModelOutput(None).replace(**{field: [1, {"a": state}]})
    with pytest.raises(
        sf.errors.ConfigError,
        match=rf"{field}: expected a value without arrays, which JSON does not hold, got int32\[\]"
        rf"; save arrays with sf.save, and give replace\({field}=None\)",
    ):
        output.to_json()
    with pytest.raises(
        sf.errors.ConfigError, match=r"dataloader_train: expected .* got float64\[3\]; save"
    ):
        TrainerConfigureDataloaderOutput([np.ones(3)]).to_json()


# Plain values, and placeholders for the others


@given(plain)
def test_plain_values_come_back_unchanged(value):
    again = round_trip(value)
    assert again == value
    assert repr(again) == repr(value)


def test_a_mesh_comes_back_where_its_devices_are():
    mesh = sf.make_mesh((2, -1), ("a", "b"))
    assert round_trip(mesh) == mesh
    elsewhere = TrainerOutput(None, mesh).to_json().replace("7", "70")
    mesh = TrainerOutput.from_json(elsewhere).mesh
    assert mesh == Unserializable("mesh of 8 devices, of which 8 exist")


def test_functions_iterators_and_optimizers_are_stored_by_name():
    output = TrainerConfigureModelOutput(len, optax.adam(0.1), optax.linear_schedule(1.0, 0.0, 10))
    again = TrainerConfigureModelOutput.from_json(output.to_json())
    assert again.model == Unserializable("builtin_function_or_method len")
    assert again.tx.description.startswith("GradientTransformation")
    assert "schedule" in again.scheduler.description
    loader = TrainerConfigureDataloaderOutput(iter([1, 2]), dataloader_eval=(i for i in "ab"))
    again = TrainerConfigureDataloaderOutput.from_json(loader.to_json())
    assert again.dataloader_train.description == "list_iterator"
    with pytest.raises(sf.errors.ConfigError, match="generator .*: JSON stores only its name"):
        next(again.dataloader_eval)


def test_a_placeholder_says_so_when_it_is_used():
    placeholder = round_trip({"step": max})["step"]
    assert repr(placeholder) == "Unserializable(description='builtin_function_or_method max')"
    with pytest.raises(
        sf.errors.ConfigError, match="max: JSON stores only its name; create it again, and"
    ):
        placeholder(1, 2)
    with pytest.raises(sf.errors.ConfigError, match="only its name"):
        list(Unserializable("generator"))
    with pytest.raises(sf.errors.ConfigError, match="only its name"):
        _ = placeholder.params
    assert not hasattr(placeholder, "shape")
    assert copy.deepcopy(placeholder) == pickle.loads(pickle.dumps(placeholder)) == placeholder


OTHER = ["", "[", "5", '{"stepfold": "array"}', '{"stepfold": "what"}', 5, "[" * 100_000]


@pytest.mark.parametrize("text", OTHER, ids=range(len(OTHER)))
def test_other_text_is_refused(text):
    with pytest.raises(sf.errors.ConfigError, match="from_json: expected the text of to_json, got"):
        TrainerOutput.from_json(text)


def test_reading_imports_and_calls_nothing():
    harm = {"stepfold": "record", "of": "os:system", "fields": {"command": "true"}}
    with pytest.raises(sf.errors.ConfigError, match="from_json: expected the text of to_json, got"):
        TrainerOutput.from_json(json.dumps({"state": harm}))
