"""Continue without processes that have died, with the bits of a run that lost none.

An attempt is the steps up to the next log point, evaluation or save. All processes that train meet
at its end (`Group.meet`). If all are alive, each copies its shards to the host, and hooks see the
metrics. So nothing that a hook has seen is ever repeated, and a file has each row once. If one has
died, the others build the step for the devices that are left, continue from their copies, and
repeat what they had not agreed on: the steps of an attempt, an evaluation or a save. It is what
`fit` does when it goes back, with a copy in memory in place of a checkpoint.

Each process also keeps the state of the loop and the position of the data. Between the end of an
attempt and the next step, they change only with what all have agreed on, so the present ones are
kept then. Steps change them, so they are kept before the first step of an attempt.

Processes without devices in the plan are spare: they wait in `fit` until a death makes another
plan. Process 0 always trains, since its service knows who is alive.
"""

import math
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from stepfold.checkpoint.restore import Restored
from stepfold.core.processes import Disbanded, Group, KeyValues, spell_processes
from stepfold.core.validation import check_flags, read_function, read_integer, read_positive
from stepfold.errors import CheckpointError, StepfoldError, refuse
from stepfold.loop.hooks.base import Stop
from stepfold.loop.host_copy import HostCopy, Replicas
from stepfold.loop.patience import spell_lost
from stepfold.sharding.distributed import is_recoverable
from stepfold.sharding.place import share_of
from stepfold.sharding.plan import mesh_of, read_step_and_plan

if TYPE_CHECKING:
    from stepfold.loop.train_loop import TrainLoop

_POLL_SECONDS = 0.1  # between two looks of a spare process at what the others do


@dataclass(frozen=True)
class Elastic:
    """A step that depends on the devices, so that `fit` continues if a process dies.

    Give it to `fit` in place of a step, after `start_distributed(elastic=True)`, with the same
    function in all processes. A run that loses processes then has the result of one that lost none:
    with `sf.ordered` gradients bit for bit, with others up to rounding. Hooks, history and metric
    files see each step once; only hooks that replace the state see an event again in which a
    process died. Only the death of process 0, the coordinator, ends the run.

    Each process keeps a copy of its shards on the host, as of the last log point, evaluation or
    save. The others continue from their copies if these have the whole state. Otherwise they
    continue from the newest checkpoint, and hooks without a state see the steps after it again. The
    batches are of `sf.batches`, in evaluations too; they divide the rows among the devices that
    are left. The guide explains :doc:`/ideas/losing-a-process`.

    Attributes:
      build: a function `devices -> (step, plan)`. It is called at the start, and again whenever
        processes have died. The plan uses devices of process 0, and as many of the others as it
        likes. Processes of which it uses none are spare: they wait in `fit`, and step in if a later
        plan uses their devices. There, `init_state` and the result of `fit` have no arrays, only
        their shapes.
      replicas: with 1, each process also keeps the shards of a process on another host that no
        third one has. A state that is sharded over all devices then survives the death of any one
        host without a checkpoint. It costs memory on the host, and time at the end of each attempt.
      every, every_seconds: the most steps to repeat, or about the most seconds. Without them, those
        between two log points, evaluations or saves.
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
    replicas: int = 0
    every: int | None = None
    every_seconds: float | None = None
    patience: float | None = None
    leave_behind: bool = True
    every_epochs: ClassVar[None] = None

    def __post_init__(self) -> None:
        read_function("build", self.build, "a function build(devices) -> (step, plan)")
        if self.replicas not in (0, 1):
            refuse("replicas", "0 or 1", repr(self.replicas))
        if self.every is not None:
            read_integer("every", self.every)
        if self.every_seconds is not None:
            read_positive("every_seconds", self.every_seconds, unit="seconds")
        if self.patience is not None:
            read_positive("patience", self.patience, unit="seconds")
        check_flags(leave_behind=self.leave_behind)

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The step for all devices of the job, but those of processes that died in a run."""
        return self.on(self._devices)[0]

    @property
    def plan(self) -> Any:
        """The plan for the same devices, to initialize the state with."""
        return self.on(self._devices)[1]

    @property
    def _devices(self) -> list[jax.Device]:
        values = KeyValues("elastic")
        dead = values.get("dead") if values else {}
        return [device for device in jax.devices() if str(device.process_index) not in dead]

    @cached_property
    def _built(self) -> dict[tuple[jax.Device, ...], Any]:
        return {}

    def attempts(self) -> "Attempts | None":
        """Return the attempts of a run; None in a single process."""
        if jax.process_count() == 1:
            return None
        if not is_recoverable():
            expected = "processes that continue after the death of one, for sf.Elastic"
            advice = "start them with sf.start_distributed(elastic=True)"
            refuse("step", expected, "others", advice)
        return Attempts(self, Group.of_live(), _Notices())

    def on(self, devices: Sequence[jax.Device]) -> tuple[Callable[[Any, Any], Any], Any]:
        """Build the step and the plan for some devices, once."""
        if (parts := self._built.get(tuple(devices))) is not None:
            return parts  # type: ignore[no-any-return]
        parts = read_step_and_plan("build", self.build(devices), devices)
        if 0 not in (used := _processes_of(parts[1])):
            expected = "a plan with devices of process 0, which cannot be spare"
            refuse("build", expected, f"one of {spell_processes(sorted(used))}")
        self._built[tuple(devices)] = parts
        return parts


