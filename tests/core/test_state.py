"""`init_state` copies, shards and compiles once; what is no state is refused."""

import gc
import weakref
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.small import full_but, ones

import stepfold as sf
from stepfold.core.state import (
    check_not_donated,
    has_nan,
    is_available,
    params_of,
    step_of,
    strengthen,
)

KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))


def init(key):
    return {"w": jax.random.normal(key, (16, 4)), "b": jnp.zeros(4)}


def loss_fn(params, batch, key):
    return sf.mean((batch @ params["w"] + params["b"]) ** 2)


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def plan_for(shape):
    """Shard what has 16 rows, replicate the rest."""
    spec = {16: PartitionSpec("x")}
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh(), spec.get((*leaf.shape, 0)[0], PartitionSpec())), shape
    )


def test_a_function_is_called_with_the_key_it_was_given(key):
    state = sf.init_state(init, optax.sgd(0.1), key)
    chex.assert_trees_all_close(state.params, init(key))
    assert state.step.dtype == jnp.int32
    assert state.step == 0
    assert state.model_state == ()


def test_no_step_draws_what_init_drew(key):
    state = sf.init_state(init, optax.sgd(0.1), key)
    of_steps = jax.vmap(jax.random.fold_in, (None, 0))(state.key, np.arange(100))
    keys = of_steps, key[None], jax.random.split(key, 100)
    data = [tuple(words) for each in keys for words in jax.random.key_data(each).tolist()]
    assert len(set(data)) == len(data) == 201


def test_a_stateful_function_gives_a_model_state(key):
    state = sf.init_state(lambda k: (init(k), {"n": 3}), optax.sgd(0.1), key, stateful=True)
    assert state.model_state["n"].dtype == jnp.int32
    state = sf.init_state((init(key), {"n": 3}), optax.sgd(0.1), key, stateful=True)
    assert state.model_state["n"] == 3


@pytest.mark.parametrize("place", ["host", "device", "mesh", "plan"])
def test_donating_the_state_leaves_the_callers_arrays_alone(key, place):
    mine = init(key)
    if place == "host":
        mine = jax.tree.map(np.asarray, mine)
    if place == "mesh":
        mine = jax.device_put(mine, plan_for(mine))
    tx = optax.adam(0.1)
    sharding = (
        plan_for(jax.eval_shape(lambda: sf.init_state(mine, tx, key))) if place == "plan" else None
    )
    before = jax.tree.map(np.array, mine)
    state = sf.init_state(mine, tx, key, sharding=sharding)
    step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
    for _ in range(2):
        state, _ = step(state, jnp.ones((8, 16)))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, mine), before)
    assert jax.random.key_data(key) is not None


@jax.tree_util.register_pytree_node_class
class Module:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_callable_tree_is_a_tree_and_a_partial_function_a_function(key):
    state = sf.init_state(Module(1.0), optax.adam(0.1), key)
    assert isinstance(state.params, Module)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    partly = jax.tree_util.Partial(lambda size, key: jnp.ones(size), 3)
    assert sf.init_state(partly, optax.sgd(0.1), key).params.shape == (3,)


def test_an_optimizer_that_keeps_the_parameters_keeps_a_copy(key):
    keep = lambda updates, state, params=None: (updates, state)
    tx = optax.chain(optax.GradientTransformation(lambda params: params, keep), optax.sgd(0.1))
    state = sf.init_state(init(key), tx, key)
    step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
    step(state, jnp.ones((8, 16)))  # a buffer that stands in the state twice cannot be donated


def test_eval_shape_and_vmap(key):
    tx = optax.adam(0.1)
    shape = jax.eval_shape(lambda k: sf.init_state(init, tx, k), key)
    chex.assert_trees_all_equal_shapes_and_dtypes(shape, sf.init_state(init, tx, key))
    many = jax.vmap(lambda k: sf.init_state(init, tx, k))(jax.random.split(key, 3))
    assert many.params["w"].shape == (3, 16, 4)
    assert many.step.shape == (3,)


@pytest.mark.parametrize("given", ["function", "arrays", "host arrays"])
def test_a_state_is_born_in_place_and_never_whole(key, given):
    tx = optax.adam(0.1)
    source = {
        "function": init,
        "arrays": init(key),
        "host arrays": jax.tree.map(np.array, init(key)),
    }
    build = lambda k: sf.init_state(source[given], tx, k)
    plan = plan_for(jax.eval_shape(build, key))
    state = sf.init_state(source[given], tx, key, sharding=plan)
    assert jax.tree.all(jax.tree.map(lambda leaf, place: leaf.sharding == place, state, plan))
    for leaf in (state.params["w"], state.opt_state[0].mu["w"]):
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 4)}
    chex.assert_trees_all_close(state.params, sf.init_state(source[given], tx, key).params)


