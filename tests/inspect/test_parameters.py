import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stepfold as sf

PARAMS = {
    "layers": [{"w": np.ones((64, 128), np.float32), "b": jnp.zeros(128, jnp.bfloat16)}] * 2,
    "norm": (jnp.full(3, 2.0),),
}


def cells(text):
    """Read a table as rows of cells, by name."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    head, *rest = [row for row in rows if row]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rest}


def test_nested_trees_are_named_by_their_paths():
    found = cells(sf.parameter_table(PARAMS))
    assert list(found) == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w", "norm/0"]
    row = found["layers/1/w"]
    assert (row["Shape"], row["Dtype"], row["Size"]) == ("(64, 128)", "float32", "8,192")
    assert found["layers/0/b"]["Dtype"] == "bfloat16"


def test_the_total_is_shown():
    numbers, size = 2 * (8192 + 128) + 3, 2 * (8192 * 4 + 128 * 2) + 3 * 4
    assert sf.parameter_table(PARAMS).endswith(f"Total: {numbers:,} -- {size:,} bytes")


def test_abstract_parameters_are_enough():
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
    found = cells(sf.parameter_table(shape))
    assert found["layers/0/w"]["Size"] == "8,192"
    assert found.keys() == cells(sf.parameter_table(PARAMS)).keys()


@pytest.mark.parametrize("abstract", [True, False])
def test_a_plan_gives_the_shardings(abstract):
    params = jax.tree.map(jnp.asarray, PARAMS)
    plan = sf.make_sharding(params, sf.make_mesh((1, 4, 2, 1)), [("layers/0/w", P("fsdp", "tp"))])
    params = jax.eval_shape(lambda: params) if abstract else params
    found = cells(sf.parameter_table(params, plan))
    assert found["layers/0/w"]["Sharding"] == "('fsdp', 'tp')"
    assert found["layers/1/w"]["Sharding"] == "(None, 'fsdp')"
    assert found["layers/0/b"]["Sharding"] == "()"


def test_arrays_show_the_shardings_they_have():
    params = jax.tree.map(jnp.asarray, PARAMS)
    params = sf.place(params, sf.make_sharding(params, sf.make_mesh()))
    assert cells(sf.parameter_table(params))["layers/1/w"]["Sharding"] == "(None, 'fsdp')"


@pytest.mark.parametrize("stats", [True, False])
def test_on_one_device_there_is_nothing_to_say_of_shardings(stats):
    found = cells(sf.parameter_table(jax.tree.map(jnp.asarray, PARAMS), stats=stats))
    assert "Sharding" not in found["norm/0"]


def test_statistics_are_optional():
    assert "Mean" not in sf.parameter_table(PARAMS)
    found = cells(sf.parameter_table({"a": jnp.array([1.0, 3.0]), "b": [np.ones(2)]}, stats=True))
    assert (found["a"]["Mean"], found["a"]["Std"]) == ("2.0", "1.0")
    assert (found["b/0"]["Mean"], found["b/0"]["Std"]) == ("1.0", "0.0")


def test_statistics_do_not_go_with_a_plan():
    params = jax.tree.map(jnp.asarray, PARAMS)
    plan = sf.make_sharding(params, sf.make_mesh())
    with pytest.raises(
        sf.ConfigError, match="stats=True: expected arrays in their shardings, got a plan"
    ):
        sf.parameter_table(params, plan, stats=True)
    found = cells(sf.parameter_table(sf.place(params, plan), stats=True))
    assert found["norm/0"]["Mean"] == "2.0"
    assert found["layers/0/w"]["Sharding"] == "(None, 'fsdp')"


def test_statistics_of_abstract_arrays_are_refused_in_words():
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
    with pytest.raises(
        sf.ConfigError, match="stats=True: expected arrays .* got the abstract layers/0/b"
    ):
        sf.parameter_table(shape, stats=True)


def test_a_plan_for_other_parameters_is_refused():
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(3)}
    plan = sf.make_sharding(params, sf.make_mesh())
    words = "the plan is for another tree:\n  v: has no sharding\n  b: has a sharding and no"
    with pytest.raises(sf.TreeMismatchError, match=words):
        sf.parameter_table({"w": params["w"], "v": params["b"]}, plan)


def test_what_is_no_array_is_refused_by_its_path():
    with pytest.raises(sf.ConfigError, match="act: expected an array"):
        sf.parameter_table({"w": jnp.ones(3), "act": jnp.tanh})


def test_nothing_is_a_table_too():
    assert sf.parameter_table({}).endswith("Total: 0 -- 0 bytes")
