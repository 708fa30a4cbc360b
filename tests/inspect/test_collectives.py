"""Collectives of a program: kinds, bytes, axes, and how often they run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.inspect.collectives import (
    Collective,
    arrays,
    collectives,
    differing_axes,
    group_axes,
    largest_group,
    parse,
    permute_pairs,
    replica_groups,
    scope,
    unknown_loops,
    walk,
)

FLOAT = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def shuffled():
    """A mesh whose positions are not its devices' ids."""
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]]
    return Mesh(devices.reshape(4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def array(mesh, shape, *axes, dtype=jnp.float32):
    place = mesh and NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def found_in(function, mesh, *args, **options):
    text = jax.jit(function, **options).lower(*args).compile().as_text()
    return collectives(parse(text), mesh)


def written(*lines, mesh=None, head=""):
    body = "\n  ".join(("%x = f32[256]{0} parameter(0)", *lines))
    text = f"HloModule m{head}\n\nENTRY %main (x: f32[256]) -> f32[] {{\n  {body}\n}}"
    return collectives(parse(text), mesh)


def short(found):
    return [(one.kind, one.count, one.bytes, one.moved, one.axes, one.devices) for one in found]


# What jit puts in


def step(w, x):
    grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w["in"]) @ w["out"]))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grad)


def weights(mesh, *axes):
    return {"in": array(mesh, (64, 128), *axes), "out": array(mesh, (128, 32), *axes)}


WEIGHTS = (64 * 128 + 128 * 32) * FLOAT


