"""Describe a step before it runs: FLOPs, memory, communication, and likely mistakes."""

import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from stepfold import tree
from stepfold.core.state import TrainState
from stepfold.core.validation import check_flags
from stepfold.errors import ConfigError, refuse
from stepfold.inspect import peaks
from stepfold.inspect.collectives import Collective, collectives, parse, unknown_loops
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.inspect.flops import Flops, Product, estimate, products, uncounted
from stepfold.inspect.memory import Memory, bytes_per_device, memory_of
from stepfold.sharding.mesh import axes_of
from stepfold.sharding.plan import shardings_of
from stepfold.table import amount, size, table


@dataclass(frozen=True)
class Report:
    """The costs of a step; `describe` makes it.

    Attributes:
      devices: the number of devices.
      device_kind: their kind.
      mesh: the mesh's axes and their sizes; empty without a mesh.
      parameters: the number of trained values.
      flops: one device's share of the matrix products. Work that several devices repeat, since no
        axis shards it, counts once.
      estimate: the classic 6 FLOPs for each parameter and token (2 in an evaluation), one device's
        share; None without `tokens`.
      products: matrix products by dtype and line, on all devices.
      memory: bytes on one device: `params`, `opt_state`, `model_state`, `rest` (step and key),
        `batch`, `temporaries` and `output`; `state` is the sum of the first four, and `peak` of
        all. `host` are bytes in the host's memory. `advice` says how to reduce the largest.
      collectives: what the devices send each other.
      not_reused: donated leaves whose memory is not reused, with their bytes.
      whole: large leaves that are replicated on several devices, with their bytes.
      remarks: likely mistakes, and what the numbers leave out.

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
        """The bytes that one device sends in one step."""
        return sum(entry.moved for entry in self.collectives)

    def mfu(self, seconds: float, peak: float | None = None, dtype: str = "bfloat16") -> float:
        """Return the model FLOPs utilization of a measured step time.

        The FLOPs are the estimate if tokens were given, otherwise the counted products, which
        include those that rematerialization repeats.

        Args:
          seconds: the duration of one step.
          peak: FLOPs per second of one device; by default looked up.
          dtype: the dtype of the operands.

        Raises:
          ConfigError: if the device is unknown and no peak is given.
        """
        flops = self.flops.dots if self.estimate is None else self.estimate
        return peaks.mfu(flops, seconds, device=self, peak=peak, dtype=dtype)

    def assert_fits(self, limit: float) -> None:
        """Raise if the predicted peak is above a number of bytes.

        Raises:
          ConfigError: with the table of memory, and how to reduce it.
        """
        if self.memory.peak > limit:
            raise ConfigError(
                f"the step needs {size(self.memory.peak)} on each device, and the limit is "
                f"{size(limit)}:\n\n{self.memory}\n\n{self.memory.advice}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        memory = asdict(self.memory) | {"state": self.memory.state, "peak": self.memory.peak}
        return asdict(self) | {
            "flops": {"dots": self.flops.dots, "unknown": list(self.flops.unknown)},
            "products": [product._asdict() for product in self.products],
            "memory": memory,
            "collectives": [
                asdict(entry) | {"axes": entry.axes and list(entry.axes)}
                for entry in self.collectives
            ],
            "not_reused": [{"path": path, "bytes": count} for path, count in self.not_reused],
            "whole": [{"path": path, "bytes": count} for path, count in self.whole],
            "remarks": list(self.remarks),
            "moved": self.moved,
        }

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {count}" for name, count in self.mesh.items() if count > 1)
        dtypes = Counter[str]()
        for product in self.products:
            dtypes[product.dtype] += product.flops
        total = dtypes.total() or 1
        shares = ", ".join(f"{name} {flops / total:.0%}" for name, flops in dtypes.items())
        device = f"{self.device_kind} device{'s' * (self.devices > 1)}"
        lines = [
            f"a step on {self.devices} {device}{axes and f' ({axes})'}",
            f"{amount(self.parameters)} parameters, {amount(self.flops.dots)} FLOPs in products"
            f"{shares and f' ({shares})'} on each device",
            "",
            str(self.memory),
        ]
        if self.estimate is not None:
            lines[1] += f"; estimate by tokens: {amount(self.estimate)}"
        if self.collectives:
            head = ("collective", "along", "times", "dtype", "buffers", "sent", "where")
            total_row = ("total", "", "", "", "", size(self.moved), "")
            lines += ["", table(head, [*map(_collective_row, self.collectives), total_row])]
        remarks = [textwrap.fill(f"! {text}", 100, subsequent_indent="  ") for text in self.remarks]
        return "\n".join([*lines, *([""] if remarks else []), *remarks])


def _collective_row(entry: Collective) -> tuple[object, ...]:
    axes = "+".join(entry.axes) if entry.axes else f"{entry.devices} devices"
    where = entry.where if len(entry.where) <= 40 else entry.where[:39] + "…"
    return entry.kind, axes, entry.count, entry.dtype, size(entry.bytes), size(entry.moved), where


def describe(
    step: Any,
    state: Any,
    batch: Any,
    *,
    sharding: Any = None,
    donate: bool = True,
    tokens: int | None = None,
) -> Report:
    """Report what a step costs, without running it.

    The step is compiled for the devices of its mesh, and their memory and collectives are reported.
    The state may be abstract and larger than any memory here, on a mesh of a TPU that is not here
    (`devices_of`), or of virtual CPU devices (`jax_num_cpu_devices`, set before anything else).

    Args:
      step: a `StepFn` or an `EvalFn`, or the result of `compile_step`.
      state: the state, or an abstract one, as `jax.eval_shape` makes it.
      batch: a batch, or an abstract one.
      sharding: the state's plan.
      donate: whether the state is donated.
      tokens: the number of tokens in a batch, to estimate FLOPs by.

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
    stepfold.errors.ConfigError: the step needs ... on each device, and the limit is 1.00 MiB: ...
    """
    check_flags(donate=donate)
    if not isinstance(step, CompiledStep):
        with warnings.catch_warnings():  # the report says it
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            step = compile_step(step, state, batch, sharding=sharding, donate=donate)
    sharding = jax.tree.leaves(step.state)[0].sharding
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
    devices = len(sharding.device_set)
    trained = step.state.params if isinstance(step.state, TrainState) else step.state
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trained))
    share = estimate(parameters, tokens or 0, training=step.trains) // devices
    program = parse(step.compiled.as_text() or "")
    sent = collectives(program, mesh)
    listed, uncounted_products = products(step.jaxpr), uncounted(step.jaxpr)
    unused, replicated = not_reused(step), replicated_leaves(step)
    loops = "not in the communication: a loop of unknown length, counted once"
    return Report(
        devices=devices,
        device_kind=min(sharding.device_set, key=lambda device: device.id).device_kind,
        mesh=dict(mesh.shape) if mesh is not None else {},
        parameters=parameters,
        flops=Flops(sum(product.flops for product in listed) // devices, uncounted_products),
        estimate=None if tokens is None else share,
        products=tuple(listed),
        memory=memory_of(step.compiled, step.state, step.batch),
        collectives=tuple(sent),
        not_reused=tuple(unused),
        whole=tuple(replicated),
        remarks=(
            *leaf_remarks("donated, but not reused", unused),
            *leaf_remarks(f"replicated on each of {devices} devices", replicated),
            *product_remarks(listed),
            *(gradient_remarks(trained, step.batch, sent) if step.trains else ()),
            *(f"not in the FLOPs: {text}" for text in uncounted_products),
            *(f"{loops}: {text}" for text in unknown_loops(program)),
        ),
    )


# Memory that a step could do without


def not_reused(step: CompiledStep) -> list[tuple[str, int]]:
    """List the donated leaves, with their bytes, whose memory no output reuses."""
    donated, _ = jax.tree.map(lambda info: info.donated, step.compiled.args_info[0])
    head, _, entry = (step.compiled.as_text() or "").partition("\nENTRY ")
    aliases = re.search(r"input_output_alias=\{(.*?)\}, \w+=", head.partition("\n")[0])
    reused = set(re.findall(r": \((\d+),", aliases[1] if aliases else ""))
    named = re.findall(r" parameter\((\d+)\)[^\n]*op_name=\"((?:\\.|[^\"\\])*)\"", entry)
    numbers = {_unescape(name): number for number, name in named}  # unused arguments have none
    leaves = jax.tree_util.tree_leaves_with_path(step.state)
    return [
        (tree.path_name(path), bytes_per_device(leaf))
        for (path, leaf), is_donated in zip(leaves, jax.tree.leaves(donated), strict=True)
        if is_donated and numbers.get("state" + jax.tree_util.keystr(path)) not in reused
    ]


def _unescape(name: str) -> str:
    """Undo the escapes of C; bytes beyond ASCII are octal numbers."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), name.encode())
    return re.sub(r"\\(.)", r"\1", raw.decode(errors="replace"))


