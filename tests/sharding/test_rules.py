import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import stepfold as sf

MESH = sf.make_mesh((2, 2, 2, 1))


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TREE = {"layers": [{"kernel": leaf(64, 256), "bias": leaf(256)}], "embed": leaf(512, 64)}


def specs(rules, tree=TREE, mesh=MESH, **options):
    return jax.tree.map(lambda place: place.spec, sf.make_sharding(tree, mesh, rules, **options))


def test_a_pair_takes_the_paths_its_expression_is_found_in():
    found = specs([("kernel", P("dp", "tp")), ("s/0/b", P("tp"))])
    assert found["layers"] == [{"kernel": P("dp", "tp"), "bias": P("tp")}]


def test_an_expression_may_be_anchored():
    tree = {"w": leaf(64, 64), "w_out": leaf(64, 64)}
    assert specs(("^w$", P("dp")), tree) == {"w": P("dp"), "w_out": P("fsdp")}
    assert specs(("w", P("dp")), tree) == {"w": P("dp"), "w_out": P("dp")}


def test_a_function_sees_the_path_and_the_leaf():
    seen = {}

    def rule(path, leaf):
        seen[path] = leaf.shape
        return P("tp") if path.endswith("bias") else None

    assert specs(rule)["layers"][0]["bias"] == P("tp")
    assert seen == {"layers/0/kernel": (64, 256), "layers/0/bias": (256,), "embed": (512, 64)}


def test_a_function_that_gives_none_leaves_the_leaf_to_the_next():
    rules = [lambda path, leaf: None, ("kernel", P("dp"))]
    assert specs(rules)["layers"][0]["kernel"] == P("dp")


def test_the_first_that_matches_wins():
    found = specs([("kernel", P("tp")), ("layers", P("dp")), ("kernel|embed", P("fsdp"))])
    assert found == {"layers": [{"kernel": P("tp"), "bias": P("dp")}], "embed": P("fsdp")}


def test_what_no_rule_takes_is_left_to_fsdp():
    assert specs(("bias", P("tp"))) == specs([("bias", P("tp")), sf.fsdp()])
    assert specs([]) == specs(sf.fsdp())
    assert specs(lambda path, leaf: None) == specs(sf.fsdp())


def test_a_rule_that_is_given_for_all_keeps_fsdp_from_them():
    whole = jax.tree.map(lambda leaf: P(), TREE)
    assert specs((".", P())) == specs([lambda path, leaf: P()]) == whole


@pytest.mark.parametrize("rule", [("bias", P("tp")), sf.fsdp(min_size=1), lambda p, leaf: P()])
def test_one_rule_needs_no_list(rule):
    assert specs(rule) == specs([rule]) == specs((rule,))


def test_a_tuple_of_two_rules_is_no_pair():
    assert specs((("bias", P("tp")), sf.fsdp()))["layers"][0]["bias"] == P("tp")


def test_fsdp_cuts_the_longest_dimension():
    assert specs(sf.fsdp())["layers"][0]["kernel"] == P(None, "fsdp")
    assert specs(sf.fsdp())["embed"] == P("fsdp")


def test_fsdp_cuts_the_longest_dimension_that_divides():
    mesh = sf.make_mesh((1, -1), ("dp", "fsdp"))
    tree = {"a": leaf(100, 64), "b": leaf(9, 16, 1000), "c": leaf(63, 65)}
    found = specs(sf.fsdp(min_size=1), tree, mesh)
    assert found == {"a": P(None, "fsdp"), "b": P(None, None, "fsdp"), "c": P()}


def test_of_dimensions_of_one_length_fsdp_cuts_the_first():
    assert specs(sf.fsdp(), {"w": leaf(64, 64)}) == {"w": P("fsdp")}
    assert specs(sf.fsdp(min_size=1), {"w": leaf(3, 64, 64)}) == {"w": P(None, "fsdp")}


def test_fsdp_leaves_alone_what_is_small():
    tree = {"below": leaf(2, 2047), "at": leaf(2, 2048)}
    assert specs(sf.fsdp(), tree) == {"below": P(), "at": P(None, "fsdp")}
    assert specs(sf.fsdp(min_size=4094), tree)["below"] == P("fsdp")
    assert specs(sf.fsdp(min_size=4097), tree)["at"] == P()


def test_fsdp_over_several_axes_uses_them_as_one():
    found = specs(sf.fsdp(("dp", "fsdp"), min_size=1), {"a": leaf(6, 4), "b": leaf(6, 2)})
    assert found == {"a": P(None, ("dp", "fsdp")), "b": P()}


