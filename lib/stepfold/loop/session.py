"""What folds a run: its step, batches, hooks and checkpoints, and where it continues from.

To start, to resume and to go back are one thing: to fold on from another run.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.restore import Restored
from stepfold.checkpoint.results import find_results
from stepfold.checkpoint.series import Series
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.processes import Position, agreement, broadcast_from_first
from stepfold.errors import CheckpointError, StepfoldError, TreeMismatchError, refuse, warn
from stepfold.loop.data import BatchFeed, batch_sizes
from stepfold.loop.elsewhere import Elsewhere
from stepfold.loop.ending import Ending, rescue
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.fold import Alone, Part, fold
from stepfold.loop.hooks.base import HookDispatcher, Stop, call_optional
from stepfold.loop.initial_state import InitialState
from stepfold.loop.parts import BatchSizes, EndEpoch, Evaluate, Log
from stepfold.loop.plan import Plan
from stepfold.loop.replay.capsule import Capsule
from stepfold.loop.rollback import Rollbacks
from stepfold.loop.run import FORMAT, Kind, Request, Run
from stepfold.loop.saves import Save
from stepfold.loop.step_runner import StepRunner

_ALL_BUT_OPT_STATE = ("params", "model_state", "step", "key")


class Options(NamedTuple):
    """Checked arguments of `fit`; `save_history` is set if no file has all metrics."""

    evaluations: Sequence[Evaluation] = ()
    log_every: int = 10
    save_history: bool = True
    restored_parts: Sequence[str] | None = None  # of the state, instead of the whole


class Session:
    """A call of `fit`: what folds, and the run that is folded.

    Attributes:
      run: the run, the one value that changes; after an exception, the last one.
      runner: the step.
      user_parts: parts of the user, done before a save.
      parts: more parts, done after all others.
      capsule: of the step in which a NaN or inf ended the run, once it is taken.
      was_over: whether there was nothing left to do where this call last continued the run: all
        steps were done, or a hook had stopped it for a reason that its state still gives.
    """

    def __init__(
        self,
        runner: StepRunner,
        initial: InitialState,
        feed: BatchFeed,
        hooks: HookDispatcher,
        series: Series | None,
        peers: Alone,
        options: Options,
        total: int | None,
    ) -> None:
        self.runner, self.feed, self.hooks, self.series = runner, feed, hooks, series
        self.peers, self._options = peers, options
        self.user_parts: Sequence[Part] = ()
        self.parts: Sequence[Part] = ()
        self.capsule: Capsule | None = None
        self.was_over = False
        self.rollbacks = None if series is None else Rollbacks(series, feed)
        state, step, hyperparams, self._make_state = initial
        self.run = Run.start(state, step, feed.first_used, total, hyperparams)
        if series is not None:
            series.on_request(partial(peers.notify, Request(Kind.SAVE)))

    def fold(self) -> None:
        """Fold to the end, or until the run goes back; save before an exception propagates."""
        run, peers = self.run, self.peers
        peers.join(self.feed, run)
        is_done = run.is_complete and run.total is not None and run.step >= run.total
        if is_done and not self._has_results():
            message = f"step {run.step} of {run.total} was done before"
            self.run = run.ask(Request(Kind.END, run.step, Stop("already_completed", message)))
            return
        self.was_over = self.was_over and not is_done  # there are results to read
        plan, hooks = self._plan(), self.hooks
        del run  # the steps replace its state
        log = Log(plan, self.feed, hooks, peers, self.series)
        evaluations = [
            Evaluate(each, plan, log, hooks, peers) for each in self._options.evaluations
        ]
        elsewhere = self._read_elsewhere(evaluations, plan, log)
        here = [each for each in evaluations if not each.evaluation.elsewhere]
        results = [] if elsewhere is None else [elsewhere]
        events: list[Part] = [*here, *results, EndEpoch(plan, log, peers)]
        awaits = (lambda _: ()) if elsewhere is None else elsewhere.awaits
        save = Save(self.series, plan, self.feed, hooks, peers, here, self.describe, awaits)
        sizes = BatchSizes(plan, self.feed, self.runner)
        parts: list[Part] = [log, *events, *self.user_parts, save, sizes, *self.parts]
        finish = None if elsewhere is None else elsewhere.finish
        ending = Ending(log, events, save, peers, self.rollbacks, finish)
        try:
            with agreement("hooks: not opened"):
                hooks.open(self.run.step, self.run.total, self.run.logged_step)
                for part in self.user_parts:
                    call_optional(part, "open", self.run)
            if elsewhere is not None:
                elsewhere.open(self.run)
            mark = self.feed.mark(self.run.step, self.run.batches_used)
            self.run = self._stop_again(self.run)._replace(marks=(mark,))
            self.run = self.run._replace(hook_states=hooks.get_state())
            # Each run is the one of this session until the next one.
            for self.run in fold(self.run, self.runner, self.feed, parts, peers):  # noqa: B020
                pass
            for self.run in ending(self.run):  # noqa: B020
                pass
            continues = self.run.go_back_request is not None or self.run.is_interrupted
            if elsewhere is not None and not continues:
                elsewhere.end(self.run)
            peers.raise_error(self.run)
        except BaseException as error:
            if not peers.leaves_at_once:
                rescue(error, self.run, save, self.feed, self.runner, peers)
            raise
        finally:
            for part in self.user_parts:
                call_optional(part, "close")

    def _stop_again(self, run: Run) -> Run:
        """Stop before the first step if a hook of process 0 has stopped the run before.

        All processes know it at once, so that none does a step until a vote.
        """
        reason = [*(self.hooks.still_stops() or ("", ""))]
        kind, message = broadcast_from_first(reason)
        if not message or run.requests.has(Kind.STOP):
            return run
        self.was_over = self.was_over or run.resumed == run.step != run.total
        return run.ask(Request(Kind.STOP, run.step, Stop(kind, message), by_hook=True))

    def _read_elsewhere(
        self, evaluations: Sequence[Evaluate], plan: Plan, log: Log
    ) -> Elsewhere | None:
        """Return the part that reads what another process evaluates, if there is one."""
        elsewhere = [each for each in evaluations if each.evaluation.elsewhere]
        if self.series is None:
            return None
        self.series.evaluated = {}
        return Elsewhere(elsewhere, self.series, plan, log, self.peers) if elsewhere else None

    def _has_results(self) -> bool:
        """Whether another process has evaluated more since the last checkpoint."""
        has_new, run, series = False, self.run, self.series
        names = [each.name for each in self._options.evaluations if each.elsewhere]
        if series is None or not names:
            return False
        with agreement(f"{series.directory}: not resumed"):
            if jax.process_index() == 0:
                results = [r for r in find_results(series.store) if r.evaluation in names]
                has_new = any(run.evaluated.get(r.evaluation, -1) < r.step for r in results)
        return broadcast_from_first([has_new])[0]

    def _plan(self) -> Plan:
        run, feed, options = self.run, self.feed, self._options
        saves = [] if self.series is None else self.series.policy.schedules
        first_step = run.step - run.batches_used
        return Plan(
            options.log_every,
            run.total,
            [*options.evaluations, *filter(None, saves)],
            epoch_ends=feed.epoch_ends,
            first_step=first_step,
            logs_epochs=self.hooks.wants_epochs,
            size_changes=[first_step + start for start, _ in batch_sizes(feed.batches)[1:]],
            delay=0 if self.hooks.needs_exact_state else Plan.delay_of(options.log_every),
        )

    def describe(self, run: Run) -> dict[str, Any]:
        """Return what a checkpoint holds next to the state."""
        options, rollbacks = self._options, self.rollbacks
        saved = self.peers.as_seen(run).to_checkpoint(
            has_history=options.save_history, logs_epochs=self.hooks.wants_epochs
        )
        parts = options.restored_parts and [*options.restored_parts]
        extra: dict[str, Any] = {"fit": {**saved, "parts": parts}}
        if rollbacks is not None and rollbacks.done:
            extra["rollbacks"] = len(rollbacks.done)
        return extra

    # Where a run continues from

    def initialize(self) -> None:
        """Make the state of a run that does not resume, if it was given as a function."""
        if self._make_state is not None:
            with agreement("state: not initialized"):
                self.run = self.run._replace(state=self._make_state())

    def continue_from_checkpoint(self, series: Series, more_steps: int | None = None) -> None:
        """Continue from the newest good checkpoint."""
        self.peers.move(Position.RESTORE, self.run.step)
        self.peers.forget()
        restored = self._restore_parts(series)
        self.run = self.run._replace(resumed=restored.step)
        self.was_over = self.continue_from(restored, series.directory, more_steps)

    def continue_from(self, restored: Restored, where: Any, more_steps: int | None = None) -> bool:
        """Continue from a state and what was kept with it; return whether the run is complete."""
        extra = restored.extra if isinstance(restored.extra, dict) else {}
        saved: Any = extra.get("fit") or {}
        if saved and (not isinstance(saved, dict) or saved.get("format") != FORMAT):
            warn(
                f"{where}: step {restored.step} was saved by another version of "
                "stepfold: its state and data position are restored, but not its metrics and hooks",
            )
            saved = {}
        before = self.run
        try:
            run = before.from_checkpoint(saved, restored.state, restored.step)
            self.hooks.set_state(run.hook_states)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StepfoldError):
                raise
            advice = "restore the state with sf.restore instead"
            expected = f"the state of a run as fit saves it in step {restored.step}"
            refuse(where, expected, f"{error!r}", advice, kind=CheckpointError, cause=error)
        run = run._replace(hyperparams=_compare_hyperparams(before.hyperparams, run, restored))
        if more_steps is not None:  # an interrupted run keeps its target
            is_interrupted = saved.get("total") is not None and not run.is_complete
            total = saved["total"] if is_interrupted else run.step + more_steps
            run = run._replace(total=total)
        needs_batches = run.total is None or run.step < run.total
        used = saved.get("batches_used")
        used = self.feed.seek(restored.data, run.step, used, needs_batches=needs_batches)
        self.run = run._replace(batches_used=used)
        return run.is_complete

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Skip ranges of batch indices, which begin after the position of the batches."""
        run, feed = self.run, self.feed
        feed.skip(ranges)
        if feed.total is not None:  # the epochs to do are shorter now
            first_step = run.step - (run.batches_used - feed.first_used)
            self.run = run._replace(total=first_step + feed.total)

    def _restore_parts(self, series: Series) -> Restored:
        """Restore the state, or parts of it if the run that saved it did not."""
        parts = self._options.restored_parts
        if parts is None:
            return series.restore(self.run.state, advice=_advise)
        restored = series.restore(self.run.state, parts=parts, advice=_advise)
        if "step" in restored.not_loaded:
            refuse("resume", "`step` among the parts, for the data position", repr(parts))
        saved = restored.extra.get("fit") if isinstance(restored.extra, dict) else None
        if isinstance(saved, dict) and saved.get("parts") == [*parts]:
            with suppress(TreeMismatchError):  # the optimizer has changed again since
                return series.restore(self.run.state)
        return restored


def _advise(paths: Sequence[str]) -> str:
    """Say what to do about a checkpoint whose state differs at some paths."""
    if all(path.startswith("opt_state") for path in paths):
        return (
            ": it was saved with another optimizer; to continue with this one, give "
            f"resume={_ALL_BUT_OPT_STATE}, and to start a new run, another directory"
        )
    return "; to train another model, give another directory; to resume, make the state as before"


def _compare_hyperparams(
    current: Mapping[str, Any], run: Run, restored: Restored
) -> Mapping[str, Any]:
    """Warn of hyper-parameters that the script has changed; the restored ones are used."""
    saved = run.hyperparams or hyperparams_of(getattr(run.state, "opt_state", ()))
    known = {name: saved[name] for name in current if name in saved and name in restored.loaded}
    changes = [
        f"{name}: expected {_short(value)} as in the checkpoint, got {_short(current[name])}"
        for name, value in known.items()
        if value != current[name]
    ]
    if changes:
        warn(
            f"{'; '.join(changes)}; the run continues with the value of the checkpoint; to use "
            "that of the script, give resume=('(?!.*/hyperparams/).*',)",
        )
    return {**current, **known}


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
