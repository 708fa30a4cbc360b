"""A step, read before it runs: what it computes, holds and sends, and what looks like a mistake."""

import textwrap
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from stepfold.core.state import TrainState
from stepfold.errors import ConfigError
from stepfold.inspect import hlo, peaks, remarks
from stepfold.inspect.collectives import Collective, collectives, moved_bytes
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.flops import Flops, count, estimate
from stepfold.inspect.memory import Memory, memory_of
from stepfold.inspect.products import Product, products
from stepfold.inspect.waste import not_reused, whole_though_large
from stepfold.table import amount, size, table


@dataclass(frozen=True)
class Report:
    """What a step costs; `describe` makes it.

    Attributes:
      devices: how many devices work on it.
      device_kind: what they are.
      mesh: the mesh's axes and their sizes; empty without a mesh.
      parameters: how many numbers are trained.
      flops: what one device computes, counted from the compiled program.
      estimate: the classic 6 FLOPs a parameter and token, a device's share; None without `tokens`.
      products: matrix products by dtype and line, on all devices, as they were written.
      memory: bytes on one device.
      collectives: what the devices send each other.
      not_reused: donated leaves whose memory is not used again, with their bytes.
      whole: large leaves that are whole on each of several devices, with their bytes.
      remarks: in words, what looks like a mistake, or is not in the numbers.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones((64, 32)), optax.adam(0.1), jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean((x @ p) ** 2), optax.adam(0.1))
    >>> report = sf.describe(step, state, jnp.ones((8, 64)))
    >>> report.flops.dots, report.parameters, report.to_dict()["memory"]["params"]
    (65536, 2048, 8192)
    """

    devices: int
    device_kind: str
    mesh: dict[str, int]
    parameters: int
    flops: Flops
    estimate: int | None
    products: tuple[Product, ...]
    memory: Memory
    collectives: tuple[Collective, ...]
    not_reused: tuple[tuple[str, int], ...]
    whole: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]

    @property
    def moved(self) -> int:
        """Give the bytes that one device sends in one step."""
        return moved_bytes(self.collectives)

    def mfu(self, seconds: float, peak: float | None = None, dtype: str = "bfloat16") -> float:
        """Give the share of the devices' peak that a measured step time makes of it.

        The arithmetic is the estimate where tokens were given, otherwise the products that were
        compiled, with what is computed twice to save memory.

        Args:
          seconds: what one step takes.
          peak: operations a second of one device; looked up where it is known.
          dtype: what is multiplied.

        Raises:
          ConfigError: if the device is not known and no peak is given.
        """
        flops = self.flops.dots if self.estimate is None else self.estimate
        return peaks.mfu(flops, seconds, device=self, peak=peak, dtype=dtype)

    def assert_fits(self, limit: float) -> None:
        """Raise if the predicted peak is above a number of bytes.

        Raises:
          ConfigError: with the table, and what would make it smaller.
        """
        if self.memory.peak > limit:
            raise ConfigError(
                f"the step needs {size(self.memory.peak)} on each device, and there are "
                f"{size(limit)}:\n\n{self.memory}\n\n{self.memory.advice}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Give all of it as plain data, for JSON."""
        made = asdict(self)
        memory, arithmetic = self.memory, self.flops
        made["flops"] = {**arithmetic._asdict(), "unknown": list(arithmetic.unknown)}
        made["products"] = [one._asdict() for one in self.products]
        made["collectives"] = [
            {**asdict(one), "axes": None if one.axes is None else list(one.axes)}
            for one in self.collectives
        ]
        made["memory"] |= {"state": memory.state, "peak": memory.peak}
        for key in ("not_reused", "whole"):
            made[key] = [{"path": path, "bytes": count} for path, count in made[key]]
        return made | {"moved": self.moved, "remarks": list(self.remarks)}

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {count}" for name, count in self.mesh.items() if count > 1)
        kinds = {one.dtype: 0 for one in self.products}
        for one in self.products:
            kinds[one.dtype] += one.flops
        total = sum(kinds.values()) or 1
        shares = ", ".join(f"{name} {share / total:.0%}" for name, share in kinds.items())
        lines = [
            f"a step on {self.devices} {self.device_kind} device{'s' * (self.devices > 1)}"
            + (f" ({axes})" if axes else ""),
            f"{amount(self.parameters)} parameters, {amount(self.flops.dots)} FLOPs in products"
            + (f" ({shares})" if self.products else "")
            + f", {amount(self.flops.everything)} in all, on each device"
            + ("" if self.estimate is None else f"; 6 a token: {amount(self.estimate)}"),
            "",
            str(self.memory),
        ]
        if self.collectives:
            lines += ["", _collectives_table(self.collectives)]
        remarks = [textwrap.fill(f"! {one}", 100, subsequent_indent="  ") for one in self.remarks]
        return "\n".join([*lines, *([""] if remarks else []), *remarks])


def describe(
    step: Any,
    state: Any,
    batch: Any,
    *,
    sharding: Any = None,
    donate: bool = True,
    tokens: int | None = None,
) -> Report:
    """Read what a step will cost, without running it.

    It is compiled for the devices at hand, from abstract arrays if need be: a state that no memory
    here could hold, on a mesh of as many virtual CPU devices (jax's `jax_num_cpu_devices`, set
    before anything else) as there will be real ones. What is counted is the program of that
    backend, so look at a GPU's on a GPU.

    Args:
      step: a `StepFn` or an `EvalFn`, or what `compile_step` made of it.
      state: the state, or an abstract one, as `jax.eval_shape` makes it.
      batch: a batch, or an abstract one.
      sharding: the state's plan.
      donate: whether the state is donated.
      tokens: how many tokens a batch has, for the estimate of 6 FLOPs a parameter and token.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> def init(key):
    ...     return {"w": jnp.zeros((8192, 65536))}
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((batch @ params["w"]) ** 2)
    >>> tx, mesh = optax.adam(1e-3), sf.make_mesh()
    >>> shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    >>> batch = jax.ShapeDtypeStruct((64, 8192), jnp.float32)
    >>> plan = sf.make_sharding(shape, mesh)
    >>> report = sf.describe(sf.make_train_step(loss_fn, tx), shape, batch, sharding=plan)
    >>> report.memory.state * report.devices // 2**30
    6
    >>> report.assert_fits(2**20)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: the step needs ... on each device, and there are 1.00 MiB: ...
    """
    if not isinstance(step, CompiledStep):
        with warnings.catch_warnings():  # the report says it
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            step = compile_step(step, state, batch, sharding=sharding, donate=donate)
    program = hlo.parse(step.compiled.as_text() or "")
    place = jax.tree.leaves(step.state)[0].sharding
    mesh: Any = place.mesh if isinstance(place, NamedSharding) else None
    device = min(place.device_set, key=lambda device: device.id)
    trained = step.state.params if isinstance(step.state, TrainState) else step.state
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trained))
    devices = len(place.device_set)
    found = products(step.step, step.state, step.batch)
    sent = collectives(program, mesh)
    flops, unused, whole = count(program), not_reused(step), whole_though_large(step)
    share = estimate(parameters, tokens or 0, training=step.trains) // devices
    return Report(
        devices=devices,
        device_kind=device.device_kind,
        mesh=dict(mesh.shape) if mesh is not None else {},
        parameters=parameters,
        flops=flops,
        estimate=None if tokens is None else share,
        products=tuple(found),
        memory=memory_of(step.compiled, step.state, step.batch),
        collectives=tuple(sent),
        not_reused=tuple(unused),
        whole=tuple(whole),
        remarks=(
            *remarks.about_leaves("donated, and not used again", unused),
            *remarks.about_leaves(f"whole on each of {devices} devices", whole),
            *remarks.about_products(found),
            *(remarks.about_sums(trained, sent) if step.trains else ()),
            *(f"not in the FLOPs: {what}" for what in flops.unknown),
        ),
    )


def _collectives_table(found: tuple[Collective, ...]) -> str:
    def row(one: Collective) -> tuple[object, ...]:
        axes = "+".join(one.axes) if one.axes else f"{one.devices} devices"
        where = one.where if len(one.where) <= 40 else one.where[:39] + "…"
        return one.kind, axes, one.count, one.dtype, size(one.bytes), size(one.moved), where

    head = ("collective", "along", "times", "dtype", "buffers", "sent", "where")
    total = ("total", "", "", "", "", size(moved_bytes(found)), "")
    return table(head, [*map(row, found), total])