def test_fsdp_on_a_mesh_without_its_axis_replicates():
    mesh = sf.make_mesh((-1,), ("x",))
    assert set(jax.tree.leaves(specs(sf.fsdp(), mesh=mesh))) == {P()}


def test_fsdp_over_an_axis_of_one_device_replicates():
    mesh = sf.make_mesh((-1, 1), ("dp", "fsdp"))
    assert set(jax.tree.leaves(specs(sf.fsdp(), mesh=mesh))) == {P()}


def test_fsdp_over_several_axes_takes_those_the_mesh_has():
    mesh = sf.make_mesh((-1,), ("fsdp",))
    found = specs(sf.fsdp(("dp", "fsdp")), {"w": leaf(64, 128)}, mesh)["w"]
    assert found in (P(None, "fsdp"), P(None, ("fsdp",)))


def test_fsdp_leaves_scalars_and_the_empty_whole():
    tree = {"s": leaf(), "e": leaf(0, 8), "one": leaf(1)}
    assert specs(sf.fsdp(min_size=0), tree) == {"s": P(), "e": P(), "one": P()}


@given(
    shape=st.lists(st.integers(1, 40), max_size=4),
    axis=st.sampled_from(["dp", "fsdp", ("dp", "tp"), ("dp", "fsdp", "tp")]),
    min_size=st.integers(0, 200),
)
def test_fsdp_always_fits(shape, axis, min_size):
    tree = {"w": leaf(*shape)}
    place = sf.make_sharding(tree, MESH, sf.fsdp(axis, min_size=min_size))["w"]
    whole, own = tree["w"].size, 1
    for size in place.shard_shape(tuple(shape)):
        own *= size
    parts = 2 if isinstance(axis, str) else 2 ** len(axis)
    cut = whole > 1 and whole >= min_size and any(size % parts == 0 for size in shape)
    assert own == (whole // parts if cut else whole)


@pytest.mark.parametrize("min_size", [-1, 1.5, "4096", None])
def test_a_size_that_is_none_is_refused(min_size):
    with pytest.raises(sf.ShardingError, match="fsdp: expected min_size of at least 0"):
        sf.fsdp(min_size=min_size)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            ("kernal", P("tp")),
            r"rules: 'kernal' matches no path; there are embed, layers/0/bias, layers/0/kernel$",
        ),
        ([("kernel", P("tp")), ("zz", P())], "rules: 'zz' matches no path; there are embed"),
        (("(", P()), r"rules: '\(' is no regular expression: missing \)"),
        ("kernel", r"rules: expected \(regex, PartitionSpec\), a function .*, got str 'k'"),
        (["kernel", P("tp")], r"rules: expected \(regex, PartitionSpec\).* got str 'kernel'"),
        (P("tp"), r"or sf.fsdp\(\), got \w+ P.*\('tp',?\)"),
        (None, r"or sf.fsdp\(\), got NoneType None"),
        ({"kernel": P()}, r"or sf.fsdp\(\), got dict {'kernel'"),
        ([("kernel", P(), 3)], r"or sf.fsdp\(\), got tuple \('kernel'"),
        (("kernel", "tp"), r"layers/0/kernel: expected a PartitionSpec from the rule, got str"),
        (lambda p, leaf: ("tp",), r"embed: expected a PartitionSpec from the rule, got tuple"),
    ],
)
def test_what_is_no_rule_is_refused(rules, message):
    with pytest.raises(sf.ShardingError, match=message):
        specs(rules)


def test_of_many_paths_the_first_eight_are_named():
    tree = {f"p{i:02}": leaf(2) for i in range(11)}
    with pytest.raises(sf.ShardingError, match=r"there are p00, .*, p07 and 3 more$"):
        specs(("zz", P()), tree)


def test_an_expression_for_parameters_is_found_in_a_state(key):
    state = jax.eval_shape(lambda: sf.init_state({"w": jnp.ones(4)}, optax.sgd(0.1), key))
    with pytest.raises(sf.ShardingError, match="'kernel' matches no path; there are step, para"):
        sf.make_sharding(state, MESH, ("kernel", P("tp")))


def test_fsdp_over_an_axis_that_is_not_there_is_refused():
    said = r"fsdp: expected axes of the mesh \('dp', 'fsdp', 'tp', 'sp'\), got 'fdsp'"
    with pytest.raises(sf.ShardingError, match=said):
        sf.make_sharding(TREE, MESH, sf.fsdp("fdsp"))
