"""Continue without processes that have died, with the bits of a run that lost none.

A segment is the steps up to the next log point, evaluation or save. All processes that train meet
at its end (`Group.meet`). If all are alive, each copies its shards to the host, and hooks see the
metrics. So nothing that a hook has seen is ever repeated, and a file has each row once. If one has
died, the others build the step for the devices that are left, continue from their copies, and
repeat what they had not agreed on: the steps of a segment, an evaluation or a save. It is what
`fit` does when it goes back, with a copy in memory in place of a checkpoint.

Each process also keeps the run and the position of the data. Between the end of a segment and the
next step, they change only with what all have agreed on, so the present ones are kept then. Steps
change them, so they are kept before the first step of a segment.

`Survivors` are the peers that meet. `Segments` are the last part of a run, which keeps it.

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
from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.restore import Restored
from stepfold.core.processes import Disbanded, Group, KeyValues, spell_processes
from stepfold.core.validation import check_flags, read_function, read_integer, read_positive
from stepfold.errors import CheckpointError, StepfoldError, refuse
from stepfold.internals.jax import is_recoverable
from stepfold.loop.data import DataPosition
from stepfold.loop.hooks.base import Stop
from stepfold.loop.host_copy import HostCopy, Replicas
from stepfold.loop.patience import spell_lost
from stepfold.loop.peers import Several
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.session import Session
from stepfold.loop.step_runner import StepRunner
from stepfold.sharding.place import share_of
from stepfold.sharding.plan import mesh_of, read_step_and_plan

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
        host without a checkpoint. It costs memory on the host, and time at the end of each segment.
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

    def segments(self) -> "Segments | None":
        """Return what repeats the segments of a run; None in a single process."""
        if jax.process_count() == 1:
            return None
        if not is_recoverable():
            expected = "processes that continue after the death of one, for sf.Elastic"
            advice = "start them with sf.start_distributed(elastic=True)"
            refuse("step", expected, "others", advice)
        return Segments(self, Group.of_live(), _Notices())

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
    """What steps change besides the state: the rest of the run, and the position of the data."""

    run: dict[str, Any]
    marks: tuple[DataPosition, ...]
    data: Any


class _Spare(NamedTuple):
    """Takes the place of the state in a process that trains nothing."""

    step: int = 0


class Segments:
    """The segments of an elastic run, and what it needs to repeat one.

    As a part, it keeps the run before the first step of a segment.

    Attributes:
      group: the processes that train; in a spare process, that one alone.
      live: those that have not died, as far as this process knows.
      losses: for each death: who, when, and what it cost.
    """

    name = "the loop"

    def __init__(self, elastic: Elastic, live: Group, notices: "_Notices") -> None:
        self.elastic, self._notices = elastic, notices
        self.live = self._met = live
        hosts = self.live.meet(socket.gethostname(), "their hosts")
        self._hosts = dict(zip(self.live.processes, hosts, strict=True))
        self.losses: list[dict[str, Any]] = []
        self._copy: HostCopy | None = None
        self._is_stale = True  # whether the copy is not of the present group
        self._replicas: Replicas | None = None
        self._kept: _Kept | None = None  # None between the end of a segment and the next
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

    def attach(self, session: Session) -> None:
        """Divide the batches by the plan, and let checkpoints be saved by the group."""
        self._met, self._session = self.group, session
        session.parts = [*session.parts, self]
        self._continue_with(session, at=session.run.step, lost="")

    def agree(self, state: Any, step: int) -> None:
        """Wait for the steps of a segment, and until all processes have done them.

        Raises:
          Disbanded: if one has died.
        """
        jax.block_until_ready(state)
        value = [step, self._length.next(step)]
        (_, self._length.steps), *_ = self.group.meet(value, "the end of a segment")
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

    def begin(self, run: Run) -> None:
        """Keep what the steps of a segment are about to change."""
        session = self._session
        position = session.feed.position(run.batches_used)
        self._kept = _Kept(session.describe(run)["fit"], run.marks, position)

    def next(self, run: Run) -> float:
        """Return the step at which a segment of `every` or `every_seconds` ends."""
        every, step = self.elastic.every, run.step
        by_step = math.inf if every is None else step + every - step % every
        return min(by_step, step + self._length.steps)

    def is_due(self, run: Run) -> bool:
        return run.end is None and self._kept is None

    def __call__(self, run: Run) -> Run:
        self.begin(run)
        return run

    def leave(self, error: BaseException) -> str:
        """End a segment that failed; return which processes have died, "" if none has."""
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

    def repeat(self, session: Session, lost: str) -> None:
        """Continue without the processes that died: from the copies, or else a checkpoint."""
        start, was_at, before = time.monotonic(), session.run.step, _processes_of(self.plan)
        lacking = self._regroup(session, lost)
        if self.is_spare:
            session.run = session.run._replace(state=_Spare(session.run.step))
            self.drop()
            return
        session.hooks.flush()  # rows may still wait in a thread
        source, copy, kept = "checkpoint", self._copy, self._kept
        if lacking is None and copy is not None and kept is not None:
            source, extra = "memory", {"fit": kept.run}
            state, names = copy.restore(self.plan), {name: name for name, _ in copy.leaves}
            restored = Restored(state, copy.step, kept.data, extra, {}, names, {}, {})
            session.continue_from(restored, "memory")
            session.run = session.run._replace(marks=kept.marks)
            session.hooks.stay()
        else:
            self._continue_from_checkpoint(session, lost, lacking)
        loss = {
            "lost": lost,
            "at": was_at,
            "from": session.run.step,
            "source": source,
            "processes": list(self.group.processes),
            "stepped_in": sorted(_processes_of(self.plan) - before),
            "seconds": round(time.monotonic() - start, 3),
            "time": time.time(),
        }
        self.losses.append(loss)
        warnings.warn(_spell_loss(loss), RuntimeWarning, stacklevel=4)

    def _regroup(self, session: Session, lost: str) -> str | None:
        """Use the devices that are left, and what is kept; return a leaf that is not, or None."""
        if (copy := self._copy) is None:
            raise CheckpointError(f"fit: {lost} before the first step; start it again")
        if self._kept is None and not copy.is_empty:  # the end of a run is repeated too
            self.begin(session.run._replace(is_complete=False))
        was_new = copy.is_empty
        _wait_for_devices()  # before the meetings
        self._notices.call(self.live, lost)
        self._met = self.live
        self._use(*self.elastic.on(self.devices))
        note = pickle.dumps((copy.step, self._kept, _start_of(session)))
        lacking, note = copy.collect(self.plan, self.live, note)
        copy.step, kept, first = pickle.loads(note)
        if was_new and not self.is_spare:
            self._kept = kept
            _step_in(session, first)
        self._met = self.group
        self._continue_with(session, at=copy.step, lost=lost)
        return lacking

    def _continue_with(self, session: Session, *, at: int, lost: str) -> None:
        """Use the step and share of the plan, with the processes that are left, after step `at`."""
        session.runner = StepRunner(self._step)
        session.feed.share((0, 1, 1) if self.is_spare else share_of(mesh_of(self.plan)))
        session.run = session.peers.regroup(self.group, session.run._replace(step=at))
        if session.series is not None:
            session.series.join(self.group, lost=lost)

    def _continue_from_checkpoint(self, session: Session, lost: str, lacking: str | None) -> None:
        """Continue from the newest checkpoint."""
        if session.series is None or self._copy is None:
            expected = f"a copy of {lacking} in the processes that are left, or checkpoints"
            advice = "give sf.Checkpoints(every=…), or replicas=1"
            refuse("plan", expected, "none", advice, kind=CheckpointError)
        session.run = session.run._replace(state=self._copy.like(self.plan))
        self.drop()
        try:
            session.continue_as_resumed()
        except CheckpointError as error:
            advice = "replicas=1 keeps a copy, sf.Checkpoints(at_start=True) saves it first"
            error.add_note(f"{lost}, and with it {lacking}: {advice}")
            raise

    def wait(self, session: Session) -> str:
        """Wait in a spare process until it is needed; return why, or "" once the run has ended."""
        call = self._notices.wait()
        if "lost" in call:
            self.live = self.live.only(call["live"])
            return str(call["lost"])
        if call["error"]:
            expected, got = "no error in any process", f"one: {call['error']}"
            refuse("fit", expected, got, kind=StepfoldError)
        number, step = call["signal"], call["step"]
        requests = [Request(Kind.END, step, Stop(*call["stop"]))]
        requests += [Request(Kind.SIGNAL, step, Signals(number))] if number else []
        session.run = session.run._replace(step=step).ask(*requests)
        if self._copy is not None:
            session.run = session.run._replace(state=self._copy.like(self.plan))
        return ""

    def end(self, step: int, stop: Stop | None, number: int | None, error: str = "") -> None:
        """Tell spare processes how the run has ended."""
        self._notices.end({"step": step, "stop": stop, "signal": number, "error": error})


def _start_of(session: Session) -> dict[str, Any]:
    """Return what a spare process needs to step in."""
    run, series, rollbacks = session.run, session.series, session.rollbacks
    return {
        "resumed": run.resumed,
        "total": run.total,
        "rollbacks": [] if rollbacks is None else rollbacks.done,
        "saved": None if series is None else series.get_progress(),
    }


def _step_in(session: Session, start: Mapping[str, Any]) -> None:
    """Step in during a run, with the values of `_start_of` in another process."""
    values = {name: start[name] for name in ("resumed", "total")}
    session.run = session.run._replace(**values)
    if session.series is not None and session.rollbacks is not None:
        session.series.set_progress(start["saved"])
        new = start["rollbacks"][len(session.rollbacks.done) :]
        session.rollbacks.done += new
        if new:
            session.skip([rollback.skipped for rollback in new])


class Survivors(Several):
    """The processes of an elastic run that train; they meet before hooks see what steps did."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments.group)
        self._segments = segments

    def meet(self, run: Run) -> Run:
        for returned in run.current.calls:
            jax.block_until_ready(returned)
            self.position.wait()
        self._segments.agree(run.state, run.step)
        return run

    def keep(self, run: Run) -> None:
        self._segments.keep(run.state, run.step)

    def defer(self, run: Run, error: Exception) -> Run:  # noqa: ARG002  all leave together
        raise error


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
    """The length in steps of segments of some seconds, if any, by the clock of process 0."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.steps: float = math.inf if seconds is None else 1
        self._last: tuple[int, float] | None = None

    def next(self, step: int) -> float:
        """Return the length of the segment after a step."""
        now, last = time.monotonic(), self._last
        self._last = step, now
        if self._seconds is None or last is None or step <= last[0]:
            return self.steps
        pace = (now - last[1]) / (step - last[0])
        return max(1, min(int(self._seconds / pace), 2 * self.steps))


def _wait_for_devices() -> None:
    """Wait until nothing of a failed segment runs on the devices of this process.

    A vote may still wait for a dead process there, as long as its timeout says. The next
    collective would wait behind it, and time out in the other processes.
    """
    for array in jax.live_arrays():
        with suppress(Exception):
            array.block_until_ready()
