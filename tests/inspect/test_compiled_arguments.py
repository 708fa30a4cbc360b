import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.inspect.compiled import (
    abstract_arguments,
    argument_changes,
    drop_uncommitted_shardings,
    is_weak,
)

FIRST, THIRD = jax.devices()[0], jax.devices()[3]


@pytest.fixture
def mesh():
    return sf.make_mesh((2, 4, 1, 1))


def shape(*dims, dtype=jnp.float32, **options):
    return jax.ShapeDtypeStruct(dims, dtype, **options)


def places(arrays):
    return jax.tree.map(lambda leaf: leaf.sharding, arrays)


# Where things are


def test_without_a_place_all_is_on_the_first_device():
    made = abstract_arguments({"w": shape(3)}, {"x": np.ones(4)})
    assert places(made) == ({"w": SingleDeviceSharding(FIRST)}, {"x": SingleDeviceSharding(FIRST)})


def test_all_goes_where_something_was_put():
    state = {"a": jnp.ones(3), "b": jax.device_put(jnp.ones(3), THIRD)}
    made = abstract_arguments(state, {"x": np.ones(4), "n": 3})
    assert {place.device_set.copy().pop() for place in jax.tree.leaves(places(made))} == {THIRD}


def test_what_has_no_place_on_a_mesh_is_everywhere_and_batches_are_spread(mesh):
    cut, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    state, batch = abstract_arguments(
        {"w": shape(8, 4, sharding=cut), "n": jnp.zeros(())}, {"x": np.ones((16, 2)), "n": 3}
    )
    assert places(state) == {"w": cut, "n": whole}
    assert places(batch) == {"x": NamedSharding(mesh, P(("dp", "fsdp"))), "n": whole}


def test_a_plan_goes_before_where_arrays_are(mesh):
    whole = NamedSharding(mesh, P())
    for plan in (whole, {"w": whole}):
        state, batch = abstract_arguments(
            {"w": jax.device_put(jnp.ones(8), THIRD)}, np.ones(8), plan
        )
        assert places(state) == {"w": whole}
        assert batch.sharding.spec == P(("dp", "fsdp"))


def test_a_batch_that_was_placed_stays_there(mesh):
    own, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
    given = {"x": shape(6, 2, sharding=own), "y": np.ones(6)}
    _, batch = abstract_arguments(
        {"w": shape(8, sharding=whole)}, given | {"y": np.ones(16), "x": shape(16, sharding=own)}
    )
    assert places(batch) == {"x": own, "y": NamedSharding(mesh, P(("dp", "fsdp")))}


def test_types_are_as_jax_takes_them():
    given = {"f": np.ones(2), "i": np.arange(2), "b": True, "n": 2.0, "k": jax.random.key(0)}
    _, batch = abstract_arguments(jnp.ones(2), given)
    assert {name: (str(leaf.dtype), leaf.weak_type) for name, leaf in batch.items()} == {
        "f": ("float32", False),
        "i": ("int32", False),
        "b": ("bool", False),
        "n": ("float32", True),
        "k": ("key<fry>", False),
    }


def test_numbers_in_a_batch_stay_weak_on_a_mesh(mesh):
    _, batch = abstract_arguments(
        shape(8, sharding=NamedSharding(mesh, P())), {"n": 2.0, "x": np.ones(8)}
    )
    assert batch["n"].weak_type


def test_an_example_that_is_no_array_is_named():
    with pytest.raises((sf.ConfigError, sf.DataError), match="batch/name: expected an array"):
        abstract_arguments(jnp.ones(2), {"name": "cat"})


def test_a_plan_for_another_state_is_refused(mesh):
    whole = NamedSharding(mesh, P())
    words = "the plan is for another tree:\n  w: has no sharding\n  v: has a sharding and no"
    with pytest.raises(sf.TreeMismatchError, match=words):
        abstract_arguments({"w": shape(8)}, None, {"v": whole})
    with pytest.raises(sf.TreeMismatchError, match="expected the containers PyTreeDef"):
        abstract_arguments([shape(8)], None, (whole,))


def test_two_meshes_are_refused(mesh):
    other = NamedSharding(sf.make_mesh((8, 1, 1, 1)), P())
    state = {"a": shape(8, sharding=other), "b": shape(8, sharding=NamedSharding(mesh, P()))}
    words = r"state: expected all of it on one mesh, got \[.*'dp': 2.*'dp': 8"
    with pytest.raises(sf.ShardingError, match=words):
        abstract_arguments(state, None)