@pytest.mark.parametrize(
    ("weight_axes", "batch_axes", "size", "moved", "axes", "devices"),
    [
        ((), "dp", WEIGHTS, WEIGHTS, ("dp",), 2),
        ((), ("dp", "tp"), WEIGHTS, 2 * WEIGHTS * 7 // 8, ("dp", "tp"), 8),
        (((None, "tp"), ("tp",)), "dp", WEIGHTS // 4, WEIGHTS // 4, ("dp",), 2),
    ],
    ids=["data parallel", "both axes", "tensor parallel"],
)
def test_gradients_are_reduced(weight_axes, batch_axes, size, moved, axes, devices, mesh):
    first, last = weight_axes or ((), ())
    split = {"in": array(mesh, (64, 128), *first), "out": array(mesh, (128, 32), *last)}
    (one,) = found_in(step, mesh, split, array(mesh, (16, 64), batch_axes))
    assert short([one]) == [("all-reduce", 1, size, moved, axes, devices)]
    assert (one.dtype, one.where) == ("f32", "dot_general (backward)")


def test_sharded_parameters_are_gathered(mesh):
    sharding = NamedSharding(mesh, P("tp"))
    gather = lambda w, x: x @ lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
    weight, batch = array(mesh, (64, 128), "tp"), array(mesh, (16, 64), "dp")
    (one,) = found_in(gather, mesh, weight, batch)
    size = 64 * 128 * FLOAT
    assert short([one]) == [("all-gather", 1, size, size * 3 // 4, ("tp",), 4)]
    assert one.where
    found = found_in(step, mesh, weights(mesh, "tp"), batch, out_shardings=sharding)
    assert ("all-gather", ("tp",)) in {(one.kind, one.axes) for one in found}


# What users write


def manual(mesh, function):
    whole = P(("dp", "tp"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    (one,) = found_in(mapped, mesh, array(mesh, (64, 16), ("dp", "tp")))
    return one


SHARE = 8 * 16 * FLOAT


@pytest.mark.parametrize(
    ("function", "kind", "size", "moved", "axes"),
    [
        (lambda x: lax.psum(x, "tp"), "all-reduce", SHARE, SHARE * 6 // 4, ("tp",)),
        (lambda x: lax.pmax(x, ("dp", "tp")), "all-reduce", SHARE, SHARE * 14 // 8, ("dp", "tp")),
        (
            lambda x: lax.all_gather(x, "tp", tiled=True),
            *("all-gather", 4 * SHARE, 3 * SHARE, ("tp",)),
        ),
        (
            lambda x: lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True),
            *("reduce-scatter", SHARE, SHARE * 3 // 4, ("tp",)),
        ),
        (
            lambda x: lax.all_to_all(x, "dp", split_axis=1, concat_axis=0, tiled=True),
            *("all-to-all", SHARE, SHARE // 2, ("dp",)),
        ),
        (
            lambda x: lax.all_to_all(x, "tp", split_axis=0, concat_axis=1, tiled=True),
            *("all-to-all", SHARE, SHARE * 3 // 4, ("tp",)),
        ),
        (
            lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
            *("collective-permute", SHARE, SHARE, ("tp",)),
        ),
        (lambda x: lax.ppermute(x, "dp", [(0, 1)]), "collective-permute", SHARE, SHARE, ("dp",)),
    ],
)
def test_what_shard_map_asks_for(function, kind, size, moved, axes, mesh):
    one = manual(mesh, function)
    assert (one.kind, one.bytes, one.moved, one.axes) == (kind, size, moved, axes)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_what_shard_map_asks_for_on_shuffled_devices(axis, shuffled):
    size = shuffled.shape[axis]
    ring = [(i, (i + 1) % size) for i in range(size)]
    for function in (lambda x: lax.psum(x, axis), lambda x: lax.ppermute(x, axis, ring)):
        one = manual(shuffled, function)
        assert (one.axes, one.devices) == ((axis,), size)


# How often


def test_collectives_in_nested_loops_count_the_product(mesh):
    def scan(w, xs):
        inner = lambda w, x: lax.scan(lambda w, x: (step(w, x), None), w, x)[0]
        return lax.scan(lambda w, x: (inner(w, x), None), w, xs)[0]

    found = found_in(scan, mesh, weights(mesh), array(mesh, (3, 5, 16, 64), None, None, "dp"))
    assert short(found) == [("all-reduce", 15, 15 * WEIGHTS, 15 * WEIGHTS, ("dp",), 2)]


def test_a_loop_of_unknown_length_with_collectives_is_listed(mesh):
    def loop(n, w, x):
        known = lambda _, w: lax.scan(lambda w, _: (step(w, x), None), w, length=5)[0]
        with jax.named_scope("trainer"):
            return lax.fori_loop(0, n, known, w)

    args = array(mesh, (), dtype=jnp.int32), weights(mesh), array(mesh, (16, 64), "dp")
    program = parse(jax.jit(loop).lower(*args).compile().as_text())
    assert [one.count for one in collectives(program, mesh)] == [5]
    assert unknown_loops(program) == ["trainer"]


def test_alike_collectives_become_one_entry(mesh):
    groups = "replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, metadata={op_name="
    found = written(
        f'%a = f32[256]{{0}} all-reduce(%x), {groups}"jit(f)/first"}}',
        '%s = f32[8]{0} slice(%x), slice={[0:8]}, metadata={op_name="jit(f)/none"}',
        f'%b = f32[8]{{0}} all-reduce(%s), {groups}"jit(f)/second"}}',
        mesh=mesh,
    )
    assert found == [Collective("all-reduce", 2, 1056, 1056, ("dp",), 2, "f32", "first and 1 more")]
    assert [one.moved for one in found] == [1056]


def test_the_largest_traffic_comes_first():
    found = written(
        "%p = f32[256]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        "%a = f32[1024]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}",
    )
    assert short(found) == [
        ("all-gather", 1, 4096, 3072, None, 4),
        ("collective-permute", 1, 1024, 1024, None, 2),
    ]


# What other backends print


GROUPS = "channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"


@pytest.mark.parametrize(
    ("lines", "kind", "size", "moved"),
    [
        (
            (
                f"%s = f32[256]{{0}} all-reduce-start(%x), {GROUPS}, to_apply=%add",
                "%d = f32[256]{0} all-reduce-done(%s)",
            ),
            *("all-reduce", 1024, 1024),
        ),
        (
            (
                f"%s = (f32[256]{{0}}, f32[512]{{0}}) all-gather-start(%x), {GROUPS}",
                "%d = f32[512]{0} all-gather-done(%s)",
            ),
            *("all-gather", 2048, 1024),
        ),
        (
            (
                f"%s = ((f32[256]{{0}}), f32[128]{{0}}) reduce-scatter-start(%x), {GROUPS}",
                "%u = ((f32[256]{0}), f32[128]{0}) reduce-scatter-update(%s)",
                "%d = f32[128]{0} reduce-scatter-done(%u)",
            ),
            *("reduce-scatter", 1024, 512),
        ),
        (
            (
                "%s = (f32[256]{0}, f32[256]{0}, u32[], u32[]) collective-permute-start(%x), "
                "channel_id=2, source_target_pairs={{0,4},{4,0}}",
                "%d = f32[256]{0} collective-permute-done(%s)",
            ),
            *("collective-permute", 1024, 1024),
        ),
        (
            (f"%b = f32[256]{{0}} collective-broadcast(%x), {GROUPS}",),
            "collective-broadcast",
            1024,
            512,
        ),
        (
            (
                "%o = s32[2]{0} parameter(1)",
                "%r = f32[256]{0} ragged-all-to-all(%x, %x, %o, %o, %o, /*index=5*/%o), " + GROUPS,
            ),
            *("ragged-all-to-all", 1024, 512),
        ),
    ],
)
def test_asynchronous_and_rare_forms(lines, kind, size, moved, mesh):
    assert short(written(*lines, mesh=mesh)) == [(kind, 1, size, moved, ("dp",), 2)]


ASYNC = """HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%NAME (p: bf16[64,16]) -> bf16[8,16] {
  %p = bf16[64,16]{1,0} parameter(0)
  ROOT %c = OP(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (x: bf16[64,16]) -> bf16[8,16] {
  %x = bf16[64,16]{1,0:T(8,128)(2,1)} parameter(0)
  CALL
}
"""


FUSED = "ROOT %f = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3"
STARTED = """%s = ((bf16[64,16]), bf16[8,16]) async-start(%x), calls=%wrapped
  ROOT %d = bf16[8,16]{1,0} async-done(%s), calls=%wrapped"""


@pytest.mark.parametrize(
    ("name", "op", "call"),
    [
        ("wrapped", "bf16[8,16] reduce-scatter", STARTED),
        ("all-reduce-scatter.3", "bf16[64,16] all-reduce", FUSED),  # on a TPU
    ],
)
def test_a_collective_in_another_computation(name, op, call, mesh):
    text = ASYNC.replace("NAME", name).replace("OP", op).replace("CALL", call)
    (one,) = collectives(parse(text), mesh)
    assert short([one]) == [("reduce-scatter", 1, 2048, 1792, ("dp", "tp"), 8)]
    assert one.dtype == "bf16"


# Groups


def test_groups_of_one_are_left_out(mesh):
    assert written("%a = f32[256]{0} all-reduce(%x), replica_groups={{0},{1}}", mesh=mesh) == []
    assert written("%a = f32[256]{0} all-reduce(%x), replica_groups={}", mesh=mesh) == []
    head = ", num_partitions=8"
    (one,) = written("%a = f32[256]{0} all-reduce(%x), replica_groups={}", mesh=mesh, head=head)
    assert one.axes == ("dp", "tp")


# In every form that XLA prints


SIZES = {"dp": 2, "tp": 4}


def sets(*groups):
    return tuple(map(frozenset, groups))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", sets({0, 1}, {2, 3})),
        ("{{0}}", sets({0})),
        ("[2,4]<=[8]", sets({0, 1, 2, 3}, {4, 5, 6, 7})),
        ("[4,2]<=[2,4]T(1,0)", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("[4,2]<=[2,2,2]T(1,0,2)", sets({0, 1}, {4, 5}, {2, 3}, {6, 7})),
        ("mesh['a'=2,'b'=4] {'b'}", sets({0, 1, 2, 3}, {4, 5, 6, 7})),
        ("mesh[a=2,b=4] {a}", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("mesh['a'=2,'b'=4] {'b','a'}", sets(set(range(8)))),
        ("mesh['a'=2,'b'=2] {}", sets({0}, {1}, {2}, {3})),
        (
            "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            sets({0, 1, 2, 3}, {4, 5, 6, 7}),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", sets({0, 3}, {1, 2})),
        ("mesh['a'=8] {'a':(1)2}", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("mesh['a'=8] {'a':(2)2}", sets({0, 2}, {1, 3}, {4, 6}, {5, 7})),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", sets({0, 1, 4, 5}, {2, 3, 6, 7})),
    ],
)
def test_groups_in_each_form(text, expected):
    found = replica_groups(f", channel_id=1, replica_groups={text}, dimensions={{0}}")
    assert set(found) == set(expected)
    assert len(found) == len(expected)


def test_a_group_of_replicas_may_mean_all_their_partitions():
    text = "channel_id=1, replica_groups={{0},{1}}, to_apply=%add"
    assert replica_groups(text, replicas=2, partitions=2) == sets({0, 1}, {2, 3})
    text += ", use_global_device_ids=true"
    assert replica_groups(text, replicas=2, partitions=2) == sets({0}, {1})


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"replica_groups: expected lists, an iota or a mesh .*got 'replica_gr",
    ):
        replica_groups("replica_groups=<new>")


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tp",)),
        ("{{3,2,1,0},{7,6,5,4}}", ("tp",)),
        ("[1,8]<=[8]", ("dp", "tp")),
        ("{{0,1},{2,3},{4,5},{6,7}}", None),  # half of an axis
        ("{{0,1,2,3}}", None),  # not everywhere
        ("{{0,5},{1,4},{2,7},{3,6}}", None),  # diagonal
        ("[2,8]<=[16]", None),  # another mesh's
    ],
)
def test_axes_are_those_the_groups_run_along(text, axes):
    assert group_axes(replica_groups(f"replica_groups={text}"), SIZES) == axes


@pytest.mark.parametrize(
    ("text", "axes", "devices"),
    [
        ("{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}", ("tp",), 4),
        ("{0,4},{4,0},{1,1}", ("dp",), 2),
        ("{0,5},{5,0}", ("dp", "tp"), 2),
        ("{0,9}", None, 2),
    ],
)
def test_axes_of_a_permute_are_those_its_pairs_differ_along(text, axes, devices):
    pairs = permute_pairs(f"source_target_pairs={{{text}}}")
    assert differing_axes(pairs, SIZES) == axes
    assert largest_group(pairs) == devices


# HLO text


def program(function, *args):
    return parse(jax.jit(function).lower(*args).compile().as_text())


def times(program, op):
    return [run.times for run in walk(program) if run.instruction.op == op]


def line(text):
    (lines,) = parse(f"ENTRY %main () -> f32[] {{\n  {text}\n}}").computations.values()
    return lines[0]


# Reading


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("pred[3]", 3),
        ("s4[3]", 2),
        ("u32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("f8e4m3fn[2,3]", 6),
        ("f4e2m1fn[4]", 2),
        ("f64[0,7]", 0),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("f32[<=16]", 64),
        ("token[]", 0),
        ("opaque[]", 0),
    ],
)
def test_types_have_sizes(text, size):
    (array,) = arrays(text)
    assert array.bytes == size


def test_a_line_is_taken_apart():
    found = line(
        "ROOT %r.1 = (f32[8,2]{1,0:T(8,128)}, /*index=1*/(u32[], f32[2]{0})) "
        'fusion(%a, f32[2]{0} %b.2, /*index=2*/%c), kind=kLoop, metadata={op_name="a(b)"}'
    )
    assert (found.name, found.op, found.operands) == ("r.1", "fusion", ("a", "b.2", "c"))
    assert found.arrays == arrays("f32[8,2] u32[] f32[2]")
    assert found.attributes.startswith(", kind=kLoop")


def test_text_that_is_not_understood_is_refused():
    with pytest.raises(
        sf.errors.ConfigError, match=r"expected text with an ENTRY.*got 'func'.*as_text"
    ):
        parse("func")
    with pytest.raises(
        sf.errors.ConfigError, match=r"expected `%name = type op\(operands\)`, got '  %y = "
    ):
        line("%y = f32[] add(%x, ")


# How often


CALLS = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%twice (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %t = f32[8]{0} tanh(%p)
}

%wrapped (q: f32[8]) -> f32[4] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%sum
}, execution_thread="parallel_thread"

%unused () -> f32[] {
  ROOT %never = f32[] constant(0)
}

ENTRY %main (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  %first = f32[8]{0} call(%x), to_apply=%twice
  %second = f32[8]{0} fusion(%first), kind=kLoop, calls=%twice
  %start = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%second), calls=%wrapped
  %update = ((f32[8]{0}), f32[4]{0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[4]{0} async-done(%update), calls=%wrapped
}
"""


def test_calls_run_for_each_place_and_asynchronous_ones_at_their_start():
    """Reductions are not followed, and what is never called does not run."""
    counts = {op: times(parse(CALLS), op) for op in ("tanh", "reduce-scatter", "add", "constant")}
    assert counts == {"tanh": [2], "reduce-scatter": [1], "add": [], "constant": []}
    (run,) = (run for run in walk(parse(CALLS)) if run.instruction.op == "reduce-scatter")
    assert (run.inputs, run.computation) == (arrays("f32[8]"), "wrapped")


@pytest.mark.parametrize("quote", ['"', r"\""])
def test_the_condition_of_a_loop_runs_once_more_than_its_body(quote):
    config = '{"known_trip_count":{"n":"12"}}'.replace('"', quote)
    loop = f"while(%x), condition=%c, body=%b, backend_config={config}"
    found = parse(
        "%b (x: f32[]) -> f32[] {\n  ROOT %y = f32[] sine(%x)\n}\n"
        "%c (x: f32[]) -> pred[] {\n  ROOT %z = pred[] constant(true)\n}\n"
        "ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %w = f32[] " + loop + "\n}"
    )
    assert (times(found, "sine"), times(found, "constant")) == ([12], [13])


# How often, read from a loop's counter


def loops(turn):
    """Functions of an array that call `turn` in loops, and how often."""

    def scan(x, length, **options):
        return lax.scan(lambda x, _: (turn(x), None), x, None, length=length, **options)[0]

    def nested(x):
        return lax.scan(lambda x, _: (scan(x, 5), None), x, None, length=3)[0]

    def strided(x):
        body = lambda at: (at[0] + 3, turn(at[1]))
        return lax.while_loop(lambda at: at[0] < 20, body, (jnp.int32(1), x))[1]

    def deep(x):
        return lax.scan(lambda x, _: (nested(x), None), x, None, length=2)[0]

    return {
        "scan": (lambda x: scan(x, 7), 7),
        "three deep": (deep, 30),
        "one turn": (lambda x: scan(x, 1), 1),
        "reverse": (lambda x: scan(x, 6, reverse=True), 6),
        "unrolled": (lambda x: scan(x, 8, unroll=2), 8),
        "nested": (nested, 15),
        "fori": (lambda x: lax.fori_loop(2, 11, lambda _, x: turn(x), x), 9),
        "strided": (strided, 7),
        "twice": (lambda x: scan(scan(x, 4), 3), 7),
    }


@pytest.mark.parametrize("name", loops(jnp.tanh))
def test_lengths_are_read_from_the_counter_where_xla_does_not_say_them(name):
    function, count = loops(lambda x: x @ x)[name]
    compiled = jax.jit(function).lower(jnp.ones((8, 8))).compile().as_text()
    found = [sum(times(parse(text), "dot")) for text in (compiled, without_trip_counts(compiled))]
    assert found == [count, count]


def without_trip_counts(text):
    return re.sub(r"known_trip_count", "hidden", text)


@pytest.mark.parametrize("is_counted", [True, False])
def test_lengths_that_depend_on_data_stay_unknown_and_count_once(is_counted):
    def loop(n, x):
        more = (lambda at: at[0] < n) if is_counted else (lambda at: at[1].sum() > 0)
        return lax.while_loop(more, lambda at: (at[0] + 1, at[1] @ at[1]), (0, x))

    found = program(loop, 3, jnp.ones((8, 8)))
    lines = [x for lines in found.computations.values() for x in lines if x.op == "while"]
    assert [x.trips for x in lines] == [None]
    assert times(found, "dot") == [1]
    assert unknown_loops(found) == []  # no collectives


ASYNCHRONOUS = """
%start (p: f32[8]) -> (f32[64], u32[]) {
  %p = f32[8]{0} parameter(0)
  %gather = f32[64]{0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], chain
  ROOT %go = (f32[64]{0}, u32[]) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%work (p: f32[8], q: u32[]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  %q = u32[] parameter(1)
  ROOT %gather.1 = f32[64]{0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], chain
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce(%p), channel_id=4, replica_groups={}, to_apply=%add
  ROOT %share = f32[8]{0} dynamic-slice(%sum), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = (f32[64]{0}, u32[]) fusion(%x), kind=kCustom, calls=%start
  %on = u32[] get-tuple-element(%first), index=1
  %second = f32[64]{0} fusion(%x, %on), kind=kCustom, calls=%work
  ROOT %r = f32[8]{0} fusion(%second), calls=%all-reduce-scatter.1, metadata={op_name="mlp/dot"}
}
""".replace("chain", 'frontend_attributes={chain_id="0"}')


def test_fused_collectives_of_a_tpu_count_once_with_the_scope_of_their_fusion():
    text = "HloModule m, replica_count=1, num_partitions=8\n" + ASYNCHRONOUS
    found = [(x.kind, x.count, x.bytes, x.where) for x in collectives(parse(text))]
    assert sorted(found) == [("all-gather", 1, 256, ""), ("reduce-scatter", 1, 256, "mlp/dot")]


# Where


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("jit(step)/jvp()/dot_general", "dot_general"),
        ("jit(step)/transpose(jvp(block))/attention/mul", "block/attention/mul (backward)"),
        ("jit(scan)/while/body/closed_call/while/body/add", "add"),
        ("jit(f)/cond/branch_1_fun/jit(gelu)/tanh", "gelu/tanh"),
        ("jit(f)/jvp()/mul;jit(g)/add", "mul"),
        (r"state.params[\'a\']", "state.params['a']"),
        ("", ""),
    ],
)
def test_places_are_short(name, short):
    assert scope(line(f'%x = f32[] add(%a, %b), metadata={{op_name="{name}" id=1}}')) == short
