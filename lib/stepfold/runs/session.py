"""A call of `fit` as one object: what folds a run, the run, and the state that it starts with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from stepfold import tree
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.state import check_not_donated, is_available, step_of, strengthen
from stepfold.errors import ConfigError, refuse
from stepfold.internals import texts
from stepfold.internals.jax import evaluate_outputs, output_shardings
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Stop
from stepfold.loop.feed import batch_sizes
from stepfold.loop.fold import Setup, fold
from stepfold.loop.hook import Hooks, call_optional
from stepfold.loop.inbox import Inbox
from stepfold.loop.run import Kind, Request, Run
from stepfold.sharding.place import committed_sharding

if TYPE_CHECKING:
    from stepfold.checkpoint.series import Series
    from stepfold.runs.capsule import Capsule
    from stepfold.runs.files import RunFiles
    from stepfold.runs.rollback import Rollbacks


@dataclass(kw_only=True, eq=False, repr=False)
class Session(Setup):
    """A call of `fit`: a `Setup`, the run that it folds, and what the fold does not need to know.

    Attributes:
      run: the run, the one value that changes; after an exception, the last one.
      make_state: makes the state of a run that does not resume; None if the run has it.
      series: the checkpoints, if there are some.
      files: the files of the run, if it has a directory.
      remote_evaluations: those that another process makes.
      restored_parts: of the state, if a resume restores only some.
      on_open: called once, after the hooks were opened for the first time.
      rollbacks: how the run has gone back, if it has checkpoints.
      capsule: of the step in which a NaN or inf ended the run, once it is taken.
      was_over: whether there was nothing left to do where this call last continued the run: all
        steps were done, or a hook had stopped it for a reason that its state still gives.
      stopped: what the checkpoint holds from which it continues, if the run has yet to stop there.
    """

    run: Run
    make_state: Callable[[], Any] | None = None
    series: "Series | None" = None
    files: "RunFiles | None" = None
    remote_evaluations: Sequence[Evaluation] = ()
    restored_parts: Sequence[str] | None = None
    on_open: Callable[[], None] | None = None
    rollbacks: "Rollbacks | None" = None
    capsule: "Capsule | None" = None
    was_over: bool = False
    stopped: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.series is not None:
            from stepfold.runs.rollback import Rollbacks  # lazy, as all that needs checkpoints

            self.rollbacks = Rollbacks(self.series, self.feed)
            inbox = self.inbox
            self.series.on_request(lambda: inbox.notify(Request(Kind.SAVE)))

    def fold(self) -> None:
        """Fold to the end, or until the run goes back; save before an exception propagates."""
        run, inbox, hooks = self.run, self.inbox, self.hooks
        inbox.begin_fold(self.feed, run)
        is_done = run.is_complete and run.total is not None and run.step >= run.total
        if is_done and not self._has_results():
            message = f"step {run.step} of {run.total} was done before"
            self.run = run.ask(Request(Kind.END, run.step, Stop("already_completed", message)))
            return
        self.was_over = self.was_over and not is_done  # there are results to read
        del run  # the steps replace its state
        self._prepare()
        try:
            self._open()
            mark = self.feed.mark(self.run.step, self.run.batches_used)
            states = self.run.hook_states or hooks.init
            self.run = self.run._replace(marks=(mark,), hook_states=states)
            self._fold()
            continues = self.run.go_back_request is not None or self.run.is_interrupted
            if self.remote is not None and not continues:
                self.remote.end(self.run)
            inbox.raise_hook_error(self.run)
        except BaseException as error:
            if not inbox.leaves_at_once:
                rescue(error, self)
            raise
        finally:
            for part in self.parts:
                call_optional(part, "close")

    def _prepare(self) -> None:
        """Make what depends on the step at which the fold begins: the schedule and the saves."""
        run, feed = self.run, self.feed
        first_step = run.step - run.batches_used
        self.schedule = replace(
            self.schedule,
            total=run.total,
            epoch_ends=feed.epoch_ends,
            first_step=first_step,
            size_changes=[first_step + start for start, _ in batch_sizes(feed.batches)[1:]],
        )
        if self.series is not None and self.rollbacks is not None:
            self._prepare_saves(self.series, self.rollbacks)

    def _prepare_saves(self, series: "Series", rollbacks: "Rollbacks") -> None:
        from stepfold.loop.saves import Saves  # lazy: for checkpoints

        series.evaluated = {}
        if self.remote_evaluations:
            from stepfold.runs.remote import RemoteResults  # lazy: as its module

            evaluations = self.remote_evaluations
            self.remote = RemoteResults(evaluations, series, self.schedule, self.inbox)
        has_history = self.files is None or self.files.metrics_path is None
        self.saves = Saves(
            series,
            rollbacks.find_target,
            self.schedule,
            self.feed,
            self.hooks,
            self.inbox,
            self.evaluations,
            # Without the session, so that no cycle keeps the state alive.
            partial(describe, self.hooks, self.inbox, rollbacks, self.restored_parts, has_history),
            (lambda _: ()) if self.remote is None else self.remote.awaits,
            self.stopped,
        )

    def _open(self) -> None:
        run = self.run
        with agreement("hooks: not opened"):
            self.hooks.open(run.step, run.total, run.logged_step)
            on_open, self.on_open = self.on_open, None  # once, even if the run goes back
            if on_open is not None:
                on_open()
            for part in self.parts:
                call_optional(part, "open", run)
        if self.remote is not None:
            self.remote.open(run)

    def _fold(self) -> None:
        has_stopped = self.run.requests.has(Kind.STOP)
        runs = fold(self.run, self)
        self.run = next(runs)  # after the hooks have seen that it begins
        if self.run.requests.has(Kind.STOP) and not has_stopped:
            is_new = self.run.resumed == self.run.step != self.run.total
            self.was_over = self.was_over or is_new
        for self.run in runs:  # so that after an exception, this session has the last one
            if self.files is not None:
                self.files.note(self.run)

    def _has_results(self) -> bool:
        """Whether another process has evaluated more since the last checkpoint."""
        has_new, run, series = False, self.run, self.series
        names = [each.name for each in self.remote_evaluations]
        if series is None or not names:
            return False
        with agreement(f"{series.directory}: not resumed"):
            if jax.process_index() == 0:
                from stepfold.checkpoint.results import find_results  # lazy: as `RemoteResults`

                results = [r for r in find_results(series.store) if r.evaluation in names]
                has_new = any(run.evaluated.get(r.evaluation, -1) < r.step for r in results)
        return broadcast_from_first([has_new])[0]


def describe(
    hooks: Hooks,
    inbox: Inbox,
    rollbacks: "Rollbacks",
    restored_parts: Sequence[str] | None,
    has_history: bool,
    run: Run,
) -> dict[str, Any]:
    """Return what a checkpoint holds next to the state; without a history if a file has it."""
    seen = inbox.as_hooks_saw(run)
    states = hooks.to_saved(seen.hook_states) if seen.hook_states else []
    saved = seen.to_checkpoint(states, has_history=has_history, logs_epochs=hooks.wants_epochs)
    extra = {"fit": {**saved, "parts": restored_parts and [*restored_parts]}}
    return extra | ({"rollbacks": len(rollbacks.done)} if rollbacks.done else {})


def rescue(error: BaseException, session: Session) -> None:
    """Save after an exception, but not with several processes: the others do not take part."""
    run, feed, saves = session.run._replace(is_complete=False), session.feed, session.saves
    if isinstance(error, FloatingPointError) and texts.DEBUG_NANS.match(str(error)):
        error.add_note(
            f"jax_debug_nans ended the run after step {run.step}. It ignores a NaN that "
            "skip_nonfinite or a loss scale skips. Turn it off to let on_nonfinite end "
            "the run, with a capsule for sf.debug.replay."
        )
    if run.state is None or not is_available(run.state):
        explanation = session.runner.explain(error)
        if explanation is not None:
            raise explanation from error
    elif session.inbox.is_alone and not feed.has_position(run.batches_used):
        error.add_note(
            f"step {run.step} was not saved, since the batches are ahead of it and cannot go "
            "back: a resume starts from the previous checkpoint"
        )
    elif session.inbox.is_alone and saves is not None:
        try:
            due = saves.find_last(run)
            try:
                saves.save(run, due)
            except ConfigError as failure:  # a position or hook state that cannot be saved
                error.add_note(
                    f"only the state is saved, for sf.restore, not for a resume: {failure}"
                )
                saves.save(run, due, has_user_code=False)
        except Exception as failure:  # noqa: BLE001  it must not replace the error
            error.add_note(f"the state could not be saved: {type(failure).__name__}: {failure}")


# The state that a run starts with

_HOW = "give the state, or a function that makes it, such as lambda: sf.init_state(…)"


class InitialState(NamedTuple):
    """The state that a run starts with.

    Attributes:
      state: the state, or an abstract one with the same shardings.
      step: its step.
      hyperparams: those of its optimizer, by path.
      make: makes the state, or raises if there is no way to; None if it is there.
    """

    state: Any
    step: int
    hyperparams: dict[str, Any]
    make: Callable[[], Any] | None = None

    @classmethod
    def read(cls, state: Any, *, may_resume: bool, may_save: bool) -> "InitialState":
        """Read the argument of `fit`.

        A run that cannot resume the whole state calls a function at once. Only a checkpoint needs
        the hyper-parameters.
        """
        is_function = callable(state) and jax.tree_util.all_leaves([state])
        if is_function and may_resume:
            return _describe(state)
        state = state() if is_function else state
        leaves: list[Any] = jax.tree.leaves(state)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            if not may_resume:
                refuse("state", "arrays", "an abstract state", _HOW)
            return cls(jax.tree.map(_strong, state), 0, {}, _refuse_start)
        check_not_donated(state)
        state = strengthen(state)
        opt_state = getattr(state, "opt_state", ())
        return cls(state, step_of(state), hyperparams_of(opt_state) if may_save else {})


def _describe(function: Callable[[], Any]) -> InitialState:
    """Trace a function that makes a state; compute only its step and hyper-parameters."""

    def make() -> Any:
        state = strengthen(function())
        check_not_donated(state)
        _check_shardings(state, described)
        return state

    try:
        jaxpr, form = jax.make_jaxpr(lambda: strengthen(function()), return_shape=True)()
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        expected = "a function that jax can trace, since a resume does not run it"
        refuse("state", expected, f"{type(error).__name__}", "give the state itself", cause=error)
    leaves: list[Any] = jax.tree.leaves(form)
    structure: Any = jax.tree.structure(form)
    described = structure.unflatten(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or sharding)
        for leaf, sharding in zip(leaves, output_shardings(jaxpr), strict=True)
    )
    # What `hyperparams_of` reads has few numbers, as the step.
    are_known = [
        name == "step" or "hyperparams" in name.split("/") for name, _ in tree.named_leaves(form)
    ]
    values = iter(evaluate_outputs(jaxpr, are_known))
    known = structure.unflatten(
        next(values) if is_known else leaf for is_known, leaf in zip(are_known, leaves, strict=True)
    )
    settings = hyperparams_of(getattr(known, "opt_state", ()))
    return InitialState(described, step_of(known), settings, make)


def _check_shardings(state: Any, described: Any) -> None:
    """Check that the state is where the trace says, since a resume only traces the function."""
    forms = jax.tree.leaves(described)
    for (name, leaf), form in zip(tree.named_leaves(state, "state"), forms, strict=True):
        sharding, traced = committed_sharding(leaf), form.sharding
        if sharding is None or traced is None:
            is_known = sharding is traced
        else:
            is_known = sharding.is_equivalent_to(traced, len(form.shape))
        if not is_known:
            expected = f"{name} on devices that tracing the function shows, as a resume does"
            advice = "give sharding=… to sf.init_state in it, or place its result by jax.device_put"
            refuse("state", expected, f"it on {sharding}, traced as {traced}", advice)


def _strong(leaf: Any) -> Any:
    return leaf.update(weak_type=False) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _refuse_start() -> Any:
    refuse("state", "a checkpoint to resume from, for an abstract state", "none", _HOW)
