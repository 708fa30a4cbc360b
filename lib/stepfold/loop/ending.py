"""How a run ends: in order, or by an exception."""

from collections.abc import Callable, Sequence

from stepfold.core.state import is_available
from stepfold.errors import ConfigError, refuse
from stepfold.internals import texts
from stepfold.loop.data import BatchFeed
from stepfold.loop.fold import Alone, Part, Runs, complete
from stepfold.loop.hooks.base import Stop
from stepfold.loop.parts import Log
from stepfold.loop.rollback import Rollbacks
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.saves import Save
from stepfold.loop.step_runner import StepRunner


class Ending:
    """What happens once a request ends the fold.

    Hooks see the rest of the metrics. Then the run goes back; or it evaluates a last time and
    saves, if all steps were done; or it saves first, so that a resume continues the open interval.
    """

    def __init__(
        self,
        log: Log,
        events: Sequence[Part],
        save: Save,
        peers: Alone,
        rollbacks: Rollbacks | None,
        finish: Callable[[Run], Run] | None,
    ) -> None:
        self._log_part, self._events, self._save = log, events, save
        self._peers, self._rollbacks = peers, rollbacks
        self._finish_elsewhere = finish  # the evaluations of another process

    def __call__(self, run: Run) -> Runs:
        """Yield the run after each thing done, and the last one."""
        run = yield from self._end(run)
        yield run
        return run

    def _end(self, run: Run) -> Runs:
        peers = self._peers
        run = peers.settle(run)
        run = run._replace(is_complete=run.is_complete or run.step == run.total)
        if run.is_complete and not run.is_interrupted:
            run = run.close_interval()
        run = yield from complete(self._log_part, run, peers)
        run = self._go_back(peers.conclude(run))
        if run.go_back_request is not None:
            return run
        if run.is_complete and not run.requests.has(Kind.ERROR):
            return (yield from self._finish(run))
        return (yield from self._leave(run._replace(is_complete=False)))

    def _finish(self, run: Run) -> Runs:
        """Evaluate and save after the last batch, unless a signal comes."""
        if not run.is_interrupted:
            run = yield from self._log(run)
            if self._finish_elsewhere is not None and not run.requests.has(Kind.GO_BACK):
                yield (run := self._save.save(run))
                run = yield from self._wait_elsewhere(run)
            run = self._go_back(self._peers.conclude(run))
            if run.go_back_request is not None:
                return run
        # If a hook stops a complete run that was to do more steps, that is why it ends.
        if not run.is_interrupted and run.end is not None and run.end.kind is not Kind.STOP:
            run = self._peers.withdraw(run, Kind.STOP)
        run = run._replace(is_complete=not run.is_interrupted)
        yield run
        return self._save.save(run)

    def _leave(self, run: Run) -> Runs:
        """Save, so that a resume continues the open interval; then evaluate, unless interrupted."""
        yield (run := self._peers.hear(self._save.save(run)))
        if run.requests.has(Kind.GO_BACK):
            run = run._replace(unsaved="the run was to go back")
        if run.is_interrupted:
            return run
        extra = self._save.describe_end(run)
        ended = yield from self._log(run)
        ended = self._peers.conclude((yield from self._wait_elsewhere(ended)))
        if not ended.is_interrupted:
            self._save.add_end(run, ended, extra)
        return ended._replace(state=run.state, notes=run.notes)  # as saved

    def _wait_elsewhere(self, run: Run) -> Runs:
        """Wait for what another process evaluates of the steps that are saved."""
        if self._finish_elsewhere is None or run.is_interrupted:
            return run
        self._save.wait()
        while (changed := self._finish_elsewhere(run)) is not run:
            yield (run := changed)
        return run

    def _log(self, run: Run) -> Runs:
        """Log the open interval, and evaluate a last time."""
        yield (run := run.close_interval())
        run = yield from complete(self._log_part, run, self._peers)
        yield (run := self._log_part.end_run(run))
        for part in self._events:
            run = yield from complete(part, run, self._peers)
        return self._peers.hear(run)

    def _go_back(self, run: Run) -> Run:
        """Find the checkpoint for a request to go back, unless a higher request is due."""
        request = run.requests.get(Kind.GO_BACK)
        if request is None or run.is_interrupted:
            return run
        others = run.requests.without(Kind.GO_BACK, Kind.END).due(run.step)
        if others is not None and others.kind > Kind.GO_BACK:
            return self._peers.withdraw(run, Kind.GO_BACK)
        if self._rollbacks is None:
            expected = "checkpoints=… for a hook that lets the run go back"
            advice = f"give sf.Checkpoints(every=…): {request.reason.why}"
            refuse("hooks", expected, "none", advice)
        target = self._rollbacks.find_target(request.reason)
        if isinstance(target, Stop):
            kind = Kind.END if run.is_complete else Kind.STOP
            stop = target._replace(message=f"{target.message}; stopped at step {run.step}")
            request = Request(kind, run.step, stop if run.is_complete else target)
            return self._peers.withdraw(run, Kind.GO_BACK, Kind.END, instead=[request])
        return run._replace(go_back_request=request.reason._replace(to=target))


def rescue(
    error: BaseException, run: Run, save: Save, feed: BatchFeed, runner: StepRunner,
    peers: Alone,
) -> None:  # fmt: skip
    """Save after an exception, but not with several processes: the others do not take part."""
    run = run._replace(is_complete=False)
    if isinstance(error, FloatingPointError) and texts.DEBUG_NANS.match(str(error)):
        error.add_note(
            f"jax_debug_nans ended the run after step {run.step}. It ignores a NaN that "
            "skip_nonfinite or a loss scale skips. Turn it off to let stop_on_nonfinite end "
            "the run, with a capsule for sf.replay."
        )
    if not is_available(run.state):
        explanation = runner.explain(error)
        if explanation is not None:
            raise explanation from error
    elif peers.is_alone and not feed.has_position(run.batches_used):
        error.add_note(
            f"step {run.step} was not saved, since the batches are ahead of it and cannot go "
            "back: a resume starts from the previous checkpoint"
        )
    elif peers.is_alone:
        try:
            try:
                save.save(run)
            except ConfigError as failure:  # a position or hook state that cannot be saved
                error.add_note(
                    f"only the state is saved, for sf.restore, not for a resume: {failure}"
                )
                save.save(run, has_user_code=False)
        except Exception as failure:  # noqa: BLE001  it must not replace the error
            error.add_note(f"the state could not be saved: {type(failure).__name__}: {failure}")
