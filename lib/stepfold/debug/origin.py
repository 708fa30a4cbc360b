"""The first operation of a program that makes NaN or inf out of finite numbers, and its line.

`jax.experimental.checkify` does not check for an overflow or a log of zero.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

from stepfold.internals.jax import user_frame, without_dead_code

core: Any = jax_core  # jax 0.12 exports these names, but not to a type checker


class Origin(NamedTuple):
    """An operation that produced `value`, "nan" or "inf", from finite numbers."""

    operation: str
    value: str
    where: str  # the file, line and function of the user
    position: tuple[int, ...]  # in the program

    def __str__(self) -> str:
        return f"{self.operation} made {self.value} at {self.where}"


def find_origin(
    function: Callable[..., Any], bad: tuple[Any, ...], good: tuple[Any, ...] | None = None
) -> Origin | None:
    """Find the first operation that makes NaN or inf out of finite numbers, or NaN out of inf.

    Operations that the results do not need are left out. One that also does so with the arguments
    `good`, whose results are finite, is skipped: its NaN or inf is masked later.
    """
    with jax.disable_jit():  # unrolls scans
        program = jax.make_jaxpr(function)(*bad)
    jaxpr = without_dead_code(program.jaxpr)

    def origins(arguments: tuple[Any, ...]) -> Iterator[Origin]:
        return _evaluate(jaxpr, program.consts, jax.tree.leaves(arguments), ())

    harmless = set() if good is None else {origin.position for origin in origins(good)}
    return next((origin for origin in origins(bad) if origin.position not in harmless), None)


def _evaluate(jaxpr: Any, consts: Any, inputs: Any, position: tuple[int, ...]) -> Iterator[Origin]:
    """Evaluate a program, and yield each operation that makes NaN or inf."""
    for number, (eqn, arguments, results) in enumerate(run_operations(jaxpr, consts, inputs)):
        worst = _worst_value(results)
        if worst is None:
            continue
        if inner := inner_program(eqn):
            yield from _evaluate(inner.jaxpr, inner.consts, arguments, (*position, number))
        elif _worst_value(arguments) not in (worst, "nan"):
            yield Origin(eqn.primitive.name, worst, line_of(eqn), (*position, number))


def run_operations(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]
) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Evaluate a program; yield each operation with its arguments and the results that are used."""

    def is_variable(atom: Any) -> bool:
        return not isinstance(atom, core.Literal)

    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    used = set(filter(is_variable, atoms))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    for eqn in jaxpr.eqns:
        arguments = [values[v] if is_variable(v) else v.val for v in eqn.invars]
        variables = list(dict.fromkeys(filter(is_variable, eqn.invars)))
        outputs = [v for v in eqn.outvars if v in used]
        # A program of one operation, without the argument names, whose number would not match.
        debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        single = core.Jaxpr((), variables, outputs, [eqn], eqn.effects, debug)
        results = core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))(*(values[v] for v in variables))
        values.update(zip(outputs, results, strict=True))
        yield eqn, arguments, results


def _worst_value(values: Any) -> str | None:
    floats = [v for v in values if jnp.issubdtype(jnp.result_type(v), jnp.inexact)]
    if any(bool(jnp.isnan(v).any()) for v in floats):
        return "nan"
    return "inf" if any(bool(jnp.isinf(v).any()) for v in floats) else None


def inner_program(eqn: Any) -> Any:
    """Return the program that an operation calls with its own arguments, as jit does."""
    values = () if eqn.primitive.name in ("scan", "while", "cond") else eqn.params.values()
    for value in values:
        if isinstance(value, core.Jaxpr) and not value.constvars:
            value = core.ClosedJaxpr(value, ())
        if isinstance(value, core.ClosedJaxpr) and value.in_avals == [v.aval for v in eqn.invars]:
            return value
    return None


def line_of(eqn: Any) -> str:
    """Describe the innermost line of user code, or else the innermost of all."""
    frame = user_frame(eqn, default=True)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"
