"""Continue without processes that have died, with the bits of a run that lost none.

An attempt is the steps up to the next log point, evaluation or save. All processes meet at its end
(`Group.meet`). If all are alive, each copies its shards to the host, and hooks see the metrics. So
nothing that a hook has seen is ever repeated, and a file has each row once. If one has died, the
others build the step for the devices that are left, continue from their copies, and repeat what
they had not agreed on: the steps of an attempt, an evaluation or a save. It is what `fit` does when
it goes back, with a copy in memory in place of a checkpoint.

Each process also keeps the state of the loop and the position of the data. Between the end of an
attempt and the next step, they change only with what all have agreed on, so the present ones are
kept then. Steps change them, so they are kept before the first step of an attempt.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from stepfold import tree
from stepfold.checkpoint.leaves import (
    Leaf,
    Region,
    arrays_of,
    as_slices,
    leaves_of,
    make_leaf,
    region,
    regions_of,
)
from stepfold.checkpoint.restore import Restored
from stepfold.core.processes import Disbanded, Group, spell_processes
from stepfold.core.validation import check_flags, read_function, read_integer, read_positive
from stepfold.errors import CheckpointError, StepfoldError, refuse
from stepfold.loop.patience import spell_lost
from stepfold.sharding.distributed import is_recoverable
from stepfold.sharding.place import share_of

if TYPE_CHECKING:
    from stepfold.loop.train_loop import TrainLoop


@dataclass(frozen=True)
class Elastic:
    """A step that depends on the devices, so that `fit` continues if a process dies.

    Give it to `fit` in place of a step, after `start_distributed(elastic=True)`, with the same
    function in all processes. A run that loses processes then has the result of one that lost none:
    with `sf.ordered` gradients bit for bit, with others up to rounding. Hooks, history and metric
    files see each step once. Only the death of process 0, the coordinator, ends the run.

    Each process keeps a copy of its shards on the host. If each process that is left has a copy of
    the whole state, since it is replicated over processes or sharded only over the devices of one,
    they continue from there. Otherwise they continue from the newest checkpoint, and hooks without
    a state see the steps after it again. The batches are of `sf.batches`, in evaluations too; they
    divide the rows among the devices that are left. Checkpoints are in a directory.

    Attributes:
      build: a function `devices -> (step, plan)`. The plan uses devices of each process, as many of
        them as it likes. It is called at the start, and again whenever processes have died.
      every: the largest number of steps to repeat; without it, those between two log points,
        evaluations or saves.
      patience: the seconds without progress, in addition to the heartbeat, after which a process
        that the others wait for is stuck, although it is alive. It then writes the stacks of its
        threads to stderr, and exits with code 1. Choose more than a step takes, than a batch, hook,
        save or evaluation may take longer in one process than in the others, and than a library may
        hold the GIL. It does not apply to the first step on new devices, which compiles. Alone, a
        process has no such limit; use `sf.watchdog`.
      leave_behind: whether the others continue without a stuck process, as after its death.
        Otherwise they end with an error that names it. They end in any case if it is process 0, or
        if all are stuck at the same point.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx, params = optax.adam(1e-3), {"w": jnp.ones((8, 8))}
    >>> shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((batch @ params["w"]) ** 2)
    >>> def build(devices):
    ...     count = 1 << len(devices).bit_length() - 1  # the largest power of two
    ...     plan = sf.make_sharding(shape, sf.make_mesh(devices=devices[:count]))
    ...     return sf.make_train_step(loss_fn, tx, grad=sf.ordered(plan)), plan
    >>> elastic = sf.Elastic(build)
    >>> state = sf.init_state(params, tx, jax.random.key(0), sharding=elastic.plan)
    >>> sf.fit(elastic, state, sf.batches(jnp.ones((64, 8)), 16, seed=0), steps=10).steps
    10
    """

    build: Callable[[Sequence[jax.Device]], tuple[Callable[[Any, Any], tuple[Any, Any]], Any]]
    _: KW_ONLY
    every: int | None = None
    patience: float | None = None
    leave_behind: bool = True
    every_epochs: ClassVar[None] = None

    def __post_init__(self) -> None:
        read_function("build", self.build, "a function build(devices) -> (step, plan)")
        if self.every is not None:
            read_integer("every", self.every)
        if self.patience is not None:
            read_positive("patience", self.patience, unit="seconds")
        check_flags(leave_behind=self.leave_behind)

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The step for all devices of the job."""
        return self._parts[0]

    @property
    def plan(self) -> Any:
        """The plan for all devices of the job, to initialize the state with."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any]:
        return self.on(jax.devices())

    def attempts(self) -> "Attempts | None":
        """Return the attempts of a run; None in a single process."""
        if jax.process_count() == 1:
            return None
        if not is_recoverable():
            expected = "processes that continue after the death of one, for sf.Elastic"
            advice = "start them with sf.start_distributed(elastic=True)"
            refuse("step", expected, "others", advice)
        return Attempts(self)

    def on(self, devices: Sequence[jax.Device]) -> tuple[Callable[[Any, Any], Any], Any]:
        """Build the step and the plan for some devices."""
        parts = self.build(devices)
        if not isinstance(parts, tuple) or len(parts) != 2:
            refuse("build", "(step, plan) from it", tree.describe_value(parts))
        used = {device.process_index for device in _mesh_of(parts[1]).devices.flat}
        if idle := {device.process_index for device in devices} - used:
            expected = "a plan with devices of each process"
            refuse("build", expected, f"none of {spell_processes(sorted(idle))}")
        return parts


def _mesh_of(plan: Any) -> Any:
    shardings = jax.tree.leaves(plan)
    if not shardings or not all(isinstance(each, NamedSharding) for each in shardings):
        advice = "make it with sf.make_sharding"
        refuse("build", "a plan from it, a tree of shardings", tree.describe_value(plan), advice)
    return shardings[0].mesh


def plan_share(plan: Any) -> tuple[int, int, int]:
    """Return which part of each batch this process makes."""
    return share_of(_mesh_of(plan))


class _Kept(NamedTuple):
    """What steps change besides the state: the state of the loop, and the position of the data."""

    run: dict[str, Any]
    data: Any


class Attempts:
    """The attempts of an elastic run, and what it needs to repeat one."""

    def __init__(self, elastic: Elastic) -> None:
        self.elastic = elastic
        self.group = Group(tuple(range(jax.process_count())))
        self.is_repeated = False  # whether the run continues from a copy
        self._copy: HostCopy | None = None
        self._kept: _Kept | None = None  # None between the end of an attempt and the next

    def start(self, loop: "TrainLoop") -> None:
        """Divide the batches by the plan, and let checkpoints be saved by the group."""
        loop.continue_with(*self.elastic._parts, at=loop.step, lost="")

    def agree(self, state: Any, step: int) -> None:
        """Wait for the steps of an attempt, and until all processes have done them.

        Raises:
          Disbanded: if one has died.
        """
        jax.block_until_ready(state)
        self.group.meet(step, "the end of an attempt")
        self._kept = None
        if self._copy is None or self._copy.step != step:
            self.keep(state, step)

    def keep(self, state: Any, step: int) -> None:
        """Copy the shards of this process to the host."""
        self._copy, self._kept = HostCopy(state, step), None

    def begin(self, loop: "TrainLoop") -> None:
        """Keep what the steps of an attempt are about to change."""
        self._kept = _Kept(loop.get_state(), loop.position())
        self.is_repeated = False

    def leave(self, error: BaseException) -> str:
        """End an attempt that failed; return which processes have died, "" if none has."""
        dead = self.group.leave(error)
        if dead:
            lost = spell_lost(self.group, dead, leave_behind=self.elastic.leave_behind)
            self.group = self.group.without(dead)
            return lost
        if isinstance(error, Disbanded):
            expected, got = "no error in any process", f"one: {error}"
            refuse("fit", expected, got, kind=StepfoldError, cause=error)
        return ""

    def repeat(self, loop: "TrainLoop", lost: str) -> None:
        """Continue without the processes that died: from the copies, or else a checkpoint."""
        if self._copy is None:
            raise CheckpointError(f"fit: {lost} before the run had begun; start it again")
        if self._kept is None:  # the end of a run is repeated too
            self._kept = _Kept({**loop.get_state(), "is_complete": False}, loop.position())
        _wait_for_devices()  # before the meetings in `continue_with`
        step, plan = self.elastic.on(self.group.devices)
        loop.continue_with(step, plan, at=self._copy.step, lost=lost)
        loop.hooks.flush()  # rows may still wait in a thread
        missing = self.group.meet(self._copy.missing(plan), "their copies of the state")
        self.is_repeated = not any(missing)
        if self.is_repeated:
            loop.resume(self._copy.restored(plan, *self._kept), "memory")
        elif loop.series is None:
            expected = f"a copy of {max(missing)[0]} in each process that is left, or checkpoints"
            advice = "give sf.Checkpoints(every=…), or replicate the state over processes"
            refuse("plan", expected, "none", advice, kind=CheckpointError)
        else:
            loop.state = self._copy.like(plan)
            self._copy.drop()
            loop.restore(loop.series)
        warnings.warn(
            f"{lost}; the run continues from step {loop.step}"
            f"{'' if self.is_repeated else ', its newest checkpoint,'} on "
            f"{spell_processes(self.group.processes)}",
            RuntimeWarning,
            stacklevel=4,
        )


def _wait_for_devices() -> None:
    """Wait until nothing of a failed attempt runs on the devices of this process.

    A vote may still wait for a dead process there, as long as its timeout says. The next
    collective would wait behind it, and time out in the other processes.
    """
    for array in jax.live_arrays():
        with suppress(Exception):
            array.block_until_ready()


class HostCopy:
    """The shards of a state that this process has, in its own memory."""

    def __init__(self, state: Any, step: int) -> None:
        self.step, self.leaves = step, leaves_of(state)
        self._structure: Any = jax.tree.structure(state)
        arrays = arrays_of(state, Group((jax.process_index(),)))
        shards = {
            name: array.addressable_shards if isinstance(array, jax.Array) else []
            for name, array in arrays.items()
        }
        for shard in (shard for each in shards.values() for shard in each):
            shard.data.copy_to_host_async()
        # Views if the device is the host: they keep the arrays valid, even if a step donates them.
        self._parts: dict[str, dict[Region, np.ndarray]] = {
            name: {region(s.index, arrays[name].shape): np.asarray(s.data) for s in each}
            for name, each in shards.items()
        }

    def missing(self, plan: Any) -> list[str]:
        """List the leaves of which the copy lacks a part that a plan has on this process."""
        return [
            name
            for name, like in self._named(plan).items()
            for part in regions_of(name, self.leaves[name], like)
            if _cut(self._parts.get(name, {}), part, self.leaves[name]) is None
        ]

    def restored(self, plan: Any, run: dict[str, Any], data: Any) -> Restored:
        """Return the state with the shardings of a plan, and what was kept with it."""
        leaves = []
        for name, like in self._named(plan).items():
            saved = self.leaves[name]
            needed = regions_of(name, saved, like)
            parts: Any = {part: _cut(self._parts[name], part, saved) for part in needed}
            leaves.append(make_leaf(name, saved, like, parts))
        state, names = self._structure.unflatten(leaves), {name: name for name in self.leaves}
        return Restored(state, self.step, data, {"fit": run}, {}, names, {}, {})

    def like(self, plan: Any) -> Any:
        """Return the abstract state with the shardings of a plan."""
        return self._structure.unflatten(self._named(plan).values())

    def drop(self) -> None:
        """Drop the arrays."""
        self._parts = {}

    def _named(self, plan: Any) -> dict[str, Any]:
        if jax.tree.structure(plan) != self._structure:
            advice = "make it with sf.make_sharding(shape, mesh), of the same shape"
            refuse("build", "a plan like the state", tree.describe_value(plan), advice)
        pairs = zip(self.leaves.items(), jax.tree.leaves(plan), strict=True)
        return {name: _abstract(leaf, sharding) for (name, leaf), sharding in pairs}


def _abstract(saved: Leaf, sharding: NamedSharding) -> Any:
    """Describe a leaf on the devices of a sharding."""
    if saved.key is None:
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=saved.key))
    return jax.ShapeDtypeStruct(saved.shape[:-1], key.dtype, sharding=sharding)


def _cut(parts: Mapping[Region, np.ndarray], wanted: Region, saved: Leaf) -> np.ndarray | None:
    """Assemble a region of a leaf from parts of it, or return None if they lack some of it."""
    shape = [stop - start for start, stop in wanted]
    result, covered = np.empty(shape, jnp.dtype(saved.dtype)), 0
    for part, array in parts.items():
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, wanted, strict=True))
        if all(start < stop for start, stop in common):
            target, source = _shift(common, wanted), _shift(common, part)
            result[as_slices(target)] = array[as_slices(source)]
            covered += math.prod(stop - start for start, stop in common)
    return result if covered == result.size else None


def _shift(part: Region, within: Region) -> Region:
    return tuple(
        (start - first, stop - first)
        for (start, stop), (first, _) in zip(part, within, strict=True)
    )
