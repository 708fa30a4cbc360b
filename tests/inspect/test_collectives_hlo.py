import jax
import jax.numpy as jnp
import pytest
from jax import lax

import stepfold as sf
from stepfold.inspect.collectives import arrays, parse, scope, unknown_loops, walk


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


def test_names_may_come_without_a_percent_sign():
    assert line("x = f32[4] add(f32[4]{0} a, b.1)").operands == ("a", "b.1")


def test_what_a_constant_or_a_parameter_holds_is_no_operand():
    assert line("%c = f32[2,2]{1,0} constant({ {1, 2}, {3, 4} })").operands == ()
    assert line('%s = u8[3]{0} constant("a)(")').operands == ()
    assert line("%p = f32[] parameter(0)").operands == ()


def test_text_without_an_entry_is_refused():
    with pytest.raises(sf.ConfigError, match=r"expected text with an ENTRY.*got 'func'.*as_text"):
        parse("func")


def test_a_line_that_is_not_understood_is_refused():
    with pytest.raises(sf.ConfigError, match=r"expected `type op\(operands\)`, got 'add\(%x, '"):
        line("%y = f32[] add(%x, ")


def test_the_real_text_of_a_step_is_read_in_full():
    text = jax.jit(jax.grad(lambda x: jnp.tanh(x @ x).sum())).lower(jnp.ones((8, 8))).compile()
    found = parse(text.as_text())
    lines = [one for lines in found.computations.values() for one in lines]
    assert len(lines) == sum(" = " in one for one in text.as_text().splitlines())
    assert (found.replicas, found.partitions) == (1, 1)
    known = {one.name for one in lines}
    assert all(name in known for one in lines for name in one.operands)


def test_partitions_are_read():
    text = "HloModule m, num_partitions=8, replica_count=2\n"
    found = parse(text + "ENTRY %main () -> f32[] {\n}")
    assert (found.replicas, found.partitions) == (2, 8)


# How often


def test_a_scan_runs_its_body_as_often_as_it_is_long():
    found = program(
        lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0], jnp.ones((8, 8))
    )
    assert times(found, "dot") == [7]
    assert unknown_loops(found) == []


def test_nested_scans_multiply():
    def inner(c, _):
        return lax.scan(lambda c, _: (c @ c, None), c, None, length=5)[0], None

    found = program(lambda x: lax.scan(inner, x, None, length=3)[0], jnp.ones((8, 8)))
    assert times(found, "dot") == [15]


def test_an_unrolled_scan_runs_each_copy_less_often():
    scan = lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=8, unroll=2)[0]
    assert times(program(scan, jnp.ones((8, 8))), "dot") == [4, 4]


def test_a_loop_of_unknown_length_counts_once():
    def loop(n, x):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))

    found = program(loop, 3, jnp.ones((8, 8)))
    assert times(found, "dot") == [1]


def test_every_branch_of_a_conditional_counts():
    def either(p, x):
        return lax.cond(p, lambda: x @ x, lambda: jnp.tanh(x) @ x.T)

    assert times(program(either, True, jnp.ones((8, 8))), "dot") == [1, 1]


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


def test_what_is_called_from_several_places_runs_for_each():
    assert times(parse(CALLS), "tanh") == [2]


def test_an_asynchronous_call_runs_at_its_start_only():
    assert times(parse(CALLS), "reduce-scatter") == [1]


def test_reductions_are_not_followed_and_what_is_never_called_does_not_run():
    assert times(parse(CALLS), "add") == []
    assert times(parse(CALLS), "constant") == []


def test_a_run_knows_what_it_is_given():
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


def test_a_place_in_real_text_names_the_users_scopes():
    def loss(x):
        with jax.named_scope("head"):
            return jnp.sum(x @ x)

    found = program(jax.value_and_grad(loss), jnp.ones((8, 8)))
    dots = {scope(run.instruction) for run in walk(found) if run.instruction.op == "dot"}
    assert dots >= {"head/dot_general", "head/dot_general (backward)"}
    assert all(name.startswith("head/") for name in dots)