def replicated_leaves(step: CompiledStep, min_bytes: int = 1 << 20) -> list[tuple[str, int]]:
    """List the large leaves of the state that are replicated on several devices."""
    return [
        (name, bytes_per_device(leaf))
        for name, leaf in tree.named_leaves(step.state)
        if len(leaf.sharding.device_set) > 1 and bytes_per_device(leaf) >= min_bytes
        if leaf.sharding.shard_shape(leaf.shape) == leaf.shape
    ]


# Remarks


def leaf_remarks(problem: str, leaves: Sequence[tuple[str, int]]) -> list[str]:
    """Name the largest of some leaves with their total, if that is worth mentioning."""
    total = sum(count for _, count in leaves)
    if total < 1024:
        return []
    largest = sorted(leaves, key=lambda leaf: -leaf[1])
    names = ", ".join(f"{name} ({size(count)})" for name, count in largest[:3])
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return [f"{size(total)} {problem}: {names}{more}"]


def product_remarks(listed: Sequence[Product]) -> list[str]:
    """Point out products in wider dtypes: float64, and float32 among narrower ones."""
    narrow = ("bfloat16", "float16", "float8")
    is_mixed = any(product.dtype.startswith(narrow) for product in listed)
    too_wide = {"float64", "float32"} if is_mixed else {"float64"}
    wide = [product for product in listed if product.dtype in too_wide and product.flops]
    if not wide:
        return []
    total = sum(product.flops for product in listed)
    lines = ", ".join(f"{x.where} ({x.dtype}, {x.flops / total:.0%})" for x in wide[:3])
    return [f"{sum(x.flops for x in wide) / total:.0%} of products in wider dtypes: {lines}"]