def test_the_compiled_init_under_a_plan_holds_a_share_on_each_device(key):
    wide = lambda k: {"w": jax.random.normal(k, (16, 4096))}
    tx = optax.adam(0.1)
    plan = plan_for(jax.eval_shape(lambda k: sf.init_state(wide, tx, k), key))
    lowered = jax.jit(lambda k: sf.init_state(wide, tx, k, sharding=plan)).lower(key)
    memory = lowered.compile().memory_analysis()
    whole = 16 * 4096 * 4  # bytes of the parameter, of which adam makes three
    assert memory.output_size_in_bytes < 3 * whole / 8 * 1.05
    assert memory.temp_size_in_bytes < whole / 2


@pytest.mark.parametrize(
    "where",
    full_but(
        ["function under a plan"],
        ["one device", "key on a mesh", "function under a plan"],
    ),
)
def test_the_second_step_compiles_nothing(key, where, compiles):
    tx = sf.ema_params(optax.adam(optax.linear_schedule(0.1, 0.0, 10)), 0.9)
    batch, sharding, source = jnp.ones((8, 16)), None, init(key)
    if where == "key on a mesh":
        key = jax.device_put(key, NamedSharding(mesh(), PartitionSpec()))
    if "plan" in where:
        sharding = plan_for(jax.eval_shape(lambda k: sf.init_state(init, tx, k), key))
        batch = jax.device_put(batch, NamedSharding(mesh(), PartitionSpec("x")))
        source = init
    state = sf.init_state(source, tx, key, sharding=sharding)
    step = jax.jit(sf.make_train_step(loss_fn, tx, skip_nonfinite=True), donate_argnums=0)
    state, _ = step(state, batch)
    compiles.clear()
    for _ in range(2):
        state, _ = step(state, batch)
    assert compiles == []


@pytest.mark.parametrize("source", ["function", "plan"])
def test_a_second_init_of_the_same_model_does_not_compile(source, compiles):
    def initialize(seed):
        tx, key = optax.adam(1e-3), jax.random.key(seed)  # both new in each call, as the lambdas
        made = lambda key: init(key)
        sharding = None
        if source == "plan":
            sharding = plan_for(jax.eval_shape(lambda key: sf.init_state(made, tx, key), key))
        compiles.clear()
        return sf.init_state(made, tx, key, sharding=sharding)

    state = initialize(0)
    again = initialize(0)
    assert compiles == []
    chex.assert_trees_all_equal(again.params, state.params)
    other = initialize(1)
    assert compiles == []
    assert not np.array_equal(other.params["w"], state.params["w"])


@pytest.mark.parametrize("call", [lambda ones: lambda _: ones, lambda ones: ones])
def test_equal_programs_for_other_containers_return_these(key, call):
    ones = jnp.ones(7)
    for params in ([ones], (ones,), {"w": ones}, {"v": ones}, Module(ones)):
        state = sf.init_state(call(params), optax.sgd(0.1), key)
        assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_init_keeps_no_model_alive(key):
    class Model:
        def __init__(self):
            self.table = np.arange(6.0, dtype=np.float32)

        def init(self, key):
            return {"table": jnp.asarray(self.table), "w": jax.random.normal(key, (3,))}

    model = Model()
    watched = weakref.ref(model), weakref.ref(model.table)
    sf.init_state(model.init, optax.sgd(0.1), key)
    sf.init_state(partial(lambda model, key: model.init(key), model), optax.sgd(0.1), key)
    del model
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def test_init_calls_the_python_function_of_each_callback(key):
    def through_python(value):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return lambda _: {"w": jax.pure_callback(lambda: np.float32(value), shape)}

    made = [sf.init_state(through_python(value), optax.sgd(0.1), key) for value in (1, 2)]
    assert [float(state.params["w"]) for state in made] == [1, 2]


