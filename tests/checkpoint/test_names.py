"""A map of names leads from a tree to the files of another library, and back, bit for bit."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint import safetensors as safetensors_module

Rule = sf.checkpoint.NameRule


def numbers(*shape, start=0):
    return start + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


W, Q, K, V = (numbers(3, 4, n, start=100 * i) for i, n in enumerate((6, 4, 2, 2)))
EXPERTS = numbers(2, 4, 4, 6)
# Rules, a tree, and the arrays that another library has for it, written out by hand.
CASES = {
    "a name": ([("a/w", "x.weight")], {"a": {"w": W}}, {"x.weight": W}),
    "text on both sides": (
        [("{part}/{kind}", "h.{kind}.{part}")],
        {"a": {"w": W}, "b": {"w": Q, "v": K}},
        {"h.w.a": W, "h.w.b": Q, "h.v.b": K},
    ),
    "the same text twice": ([("{a}/{a}", "{a}.x.{a}")], {"w": {"w": W}}, {"w.x.w": W}),
    "layers of a list": (
        [("layers/{i}/w", "h.{i}.w")],
        {"layers": [{"w": W[0]}, {"w": W[1]}]},
        {"h.0.w": W[0], "h.1.w": W[1]},
    ),
    "stacked": (
        [("layers/w", "h.{i}.w")],
        {"layers": {"w": W}},
        {f"h.{i}.w": W[i] for i in range(3)},
    ),
    "stacked twice": (
        [Rule("w", "h.{layer}.e.{expert}.w", transpose=(1, 0))],
        {"w": EXPERTS},
        {f"h.{i}.e.{j}.w": EXPERTS[i, j].T for i in range(2) for j in range(4)},
    ),
    "transposed": ([Rule("w", "w", transpose=(1, 0))], {"w": W[0]}, {"w": W[0].T}),
    "leaves joined, transposed": (
        [Rule(("q", "k", "v"), "h.{i}.qkv", transpose=(1, 0))],
        {"q": Q, "k": K, "v": V},
        {f"h.{i}.qkv": np.concatenate([Q[i], K[i], V[i]], 1).T for i in range(3)},
    ),
    "vectors and matrices joined along the last axis": (
        [Rule(("q/{kind}", "k/{kind}"), "h.{i}.{kind}", axis=-1)],
        {"q": {"w": Q, "b": Q[:, 0]}, "k": {"w": K, "b": K[:, 0]}},
        {f"h.{i}.w": np.concatenate([Q[i], K[i]], -1) for i in range(3)}
        | {f"h.{i}.b": np.concatenate([Q[i, 0], K[i, 0]], -1) for i in range(3)},
    ),
    "arrays joined with sizes, transposed": (
        [Rule("w", ("h.{i}.a", "h.{i}.b"), transpose=(1, 0), sizes=(2, 1))],
        {"w": W},
        {
            f"h.{i}.{name}": W[i, :, part].T
            for i in range(3)
            for name, part in (("a", slice(4)), ("b", slice(4, 6)))
        },
    ),
    "the first rule": ([("a", "x"), ("{a}", "y.{a}")], {"a": W, "b": Q}, {"x": W, "y.b": Q}),
    "tied": (sf.checkpoint.NameMap([("w", "a")], tied={"b": "a"}), {"w": W}, {"a": W, "b": W}),
    "no elements": ([("w", "h.{i}.w")], {"w": W[:, :0]}, {f"h.{i}.w": W[i, :0] for i in range(3)}),
}


def as_map(rules):
    return rules if isinstance(rules, sf.checkpoint.NameMap) else sf.checkpoint.NameMap(rules)


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", CASES)
def test_files_are_those_of_the_other_library(tmp_path, name, kind):
    rules, params, theirs = CASES[name]
    params = jax.tree.map(kind, params)
    sf.checkpoint.export_params(tmp_path / "mine.safetensors", params, names=as_map(rules))
    same(load_file(tmp_path / "mine.safetensors"), theirs)
    contiguous = {name: np.asarray(array, order="C") for name, array in theirs.items()}
    save_file(contiguous, tmp_path / "theirs.safetensors")
    same(
        sf.checkpoint.load_params(tmp_path / "theirs.safetensors", params, names=as_map(rules)),
        params,
    )


# Shardings


@pytest.fixture(scope="module")
def mesh():
    return sf.make_mesh((2, 4), ("dp", "fsdp"))


SPECS = [PartitionSpec(), PartitionSpec("dp"), PartitionSpec(None, "fsdp")]
SPECS += [PartitionSpec(None, None, "dp"), PartitionSpec(None, "fsdp", "dp")]


@pytest.mark.parametrize("spec", full_but(SPECS[-1:], SPECS), ids=str)
@pytest.mark.parametrize("name", ["stacked", "leaves joined, transposed", "stacked twice"])
def test_a_sharded_leaf_is_read_in_its_parts_and_written_whole(
    tmp_path, mesh, monkeypatch, name, spec
):
    rules, params, _ = CASES[name]
    params = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), params)  # 6 layers
    stacked = name != "stacked twice"
    sf.checkpoint.export_params(tmp_path, params, names=sf.checkpoint.NameMap(rules))
    plan = sf.make_sharding(params, mesh, [(".", spec)], misfit="error")
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        params,
        plan,
    )
    read, original = [], safetensors_module.converted
    spy = lambda *arguments: (read.append(arguments[-1].size), original(*arguments))[1]
    monkeypatch.setattr(safetensors_module, "converted", spy)
    loaded = sf.checkpoint.load_params(tmp_path, like, names=sf.checkpoint.NameMap(rules))
    same(loaded, params)
    assert jax.tree.all(jax.tree.map(lambda leaf, place: leaf.sharding == place, loaded, plan))
    assert sum(read) == sum(leaf.size for leaf in jax.tree.leaves(params))
    sf.checkpoint.export_params(tmp_path / "again", loaded, names=sf.checkpoint.NameMap(rules))
    same(load_file(tmp_path / "again/model.safetensors"), load_file(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == (6 if stacked else 16)


@pytest.mark.parametrize("spec", [PartitionSpec("dp"), PartitionSpec("dp", "fsdp")], ids=str)
def test_leaves_on_explicit_axes_are_written_and_read(tmp_path, spec):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=explicit)
    params = {"w": jax.device_put(np.repeat(W, 2, axis=0), NamedSharding(mesh, spec))}
    names = sf.checkpoint.NameMap([Rule("w", "h.{i}.w", transpose=(1, 0))])
    sf.checkpoint.export_params(tmp_path, params, names=names)
    loaded = sf.checkpoint.load_params(tmp_path, params, names=names)
    same(loaded, params)
    assert loaded["w"].sharding == params["w"].sharding


# Laws


@st.composite
def layouts(draw):
    """Draw a rule, the leaves that it matches, and the number of layers."""
    layers = draw(st.integers(0, 3))
    inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = tuple(draw(st.permutations(range(len(inner)))))
    axis = draw(st.integers(-len(inner), len(inner) - 1))
    stack = draw(st.integers(0, len(inner))) if layers else 0
    ours, theirs, sizes = ("a",), ("a" + ".{i}" * (layers > 0),), None
    split = draw(st.sampled_from(["ours", "theirs", None]))
    lengths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    if split == "ours":
        ours = tuple(f"{i}" for i in range(len(lengths)))
    elif split == "theirs":
        theirs = tuple(f"{i}" + ".{i}" * (layers > 0) for i in range(len(lengths)))
        sizes, lengths = tuple(lengths), [sum(lengths) * draw(st.integers(1, 2))]
    else:
        axis, lengths = 0, [inner[0]]
    shapes = []
    for length in lengths:
        theirs_shape = list(inner)
        theirs_shape[axis] = length
        shape = [theirs_shape[i] for i in order]
        shapes.append(shape[:stack] + [layers] * (layers > 0) + shape[stack:])
    rule = Rule(ours, theirs, order, axis, sizes, stack)
    leaves = [numbers(*shape, start=1000 * i) for i, shape in enumerate(shapes)]
    return rule, dict(zip(ours, leaves, strict=True)), layers


def reference(rule, params, layers):
    """Say in numpy what a file contains."""
    arrays = {}
    for i in range(max(layers, 1)):
        pieces = [leaf.take(i, rule.stack) if layers else leaf for leaf in params.values()]
        joined = np.concatenate(
            [piece.transpose(np.argsort(rule.transpose)) for piece in pieces], rule.axis
        )
        ratio = rule.sizes or (1,)
        ends = np.cumsum(ratio)[:-1] * joined.shape[rule.axis] // sum(ratio)
        split = np.split(joined, ends, rule.axis)
        arrays |= {name.format(i=i): part for name, part in zip(rule.theirs, split, strict=True)}
    return arrays


@given(layouts())
def test_any_rule_is_the_reference_and_its_inverse(tmp_path_factory, layout):
    rule, params, layers = layout
    folder, names = tmp_path_factory.mktemp("law"), sf.checkpoint.NameMap([rule])
    sf.checkpoint.export_params(folder, params, names=names)
    same(load_file(folder / "model.safetensors"), reference(rule, params, layers))
    same(sf.checkpoint.load_params(folder, params, names=names), params)


# Files of others


def test_ignored_names_are_neither_read_nor_written(tmp_path):
    names = sf.checkpoint.NameMap([("w", "h.{i}.w")], ignore=["h.{i}.mask", "vision", "head.b"])
    more = {"h.0.mask": W, "h.11.mask": W, "vision.w": W, "vision": W, "head.b": W}
    save_file({f"h.{i}.w": W[i].copy() for i in range(3)} | more, tmp_path / "m.safetensors")
    same(sf.checkpoint.load_params(tmp_path / "m.safetensors", {"w": W}, names=names), {"w": W})
    for name in ("h.0.masked", "visions", "head.bias", "h.0.1.mask", "x.h.0.mask"):
        save_file(
            {f"h.{i}.w": W[i].copy() for i in range(3)} | {name: W}, tmp_path / "m.safetensors"
        )
        with pytest.raises(
            sf.errors.TreeMismatchError, match=rf"{name} +float32\[3,4,6\] +nothing"
        ):
            sf.checkpoint.load_params(tmp_path / "m.safetensors", {"w": W}, names=names)
    save_file({f"h.{i}.w": W[i].copy() for i in range(3)}, tmp_path / "m.safetensors")
    ignores_all = sf.checkpoint.NameMap(
        [("w", "h.{i}.w")], ignore=["h"]
    )  # but not what a leaf needs
    same(
        sf.checkpoint.load_params(tmp_path / "m.safetensors", {"w": W}, names=ignores_all), {"w": W}
    )


def test_tied_copies_may_be_missing_but_have_to_be_equal(tmp_path):
    names, file = (
        sf.checkpoint.NameMap([("w", "embed")], tied={"head": "embed"}),
        tmp_path / "m.safetensors",
    )
    nan = np.where(W == 3, np.nan, W).astype(np.float32)
    for copies in ({}, {"head": nan}):
        save_file({"embed": nan} | copies, file)
        same(sf.checkpoint.load_params(file, {"w": W}, names=names), {"w": nan})
    for other in (W, nan[:2], nan.astype(np.float64)):
        save_file({"embed": nan, "head": np.ascontiguousarray(other)}, file)
        with pytest.raises(
            sf.errors.TreeMismatchError, match=r"w \(head\): expected a copy of embed, .* got other"
        ):
            sf.checkpoint.load_params(file, {"w": W}, names=names)


def test_every_difference_is_listed_with_its_leaf_and_its_name(tmp_path):
    names = sf.checkpoint.NameMap([Rule("up", "h.{i}.up", transpose=(1, 0)), ("b", "h.{i}.b")])
    file = tmp_path / "m.safetensors"
    arrays = {f"h.{i}.up": W[i].copy() for i in (0, 1)} | {"h.0.b": W[0, 0], "h.1.b": W[0, 0]}
    save_file(arrays | {"h.3.b": W[0, 0], "other": W}, file)
    with pytest.raises(sf.errors.TreeMismatchError) as raised:
        sf.checkpoint.load_params(file, {"up": W, "b": W[:, 0]}, names=names)
    first, _, _, *rows = str(raised.value).splitlines()
    assert first == (
        f"{file}: expected the tree that was saved, got one that differs at 6 paths; correct the "
        "rules of the NameMap, ignore names, or convert dtypes by cast=True"
    )
    assert [row.split("  ")[0] for row in rows] == [
        "b (h.2.b)", "up (h.0.up)", "up (h.1.up)", "up (h.2.up)", "h.3.b", "other",
    ]  # fmt: skip
    assert rows[0].split()[2:] == ["nothing", "float32[6]"]  # a layer is missing
    assert rows[1].split()[2:] == ["float32[4,6]", "float32[6,4]"]  # not transposed
    assert rows[4].split()[1:] == ["float32[6]", "nothing"]  # a layer too many


# Errors


RULES = {
    "no list": ({"w": "w"}, "NameMap: rules: expected a list, got dict"),
    "no rule": (["w"], r"rules\[0\]: expected a NameRule, or a tuple of its fields, got str 'w'"),
    "half a rule": ([("w",)], r"rules\[0\]: expected a NameRule, or a tuple of its fields, got t"),
    "no name": ([("w", 3)], r"rules\[0\]: expected a path or a name, with placeholders .* got 3"),
    "an empty name": ([("w", "")], "expected a path or a name, with placeholders .* got ''"),
    "no names": ([("w", ())], "expected one path or one name, got 1 paths and 0 names"),
    "many to many": ([(("a", "b"), ("a", "b"))], "one path or one name, got 2 paths and 2"),
    "half a placeholder": ([("w", "h.{i.w")], r"got 'h.{i.w'; write a word between { and }"),
    "an empty placeholder": ([("w", "h.{}.w")], r"got 'h.{}.w'; write a word between { and }"),
    "unknown in ours": ([("{i}/w", "w")], r"expected the placeholders of 'w', .* got '{i}/w'"),
    "unknown in one of theirs": ([("w", ("{i}.a", "{j}.b"))], "of '{i}.a', .* got '{j}.b'"),
    "missing in one of ours": ([(("a/{i}", "b"), "{i}.c")], "expected the placeholders .* got 'b'"),
    "an axis twice": ([Rule("w", "w", transpose=(0, 0))], r"transpose: .* got \(0, 0\)"),
    "an axis too many": ([Rule("w", "w", transpose=(1, 2))], "expected every axis once"),
    "no axes": ([Rule("w", "w", transpose=True)], "expected every axis once, .* got True"),
    "an axis of nothing": ([Rule("w", "w", axis=1)], "axis: .* 0 unless arrays are joined, got 1"),
    "no axis": ([Rule("w", ("a", "b"), axis="x")], "axis: expected an integer, .* got 'x'"),
    "other sizes": ([Rule("w", ("a", "b"), sizes=(1, 2, 3))], r"each of 2 names, got \(1, 2, 3\)"),
    "no size": ([Rule("w", ("a", "b"), sizes=(1, 0))], r"sizes: .* each of 2 names, got \(1, 0\)"),
    "no stack": ([Rule("w", "{i}", stack=-1)], "stack: expected an integer of at least 0, got -1"),
}


@pytest.mark.parametrize("name", RULES)
def test_wrong_rules_are_refused_when_they_are_built(name):
    rules, words = RULES[name]
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.checkpoint.NameMap(rules)


@pytest.mark.parametrize("name", Rule._fields)
def test_any_wrong_value_of_a_rule_is_refused(name):
    for wrong in (0.5, b"a", {}, {1}, [1, 0], [None], ([],), (None,), (0.5,), object(), len):
        with pytest.raises(sf.errors.ConfigError, match=r"rules\[0\]"):
            sf.checkpoint.NameMap([Rule("a", ("b", "c"), axis=1)._replace(**{name: wrong})])


def test_wrong_options_are_refused_when_they_are_built():
    for options in ({"ignore": "a"}, {"tied": ["a"]}):
        with pytest.raises(
            sf.errors.ConfigError, match=f"NameMap: {next(iter(options))}: expected a"
        ):
            sf.checkpoint.NameMap([], **options)
    for options in ({"ignore": ["{"]}, {"tied": {"a": 3}}, {"tied": {"}": "a"}}):
        with pytest.raises(
            sf.errors.ConfigError, match="ignore, tied: expected a path or a name, with"
        ):
            sf.checkpoint.NameMap([], **options)


JOINED = [Rule(("a", "b"), "{i}.x", axis=1)]
TREES = {
    "no rule": ([("a", "a")], {"a": W, "b": W, "c": W}, "params: .* got none for b, c; add"),
    "a longer path": ([("{a}", "{a}")], {"a": {"b": W}}, "got none for a/b; add rules"),
    "a name twice": (
        [("a", "x"), ("b", "x")],
        {"a": W, "b": W},
        "b: expected a unique name, got 'x', the name of a; correct",
    ),
    "a name counted twice": (
        [("a", "{i}"), ("b", "2")],
        {"a": W, "b": W},
        "got '2', the name of a",
    ),
    "a missing member": ([(("a", "b"), "x")], {"a": W}, "a: expected leaves at a, b, .* none at b"),
    "other shapes": (
        JOINED,
        {"a": Q, "b": W[:, :2]},
        r"b: .* be joined with a, float32\[3,4,4\], along axis 1 of {i}.x, got float32\[3,2,6\]",
    ),
    "other layers": (JOINED, {"a": Q, "b": K[:2]}, r"b: .* joined with a, .* float32\[2,4,2\]"),
    "other dtypes": (
        JOINED,
        {"a": Q, "b": K.astype(np.float16)},
        r"b: expected what can be joined with a, .* got float16\[3,4,2\]; correct .* or cast it",
    ),
    "axes to transpose": (
        [Rule("a", "a", transpose=(1, 0))],
        {"a": W},
        r"a: expected dimensions for a with transpose=\(1, 0\), got float32\[3,4,6\]; correct",
    ),
    "axes to stack": ([("a", "{i}.{j}")], {"a": W[0, 0]}, r"with 2 stacked, got float32\[6\]"),
    "an axis to stack on": ([Rule("a", "{i}", stack=3)], {"a": W}, "with 1 stacked at 3, got flo"),
    "an axis to join": (
        [Rule(("a", "b"), "{i}", axis=2)],
        {"a": Q, "b": K},
        r"a: expected dimensions for {i} with 1 stacked, axis=2, got float32\[3,4,4\]",
    ),
    "a scalar to join": (
        [(("a", "b"), "x")],
        {"a": W[0, 0, 0], "b": W[0, 0, 0]},
        r"a: expected dimensions for x with axis=0, got float32\[\]",
    ),
    "unequal parts": (
        [Rule("a", ("x", "y", "z"), axis=1)],
        {"a": W[0, :, :4]},
        "a: expected a size that divides by 3 along axis 1 of x, got 4; correct the sizes",
    ),
    "tied to nothing": (
        sf.checkpoint.NameMap([("a", "wte")], tied={"head": "wtf"}),
        {"a": W},
        "tied: expected a name without a leaf .* got 'head' for 'wtf'; did you mean 'wte'",
    ),
    "tied to a leaf": (
        sf.checkpoint.NameMap([("a", "x"), ("b", "y")], tied={"x": "y"}),
        {"a": W, "b": W},
        "tied: expected .* got 'x' for 'y'",
    ),
    "a name of safetensors": ([("a", "__metadata__")], {"a": W}, "at 'a', got '__metadata__'"),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_that_do_not_fit_are_refused(tmp_path, name):
    rules, params, words = TREES[name]
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.checkpoint.export_params(tmp_path, params, names=as_map(rules))
    with pytest.raises(sf.errors.ConfigError, match=words.replace("params:", "like:")):
        sf.checkpoint.load_params(tmp_path, params, names=as_map(rules))
    assert not list(tmp_path.iterdir())