def test_a_mesh_of_one_device_spreads_nothing():
    mesh = sf.make_mesh((1, 1, 1, 1), devices=jax.devices()[:1])
    whole = NamedSharding(mesh, P())
    _, batch = abstract_arguments(shape(8, sharding=whole), np.ones((7, 2)))
    assert batch.sharding == whole


# Uncommitted arrays


def test_only_what_brings_its_place_along_keeps_it(mesh):
    given = {"x": jax.device_put(jnp.ones(8), THIRD), "y": jnp.ones(8), "z": np.ones(8)}
    _, batch = abstract_arguments(jnp.ones(2), given)
    seen = drop_uncommitted_shardings(batch, given)
    assert places(seen) == {"x": SingleDeviceSharding(THIRD), "y": None, "z": None}
    assert seen["z"].dtype == jnp.float32


# What changed


def home(*dims, dtype=jnp.float32, weak=False):
    place = SingleDeviceSharding(FIRST)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=place, weak_type=weak)


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.ones(3),
        np.ones(3, np.float32),
        jax.device_put(jnp.ones(3), FIRST),
        jax.device_put(
            jnp.ones(3), NamedSharding(sf.make_mesh((1,), ("x",), devices=[FIRST]), P())
        ),
    ],
)
def test_the_same_is_no_change(leaf):
    assert argument_changes({"a": home(3)}, {"a": leaf}, "batch") == []


def test_what_jax_takes_for_the_same_is_no_change():
    assert (
        argument_changes([home(3), home(3, dtype=jnp.int32)], [np.ones(3), np.arange(3)], "batch")
        == []
    )


@pytest.mark.parametrize(
    ("form", "leaf", "line"),
    [
        (home(3), jnp.ones(4), "a: expected float32[3], got float32[4]"),
        (home(3), jnp.full(3, 1.0), "with a strong type, got a weak type, as Python"),
        (
            home(weak=True),
            jnp.ones(()),
            "with a weak type, as Python numbers have, got a strong type",
        ),
        (home(), 1.0, "a: expected float32[], got the Python number 1.0, which is weakly typed"),
        (home(), 1, "a: expected float32[], got int 1"),
        (home(), "cat", "a: expected float32[], got str 'cat'"),
        (home(3), jax.device_put(jnp.ones(3), THIRD), "a: expected it on "),
    ],
)
def test_a_change_is_a_line(form, leaf, line):
    (found,) = argument_changes({"a": form}, {"a": leaf}, "")
    assert line in found
    (found,) = argument_changes({"a": form}, {"a": leaf}, "batch")
    assert found.startswith("batch/a: ")


def test_numbers_for_numbers_are_no_change():
    forms = [home(weak=True), home(dtype=jnp.int32, weak=True), home(dtype=bool)]
    assert argument_changes(forms, [1.0, 2, True], "batch") == []


def test_every_change_is_a_line():
    forms = {"a": home(3), "b": home(3), "c": home(3)}
    got = {"a": jnp.ones(4), "b": jnp.ones(3), "c": jnp.ones(5)}
    assert len(argument_changes(forms, got, "batch")) == 2


def test_what_is_weak():
    arrays = jnp.asarray(1), jnp.asarray(1.0), 1, 1.0
    assert all(map(is_weak, arrays))
    strong = jnp.ones(()), np.float32(1), np.ones(2), np.bool_(True), jax.random.key(0)
    assert [is_weak(leaf) for leaf in strong] == [False] * len(strong)


def test_a_state_that_is_partly_elsewhere_is_refused_by_its_paths():
    mesh = sf.make_mesh()
    state = sf.init_state({"w": jnp.ones((64, 64))}, optax.sgd(0.1), jax.random.key(0))
    state = sf.place(state, sf.make_sharding(state, mesh))
    state = state._replace(key=jax.device_put(jax.random.key(0), jax.devices()[3]))
    words = (
        r"on the devices of P\(\) of the mesh .*, got elsewhere state/key; move it with sf.place"
    )
    with pytest.raises(sf.ShardingError, match=words):
        abstract_arguments(state, jnp.ones((8, 64)))


@pytest.mark.parametrize(
    ("state", "batch", "message"),
    [
        (
            {"w": "a"},
            np.ones(2),
            "state/w: expected an array, got str 'a'; pass the state of sf.init_state",
        ),
        (
            np.ones(2),
            {"x": ["a"]},
            r"batch/x/0: .*; pass a tree of arrays and numbers, such as next\(batches\)",
        ),
    ],
)
def test_the_error_for_other_types_says_what_to_pass(state, batch, message):
    with pytest.raises(sf.ConfigError, match=message):
        abstract_arguments(state, batch)
