"""Choose among ways to make a step: the cheapest that fits into the memory of a device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from stepfold.core.validation import read_positive
from stepfold.errors import OutOfMemoryError, refuse
from stepfold.inspect.report import Report, describe
from stepfold.sharding.plan import read_step_and_plan
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
    devices: Sequence[jax.Device] | None = None,
    limit: float | None = None,
    sharding: Any = None,
) -> Choice:
    """Compile a step in several ways, and choose the cheapest that fits.

    The cheapest has the fewest FLOPs on all devices; among equals the fewest bytes sent, and then
    the least memory. Nothing runs, so the devices may be those of `devices_of`.

    With `devices`, one function is inspected, chosen and run: `Elastic` takes it too, with the
    arguments of the choice.

    Args:
      make_step: returns a step for the arguments of a candidate, passed by keyword. With `devices`,
        a function `(devices, **arguments) -> (step, plan)`.
      state: the state, or an abstract one.
      batch: a batch, or an abstract one.
      candidates: the arguments of each. Without `devices`, `sharding` is its plan, and not passed
        to `make_step`.
      devices: the devices to compile for.
      limit: the bytes that a device may need; by default all that the compiler accepts.
      sharding: the plan of candidates that have none, without `devices`.

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
    >>> def build(devices, **options):
    ...     plan = sf.make_sharding(state, sf.make_mesh(devices=devices))
    ...     return make_step(**options), plan
    >>> choice = sf.choose(build, state, batch, candidates, devices=jax.devices(), limit=2**21)
    >>> elastic = sf.Elastic(functools.partial(build, **choice.arguments))  # for sf.fit
    """
    if limit is not None:
        read_positive("limit", limit, unit="bytes")
    if not candidates or not all(isinstance(each, Mapping) for each in candidates):
        advice = 'pass [{"accumulate": 1}, {"accumulate": 4, "remat": True}]'
        refuse("candidates", "a list of arguments", describe_value(candidates), advice)
    if devices is not None and (sharding is not None or any("sharding" in x for x in candidates)):
        refuse("sharding", "none with devices=…", "one", "return the plan from the function")
    rows, fitting = [], []
    for index, arguments in enumerate(candidates):
        options = {"sharding": sharding, **arguments}
        plan = options.pop("sharding")
        words = [f"{name}={value!r:.20}" for name, value in options.items()]
        words += [f"sharding {index}"] if "sharding" in arguments else []
        name = ", ".join(words) or "no arguments"
        try:
            if devices is None:
                step = make_step(**options)
            else:
                parts = make_step(devices, **options)
                step, plan = read_step_and_plan("make_step", parts, devices)
            report = describe(step, state, batch, sharding=plan)
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