def test_init_of_traced_arrays_is_traced(key):
    scaled = lambda scale: sf.init_state(lambda _: {"w": scale * jnp.ones(2)}, optax.sgd(0.1), key)
    assert jax.vmap(scaled)(jnp.arange(3.0)).params["w"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert jax.grad(lambda scale: scaled(scale).params["w"].sum())(1.0) == 2
    jaxpr = jax.make_jaxpr(lambda: scaled(1.0))()
    assert "random_fold_in" in str(jaxpr)  # staged, not computed while tracing


def test_donating_one_state_leaves_the_next_one_alone(key):
    fixed = jnp.arange(16.0)
    states = [sf.init_state(lambda _: {"w": fixed}, optax.adam(0.1), key) for _ in range(2)]
    jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)(states[0])
    chex.assert_trees_all_equal(states[1].params["w"], jnp.arange(16.0))
    chex.assert_trees_all_equal(fixed, jnp.arange(16.0))


def test_debug_nans_finds_a_nan_in_init(key):
    nan = lambda key: {"w": jnp.log(-jax.random.uniform(key, (3,)) - 1)}
    assert np.isnan(sf.init_state(nan, optax.sgd(0.1), key).params["w"]).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        sf.init_state(nan, optax.sgd(0.1), key)


@pytest.mark.parametrize("source", [init, {"w": ones((16, 4)), "b": ones(4)}])
def test_one_sharding_stands_for_the_whole_state(key, source):
    everywhere = NamedSharding(mesh(), PartitionSpec())
    state = sf.init_state(source, optax.adam(0.1), key, sharding=everywhere)
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {everywhere}


def test_without_a_plan_the_optimizer_lies_where_the_parameters_lie(key):
    placed = jax.device_put(init(key), plan_for(init(key)))
    state = sf.init_state(placed, optax.adam(0.1), key)
    assert state.opt_state[0].mu["w"].sharding == placed["w"].sharding
    assert len(state.step.sharding.device_set) == len(state.key.sharding.device_set) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"w": ones(2, np.int32)},
            r"params/w: expected floating numbers, got int32\[2\]; .*model_state",
        ),
        ({"w": ones(2, np.complex64)}, "params/w: expected floating numbers, got complex64"),
        (lambda _: {"w": jnp.zeros(2, int)}, "params/w: expected floating numbers"),
        ({"a": {"act": jnp.tanh}}, r"params/a/act: expected an array, got .*equinox.partition"),
        ({"name": "adam"}, r"params/name: expected an array, got str 'adam'"),
        ({"x": np.array(["a"])}, r"params/x: expected an array, got <U1\[1\]"),
        ({"x": np.array([None])}, r"params/x: expected an array, got object\[1\]"),
        (
            {"x": KEY},
            r"params/x: expected floating numbers, got key<fry>\[\]",
        ),
        ({"x": jax.ShapeDtypeStruct((2,), float)}, r"params/x: expected an array"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(key, params, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.init_state(params, optax.sgd(0.1), key)


@pytest.mark.parametrize(
    "key",
    [
        *(0, None, ones(2)),
        jax.random.wrap_key_data(np.zeros((4, 2), np.uint32)),
        jax.device_put(np.zeros((4, 2), np.uint32)),  # four old ones
    ],
)
def test_what_is_no_key_is_refused(key):
    with pytest.raises(
        sf.errors.ConfigError, match=r"key: expected one PRNG key, got .*jax.random.key\(0\)"
    ):
        sf.init_state(init, optax.sgd(0.1), key)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (ones(2), "expected .params, model_state., got Array"),
        ((ones(2),), "expected .params, model_state., got tuple of 1"),
    ],
)
def test_a_stateful_init_that_gives_no_pair_is_refused(key, made, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.init_state(made, optax.sgd(0.1), key, stateful=True)


def test_a_model_state_holds_arrays(key):
    with pytest.raises(sf.errors.ConfigError, match="model_state/f: expected an array, got"):
        sf.init_state((jnp.ones(2), {"f": jnp.tanh}), optax.sgd(0.1), key, stateful=True)


def test_an_optimizer_that_is_none_is_refused(key):
    with pytest.raises(sf.errors.ConfigError, match=r"tx: .*did you mean to call it"):
        sf.init_state(init, optax.adam, key)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: None,
            r"init: expected a function init\(key\) -> params, got <lambda>\(\); give what",
        ),
        (
            lambda key, x: {},
            r"got <lambda>\(key, x\); .* as in lambda key: model.init\(key, example",
        ),
        (lambda key: None, "params: expected at least one array, got NoneType None; does init ret"),
        ({}, "params: expected at least one array, got dict {}"),
    ],
)
def test_what_makes_no_parameters_is_refused(made, said):
    with pytest.raises(sf.errors.ConfigError, match=said):
        sf.init_state(made, optax.sgd(0.1), jax.random.key(0))