def gradient_remarks(trained: Any, batch: Any, sent: Sequence[Collective]) -> list[str]:
    """Warn where a CPU's program sends more for gradients than that of a GPU or TPU."""
    axes = set[str]().union(*map(_sharded_over, jax.tree.leaves(batch)))
    sharded = [leaf for leaf in jax.tree.leaves(trained) if axes & _sharded_over(leaf)]
    devices = {device for leaf in sharded for device in leaf.sharding.device_set}
    reduced = [entry for entry in sent if entry.kind == "all-reduce"]
    summed = sum(entry.bytes for entry in reduced if entry.axes is None or axes & {*entry.axes})
    is_cpu = all(device.platform == "cpu" for device in devices)
    if not is_cpu or not sharded or summed < bytes_per_device(sharded):
        return []
    return [
        "compiled for a CPU, which reduces the gradients of sharded parameters with an all-reduce; "
        "a GPU or TPU uses a reduce-scatter, and sends half as much"
    ]


def _sharded_over(leaf: Any) -> set[str]:
    """Return the mesh axes of more than one device over which a leaf is sharded."""
    names = {name for entry in getattr(leaf.sharding, "spec", ()) for name in axes_of(entry)}
    return {name for name in names if leaf.sharding.mesh.shape[name] > 1}


# A table of parameters


def parameter_table(params: Any, plan: Any = None, *, stats: bool = False) -> str:
    """Format parameters as a table: name, shape, dtype, size, and their total.

    Parameters with shardings on a mesh also show their partition specs.

    Args:
      params: a tree of arrays, or of abstract ones.
      plan: their shardings, if the arrays do not have them yet.
      stats: whether to add mean and standard deviation. The arrays must not be abstract.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> print(sf.inspect.parameter_table({"layers": [{"w": jnp.ones((2, 3))}]}))
    +------------+--------+---------+------+
    | Name       | Shape  | Dtype   | Size |
    +------------+--------+---------+------+
    | layers/0/w | (2, 3) | float32 | 6    |
    +------------+--------+---------+------+
    Total: 6 -- 24 bytes
    """
    check_flags(stats=stats)
    from clu.parameter_overview import get_parameter_overview  # it imports flax

    flat = dict(tree.named_leaves(params))
    for name, leaf in flat.items():
        if not tree.is_array(leaf):
            refuse(name, "an array", tree.describe_value(leaf))
        if stats and (plan is not None or isinstance(leaf, jax.ShapeDtypeStruct)):
            got = (
                "a plan" if plan is not None else f"the abstract {name} {tree.describe_value(leaf)}"
            )
            refuse("stats=True", "arrays in their shardings", got, "place the arrays first")
    if plan is not None:
        flat = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (name, leaf), sharding in zip(flat.items(), shardings_of(params, plan), strict=True)
        }
    is_sharded = any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in flat.values())
    columns = ("global" if is_sharded else True) if stats else is_sharded and "sharding"
    overview: str = get_parameter_overview(flat, include_stats=columns)
    return overview
