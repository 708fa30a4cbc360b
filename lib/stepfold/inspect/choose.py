"""Choose among ways to make a step: the cheapest that fits into the memory of a device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from stepfold.core.validation import read_positive
from stepfold.errors import OutOfMemoryError, refuse
from stepfold.inspect.compiled import abstract_arguments
from stepfold.inspect.flops import count
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
    the least memory. A step that keeps arrays in the host's memory comes after all others, since
    the time of its copies is not known. The table has the FLOPs beyond the fewest as `extra`.
    Nothing runs, so the devices may be those of `devices_of`.

    With `devices`, one function is inspected, chosen and run: call it with the devices of the job
    and the arguments of the choice.

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
    >>> sf.inspect.choose(make_step, state, batch, candidates, limit=2**21).arguments
    {'accumulate': 8}
    >>> def build(devices, **options):
    ...     plan = sf.make_sharding(state, sf.make_mesh(devices=devices))
    ...     return make_step(**options), plan
    >>> choice = sf.inspect.choose(
    ...     build, state, batch, candidates, devices=jax.devices(), limit=2**21
    ... )
    >>> step, plan = build(jax.devices(), **choice.arguments)  # for sf.fit
    """
    if not candidates or not all(isinstance(each, Mapping) for each in candidates):
        advice = 'pass [{"accumulate": 1}, {"accumulate": 4, "remat": True}]'
        refuse("candidates", "a list of arguments", describe_value(candidates), advice)
    if devices is not None and (sharding is not None or any("sharding" in x for x in candidates)):
        refuse("sharding", "none with devices=…", "one", "return the plan from the function")
    named = []
    for index, arguments in enumerate(candidates):
        words = [f"{name}={value!r:.20}" for name, value in arguments.items() if name != "sharding"]
        words += [f"sharding {index}"] if "sharding" in arguments else []
        named.append((", ".join(words) or "no arguments", arguments))
    make = partial(_make, make_step, devices, sharding=sharding)
    return _choose(make, state, batch, named, limit)


def choose_remat(
    make_step: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    devices: Sequence[jax.Device] | None = None,
    limit: float | None = None,
    sharding: Any = None,
) -> Choice:
    """Choose what the forward pass keeps for the backward pass: the cheapest policy that fits.

    The candidates are policies of `jax.checkpoint`, compiled and compared as by `choose`:
    everything is kept; all matrix products; those without batch dimensions; what the model names
    with `jax.ad_checkpoint.checkpoint_name`; and nothing, so that all is computed again. Where
    devices can use the host's memory, the products without batch dimensions and the named values
    may also wait there. The gradients of all are equal up to rounding.

    Apply the policy to each layer, as in `jax.checkpoint(layer, policy=remat)` or flax's
    `nn.remat(Layer, policy=remat)`. Around a whole loss function, as by `make_train_step(remat=…)`,
    it saves little: the backward pass first computes the values of all layers.

    Args:
      make_step: returns a step for `remat=policy`. With `devices`, a function
        `(devices, remat) -> (step, plan)`.
      state: the state, or an abstract one.
      batch: a batch, or an abstract one.
      devices: the devices to compile for.
      limit: the bytes that a device may need; by default all that the compiler accepts.
      sharding: the plan of the state, without `devices`.

    Returns:
      The choice; `make_step(**choice.arguments)` makes its step.

    Raises:
      OutOfMemoryError: if none fits, with the table of all.
      ConfigError: if the step does not use the policy.

    >>> import functools, jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx, batch = optax.sgd(0.1), jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    >>> state = jax.eval_shape(lambda: sf.init_state(jnp.ones((8, 64, 64)), tx, jax.random.key(0)))
    >>> def make_step(remat):
    ...     @functools.partial(jax.checkpoint, policy=remat)
    ...     def layer(x, w):
    ...         return jnp.sin(jnp.tanh(x @ w)), None
    ...     def loss_fn(params, batch, key):
    ...         return sf.mean(jax.lax.scan(layer, batch, params)[0])
    ...     return sf.make_train_step(loss_fn, tx)
    >>> choice = sf.inspect.choose_remat(make_step, state, batch, limit=8 * 2**20)
    >>> choice.arguments["remat"] is jax.checkpoint_policies.nothing_saveable
    True
    """
    seen: list[tuple[str, Any]] = []

    def policy(primitive: Any, *_: Any, **params: Any) -> bool:
        seen.append((primitive.name, params.get("name")))
        return True

    make = partial(_make, make_step, devices, sharding=sharding)
    step, plan = make(remat=policy)
    arguments = abstract_arguments(state, batch, plan)
    jax.make_jaxpr(step)(*arguments)
    if not seen:
        advice = "pass it to jax.checkpoint(layer, policy=remat)"
        refuse("make_step", "a step whose gradients use remat", "one that ignores it", advice)
    names = sorted({name for kind, name in seen if kind == "name"})
    policies = remat_policies(names, min(_devices(arguments), key=lambda device: device.id))
    candidates = [(name, {"remat": each}) for name, each in policies.items()]
    return _choose(make, state, batch, candidates, limit)


