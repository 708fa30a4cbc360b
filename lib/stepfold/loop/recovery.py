"""Where a call of `fit` starts, and how it continues: to resume, to go back, and after a death.

All of them fold on from another run: that of the newest checkpoint, of an earlier one, or of the
copy in memory.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from stepfold.checkpoint.policy import Checkpoints
from stepfold.checkpoint.results import drop_results
from stepfold.checkpoint.series import Series
from stepfold.core.processes import Disbanded, Group, agreement, broadcast_from_first
from stepfold.errors import StepfoldError, refuse
from stepfold.loop.elastic import Elastic, Segments, Survivors
from stepfold.loop.fold import Alone
from stepfold.loop.hooks.base import GoBack, Stop
from stepfold.loop.hooks.progress import progress
from stepfold.loop.initial_state import InitialState
from stepfold.loop.peers import Several
from stepfold.loop.run import Kind
from stepfold.loop.run_directory import RunDirectory
from stepfold.loop.session import Session


def read_step(step: Any, initial: InitialState) -> tuple[Any, InitialState, Segments | None]:
    """Return the step, the state to start with, and the segments of an elastic run."""
    if not isinstance(step, Elastic):
        return step, initial, None
    with needs_all():
        segments = step.segments()
        if segments is not None:
            initial = initial._replace(state=segments.stand_in(initial.state), make=None)
        return step.step, initial, segments


@contextmanager
def needs_all() -> Iterator[None]:
    """End the run if a process of it dies before the first step."""
    try:
        yield
    except Disbanded as error:
        message = f"fit: {error} before the first step; start it again"
        raise StepfoldError(message) from error


def open_series(
    checkpoints: Checkpoints | None, directory: RunDirectory, group: Group | None
) -> Series | None:
    """Open the checkpoints of a run, in its directory unless they have one."""
    if checkpoints is None:
        return None
    if checkpoints.directory is None and directory.path is None:
        refuse("checkpoints", "a directory", "none", "give run_dir=…, or sf.Checkpoints('path')")
    path: Any = checkpoints.directory
    return Series(checkpoints, path or directory.path / "checkpoints", group)  # type: ignore[operator]


def make_peers(segments: Segments | None) -> Alone:
    """Return the processes that train."""
    if segments is not None:
        return Survivors(segments)
    return Alone() if jax.process_count() == 1 else Several()


def start_or_resume(
    session: Session,
    directory: RunDirectory,
    segments: Segments | None,
    more_steps: int | None,
    resume: bool | Sequence[str],
) -> None:
    """Resume from a checkpoint if there is one."""
    series, rollbacks = session.series, session.rollbacks
    if segments is not None:
        segments.attach(session)
    if series is None or rollbacks is None or not _has_checkpoint(series):
        if rollbacks is not None:
            rollbacks.drop_note()
        if series is not None:
            with agreement(f"{series.directory}: not started", series.group):
                if jax.process_index() == 0:
                    drop_results(series.store)
        if series is not None and (others := series.steps()):
            steps = ", ".join(map(str, others))
            text = f"{series.directory} has steps {steps} of another program"
            advice = "the run starts from the beginning; sf.restore may read these steps"
            warnings.warn(f"checkpoints: {text}; {advice}", stacklevel=3)
        session.initialize()
        directory.start(session)
        return
    if resume is False:
        expected = "a directory without checkpoints to start in"
        got = f"steps {', '.join(map(str, series.steps()))} in {series.directory}"
        refuse("resume=False", expected, got, "delete them, or give another directory")
    rollbacks.load()
    if rollbacks.done:
        session.skip([rollback.skipped for rollback in rollbacks.done])
    with agreement(f"{series.directory}: not resumed", session.peers.group):
        session.continue_from_checkpoint(series, more_steps)
    directory.fetch(session)
    directory.continue_from(session)


def show_start(session: Session, directory: RunDirectory) -> None:
    """Let hooks that show progress say from where the run resumes, and what it compiles."""
    step, series, programs = session.run.resumed, session.series, directory.programs
    hooks = [hook for hook in session.hooks.hooks if isinstance(hook, progress)]

    def show(line: str) -> None:
        for hook in hooks:
            hook.show(line)

    programs.show = show
    session.runner.on_compile = programs.note_step
    if step is not None and series is not None:
        show(f"resuming from step {step} of {directory.path or series.directory}")


def fold_to_the_end(
    session: Session,
    directory: RunDirectory,
    segments: Segments | None,
    more_steps: int | None,
) -> None:
    """Fold to the end; go back where a hook asks for it, and continue where processes die."""
    lost, has_ended = "", False
    while not has_ended:
        try:
            if segments is not None and lost:
                directory.end_attempt(session.run.step, Stop("process_died", lost))
                segments.repeat(session, lost)
                lost = ""
                if not segments.is_spare:
                    directory.continue_from(session, segments.losses)
            if segments is not None and segments.is_spare:
                lost = segments.wait(session)
                has_ended = not lost
                continue
            if session.run.go_back_request is not None:
                _go_back(session, directory, segments, session.run.go_back_request, more_steps)
            session.fold()
            has_ended = session.run.go_back_request is None
        except (Exception, Disbanded) as error:
            died = "" if segments is None else segments.leave(error)
            if not died:
                raise
            lost = f"{lost}, {died}" if lost else died
    if segments is not None:
        run = session.run
        agreed = run.requests.get(Kind.SIGNAL)
        segments.end(run.step, run.stop, None if agreed is None else agreed.reason)


def tell_spares(
    session: Session, segments: Segments, _: Any, error: BaseException | None, __: Any
) -> None:
    """Tell spare processes of an error, since they do not meet the others."""
    if error is not None:
        segments.end(session.run.step, None, None, f"{type(error).__name__}: {error}"[:500])


def _go_back(
    session: Session,
    directory: RunDirectory,
    segments: Segments | None,
    request: GoBack,
    more_steps: int | None,
) -> None:
    """Restore an earlier checkpoint, and skip the batches that the request names."""
    series, rollbacks, run = session.series, session.rollbacks, session.run
    if series is None or rollbacks is None:
        return
    session.hooks.flush()  # rows of later steps may still wait in a thread
    rollback = rollbacks.note(request, run.step, run.batches_used)
    if segments is not None:
        segments.drop()  # from the note on, only the checkpoint counts
    directory.end_attempt(run.step, Stop("go_back", str(rollback)))
    del run  # so that the restored state can take the memory
    rollbacks.delete_later()
    session.continue_from_checkpoint(series, more_steps)
    session.skip([rollback.skipped])
    directory.continue_from(session, [] if segments is None else segments.losses)


def _has_checkpoint(series: Series) -> bool:
    """Whether process 0 sees a checkpoint, which may be damaged; collective."""
    with agreement(f"{series.directory}: not resumed", series.group):
        has_checkpoint = jax.process_index() == 0 and series.has_checkpoint()
    return broadcast_from_first([has_checkpoint], series.group)[0]
