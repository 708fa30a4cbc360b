"""Choose among ways to make a step: the cheapest that fits into the memory of a device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stepfold.core.validation import read_positive
from stepfold.errors import OutOfMemoryError, refuse
from stepfold.inspect.report import Report, describe
from stepfold.table import amount, size, table
from stepfold.tree import describe_value


class Choice(NamedTuple):
    """The arguments and the costs of the cheapest candidate that fits, and a table of all."""

    arguments: Mapping[str, Any]
    report: Report
    table: str

    def __str__(self) -> str:
        return self.table


def choose(
    make_step: Callable[..., Any],
    state: Any,
    batch: Any,
    candidates: Sequence[Mapping[str, Any]],
    *,
    limit: float | None = None,
    sharding: Any = None,
) -> Choice:
    """Compile a step in several ways, and choose the cheapest that fits.

    The cheapest has the fewest FLOPs on all devices; among equals the fewest bytes sent, and then
    the least memory. Nothing runs, so the devices may be those of `devices_of`.

    Args:
      make_step: returns a step for the arguments of a candidate, passed by keyword.
      state: the state, or an abstract one.
      batch: a batch, or an abstract one.
      candidates: the arguments of each. `sharding` is its plan, and not passed to `make_step`.
      limit: the bytes that a device may need; by default all that the compiler accepts.
      sharding: the plan of candidates that have none.

    Raises:
      OutOfMemoryError: if none fits.

    >>> import functools, jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx, batch = optax.sgd(0.1), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> loss_fn = lambda params, x, key: sf.mean(jnp.tanh(x @ params) ** 2)
    >>> state = jax.eval_shape(lambda: sf.init_state(jnp.ones((64, 64)), tx, jax.random.key(0)))
    >>> make_step = functools.partial(sf.make_train_step, loss_fn, tx)
    >>> candidates = [{}, {"accumulate": 8}, {"accumulate": 8, "remat": True}]
    >>> sf.choose(make_step, state, batch, candidates, limit=2**21).arguments
    {'accumulate': 8}
    """
    if limit is not None:
        read_positive("limit", limit, unit="bytes")
    if not candidates or not all(isinstance(each, Mapping) for each in candidates):
        advice = 'pass [{"accumulate": 1}, {"accumulate": 4, "remat": True}]'
        refuse("candidates", "a list of arguments", describe_value(candidates), advice)
    rows, fitting = [], []
    for index, arguments in enumerate(candidates):
        options = {"sharding": sharding, **arguments}
        plan = options.pop("sharding")
        words = [f"{name}={value!r:.20}" for name, value in options.items()]
        words += [f"sharding {index}"] if "sharding" in arguments else []
        name = ", ".join(words) or "no arguments"
        try:
            report = describe(make_step(**options), state, batch, sharding=plan)
        except OutOfMemoryError as error:
            rows.append((name, "", "", "", f"no: {str(error).partition('reports: ')[2]:.90}"))
            continue
        except Exception as error:
            error.add_note(f"candidates: raised for {name}")
            raise
        flops, moved, memory = report.flops.dots, report.moved, report.memory.peak
        fits = limit is None or memory <= limit
        rows.append((name, size(memory), amount(flops), size(moved), "yes" if fits else "no"))
        if fits:
            total = flops * report.devices, moved * report.devices
            fitting.append((*total, memory, index, name, report))
    text = table(("on each device", "memory", "FLOPs", "sent", "fits"), rows)
    if not fitting:
        raise OutOfMemoryError(
            f"candidates: expected one that fits into {size(limit) if limit else 'a device'}, "
            f"got none; use accumulate=n, remat=True or more devices\n\n{text}"
        )
    *_, index, name, report = min(fitting)  # no two have the same index
    return Choice(candidates[index], report, f"{text}\n\nthe cheapest that fits: {name}")