def test_a_model_that_needs_an_example_is_refused_with_what_to_give():
    class Dense:
        def init(self, key, x): ...

        def apply(self, params, x): ...

        def __call__(self, x): ...

    with pytest.raises(
        sf.errors.ConfigError, match=r"init: Dense makes its .*; give model.init\(key, exam"
    ):
        sf.init_state(Dense(), optax.sgd(0.1), jax.random.key(0))


@pytest.mark.parametrize("sharding", [mesh, lambda: {"w": NamedSharding(mesh(), PartitionSpec())}])
def test_a_mesh_or_a_plan_of_parameters_alone_is_no_plan(sharding):
    message = (
        "sharding: expected one for the whole state, got (Mesh|dict) .*; give sf.make_sharding"
    )
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.init_state(init, optax.sgd(0.1), jax.random.key(0), sharding=sharding())


def test_what_was_donated_is_refused_by_its_path_and_what_is_there_or_traced_is_not():
    state = {"a": np.ones(2), "b": {"c": jnp.ones(2)}}
    check_not_donated(state)
    jax.eval_shape(check_not_donated, state)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["b"]["c"])
    words = "^state/b/c, …: the arrays were donated to an earlier call and are gone; continue"
    with pytest.raises(sf.errors.ConfigError, match=words):
        check_not_donated(state)
    with pytest.raises(sf.errors.ConfigError, match="^state, …: the arrays were donated"):
        check_not_donated(state["b"]["c"])


# What the loop asks of a state


def small(w=1.0):
    return sf.init_state({"w": jnp.full(3, w)}, optax.adam(1.0), jax.random.key(0))


def test_a_state_tells_how_far_it_is():
    assert step_of(small()._replace(step=jnp.int32(7))) == 7
    assert step_of((1, 2)) == 0


def test_states_that_are_stacked_are_refused_where_one_is_folded():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), small())
    step = jax.vmap(sf.make_train_step(lambda p, x, key: sf.mean(x @ p["w"]), optax.adam(1.0)))
    with pytest.raises(sf.errors.ConfigError, match=r"step: .* got int32\[2\]; train stacked"):
        sf.fit(step, states, [jnp.ones((2, 4, 3))])


def test_what_was_donated_or_a_failed_step_left_is_not_whole():
    assert is_available({"w": np.ones(2)})
    gone = small()
    assert is_available(gone)
    jax.jit(lambda x: x, donate_argnums=0)(gone)
    assert not is_available(gone)
    huge = jax.jit(jnp.outer)  # of 64 TiB
    assert not is_available({"w": huge(jnp.ones(1 << 22), jnp.ones(1 << 22))})


def test_only_a_nan_in_any_of_the_states_is_not_worth_keeping():
    for w, nan in ((1.0, False), (np.nan, True), (-np.inf, False)):
        assert has_nan(small(w)) is nan
        assert has_nan({"actor": small(), "critic": small(w)}) is nan
        assert has_nan((small(w), small())) is nan
    assert not has_nan({"w": jnp.nan})


def test_parameters_are_found_in_whatever_holds_states():
    pair = small(1.0), {"critic": small(2.0), "replay": jnp.ones(9)}
    assert [leaf[0] for leaf in jax.tree.leaves(params_of(pair, ()))] == [1.0, 2.0]
    assert params_of(pair[0], ()) is pair[0].params
    assert params_of({"w": jnp.ones(2)}, "unknown") == "unknown"


def test_weak_types_and_numbers_are_made_strong():
    state = strengthen(
        {"step": 0, "rate": jnp.asarray(0.5), "w": np.ones(2, np.float16), "on": True}
    )
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    assert [str(state[name].dtype) for name in ("step", "rate", "w", "on")] == [
        *("int32", "float32", "float16", "bool")
    ]


def test_a_state_has_a_short_repr():
    state = sf.init_state(
        {f"w{i}": jnp.ones(9) for i in range(99)}, optax.adam(1.0), jax.random.key(0)
    )
    assert repr(state).startswith("TrainState(step=int32[], params={99 arrays, 891 elements}, ")
    assert len(repr(state)) < 200


def test_parameters_that_are_committed_can_be_planned_for(key):
    params = jax.device_put({"w": jnp.ones(3)}, jax.devices()[1])
    shape = jax.eval_shape(lambda key: sf.init_state(params, optax.adam(0.1), key), key)
    assert shape.params["w"].shape == (3,)
    assert sf.init_state(params, optax.adam(0.1), key).step.devices() == {jax.devices()[1]}