def remat_policies(names: Sequence[str], device: jax.Device) -> dict[str, Callable[..., Any]]:
    """Return the policies for a model with names in its layers, by what the table calls them."""
    known = jax.checkpoint_policies
    policies: dict[str, Any] = {
        "everything_saveable": known.everything_saveable,
        "dots_saveable": known.dots_saveable,
        "dots_with_no_batch_dims_saveable": known.dots_with_no_batch_dims_saveable,
        "nothing_saveable": known.nothing_saveable,
    }
    listed = ", ".join(names)
    if names:
        policies[f"names saved: {listed}"] = known.save_only_these_names(*names)
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:  # a CPU has one memory
        return policies
    offloaded = known.offload_dot_with_no_batch_dims("device", "pinned_host")
    policies["dots_with_no_batch_dims offloaded"] = offloaded
    if names:
        policies[f"names offloaded: {listed}"] = known.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies


def _make(
    make_step: Callable[..., Any],
    devices: Sequence[jax.Device] | None,
    *,
    sharding: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the step and the plan of a candidate."""
    if devices is None:
        return make_step(**options), sharding
    return read_step_and_plan("make_step", make_step(devices, **options), devices)


class _Cost(NamedTuple):
    """What a candidate costs; there is no report of one that the compiler refuses, but a reason."""

    flops: int  # on all devices
    devices: int
    report: Report | None
    refusal: str = ""


def _cost(step: Any, state: Any, batch: Any, plan: Any) -> _Cost:
    try:
        report = describe(step, state, batch, sharding=plan)
    except OutOfMemoryError as error:
        arguments = abstract_arguments(state, batch, plan)
        flops = count(jax.make_jaxpr(step)(*arguments)).dots
        refusal = str(error).partition("reports: ")[2][:90]
        return _Cost(flops, len(_devices(arguments)), None, refusal)
    return _Cost(sum(each.flops for each in report.products), report.devices, report)


def _devices(arguments: Any) -> set[jax.Device]:
    devices: set[jax.Device] = jax.tree.leaves(arguments)[0].sharding.device_set
    return devices


def _choose(
    make: Callable[..., tuple[Any, Any]],
    state: Any,
    batch: Any,
    candidates: Sequence[tuple[str, Mapping[str, Any]]],
    limit: float | None,
) -> Choice:
    if limit is not None:
        read_positive("limit", limit, unit="bytes")
    costs = []
    for name, arguments in candidates:
        try:
            step, plan = make(**arguments)
            costs.append(_cost(step, state, batch, plan))
        except Exception as error:
            error.add_note(f"candidates: raised for {name}")
            raise
    fewest = max(1, min(cost.flops for cost in costs))
    rows, fitting = [], []
    for index, (flops, devices, report, refusal) in enumerate(costs):
        name, _ = candidates[index]
        work = amount(flops // devices), f"{flops / fewest - 1:.0%}"
        if report is None:
            rows.append((name, "", *work, "", f"no: {refusal}"))
            continue
        memory, fits = report.memory, limit is None or report.memory.peak <= limit
        held = size(memory.peak) + (f" + {size(memory.host)} on the host" if memory.host else "")
        rows.append((name, held, *work, size(report.moved), "yes" if fits else "no"))
        if fits:
            sent = report.moved * devices
            fitting.append((memory.host > 0, flops, sent, memory.peak, index, report))
    text = table(("on each device", "memory", "FLOPs", "extra", "sent", "fits"), rows)
    if not fitting:
        raise OutOfMemoryError(
            f"candidates: expected one that fits into {size(limit) if limit else 'a device'}, got "
            f"none; use accumulate=n, jax.checkpoint for each layer or more devices\n\n{text}"
        )
    *_, index, report = min(fitting)  # no two have the same index
    name, arguments = candidates[index]
    return Choice(arguments, report, f"{text}\n\nthe cheapest that fits: {name}")
