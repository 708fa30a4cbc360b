"""`make_sharding` plans any state by rules, and names rules that do not fit."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import ones

import stepfold as sf
from stepfold import table, tree

pytestmark = pytest.mark.not_optimized
MESH = sf.make_mesh((2, 2, 2, 1))
PARAMS = {
    "w": ones((16, 32)),
    "square": ones((16, 16)),
    "b": ones(6),
    "deep": [{"kernel": ones((4, 8, 16))}],
}
RULES = [
    ("w$", P("dp", "tp")),
    ("square$", P("fsdp", None)),
    ("b$", P("tp")),
    ("kernel$", P(None, "tp", ("dp", "fsdp"))),
]
SPECS = {
    "w": P("dp", "tp"),
    "square": P("fsdp", None),
    "b": P("tp"),
    "deep": [{"kernel": P(None, "tp", ("dp", "fsdp"))}],
}


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def state_of(tx, params=PARAMS, key=None, **options):
    key = jax.random.key(0) if key is None else key
    return jax.eval_shape(lambda: sf.init_state(params, tx, key, **options))


def plan_of(tx, params=PARAMS, rules=RULES, **options):
    return sf.make_sharding(state_of(tx, params), MESH, rules, **options)


def specs(plan):
    """Give the specs, with Nones at their ends left out, as they mean nothing."""
    return jax.tree.map(lambda place: _short(place.spec), plan)


def _short(spec):
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def short(tree):
    return jax.tree.map(_short, tree, is_leaf=lambda x: isinstance(x, P))


def by_path(plan):
    return {path: _short(place.spec) for path, place in tree.named_leaves(plan)}


def born(tx, plan, params=PARAMS):
    """Check that a state is born as planned, and stays so through an update."""
    state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    places = jax.tree.map(lambda x: x.sharding, state)
    agree = jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim), state, plan)
    assert all(jax.tree.leaves(agree)), places
    return state


def test_moments_follow_their_parameters():
    plan = specs(plan_of(optax.adam(0.1)))
    assert plan.params == plan.opt_state[0].mu == plan.opt_state[0].nu == short(SPECS)
    assert plan.step == plan.key == plan.opt_state[0].count == P()


def test_any_tree_of_arrays_can_be_planned():
    assert specs(sf.make_sharding(PARAMS, MESH, RULES)) == short(SPECS)
    assert sf.make_sharding({}, MESH) == {}
    assert specs(sf.make_sharding(leaf(64, 128), MESH)) == P(None, "fsdp")
    numpy = {"w": np.ones((64, 128), np.float32)}
    assert specs(sf.make_sharding(numpy, MESH)) == {"w": P(None, "fsdp")}
    params = [jnp.ones((8, 8)), (jnp.ones((8, 4)), jnp.ones(4))]
    rules = [("^params/0$", P("dp")), ("^params/1/0$", P("tp")), ("^params/1/1$", P("fsdp"))]
    plan = specs(plan_of(optax.adam(0.1), params, rules))
    assert plan.params == plan.opt_state[0].nu == [P("dp"), (P("tp"), P("fsdp"))]


def test_factored_moments_follow_by_the_dimension_that_is_left():
    tx = optax.adafactor(0.1, min_dim_size_to_factor=4)
    state, plan = state_of(tx), plan_of(tx)
    moments, places = state.opt_state[0], specs(plan).opt_state[0]
    assert moments.v_row["w"].shape == (16,)
    assert places.v_row["w"] == P("dp")
    assert moments.v_col["w"].shape == (32,)
    assert places.v_col["w"] == P("tp")
    assert moments.v_row["deep"][0]["kernel"].shape == (4, 8)
    assert places.v_row["deep"][0]["kernel"] == P(None, "tp")
    assert moments.v_col["deep"][0]["kernel"].shape == (4, 16)
    assert places.v_col["deep"][0]["kernel"] == P(None, ("dp", "fsdp"))
    assert places.v["b"] == P("tp")
    born(tx, plan)


@pytest.mark.filterwarnings("ignore:mesh. expected every axis")
@pytest.mark.parametrize(
    ("spec", "cut"),
    [
        (P("fsdp"), [P("fsdp")]),
        (P("fsdp", None), [P("fsdp")]),
        (P(None, "fsdp"), [P("fsdp")]),
        (P("dp", "tp"), [P("dp"), P("tp")]),  # cut twice, it leaves either
    ],
)
def test_factored_moments_of_a_square_stay_cut(spec, cut):
    tx = optax.adafactor(0.1, min_dim_size_to_factor=4)
    moments = specs(plan_of(tx, {"w": jnp.ones((16, 16))}, ("w$", spec))).opt_state[0]
    assert moments.v_row["w"] in cut
    assert moments.v_col["w"] in cut


def test_histories_follow_behind_the_dimension_they_add():
    tx = optax.lbfgs(0.1, linesearch=None)
    plan = plan_of(tx)
    behind = jax.tree.map(lambda s: P(None, *s), short(SPECS), is_leaf=lambda x: isinstance(x, P))
    assert specs(plan).opt_state[0].diff_params_memory == behind
    assert specs(plan).opt_state[0].diff_updates_memory == behind
    assert specs(plan).opt_state[0].weights_memory == P()
    born(tx, plan)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="sgd"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="momentum"),
        pytest.param(optax.inject_hyperparams(optax.adamw)(0.1), id="inject_hyperparams"),
        pytest.param(optax.apply_if_finite(optax.adam(0.1), 3), id="apply_if_finite"),
        pytest.param(optax.contrib.schedule_free_adamw(0.1), id="schedule_free"),
        pytest.param(optax.contrib.muon(0.1), id="muon"),
        pytest.param(optax.contrib.prodigy(0.1), id="prodigy"),
        pytest.param(optax.rprop(0.1), id="rprop"),
        pytest.param(optax.sm3(0.1), id="sm3"),
        pytest.param(optax.lbfgs(0.1), id="lbfgs"),
        pytest.param(optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), id="plateau"),
    ],
)
def test_whatever_has_the_shape_of_its_parameter_lies_beside_it(tx):
    state, plan = state_of(tx), plan_of(tx)
    assert specs(plan.params) == short(SPECS)
    wanted = by_path(plan.params)
    shapes = {path: x.shape for path, x in tree.named_leaves(PARAMS)}
    pairs = zip(tree.named_leaves(state.opt_state), by_path(plan.opt_state).items(), strict=True)
    for (path, x), (_, spec) in pairs:
        owners = [name for name in wanted if f"/{path}".endswith(f"/{name}")]
        if owners and shapes[owners[0]] == x.shape:
            assert spec == wanted[owners[0]], path
        elif not owners:
            assert spec == P(), path
    for sharding, x in zip(jax.tree.leaves(plan), jax.tree.leaves(state), strict=True):
        sharding.shard_shape(x.shape)  # raises where a dimension does not divide


def test_of_parameters_whose_paths_end_alike_each_has_its_own_followers():
    params = {"w": jnp.ones((8, 8)), "a": {"w": jnp.ones((8, 8)), "a": {"w": jnp.ones((8, 8))}}}
    rules = [("params/w", P("dp")), ("params/a/w", P("tp")), ("params/a/a/w", P(None, "fsdp"))]
    plan = specs(plan_of(optax.adam(0.1), params, rules))
    wanted = {"w": P("dp"), "a": {"w": P("tp"), "a": {"w": P(None, "fsdp")}}}
    assert plan.params == plan.opt_state[0].mu == plan.opt_state[0].nu == wanted


def test_parameters_may_be_one_bare_array():
    params = jnp.ones((16, 32))
    adam = specs(plan_of(optax.adam(0.1), params, ("^params$", P("dp", "tp"))))
    assert adam.params == adam.opt_state[0].mu == P("dp", "tp")
    tx = optax.adafactor(0.1, min_dim_size_to_factor=4)
    adafactor = specs(plan_of(tx, params, ("^params$", P("dp", "tp"))))
    assert adafactor.opt_state[0].v_row == P("dp")
    assert adafactor.opt_state[0].v_col == P("tp")
    tx = optax.lbfgs(0.1, linesearch=None)
    plan = plan_of(tx, params, ("^params$", P("dp", "tp")))
    assert specs(plan).opt_state[0].diff_params_memory == P(None, "dp", "tp")
    born(tx, plan, params)


def test_a_model_state_is_asked_for_by_its_path(key):
    parts = {"w": jnp.ones((8, 8))}, {"mean": jnp.ones(8), "seen": jnp.zeros((), int)}
    state = state_of(optax.adam(0.1), parts, stateful=True)
    plan = specs(sf.make_sharding(state, MESH, ("model_state/mean", P("tp"))))
    assert plan.model_state == {"mean": P("tp"), "seen": P()}


@pytest.mark.filterwarnings("ignore:mesh. expected every axis")
@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_keys_and_scalars_are_replicated_without_asking(key):
    asked = []

    def rule(path, leaf):
        asked.append(path)
        return P("dp")

    params = {"w": jnp.ones((8, 8)), "scale": jnp.ones(()), "one": jnp.ones((1, 1))}
    plan = specs(sf.make_sharding(state_of(optax.adam(0.1), params, key), MESH, rule))
    assert asked == ["params/w"]
    assert plan.key == plan.step == plan.params["scale"] == plan.params["one"] == P()


def test_under_misfit_replicate_followers_follow_the_fallback():
    params = {"w": jnp.ones((63, 128)), "v": jnp.ones((64, 7)), "fits": jnp.ones((4, 2))}
    with pytest.warns(UserWarning, match="unsharded") as caught:
        plan = plan_of(
            optax.adam(0.1), params, ("params", P(("dp", "fsdp"), "tp")), misfit="replicate"
        )
    (warning,) = caught
    assert warning.filename == __file__
    lines = str(warning.message).split("\n  ")
    assert lines[0] == "misfit='replicate' left these dimensions unsharded:"
    assert lines[1].startswith("params/v: ")
    assert lines[1].endswith("for the shape (64, 7), and dimension 1 of 7 does not divide by 2")
    assert lines[2].startswith("params/w: ")
    assert lines[2].endswith("for the shape (63, 128), and dimension 0 of 63 does not divide by 4")
    assert len(lines) == 3
    plan = specs(plan)
    wanted = {"w": P(None, "tp"), "v": P(("dp", "fsdp")), "fits": P(("dp", "fsdp"), "tp")}
    assert plan.params == plan.opt_state[0].mu == plan.opt_state[0].nu == wanted


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((8,), P("dp", "tp"), r"w: .*P.* has 2 entries, and the shape \(8,\) 1 dimensions"),
        ((8,), P(None, None), r"w: .* has 2 entries, and the shape \(8,\) 1 dimensions"),
        ((8, 8), P("zz"), r"\(8, 8\) names \['zz'\], and the axes are \('dp', 'fsdp', 'tp'"),
        ((8, 8), P(("dp", "zz")), r"w: .* for the shape \(8, 8\) names \['zz'\], and the axes are"),
        ((8, 8), P("dp", "dp"), r"w: .* for the shape \(8, 8\) uses \['dp'\] more than once"),
        ((8, 8), P("sp", "sp"), r"w: .* the shape \(8, 8\) uses \['sp'\] more than once"),
        ((8, 8), P("dp", ("tp", "dp")), r"w: .* the shape \(8, 8\) uses \['dp'\] more than once"),
        (
            (8, 9),
            P("dp", "tp"),
            r"w: .* shape \(8, 9\), and dimension 1 of 9 does not divide by 2\n"
            r"  pass misfit='replicate' to leave such dimensions unsharded",
        ),
        ((8, 6), P(None, ("dp", "tp")), r"dimension 1 of 6 does not divide by 4"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_with_path_shape_and_mesh(shape, spec, message):
    with pytest.raises(sf.errors.ShardingError, match=message) as caught:
        sf.make_sharding({"w": leaf(*shape)}, MESH, ("w", spec))
    assert str(caught.value).startswith(
        "the rules do not fit the mesh {'dp': 2, 'fsdp': 2, 'tp': 2, 'sp': 1}:\n  w: "
    )


def test_all_faults_are_told_at_once():
    tree = {"a": leaf(7, 6), "b": leaf(8), "c": leaf(3, 8), "d": leaf(4, 4), "fits": leaf(8, 8)}
    rules = [("b", P("dp", "tp")), ("d", P("zz")), (".", P("dp", "tp"))]
    with pytest.raises(sf.errors.ShardingError) as caught:
        sf.make_sharding(tree, MESH, rules)
    lines = str(caught.value).split("\n  ")[1:-1]
    assert sorted(line[:2] for line in lines) == ["a:", "b:", "c:", "d:"]


@pytest.mark.parametrize("misfit", ["ignore", None, True])
def test_another_misfit_is_refused(misfit):
    with pytest.raises(
        sf.errors.ShardingError, match="misfit: expected 'error' or 'replicate', got"
    ):
        sf.make_sharding(PARAMS, MESH, misfit=misfit)


@pytest.mark.parametrize(("thing", "spelled"), [(1.0, "float 1.0"), ("x", "str 'x'")])
def test_what_is_no_array_is_refused_by_its_path(thing, spelled):
    message = f"a/0: expected an array or an abstract one, got {spelled}"
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.make_sharding({"a": [thing]}, MESH)
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.sharding.sharding_table({"a": [thing]})
    with pytest.raises(sf.errors.ShardingError, match="tree: expected an array or an abstract one"):
        sf.make_sharding(lambda key: key, MESH)


def test_a_table_has_path_shape_spec_and_bytes_per_device():
    params = {"w": leaf(64, 128), "b": leaf(128), "d": leaf(4, 8, 2)}
    rules = [("w", P("dp", ("fsdp", "tp"))), ("d", P(None, "tp"))]
    assert sf.sharding.sharding_table(
        params, sf.make_sharding(params, MESH, rules)
    ).splitlines() == [
        "path   shape            spec         bytes per device",
        "-----  ---------------  -----------  ----------------",
        "b      float32[128]     replicated              512 B",
        "d      float32[4,8,2]   ·, tp                   128 B",
        "w      float32[64,128]  dp, fsdp+tp          4.00 KiB",
        "total  8384 elements                         4.62 KiB",
    ]


def test_a_table_without_shardings_is_refused():
    with pytest.raises(
        sf.errors.ShardingError, match="w: expected a sharding, got None; give plan="
    ):
        sf.sharding.sharding_table({"w": np.ones(3, np.float32)})


def test_a_table_of_arrays_says_where_they_are(key):
    arrays = {
        "cut": jax.device_put(jnp.ones((8, 8)), NamedSharding(MESH, P("dp"))),
        "key": key,
        "half": jnp.ones(8, jnp.bfloat16),
    }
    assert sf.sharding.sharding_table(arrays).splitlines()[2:] == [
        "cut    float32[8,8]  dp                     128 B",
        "half   bfloat16[8]   one device              16 B",
        "key    key<fry>[]    one device               8 B",
        "total  73 elements                          152 B",
    ]


AXES = st.permutations(["dp", "fsdp", "tp", "sp"])
SIZES = dict(MESH.shape)


@st.composite
def leaves(draw):
    """Give a shape and a spec that fits it."""
    axes, shape, entries = list(draw(AXES)), [], []
    for _ in range(draw(st.integers(0, 4))):
        mine = tuple(axes.pop() for _ in range(min(len(axes), draw(st.integers(0, 2)))))
        shape.append(math.prod(SIZES[axis] for axis in mine) * draw(st.integers(1, 3)))
        entries.append(None if not mine else mine[0] if len(mine) == 1 else mine)
    return tuple(shape), P(*entries[: draw(st.integers(0, len(entries)))])


TREES = st.recursive(
    leaves().map(lambda pair: {"leaf": pair}),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda many: {"many": many})
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


def is_pair(x):
    return isinstance(x, tuple)


@given(pairs=TREES, dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8, bool]))
def test_a_plan_of_specs_that_fit_is_where_arrays_can_be_put(pairs, dtype):
    found = jax.tree_util.tree_leaves_with_path(pairs, is_leaf=is_pair)
    given_specs = {tree.path_name(path): pair[1] for path, pair in found}
    arrays = jax.tree.map(lambda pair: np.zeros(pair[0], dtype), pairs, is_leaf=is_pair)
    plan = sf.make_sharding(arrays, MESH, lambda path, leaf: given_specs[path])
    placed = jax.device_put(arrays, plan)
    assert sf.sharding.sharding_table(placed) == sf.sharding.sharding_table(arrays, plan)
    rows = sf.sharding.sharding_table(arrays, plan).splitlines()[2:]
    sizes = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed)]
    for row, own in zip(rows, [*sizes, sum(sizes)], strict=True):
        assert row.endswith(f" {table.size(own)}")
    for (path, x), place in zip(tree.named_leaves(placed), jax.tree.leaves(plan), strict=True):
        wanted = given_specs[path] if x.size > 1 else P()
        assert place.is_equivalent_to(NamedSharding(MESH, wanted), x.ndim)


@pytest.mark.filterwarnings("ignore:mesh. expected every axis")
@given(pairs=TREES.filter(lambda t: jax.tree.leaves(t, is_leaf=is_pair)))
def test_the_state_of_any_optimizer_is_born_as_planned(pairs):
    found = jax.tree_util.tree_leaves_with_path(pairs, is_leaf=is_pair)
    given_specs = {f"params/{tree.path_name(path)}": pair[1] for path, pair in found}
    params = jax.tree.map(lambda pair: np.ones(pair[0], np.float32), pairs, is_leaf=is_pair)
    tx = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.scale_by_lbfgs(memory_size=2),
        optax.trace(0.9),
    )
    shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, MESH, lambda path, leaf: given_specs.get(path, P()))
    assert specs(plan.opt_state[2].trace) == specs(plan.params)
    for place, x in zip(jax.tree.leaves(plan), jax.tree.leaves(shape), strict=True):
        place.shard_shape(x.shape)  # raises where a dimension does not divide


def test_what_is_no_plan_is_refused():
    place = NamedSharding(MESH, P())
    with pytest.raises(sf.errors.TreeMismatchError, match="the plan is for another tree:"):
        sf.sharding.sharding_table({"a": leaf(2)}, [place, place])
    with pytest.raises(
        sf.errors.ShardingError, match="plan: expected shardings, as sf.make_sharding"
    ):
        sf.sharding.place({"a": jnp.ones(2)}, MESH)
    with pytest.raises(
        sf.errors.ShardingError, match="plan/a: expected shardings, .* got str 'fsdp'"
    ):
        sf.sharding.sharding_table({"a": leaf(2)}, {"a": "fsdp"})


# Rules


RULED = {"layers": [{"kernel": leaf(64, 256), "bias": leaf(256)}], "embed": leaf(512, 64)}


def by_rules(rules, tree=RULED, mesh=MESH, **options):
    return jax.tree.map(lambda place: place.spec, sf.make_sharding(tree, mesh, rules, **options))


def test_a_pair_takes_the_paths_its_expression_is_found_in():
    found = by_rules([("kernel", P("dp", "tp")), ("s/0/b", P("tp"))])
    assert found["layers"] == [{"kernel": P("dp", "tp"), "bias": P("tp")}]
    tree = {"w": leaf(64, 64), "w_out": leaf(64, 64)}
    assert by_rules(("^w$", P("dp")), tree) == {"w": P("dp"), "w_out": P("fsdp")}
    assert by_rules(("w", P("dp")), tree) == {"w": P("dp"), "w_out": P("dp")}


def test_a_function_sees_the_path_and_the_leaf():
    seen = {}

    def rule(path, leaf):
        seen[path] = leaf.shape
        return P("tp") if path.endswith("bias") else None

    assert by_rules(rule)["layers"][0]["bias"] == P("tp")
    assert seen == {"layers/0/kernel": (64, 256), "layers/0/bias": (256,), "embed": (512, 64)}


def test_what_no_rule_takes_is_left_to_fsdp():
    assert by_rules(("bias", P("tp"))) == by_rules([("bias", P("tp")), sf.sharding.fsdp()])
    assert by_rules([]) == by_rules(sf.sharding.fsdp())
    assert by_rules(lambda path, leaf: None) == by_rules(sf.sharding.fsdp())


def test_a_rule_that_is_given_for_all_keeps_fsdp_from_them():
    whole = jax.tree.map(lambda leaf: P(), RULED)
    assert by_rules((".", P())) == by_rules([lambda path, leaf: P()]) == whole


EIGHT = sf.make_mesh((1, -1), ("dp", "fsdp"))
NONE = sf.make_mesh((-1,), ("x",))
ALONE = sf.make_mesh((-1, 1), ("dp", "fsdp"))


@pytest.mark.parametrize(
    ("rule", "mesh", "shape", "wanted"),
    [
        (sf.sharding.fsdp(), MESH, (64, 256), P(None, "fsdp")),  # the longest dimension
        (sf.sharding.fsdp(), MESH, (512, 64), P("fsdp")),
        (sf.sharding.fsdp(), MESH, (64, 64), P("fsdp")),  # of several of one length the first
        (sf.sharding.fsdp(min_size=1), MESH, (3, 64, 64), P(None, "fsdp")),
        (sf.sharding.fsdp(min_size=1), EIGHT, (100, 64), P(None, "fsdp")),  # that divides
        (sf.sharding.fsdp(min_size=1), EIGHT, (9, 16, 1000), P(None, None, "fsdp")),
        (sf.sharding.fsdp(min_size=1), EIGHT, (63, 65), P()),
        (sf.sharding.fsdp(), MESH, (2, 2047), P()),  # too small
        (sf.sharding.fsdp(), MESH, (2, 2048), P(None, "fsdp")),
        (sf.sharding.fsdp(min_size=4094), MESH, (2, 2047), P("fsdp")),
        (sf.sharding.fsdp(min_size=4097), MESH, (2, 2048), P()),
        (sf.sharding.fsdp(("dp", "fsdp"), min_size=1), MESH, (6, 4), P(None, ("dp", "fsdp"))),
        (sf.sharding.fsdp(("dp", "fsdp"), min_size=1), MESH, (6, 2), P()),  # several axes are one
        (sf.sharding.fsdp(), NONE, (512, 64), P()),  # without its axis
        (sf.sharding.fsdp(), ALONE, (512, 64), P()),  # of one device
        (sf.sharding.fsdp(min_size=0), MESH, (), P()),
        (sf.sharding.fsdp(min_size=0), MESH, (0, 8), P()),
        (sf.sharding.fsdp(min_size=0), MESH, (1,), P()),
    ],
)
def test_fsdp_cuts_the_longest_dimension_that_divides(rule, mesh, shape, wanted):
    assert by_rules(rule, {"w": leaf(*shape)}, mesh) == {"w": wanted}


def test_fsdp_over_several_axes_takes_those_the_mesh_has():
    mesh = sf.make_mesh((-1,), ("fsdp",))
    found = by_rules(sf.sharding.fsdp(("dp", "fsdp")), {"w": leaf(64, 128)}, mesh)["w"]
    assert found in (P(None, "fsdp"), P(None, ("fsdp",)))


@given(
    shape=st.lists(st.integers(1, 40), max_size=4),
    axis=st.sampled_from(["dp", "fsdp", ("dp", "tp"), ("dp", "fsdp", "tp")]),
    min_size=st.integers(0, 200),
)
def test_fsdp_always_fits(shape, axis, min_size):
    tree = {"w": leaf(*shape)}
    place = sf.make_sharding(tree, MESH, sf.sharding.fsdp(axis, min_size=min_size))["w"]
    whole, own = tree["w"].size, 1
    for size in place.shard_shape(tuple(shape)):
        own *= size
    parts = 2 if isinstance(axis, str) else 2 ** len(axis)
    cut = whole > 1 and whole >= min_size and any(size % parts == 0 for size in shape)
    assert own == (whole // parts if cut else whole)


@pytest.mark.parametrize("min_size", [-1, 1.5, "4096", None])
def test_a_size_that_is_none_is_refused(min_size):
    with pytest.raises(sf.errors.ShardingError, match="fsdp: expected min_size of at least 0"):
        sf.sharding.fsdp(min_size=min_size)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            ("kernal", P("tp")),
            r"rules: 'kernal' matches no path; there are embed, layers/0/bias, layers/0/kernel$",
        ),
        ([("kernel", P("tp")), ("zz", P())], "rules: 'zz' matches no path; there are embed"),
        (("(", P()), r"rules: expected a regular expression, got '\(': missing \)"),
        ("kernel", r"rules: expected \(regex, PartitionSpec\), a function .*, got str 'k'"),
        (["kernel", P("tp")], r"rules: expected \(regex, PartitionSpec\).* got str 'kernel'"),
        (P("tp"), r"or sf.sharding.fsdp\(\), got \w+ P.*\('tp',?\)"),
        (None, r"or sf.sharding.fsdp\(\), got NoneType None"),
        ({"kernel": P()}, r"or sf.sharding.fsdp\(\), got dict {'kernel'"),
        ([("kernel", P(), 3)], r"or sf.sharding.fsdp\(\), got tuple \('kernel'"),
        (("kernel", "tp"), r"layers/0/kernel: expected a PartitionSpec from the rule, got str"),
        (lambda p, leaf: ("tp",), r"embed: expected a PartitionSpec from the rule, got tuple"),
    ],
)
def test_what_is_no_rule_is_refused(rules, message):
    with pytest.raises(sf.errors.ShardingError, match=message):
        by_rules(rules)


def test_fsdp_over_an_axis_that_is_not_there_is_refused():
    said = r"fsdp: expected axes of the mesh \('dp', 'fsdp', 'tp', 'sp'\), got 'fdsp'"
    with pytest.raises(sf.errors.ShardingError, match=said):
        sf.make_sharding(RULED, MESH, sf.sharding.fsdp("fdsp"))
    for axis in (("fsdp", "typo"), ("dp", "fsdp", "typo"), ("typo", "none")):
        with pytest.raises(
            sf.errors.ShardingError, match=r"fsdp: expected axes of the mesh .*'typo'"
        ):
            sf.make_sharding(RULED, MESH, sf.sharding.fsdp(axis))
    with pytest.raises(sf.errors.ShardingError, match=r"mesh \('x',\), got \('dp', 'fsdp'\)"):
        sf.make_sharding(RULED, sf.make_mesh((-1,), ("x",)), sf.sharding.fsdp(("dp", "fsdp")))


# Boxes of flax


def boxed(value, *names, kind=nn.Partitioned):
    return kind(value, names)


def test_the_names_of_a_box_are_a_rule():
    params = {"box": boxed(jnp.ones((8, 64)), None, "tp"), "plain": jnp.ones((64, 128))}
    state = state_of(optax.adam(0.1), params)
    for rules in ((), sf.sharding.fsdp(min_size=1)):
        plan = sf.make_sharding(state, MESH, rules)
        assert jax.tree.structure(plan) == jax.tree.structure(state)
        plan = specs(plan)
        assert plan.params == plan.opt_state[0].mu == plan.opt_state[0].nu
        assert plan.params["box"].value == P(None, "tp")
        assert plan.params["plain"] == P(None, "fsdp")


def test_a_rule_before_fsdp_overrides_a_box():
    params = {"box": boxed(jnp.ones((8, 64)), None, "tp")}
    assert by_rules([("box", P("dp"))], params)["box"].value == P("dp")
    assert by_rules(lambda path, leaf: None, params)["box"].value == P(None, "tp")
    assert by_rules([sf.sharding.fsdp(), ("box", P("dp"))], params)["box"].value == P(None, "tp")


def test_factored_moments_of_a_boxed_parameter_follow():
    params = {"box": boxed(jnp.ones((16, 32)), "dp", "tp")}
    plan = plan_of(optax.adafactor(0.1, min_dim_size_to_factor=4), params, ())
    assert by_path(plan.opt_state)["0/v_row/box/value"] == P("dp")
    assert by_path(plan.opt_state)["0/v_col/box/value"] == P("tp")


def test_a_stateful_models_boxes_are_read_too():
    parts = {"w": jnp.ones((8, 8))}, {"mean": boxed(jnp.ones(8), "tp")}
    plan = sf.make_sharding(state_of(optax.sgd(0.1), parts, stateful=True), MESH)
    assert plan.model_state["mean"].value.spec == P("tp")


@pytest.mark.parametrize(
    ("names", "kind", "problem"),
    [
        ((None, "model"), nn.Partitioned, r"names \['model'\], and the axes are \('dp', 'fsdp'"),
        (("embed", "mlp"), nn.LogicallyPartitioned, r"names \['embed', 'mlp'\]"),
        (("dp", "tp", None), nn.Partitioned, r"has 3 entries, and the shape \(8, 64\) 2 dimen"),
    ],
)
def test_a_box_that_does_not_fit_the_mesh_is_refused_with_advice(names, kind, problem):
    params = {"box": boxed(jnp.ones((8, 64)), *names, kind=kind)}
    words = f"box/value: .*{problem}.*; these are the names of its nn.Partitioned, .* nn.unbox"
    with pytest.raises(sf.errors.ShardingError, match=words):
        sf.make_sharding(params, MESH)
    assert by_rules(("box", P("dp")), params)["box"].value == P("dp")
    assert specs(sf.make_sharding(nn.unbox(params), MESH, sf.sharding.fsdp(min_size=1))) == {
        "box": P(None, "fsdp")
    }


def test_a_rule_with_the_names_of_the_box_is_not_advised_to_be_given():
    params = {"box": boxed(jnp.ones((8, 64)), None, "model"), "plain": jnp.ones((8, 64))}
    with pytest.raises(sf.errors.ShardingError, match=r"box/value: .*names \['model'\]") as caught:
        by_rules(("box", P(None, "model")), params)
    assert "nn.Partitioned" not in str(caught.value)


@pytest.mark.parametrize("rules", [("(box|plain)$", P()), [sf.sharding.fsdp(), ("box", P())]])
def test_a_rule_that_does_not_reach_a_box_is_pointed_out(rules):
    params = {"box": boxed(jnp.ones((8, 64)), None, "model"), "plain": jnp.ones((8, 64))}
    words = (
        r"box/value: .*no rule before sf.sharding.fsdp\(\) matches this path: .*"
        "add a rule for the path"
    )
    with pytest.raises(sf.errors.ShardingError, match=words):
        by_rules(rules, params)