def _processes_of(plan: Any) -> set[int]:
    return {device.process_index for device in mesh_of(plan).devices.flat}


class _Kept(NamedTuple):
    """What steps change besides the state: the state of the loop, and the position of the data."""

    run: dict[str, Any]
    data: Any


class _Spare(NamedTuple):
    """Takes the place of the state in a process that trains nothing."""

    step: int = 0


class Attempts:
    """The attempts of an elastic run, and what it needs to repeat one.

    Attributes:
      group: the processes that train; in a spare process, that one alone.
      live: those that have not died, as far as this process knows.
      losses: for each death: who, when, and what it cost.
    """

    def __init__(self, elastic: Elastic, live: Group, notices: "_Notices") -> None:
        self.elastic, self._notices = elastic, notices
        self.live = self._met = live
        hosts = self.live.meet(socket.gethostname(), "their hosts")
        self._hosts = dict(zip(self.live.processes, hosts, strict=True))
        self.losses: list[dict[str, Any]] = []
        self.is_repeated = False  # whether the run continues from a copy
        self._copy: HostCopy | None = None
        self._is_stale = True  # whether the copy is not of the present group
        self._replicas: Replicas | None = None
        self._kept: _Kept | None = None  # None between the end of an attempt and the next
        self._length: _Length | None = None
        if elastic.every_seconds is not None:
            self._length = _Length(elastic.every_seconds)
        self._use(*elastic.on(self.devices))

    def _use(self, step: Callable[..., Any], plan: Any) -> None:
        self._step, self.plan, self._replicas, self._is_stale = step, plan, None, True
        processes, me = _processes_of(plan), jax.process_index()
        self.group = self.live.only(processes if me in processes else {me})

    @property
    def devices(self) -> list[jax.Device]:
        """The devices that are left."""
        return self.live.devices

    @property
    def is_spare(self) -> bool:
        """Whether this process trains nothing now."""
        return jax.process_index() not in _processes_of(self.plan)

    def stand_in(self, state: Any) -> Any:
        """Return what takes the place of the state in a spare process, and the state in others."""
        if self.is_spare:
            self._copy = HostCopy(state, 0)
            return _Spare()
        used = {
            device.process_index
            for leaf in jax.tree.leaves(state)
            for device in getattr(getattr(leaf, "sharding", None), "device_set", ())
        }
        if dead := sorted(used - {*self.live.processes}):
            raise Disbanded(dead)
        return state

    def start(self, loop: "TrainLoop") -> None:
        """Divide the batches by the plan, and let checkpoints be saved by the group."""
        self._met = self.group
        loop.continue_with(self._step, self._share, at=loop.step, lost="")

    @property
    def _share(self) -> tuple[int, int, int]:
        """Which part of each batch this process makes."""
        return (0, 1, 1) if self.is_spare else share_of(mesh_of(self.plan))

    def agree(self, state: Any, step: int) -> None:
        """Wait for the steps of an attempt, and until all processes have done them.

        Raises:
          Disbanded: if one has died.
        """
        jax.block_until_ready(state)
        length = None if self._length is None else self._length.next(step)
        (_, length), *_ = self.group.meet([step, length], "the end of an attempt")
        if self._length is not None:
            self._length.steps = length
        if self._copy is None or self._copy.step != step or self._is_stale:
            self.keep(state, step)
        self._kept = None

    def keep(self, state: Any, step: int) -> None:
        """Copy the shards of this process to the host, and to another process."""
        copy = HostCopy.of(state, step)
        if self.elastic.replicas and len(self.group.processes) > 1:
            start = time.monotonic()
            if self._replicas is None:
                self._replicas = Replicas(copy, self.plan, self.group, self._hosts)
            copy.replicate(self._replicas)
            # The previous copies count until all have the new ones.
            self.group.meet(step, "their copies")
            self._replicas.seconds = time.monotonic() - start
        self._copy, self._kept, self._is_stale = copy, None, False

    def drop(self) -> None:
        """Drop the copy, so that a checkpoint replaces it if a process dies."""
        self._kept, self._is_stale = None, True
        if self._copy is not None:
            self._copy.drop()

    def begin(self, loop: "TrainLoop") -> None:
        """Keep what the steps of an attempt are about to change."""
        self._kept = _Kept(loop.get_state(), loop.position())
        self.is_repeated = False

    def next_end(self, step: int) -> float:
        """Return the step at which an attempt of `every_seconds` ends."""
        return math.inf if self._length is None else step + self._length.steps

    def leave(self, error: BaseException) -> str:
        """End an attempt that failed; return which processes have died, "" if none has."""
        dead = self._met.leave(error)
        if dead:
            lost = spell_lost(self.group, dead, leave_behind=self.elastic.leave_behind)
            for process in dead:  # a later run of this job starts without it
                KeyValues("elastic").set(f"dead/{process}", True)
            self.live = self.live.only(set(self.live.processes) - dead)
            self._met = self._met.only(self.live.processes)
            return lost
        if isinstance(error, Disbanded):
            expected, got = "no error in any process", f"one: {error}"
            refuse("fit", expected, got, kind=StepfoldError, cause=error)
        return ""

    def repeat(self, loop: "TrainLoop", lost: str) -> None:
        """Continue without the processes that died: from the copies, or else a checkpoint."""
        start, was_at, before = time.monotonic(), loop.step, _processes_of(self.plan)
        lacking = self._regroup(loop, lost)
        if self.is_spare:
            loop.state = _Spare(loop.step)
            self.drop()
            return
        loop.hooks.flush()  # rows may still wait in a thread
        self.is_repeated = lacking is None
        if self.is_repeated and self._copy is not None and self._kept is not None:
            loop.resume(self._restored(self._copy, self._kept), "memory")
        else:
            self._restart(loop, lost, lacking)
        loss = {
            "lost": lost,
            "at": was_at,
            "from": loop.step,
            "source": "memory" if self.is_repeated else "checkpoint",
            "processes": list(self.group.processes),
            "stepped_in": sorted(_processes_of(self.plan) - before),
            "seconds": round(time.monotonic() - start, 3),
            "time": time.time(),
        }
        self.losses.append(loss)
        warnings.warn(_spell_loss(loss), RuntimeWarning, stacklevel=4)

    def _regroup(self, loop: "TrainLoop", lost: str) -> str | None:
        """Use the devices that are left, and what is kept; return a leaf that is not, or None."""
        if (copy := self._copy) is None:
            raise CheckpointError(f"fit: {lost} before the run had begun; start it again")
        if self._kept is None and not copy.is_empty:  # the end of a run is repeated too
            self._kept = _Kept({**loop.get_state(), "is_complete": False}, loop.position())
        was_new = copy.is_empty
        _wait_for_devices()  # before the meetings
        self._notices.call(self.live, lost)
        self._met = self.live
        self._use(*self.elastic.on(self.devices))
        note = pickle.dumps((copy.step, self._kept, loop.get_start()))
        lacking, note = copy.collect(self.plan, self.live, note)
        copy.step, kept, begun = pickle.loads(note)
        if was_new and not self.is_spare:
            self._kept = kept
            loop.set_start(begun)
        self._met = self.group
        loop.continue_with(self._step, self._share, at=copy.step, lost=lost)
        return lacking

    def _restart(self, loop: "TrainLoop", lost: str, lacking: str | None) -> None:
        """Continue from the newest checkpoint."""
        if loop.series is None or self._copy is None:
            expected = f"a copy of {lacking} in the processes that are left, or checkpoints"
            advice = "give sf.Checkpoints(every=…), or replicas=1"
            refuse("plan", expected, "none", advice, kind=CheckpointError)
        loop.state = self._copy.like(self.plan)
        self.drop()
        try:
            loop.restart()
        except CheckpointError as error:
            advice = "replicas=1 keeps a copy, sf.Checkpoints(at_start=True) saves it first"
            error.add_note(f"{lost}, and with it {lacking}: {advice}")
            raise

    def _restored(self, copy: HostCopy, kept: _Kept) -> Restored:
        """Return the state from the copy, and what was kept with it."""
        names = {name: name for name, _ in copy.leaves}
        extra = {"fit": kept.run}
        return Restored(copy.restore(self.plan), copy.step, kept.data, extra, {}, names, {}, {})

    def wait(self, loop: "TrainLoop") -> str:
        """Wait in a spare process until it is needed; return why, or "" once the run has ended."""
        call = self._notices.wait()
        if "lost" in call:
            self.live = self.live.only(call["live"])
            return str(call["lost"])
        if call["error"]:
            expected, got = "no error in any process", f"one: {call['error']}"
            refuse("fit", expected, got, kind=StepfoldError)
        number = call["signal"]
        loop.end_as(call["step"], Stop(*call["stop"]), number and Signals(number))
        if self._copy is not None:
            loop.state = self._copy.like(self.plan)
        return ""

    def end(self, step: int, stop: Stop | None, number: int | None, error: str = "") -> None:
        """Tell spare processes how the run has ended."""
        self._notices.end({"step": step, "stop": stop, "signal": number, "error": error})


