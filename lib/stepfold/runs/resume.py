"""Continue a run from a checkpoint, to resume or to go back.

Both are the same: fold from the run that the checkpoint keeps.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from stepfold.checkpoint.restore import Restored
from stepfold.checkpoint.results import drop_results
from stepfold.checkpoint.series import Series
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.processes import Position, agreement, broadcast_from_first
from stepfold.errors import CheckpointError, StepfoldError, TreeMismatchError, refuse, warn
from stepfold.loop.events import GoBack, Stop
from stepfold.loop.run import FORMAT, Run
from stepfold.runs.rollback import Rollbacks
from stepfold.runs.session import Session

_ALL_BUT_OPT_STATE = ("params", "model_state", "step", "key")


def resume_if_possible(
    session: Session,
    series: Series,
    rollbacks: Rollbacks,
    more_steps: int | None,
    resume: bool | Sequence[str],
) -> bool:
    """Continue from a checkpoint, and return whether there is one."""
    if not _has_checkpoint(series):
        rollbacks.drop_note()
        with agreement(f"{series.directory}: not started"):
            if jax.process_index() == 0:
                drop_results(series.store)
        if others := series.steps():
            steps = ", ".join(map(str, others))
            text = f"{series.directory} has steps {steps} of another program"
            advice = "the run starts from the beginning; sf.restore may read these steps"
            warn(f"checkpoints: {text}; {advice}")
        return False
    if resume is False:
        expected = "a directory without checkpoints to start in"
        got = f"steps {', '.join(map(str, series.steps()))} in {series.directory}"
        refuse("resume=False", expected, got, "delete them, or give another directory")
    rollbacks.load()
    if rollbacks.done:
        _skip(session, [rollback.skipped for rollback in rollbacks.done])
    with agreement(f"{series.directory}: not resumed"):
        _continue_from_checkpoint(session, series, more_steps)
    if session.files is not None:
        session.files.fetch(session.run.step)
        session.files.continue_from(session.run, rollbacks.done)
    return True


def _has_checkpoint(series: Series) -> bool:
    """Whether process 0 sees a checkpoint, which may be damaged; collective."""
    with agreement(f"{series.directory}: not resumed"):
        has_checkpoint = jax.process_index() == 0 and series.has_checkpoint()
    return broadcast_from_first([has_checkpoint])[0]


def go_back(session: Session, request: GoBack, more_steps: int | None) -> None:
    """Restore an earlier checkpoint, and skip the batches that the request names."""
    series, rollbacks, run, files = session.series, session.rollbacks, session.run, session.files
    if series is None or rollbacks is None:
        return
    session.hooks.flush()  # rows of later steps may still wait in a thread
    rollback = rollbacks.note(request, run.step, run.batches_used)
    if files is not None:
        files.end_attempt(run.step, Stop("go_back", str(rollback)))
    del run  # so that the restored state can take the memory
    rollbacks.delete_later()
    _continue_from_checkpoint(session, series, more_steps)
    _skip(session, [rollback.skipped])
    if files is not None:
        files.continue_from(session.run, rollbacks.done)


def _continue_from_checkpoint(session: Session, series: Series, more_steps: int | None) -> None:
    """Continue from the newest good checkpoint."""
    session.inbox.track(Position.RESTORE, session.run.step)
    session.inbox.drop_hook_requests()
    restored = _restore_parts(session, series)
    session.run = session.run._replace(resumed=restored.step)
    session.was_over = continue_from(session, restored, series.directory, more_steps)


def continue_from(
    session: Session, restored: Restored, where: Any, more_steps: int | None = None
) -> bool:
    """Continue from a restored checkpoint; return whether its run was complete."""
    extra = restored.extra if isinstance(restored.extra, dict) else {}
    saved: Any = extra.get("fit") or {}
    if saved and (not isinstance(saved, dict) or saved.get("format") != FORMAT):
        warn(
            f"{where}: step {restored.step} was saved by another version of "
            "stepfold: its state and data position are restored, but not its metrics and hooks",
        )
        saved = {}
    before = session.run
    try:
        run = before.from_checkpoint(saved, restored.state, restored.step)
        if saved:
            states = before.hook_states or session.hooks.init
            run = run._replace(hook_states=session.hooks.from_saved(saved["hooks"], states))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, StepfoldError):
            raise
        raise CheckpointError(
            f"{where}: fit cannot continue from step {restored.step}: {error!r}; restore the state "
            "with sf.restore instead"
        ) from error
    run = run._replace(hyperparams=_compare_hyperparams(before.hyperparams, run, restored))
    if more_steps is not None:  # an interrupted run keeps its target
        is_interrupted = saved.get("total") is not None and not run.is_complete
        total = saved["total"] if is_interrupted else run.step + more_steps
        run = run._replace(total=total)
    needs_batches = run.total is None or run.step < run.total
    used = saved.get("batches_used")
    used = session.feed.seek(restored.data, run.step, used, needs_batches=needs_batches)
    session.run = run._replace(batches_used=used)
    session.stopped = extra if saved.get("stop") is not None else None
    return run.is_complete


def _skip(session: Session, ranges: Sequence[tuple[int, int]]) -> None:
    """Skip ranges of batch indices, which begin after the position of the batches."""
    run, feed = session.run, session.feed
    feed.skip(ranges)
    if feed.total is not None:  # the epochs to do are shorter now
        first_step = run.step - (run.batches_used - feed.first_used)
        session.run = run._replace(total=first_step + feed.total)


def _restore_parts(session: Session, series: Series) -> Restored:
    """Restore the state, or parts of it if the run that saved it did not."""
    state, parts = session.run.state, session.restored_parts
    if parts is None:
        return series.restore(state, advice=_advise)
    restored = series.restore(state, parts=parts, advice=_advise)
    if "step" in restored.not_loaded:
        refuse("resume", "`step` among the parts, for the data position", repr(parts))
    saved = restored.extra.get("fit") if isinstance(restored.extra, dict) else None
    if isinstance(saved, dict) and saved.get("parts") == [*parts]:
        with suppress(TreeMismatchError):  # the optimizer has changed again since
            return series.restore(state)
    return restored


def _advise(paths: Sequence[str]) -> str:
    """Advise on a checkpoint whose state differs at some paths."""
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
