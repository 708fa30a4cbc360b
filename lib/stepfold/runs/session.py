"""What folds a run: its step, batches, hooks and checkpoints; and the state that it starts with.

A resume only describes that state if it is given as a function.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from stepfold import tree
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.state import check_not_donated, step_of, strengthen
from stepfold.errors import refuse
from stepfold.internals.jax import evaluate_outputs, output_shardings
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Stop
from stepfold.loop.feed import BatchFeed, batch_sizes
from stepfold.loop.fold import Part, Setup, fold
from stepfold.loop.hook import Hooks, call_optional
from stepfold.loop.inbox import Inbox
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.saves import Saves, rescue
from stepfold.loop.schedule import Plan
from stepfold.loop.step_runner import StepRunner
from stepfold.sharding.place import committed_sharding

if TYPE_CHECKING:
    from stepfold.checkpoint.series import Series
    from stepfold.runs.capsule import Capsule
    from stepfold.runs.elsewhere import Elsewhere
    from stepfold.runs.files import RunFiles


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
      files: the files of the run, if it has a directory.
      parts: parts of the user.
      on_open: called once, after the hooks were opened first.
      capsule: of the step in which a NaN or inf ended the run, once it is taken.
      was_over: whether there was nothing left to do where this call last continued the run: all
        steps were done, or a hook had stopped it for a reason that its state still gives.
      stopped: what the checkpoint holds from which it continues, if the run has yet to stop there.
    """

    def __init__(
        self,
        runner: StepRunner,
        initial: "InitialState",
        feed: BatchFeed,
        hooks: Hooks,
        series: "Series | None",
        inbox: Inbox,
        options: Options,
        total: int | None,
    ) -> None:
        self.runner, self.feed, self.hooks, self.series = runner, feed, hooks, series
        self.inbox, self.options = inbox, options
        self.files: RunFiles | None = None
        self.parts: Sequence[Part] = ()
        self.on_open: Callable[[], None] | None = None
        self.capsule: Capsule | None = None
        self.was_over = False
        self.stopped: Mapping[str, Any] | None = None
        state, step, hyperparams, self._make_state = initial
        self.run = Run.start(state, step, feed.first_used, total, hyperparams)
        self.rollbacks = None
        if series is not None:
            from stepfold.runs.rollback import Rollbacks  # lazy, as all that needs checkpoints

            self.rollbacks = Rollbacks(series, feed)
            series.on_request(partial(inbox.notify, Request(Kind.SAVE)))

    def fold(self) -> None:
        """Fold to the end, or until the run goes back; save before an exception propagates."""
        run, inbox, hooks = self.run, self.inbox, self.hooks
        inbox.join(self.feed, run)
        is_done = run.is_complete and run.total is not None and run.step >= run.total
        if is_done and not self._has_results():
            message = f"step {run.step} of {run.total} was done before"
            self.run = run.ask(Request(Kind.END, run.step, Stop("already_completed", message)))
            return
        self.was_over = self.was_over and not is_done  # there are results to read
        del run  # the steps replace its state
        late = self._make_late()
        setup = self._setup(late)
        try:
            self._open()
            if late is not None:
                late.open(self.run)
            mark = self.feed.mark(self.run.step, self.run.batches_used)
            states = self.run.hook_states or hooks.init
            self.run = self.run._replace(marks=(mark,), hook_states=states)
            self._fold(setup)
            continues = self.run.go_back_request is not None or self.run.is_interrupted
            if late is not None and not continues:
                late.end(self.run)
            inbox.raise_error(self.run)
        except BaseException as error:
            if not inbox.leaves_at_once:
                rescue(error, self.run, setup.saves, self.feed, self.runner, inbox)
            raise
        finally:
            for part in self.parts:
                call_optional(part, "close")

    def _open(self) -> None:
        run = self.run
        with agreement("hooks: not opened"):
            self.hooks.open(run.step, run.total, run.logged_step)
            on_open, self.on_open = self.on_open, None  # once, even if the run goes back
            if on_open is not None:
                on_open()
            for part in self.parts:
                call_optional(part, "open", run)

    def _fold(self, setup: Setup) -> None:
        has_stopped = self.run.requests.has(Kind.STOP)
        runs = fold(self.run, setup)
        self.run = next(runs)  # after the hooks have seen that it begins
        if self.run.requests.has(Kind.STOP) and not has_stopped:
            is_new = self.run.resumed == self.run.step != self.run.total
            self.was_over = self.was_over or is_new
        for self.run in runs:  # each is the one of this session until the next one
            if self.files is not None:
                self.files.note(self.run)

    def _setup(self, late: "Elsewhere | None") -> Setup:
        plan, evaluations = self._plan(), self.options.evaluations
        here = [each for each in evaluations if not each.elsewhere]
        saves = Saves(
            self.series,
            None if self.rollbacks is None else self.rollbacks.find_target,
            plan,
            self.feed,
            self.hooks,
            self.inbox,
            here,
            self.describe,
            (lambda _: ()) if late is None else late.awaits,
            self.stopped,
        )
        return Setup(
            plan, self.runner, self.feed, self.hooks, self.inbox, saves, here, late, self.parts
        )

    def _make_late(self) -> "Elsewhere | None":
        """Return what reads the evaluations of another process, if there are some."""
        elsewhere = [each for each in self.options.evaluations if each.elsewhere]
        if self.series is None:
            return None
        self.series.evaluated = {}
        if not elsewhere:
            return None
        from stepfold.runs.elsewhere import Elsewhere  # lazy: for evaluations by another process

        return Elsewhere(elsewhere, self.series, self._plan(), self.inbox)

    def _has_results(self) -> bool:
        """Whether another process has evaluated more since the last checkpoint."""
        has_new, run, series = False, self.run, self.series
        names = [each.name for each in self.options.evaluations if each.elsewhere]
        if series is None or not names:
            return False
        with agreement(f"{series.directory}: not resumed"):
            if jax.process_index() == 0:
                from stepfold.checkpoint.results import find_results  # lazy, as `Elsewhere`

                results = [r for r in find_results(series.store) if r.evaluation in names]
                has_new = any(run.evaluated.get(r.evaluation, -1) < r.step for r in results)
        return broadcast_from_first([has_new])[0]

    def _plan(self) -> Plan:
        run, feed, options = self.run, self.feed, self.options
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
            delay=0 if self.hooks.exact else Plan.delay_of(options.log_every),
        )

    def describe(self, run: Run) -> dict[str, Any]:
        """Return what a checkpoint holds next to the state."""
        options, rollbacks = self.options, self.rollbacks
        seen = self.inbox.as_seen(run)
        states = self.hooks.to_saved(seen.hook_states) if seen.hook_states else []
        saved = seen.to_checkpoint(
            states, has_history=options.save_history, logs_epochs=self.hooks.wants_epochs
        )
        parts = options.restored_parts and [*options.restored_parts]
        extra: dict[str, Any] = {"fit": {**saved, "parts": parts}}
        if rollbacks is not None and rollbacks.done:
            extra["rollbacks"] = len(rollbacks.done)
        return extra

    def initialize(self) -> None:
        """Make the state of a run that does not resume, if it was given as a function."""
        if self._make_state is not None:
            with agreement("state: not initialized"):
                self.run = self.run._replace(state=self._make_state())


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
    def read(cls, state: Any, *, may_resume: bool) -> "InitialState":
        """Read the argument of `fit`.

        A run that cannot resume the whole state calls a function at once.
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
        return cls(state, step_of(state), hyperparams_of(getattr(state, "opt_state", ())))


def _describe(function: Callable[[], Any]) -> InitialState:
    """Trace a function that makes a state, and compute no more than its step and settings."""

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
    """Check that a resume, which does not run the function, knows where the state is."""
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
