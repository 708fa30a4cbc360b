"""`shard_batch` and `place` put each leaf where they say, and share no memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf

pytestmark = pytest.mark.not_optimized
MESH = sf.make_mesh((2, 2, 2, 1))
ROWS = P(("dp", "fsdp"))


def bare(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_rows_are_spread_over_the_data_axes_in_order():
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    placed = sf.shard_batch({"x": x}, MESH)["x"]
    assert placed.sharding == NamedSharding(MESH, ROWS)
    np.testing.assert_array_equal(placed, x)
    for shard in placed.addressable_shards:
        (dp, fsdp, *_), *_ = np.argwhere(MESH.devices == shard.device)
        first = 2 * (2 * dp + fsdp)
        np.testing.assert_array_equal(shard.data, x[first : first + 2])


def test_scalars_are_on_every_device():
    batch = {"x": np.zeros((4, 1)), "rate": 0.5, "n": 3, "on": True, "np": np.float32(2)}
    placed = sf.shard_batch(batch, MESH)
    for name in ("rate", "n", "on", "np"):
        assert placed[name].sharding == NamedSharding(MESH, P())
        assert placed[name] == batch[name]
    assert placed["x"].sharding.spec == ROWS
    assert sf.shard_batch([1, 2.0], MESH)[1].sharding == NamedSharding(MESH, P())
    assert sf.shard_batch(3, MESH) == 3


@pytest.mark.parametrize("batch", [{}, [], (), None, {"a": None}])
def test_an_empty_batch_stays_empty(batch):
    assert sf.shard_batch(batch, MESH) == batch


def test_trees_and_dtypes_are_kept(key):
    batch = {
        "nest": [(np.arange(4, dtype=np.int8), jnp.zeros((4, 2), jnp.bfloat16))],
        "mask": np.ones(4, bool),
        "keys": jax.random.split(key, 4),
    }
    placed = sf.shard_batch(batch, MESH)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        assert y.sharding.spec == ROWS
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(bare(x), bare(y))


@given(
    rows=st.integers(1, 6),
    shape=st.lists(st.integers(0, 3), max_size=2),
    axes=st.sampled_from([None, "dp", "tp", ("dp", "tp"), ["tp", "fsdp", "dp"], "sp"]),
)
def test_a_batch_comes_back_as_it_was(rows, shape, axes):
    parts = {None: 4, "dp": 2, "tp": 2, "sp": 1}.get(axes if isinstance(axes, str) else None, 4)
    parts = 2 ** len(axes) if isinstance(axes, tuple | list) else parts
    x = np.random.default_rng(0).normal(size=(rows * parts, *shape)).astype(np.float32)
    placed = sf.shard_batch(x, MESH, axes=axes)
    np.testing.assert_array_equal(placed, x)
    assert placed.addressable_shards[0].data.shape == (rows, *shape)


def test_axes_may_be_named_and_by_default_a_mesh_needs_but_one_data_axis():
    x = np.arange(8)
    assert sf.shard_batch(x, MESH, axes="tp").sharding.spec == P("tp")
    assert sf.shard_batch(x, MESH, axes=("tp", "dp")).sharding.spec == P(("tp", "dp"))
    for name, axes in (("data", "data"), ("dp", None), ("fsdp", None)):
        mesh = sf.make_mesh((-1, 1), (name, "tp"))
        assert sf.shard_batch(x, mesh, axes=axes).sharding == NamedSharding(mesh, P(name))
    mesh = sf.make_mesh(devices=jax.devices()[:1])  # one device takes any batch
    np.testing.assert_array_equal(sf.shard_batch(np.arange(7), mesh), np.arange(7))


def test_abstract_batches_give_abstract_ones_with_shardings():
    batch = {"x": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16), "n": jax.ShapeDtypeStruct((), int)}
    placed = sf.shard_batch(batch, MESH)
    assert isinstance(placed["x"], jax.ShapeDtypeStruct)
    assert placed["x"].sharding == NamedSharding(MESH, ROWS)
    assert (placed["x"].shape, placed["x"].dtype) == ((8, 3), jnp.bfloat16)
    assert placed["n"].sharding == NamedSharding(MESH, P())


def test_arrays_that_are_placed_already_stay_or_move():
    x = jax.device_put(jnp.arange(8), NamedSharding(MESH, P("tp")))
    placed = sf.shard_batch(x, MESH)
    assert placed.sharding == NamedSharding(MESH, ROWS)
    again = sf.shard_batch(placed, MESH)
    assert again.sharding == placed.sharding
    np.testing.assert_array_equal(again, np.arange(8))
    np.testing.assert_array_equal(x, np.arange(8))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"x": np.zeros(8), "y": [np.zeros((4, 2))], "n": 1},
            sf.errors.DataError,
            r"shard_batch: expected the same number of rows in every leaf, got "
            r"batch/x float64\[8\], batch/y/0 float64\[4,2\]$",
        ),
        (
            {"x": np.zeros((6, 2))},
            sf.errors.ShardingError,
            r"^shard_batch: expected a multiple of 4 rows, one for each shard of this process "
            r"along \('dp', 'fsdp'\), got 6 rows; drop or pad the last batch$",
        ),
        (np.zeros((0, 3)), sf.errors.ShardingError, r"multiple of 4 rows, .* got 0 rows"),
        (
            {"x": jax.ShapeDtypeStruct((7, 3), int)},
            sf.errors.ShardingError,
            r"shard_batch: expected a multiple of 4 rows, .* got 7 rows",
        ),
        (
            {"text": "hello"},
            sf.errors.DataError,
            r"^batch/text: expected an array, got str 'hello'$",
        ),
        ("hello", sf.errors.DataError, r"^batch: expected an array, got str 'hello'$"),
        (
            {"x": object},
            sf.errors.DataError,
            r"^batch/x: expected an array, got type <class 'object'>$",
        ),
    ],
)
def test_a_batch_that_cannot_be_spread_is_refused(batch, error, message):
    with pytest.raises(error, match=message):
        sf.shard_batch(batch, MESH)


@pytest.mark.parametrize("text", [["a"] * 4, [b"a"] * 4, [None] * 4], ids=["str", "bytes", "None"])
def test_numpy_arrays_of_no_numbers_are_refused_by_name(text):
    with pytest.raises(sf.errors.DataError, match="batch/text: expected"):
        sf.shard_batch({"text": np.array(text)}, MESH)


@pytest.mark.parametrize(
    ("axes", "names", "message"),
    [
        (
            None,
            ("x",),
            r"^axes: expected axes of the mesh \('x',\) to shard the batch over, got "
            r"\('dp', 'fsdp'\); place each batch with sf.shard_batch\(batch, mesh, axes=…\), or "
            r"let sf.prefetch\(batches, sharding=…\) do it$",
        ),
        ("dp", ("x",), r"mesh \('x',\) to .*, got \('dp',\); place .* axes="),
        (("x", "dp"), ("x",), r"mesh \('x',\) to .*, got \('x', 'dp'\); place .* axes="),
        ((), ("dp",), r"mesh \('dp',\) to .*, got \(\); place .* axes="),
    ],
)
def test_axes_that_the_mesh_lacks_are_refused(axes, names, message):
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.shard_batch(np.zeros(8), sf.make_mesh((-1,), names), axes=axes)


def aligned(count):
    """Give numbers in memory that jax could use as it is, without a copy."""
    memory = np.zeros(4 * count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 4 * count].view(np.float32)
    x[:] = np.arange(count)
    return x


PLACES = {
    "replicated": NamedSharding(MESH, P()),
    "cut": NamedSharding(MESH, P(("dp", "fsdp"))),
    "partly": NamedSharding(MESH, P("tp")),
    "first device": SingleDeviceSharding(jax.devices()[0]),
    "another device": SingleDeviceSharding(jax.devices()[3]),
}
GIVEN = {
    "uncommitted": lambda x, place: jnp.array(x),
    "committed": lambda x, place: jax.device_put(x, jax.devices()[0]),
    "elsewhere": lambda x, place: jax.device_put(x, jax.devices()[5]),
    "replicated": lambda x, place: jax.device_put(x, NamedSharding(MESH, P())),
    "there already": lambda x, place: jax.device_put(x, place),
    "there by another name": lambda x, place: jax.device_put(
        x, NamedSharding(MESH, P(*place.spec, None)) if hasattr(place, "spec") else place
    ),
    "numpy": lambda x, place: x,
}


OVERWRITE = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
FOLD = jax.jit(jax.vmap(lambda key: jax.random.fold_in(key, 1)), donate_argnums=0)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_is_placed_shares_nothing_with_what_was_given(place):
    for name, give in GIVEN.items():
        x = give(aligned(4096).reshape(64, 64), place)
        (placed,) = sf.sharding.place((x,), (place,))
        assert placed.sharding == place, name
        np.testing.assert_array_equal(placed, np.arange(4096).reshape(64, 64), name)
        jax.block_until_ready(OVERWRITE(placed))
        assert placed.is_deleted(), name
        assert isinstance(x, np.ndarray) or not x.is_deleted(), name
        np.testing.assert_array_equal(x, np.arange(4096).reshape(64, 64), name)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_keys_are_copied_too(key, place):
    keys = jax.random.split(key, 8)
    want = bare(FOLD(jax.random.split(key, 8)))
    for given_keys in (keys, jax.device_put(keys, place)):
        placed = sf.sharding.place(given_keys, place)
        assert placed.sharding.is_equivalent_to(place, 1)
        after = FOLD(placed)
        assert placed.is_deleted()
        np.testing.assert_array_equal(bare(after), want)
        np.testing.assert_array_equal(bare(given_keys), bare(jax.random.split(key, 8)))


def test_a_state_that_is_placed_steps_as_one_that_is_born_there(key):
    tx = optax.adam(0.1)
    params = {"w": jnp.arange(4096.0).reshape(64, 64) / 4096}
    state = sf.init_state(params, tx, key)
    plan = sf.make_sharding(state, sf.make_mesh((4, 2, 1, 1)), sf.sharding.fsdp(min_size=1))
    born, placed = sf.init_state(params, tx, key, sharding=plan), sf.sharding.place(state, plan)
    for x, y in zip(jax.tree.leaves(born), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert x.dtype == y.dtype
        assert not getattr(y, "weak_type", False)
        np.testing.assert_array_equal(bare(x), bare(y))


R = PLACES["replicated"]


@pytest.mark.parametrize(
    ("state", "plan", "lines"),
    [
        ({"a": 1.0, "b": 2.0}, {"a": R}, ["b: has no sharding"]),
        ({"a": 1.0}, {"a": R, "b": R}, ["b: has a sharding and no array"]),
        (
            {"a": [1.0]},
            {"a": R},
            ["a/0: has no sharding", "a: has a sharding and no array"],
        ),
        ({"a": None}, {"a": R}, ["a: has a sharding and no array"]),
        ({"a": 1.0}, {"a": None}, ["a: has no sharding"]),
    ],
)
def test_a_plan_for_another_tree_is_refused_leaf_by_leaf(state, plan, lines):
    with pytest.raises(sf.errors.TreeMismatchError) as caught:
        sf.sharding.place(state, plan)
    assert str(caught.value).split("\n  ") == ["the plan is for another tree:", *lines]


def test_a_plan_in_other_containers_is_refused():
    with pytest.raises(
        sf.errors.TreeMismatchError, match=r"expected the containers .*\(\*,\).*, got"
    ):
        sf.sharding.place((1.0,), [R])


def test_a_state_made_by_hand_compiles_its_step_once(key, compiles):
    tx = optax.sgd(0.1)
    state = sf.TrainState(0, {"w": jnp.ones(64)}, tx.init({"w": jnp.ones(64)}), (), key)
    state = sf.sharding.place(state, jax.tree.map(lambda _: R, state))
    step = jax.jit(sf.make_train_step(lambda p, b, k: sf.mean(b * p["w"].sum()), tx))
    batch = sf.shard_batch(np.ones(8, np.float32), MESH)
    state, _ = jax.block_until_ready(step(state, batch))
    before = len(compiles)
    jax.block_until_ready(step(state, batch))
    assert len(compiles) == before