def _spell_loss(loss: Mapping[str, Any]) -> str:
    checkpoint = "" if loss["source"] == "memory" else ", its newest checkpoint,"
    where = spell_processes(loss["processes"])
    if loss["stepped_in"]:
        where += f" with {spell_processes(loss['stepped_in'])}, which stepped in"
    return f"{loss['lost']}; the run continues from step {loss['from']}{checkpoint} on {where}"


class _Notices:
    """What process 0 tells spare processes: that they are needed, or that the run has ended."""

    def __init__(self) -> None:
        self._values = KeyValues("elastic")
        self._run, self._calls = str(self._values.count_call()), 0

    def call(self, live: Group, lost: str) -> None:
        """Call all live processes to a recovery; each counts those that it took part in."""
        self._calls += 1
        notice = {"number": self._calls, "live": live.processes, "lost": lost}
        self._set("call", notice)

    def end(self, notice: dict[str, Any]) -> None:
        self._set("end", notice)

    def wait(self) -> dict[str, Any]:
        """Wait for the next call, or the end of the run."""
        while True:
            notices = self._values.get(self._run)
            if notices.get("call", {}).get("number", 0) > self._calls:
                return notices["call"]  # type: ignore[no-any-return]
            if "end" in notices:
                return notices["end"]  # type: ignore[no-any-return]
            time.sleep(_POLL_SECONDS)

    def _set(self, key: str, notice: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            self._values.set(f"{self._run}/{key}", notice)


class _Length:
    """The length in steps of attempts of some seconds, by the clock of process 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.steps = seconds, 1
        self._last: tuple[int, float] | None = None

    def next(self, step: int) -> int:
        """Return the length of the attempt after a step."""
        now, last = time.monotonic(), self._last
        self._last = step, now
        if last is None or step <= last[0]:
            return self.steps
        pace = (now - last[1]) / (step - last[0])
        return max(1, min(int(self._seconds / pace), 2 * self.steps))


def _wait_for_devices() -> None:
    """Wait until nothing of a failed attempt runs on the devices of this process.

    A vote may still wait for a dead process there, as long as its timeout says. The next
    collective would wait behind it, and time out in the other processes.
    """
    for array in jax.live_arrays():
        with suppress(Exception):
            array.block_until_ready()
