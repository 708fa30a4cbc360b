"""Where a number that is not finite comes from: the first operation that makes one, and its line.

`jax.experimental.checkify` is no use for it: its checks know NaN and a division by zero, and an
overflow or a logarithm of zero is neither. So the program is gone through operation by operation,
loops unrolled, and what comes out of each is looked at.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as exported

core: Any = exported  # jax 0.12 has these names there for use, and not for a type checker

# What a person did not write: a line in there says less than the one that called it.
_NOT_THEIRS = tuple(
    str(Path(file).parent) + os.sep
    for file in (str(jax.__file__), str(optax.__file__), str(Path(__file__).parent))
)
_LOOPS = ("scan", "while", "cond")


class Site(NamedTuple):
    """One operation of a program.

    Attributes:
      operation: jax's name for it.
      value: what it made of numbers that were in order, "nan" or "inf".
      where: the file, the line and the function of the user's that it comes from.
      place: which operation of the program it is, to tell it from others of one line.
    """

    operation: str
    value: str
    where: str
    place: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation} made {self.value} at {self.where}"


def first_site(function: Callable[..., Any], bad: tuple[Any, ...], good: Any = None) -> Site | None:
    """Find the first operation that makes of numbers in order one that is not finite.

    A NaN that comes of an infinity counts too. What the same function also makes of arguments with
    which all is well, a -inf that is masked later, say, is passed over.

    Args:
      function: any function that jax can trace.
      bad: its arguments.
      good: arguments of the same form with which its results are finite, if there are any.

    >>> import jax.numpy as jnp
    >>> site = first_site(lambda x: jnp.log(x) * 2, (jnp.zeros(()),))
    >>> site.operation, site.value
    ('log', 'inf')
    """
    with jax.disable_jit():  # so that a scan is its steps, one by one
        program = jax.make_jaxpr(function)(*bad)
    usual = {site.place for site in _sites(program, good)} if good is not None else set()
    return next((site for site in _sites(program, bad) if site.place not in usual), None)


def _sites(program: Any, arguments: tuple[Any, ...]) -> Iterator[Site]:
    return _walk(program.jaxpr, program.consts, jax.tree.leaves(arguments), ())


def _walk(jaxpr: Any, consts: Any, values: Any, place: tuple[int, ...]) -> Iterator[Site]:
    """Run a program, and give the operations that make what is not finite as they come."""
    read = {v for eqn in jaxpr.eqns for v in _variables(eqn.invars)}
    read |= set(_variables(jaxpr.outvars))
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    for number, eqn in enumerate(jaxpr.eqns):
        given = [v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
        wanted = [v for v in eqn.outvars if v in read]
        made = _run(eqn, wanted, known, jaxpr.debug_info)
        known.update(zip(wanted, made, strict=True))
        value = _worst(made)
        if value is None:
            continue
        inner = _inside(eqn)
        if inner is not None:
            yield from _walk(inner.jaxpr, inner.consts, given, (*place, number))
        elif _worst(given) is None or (value == "nan" and _worst(given) != "nan"):
            yield Site(eqn.primitive.name, value, _line(eqn), (*place, number))


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _run(eqn: Any, wanted: list[Any], known: dict[Any, Any], about: Any) -> Any:
    """Run one operation, for the results that anybody reads."""
    taken = list(dict.fromkeys(_variables(eqn.invars)))
    about = about._replace(arg_names=None, result_paths=None)  # of another number of them
    alone = core.Jaxpr((), taken, wanted, [eqn], eqn.effects, about)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*(known[v] for v in taken))


def _worst(values: Any) -> str | None:
    """Say of numbers whether one is NaN, or else infinite."""
    floats = [v for v in values if jnp.issubdtype(jnp.result_type(v), jnp.inexact)]
    if any(bool(jnp.isnan(v).any()) for v in floats):
        return "nan"
    return "inf" if any(bool(jnp.isinf(v).any()) for v in floats) else None


def _inside(eqn: Any) -> Any:
    """Give the program that an operation stands for, if it is called with what the operation is."""
    if eqn.primitive.name in _LOOPS:
        return None
    for value in eqn.params.values():
        if isinstance(value, core.Jaxpr) and not value.constvars:
            value = core.ClosedJaxpr(value, ())
        if isinstance(value, core.ClosedJaxpr) and value.in_avals == [v.aval for v in eqn.invars]:
            return value
    return None


def _line(eqn: Any) -> str:
    """Find the innermost line that a person wrote, or else the innermost there is."""
    trace = eqn.source_info.traceback
    frames = list(trace.frames) if trace else []
    theirs = [frame for frame in frames if not frame.file_name.startswith(_NOT_THEIRS)]
    for frame in [*theirs, *frames][:1]:
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"
    return "a line that is not known"
