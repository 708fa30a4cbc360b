"""What `fit` means, as the plainest program: a fold over batches, without threads or files.

`Fit(call, directory)()` does to a directory in memory what a call of `sf.fit` does to one on disk.
Hooks are functions `(event, state) -> (returned, state)`. An exception of a hook, the batches or an
evaluation cuts a run; a `Signal` asks it to stop, and after a `Crash` nothing is saved. The parts
of a run are replaced and never modified, so that a checkpoint is a shallow copy of it.
"""

import copy
import functools
import math
from types import SimpleNamespace

import jax
import numpy as np
from clu.metrics import Average

import stepfold as sf
from stepfold.core.metrics import TermSum


class Signal(BaseException):
    """A signal to stop came while the run waited for a batch or an evaluation."""


class Crash(BaseException):
    """The process was killed."""


class Fit:
    def __init__(self, call, directory):
        self.call, self.directory, self.warnings, self.resumed = call, directory, [], None
        self.is_signaled = self.is_save_requested = self.was_complete = self.saw_event = False
        self.saved = self.stop = None
        call.cut.fit = self  # sets the first two

    def __call__(self):
        call, directory = self.call, self.directory
        found, rows_left = {**directory.temporary, **directory.permanent}, {}
        if not found:
            is_moved = any(directory.rows)
            self.warnings += ["its files are now in"] if is_moved else []
            rows_left = {} if is_moved else directory.rows  # at most that of step 0
            directory.skips = []
        self.data = call.data(directory.skips)
        self.run = SimpleNamespace(
            state=call.state, step=0, used=self.data.first, is_complete=False, epoch_ended=0,
            open=(), closed=(), rows={}, evaluated={}, hooks={h.name: 0 for h in call.hooks},
            stop=None, request=None, replaced=None, changes=(), ranked={},
        )  # fmt: skip
        self.run.total = call.total(self.data, self.run, None)
        is_kept = call.checkpoints is not None and not self.data.is_iterator
        self.warnings += ["expected get_state"] if is_kept else []
        if found:
            self.restore(found[max(found)])
        try:
            while not self.fold():
                self.restore(self.go_back())
            self.stop = "nonfinite" if self.found_nonfinite else self.stop
        except Exception:
            self.run.is_complete, self.stop = False, "error"
            self.save()
            raise
        finally:
            rows = self.run.rows
            directory.rows = rows_left | {i: rows_left.get(i, {}) | rows[i] for i in rows}
        if self.was_complete and self.run.step == self.resumed and not self.is_signaled:
            self.warnings.append("nothing was trained")
        return self

    def restore(self, saved):
        names = [hook.name for hook in self.call.hooks]
        self.run, self.resumed, self.was_complete = copy.copy(saved), saved.step, saved.is_complete
        is_dropped = saved.hooks.keys() - {*names}
        self.warnings += ["but fit has no such hook, so the state is dropped"] if is_dropped else []
        self.run.hooks = {name: saved.hooks.get(name, 0) for name in names}
        self.run.state = self.call.place(saved.state)
        self.data = self.call.data(self.directory.skips, saved.changes)
        self.run.total = self.call.total(self.data, self.run, saved)
        self.saved, self.saw_event = None, False

    def fold(self):
        """Run to the end, or return False to go back."""
        call, run, self.stop, self.found_nonfinite = self.call, self.run, None, False
        if run.is_complete and run.total is not None and run.step >= run.total:
            self.stop = "already_completed"
            return True
        if run.stop is None and any(h.has_enough(run.hooks.get(h.name, 0)) for h in call.hooks):
            run.stop = run.step, "hook"
            self.was_complete |= self.resumed == run.step != run.total
        if run.step > 0:  # what an exception interrupted
            self.log(run.step if self.reads(run.step) else run.step - call.delay)
        is_best = False
        if run.step != run.total:
            is_due = lambda item: self.is_due(item, run.step) if run.step else item.at_start
            is_best = self.evaluate([*filter(is_due, call.evaluations)])
            if self.stop is None:
                self.end_epoch()
        self.save(permanent=run.step == 0 or is_best, is_best=is_best)
        if run.total is not None and run.step >= run.total:
            self.stop = "completed"
        self.take_effect()
        while self.stop is None and (batches := self.pull()):
            for batch in batches:
                run.state, metrics = call.step(run.state, batch)
                run.step, run.used, run.is_complete = run.step + 1, run.used + 1, False
                if run.open and run.open[-1].keys() - metrics.keys():
                    self.warnings.append("as in the resumed run")
                run.open = (*run.open, metrics)
            self.boundary()
            self.log(run.step - call.delay)
            if self.is_save_requested and self.stop is None:
                self.log(run.step)
                if self.stop is None:
                    self.save(is_requested=True)
            self.is_save_requested = False
        return self.finish()

    # What is due, and when

    def epochs_done(self, step):
        used, epochs = self.run.used + step - self.run.step, self.data.epochs
        return epochs[used] if epochs and used > 0 and epochs[used] > epochs[used - 1] else 0

    def is_due(self, item, step):
        epochs = self.epochs_done(step) if item.every_epochs else 0
        return bool(item.every and step % item.every == 0) or bool(
            epochs and epochs % item.every_epochs == 0
        )

    def is_log_point(self, step):
        ends_epoch = self.call.wants_epochs and self.epochs_done(step) > 0
        return step % self.call.log_every == 0 or step == self.run.total or ends_epoch

    def reads(self, step):
        """Whether hooks see the metrics of a log point before the next step."""
        call = self.call
        items = [*call.evaluations, *filter(None, (call.checkpoints, call.temporary))]
        ends_epoch = call.wants_epochs and self.epochs_done(step) > 0
        is_needed = ends_epoch or step == self.run.total
        return is_needed or any(self.is_due(item, step) for item in items)

    def pull(self):
        """Pull the batches of a call, which goes past no step after which something happens."""
        call, run, data, batches = self.call, self.run, self.data, []
        delayed = [step + call.delay for step, _ in run.closed]
        while len(batches) < call.steps_per_call and not self.is_signaled:
            step, used = run.step + len(batches), run.used + len(batches)
            is_due = self.is_log_point(step) or self.reads(step) or step in delayed
            is_due |= bool(call.part) and step % call.part == 0
            if batches and (is_due or used in data.size_changes):
                break
            try:
                call.cut("pull", step + 1)
                batches.append(data.batches[used])
            except (Signal, IndexError):
                break
        if not batches and self.is_signaled:
            self.stop = "signal"
        elif not batches:
            self.stop, run.is_complete = "exhausted", True
            is_short = run.total is not None and not data.is_iterator
            self.warnings += ["expected enough for"] if is_short else []
        return batches

    # Between two steps: log, evaluate, end the epoch, save

    def boundary(self):
        run, step = self.run, self.run.step
        self.stop = "completed" if step == run.total else None
        if self.is_log_point(step):
            self.close_interval()
        is_read = self.reads(step) or not self.call.delay
        self.log(step if is_read else step - self.call.delay)
        is_best = False
        if step != run.total:
            is_best = self.evaluate([e for e in self.call.evaluations if self.is_due(e, step)])
        if self.stop is None:
            self.end_epoch()
        if self.call.part and step % self.call.part == 0 and not self.is_signaled:
            self.call.part_seen.append((step, run.used))
        if self.stop is None:
            self.save(permanent=is_best, is_requested=is_best)

    def finish(self):
        run, is_interrupted = self.run, self.is_signaled
        run.is_complete = run.is_complete or run.step == run.total
        if run.is_complete and not is_interrupted:
            self.close_interval()
        self.log(run.step)
        if self.goes_back():
            return False
        if not run.is_complete:
            self.save()
        state = None if run.is_complete else run.state
        if not is_interrupted:
            self.close_interval()
            self.log(run.step)
            self.evaluate(self.call.evaluations)
            self.end_epoch()
            if run.is_complete and self.goes_back():
                return False
        run.state = run.state if state is None else state
        if run.is_complete:
            run.is_complete = not self.is_signaled
            run.stop = run.stop if self.is_signaled else None
            self.save()
        elif not self.is_signaled and self.saved_in():
            self.saved_in()[run.step].stop = None  # the end is done
            self.saved_in()[run.step].ranked = self.rank(run.step)
        return True

    def goes_back(self):
        """Whether to go back as a hook asked, unless a signal or a reason to stop comes first."""
        run = self.run
        if run.request is None or self.is_signaled:
            return False
        is_stopped = run.stop is not None and run.stop[0] <= run.step
        if not is_stopped and self.targets():
            return True
        self.stop, run.request = self.stop if is_stopped else "spike", None
        return False

    def close_interval(self):
        if self.run.open:
            self.run.closed += ((self.run.step, self.run.open),)
            self.run.open = ()

    def log(self, until):
        run = self.run
        while run.closed and run.closed[0][0] <= until:
            step, metrics = run.closed[0]
            after = range(step, step + self.call.delay)
            effective = next(filter(self.reads, after), step + self.call.delay)
            if any(map(has_nonfinite_loss, metrics)):
                self.found_nonfinite = True
                self.ask((effective, "nonfinite"))
            self.dispatch("train", step, merged(metrics, "train"), effective)
            run.closed = run.closed[1:]
        self.take_effect()

    def evaluate(self, evaluations):
        run = self.run
        for evaluation in evaluations:
            if run.evaluated.get(evaluation.name) != run.step and not self.is_signaled:
                try:
                    self.call.cut("evaluate", evaluation.name, run.step)
                except Signal:
                    break
                metrics = merged([*evaluation.results(run.state)], evaluation.name)
                self.dispatch(evaluation.name, run.step, metrics, run.step)
                run.evaluated = {**run.evaluated, evaluation.name: run.step}
        self.take_effect()
        return bool(evaluations) and self.is_best()

    def is_best(self):
        """Whether the metric that ranks checkpoints is better than ever before in the run."""
        values = {step: x for step in self.run.rows for x in self.rank(step).values()}
        return self.call.checkpoints is not None and self.ranking(values)[:1] == [self.run.step]

    def rank(self, step):
        """The metric of a step that ranks its checkpoint, if an evaluation has measured it."""
        best = self.call.checkpoints and self.call.checkpoints.best
        metrics = self.run.rows.get(step, {}) if best and not best.startswith("train/") else {}
        return {best: metrics[best]} if best in metrics else {}

    def ranking(self, values):
        sign = -1 if self.call.checkpoints.mode == "max" else 1
        return [s for _, s in sorted((sign * x, s) for s, x in values.items() if not np.isnan(x))]

    def dispatch(self, kind, step, metrics, effective):
        run, states, reasons, weights = self.run, dict(self.run.hooks), [], None
        event = SimpleNamespace(
            kind=kind, step=step, metrics=metrics, total=run.total, state=run.state
        )
        for hook in self.call.hooks:
            returned, states[hook.name] = hook.react(event, states.get(hook.name, 0))
            if isinstance(returned, sf.hooks.Replace):
                event.state = returned.state
            elif isinstance(returned, sf.hooks.Reweight):
                weights = returned.weights
            elif isinstance(returned, dict):
                event.metrics = {**event.metrics, **returned}
            elif returned is not None:
                reasons.append(returned)
        run.hooks, self.saw_event = states, True
        if event.state is not run.state and self.saved != run.step:
            run.state, run.replaced = event.state, run.step
        if weights is not None and self.saved != run.step:
            first = self.data.indices[run.used + effective - run.step]
            run.changes = (*(c for c in run.changes if c[0] < first), (first, weights))
            run.replaced, self.data = run.step, self.call.data(self.directory.skips, run.changes)
        run.rows = {**run.rows, step: {**run.rows.get(step, {}), **event.metrics}}
        for reason in reasons:
            self.ask(reason if isinstance(reason, sf.hooks.GoBack) else (effective, "hook"))

    def ask(self, request):
        """Request to go back, or to stop."""
        run = self.run
        if isinstance(request, sf.hooks.GoBack):
            run.request = run.request or request
        else:
            run.stop = run.stop or request

    def take_effect(self):
        """Stop by a reason that a hook gave, at a step that no cut and no call changes."""
        if self.run.stop is not None and self.run.stop[0] <= self.run.step:
            self.stop = self.run.stop[1] if self.stop in (None, "go_back") else self.stop
        if self.run.request is not None:
            self.stop = self.stop or "go_back"
        if self.is_signaled and self.stop in (None, "go_back", "hook", "nonfinite"):
            self.stop = "signal"

    def end_epoch(self):
        run, done = self.run, self.epochs_done(self.run.step)
        if done and run.step > run.epoch_ended:
            event = SimpleNamespace(kind="epoch", step=done - 1, metrics={}, total=None)
            for hook in self.call.hooks:
                if hook.wants_epochs:
                    run.hooks = {
                        **run.hooks,
                        hook.name: hook.react(event, run.hooks.get(hook.name, 0))[1],
                    }
            run.epoch_ended = run.step

    # Checkpoints

    def save(self, *, permanent=True, is_requested=False, is_best=False):
        call, run, directory = self.call, self.run, self.directory
        if not call.checkpoints or run.request is not None:
            return
        if run.step == self.saved and not (run.is_complete and self.saw_event):
            return
        if not call.wants_epochs:  # no hook is owed the end of an epoch
            run.epoch_ended = run.step
        is_new = permanent and run.step in directory.temporary
        is_new |= self.resumed is None and (call.checkpoints.at_start or is_best)
        if run.step == self.saved:  # the last evaluation came after the save
            directory.permanent[run.step] = copy.copy(run)
            return
        if run.step == (self.resumed or 0) and not is_new:
            if self.resumed is not None and self.saw_event and run.replaced != run.step:
                self.saved_in()[run.step] = copy.copy(run)
                self.saw_event = False
            return
        is_permanent = permanent or self.is_due(call.checkpoints, run.step)
        if not is_permanent and not (call.temporary and self.is_due(call.temporary, run.step)):
            return
        if any(np.isnan(leaf).any() for leaf in jax.tree.leaves(run.state.params)):
            if self.stop is None:
                self.close_interval()
                self.log(run.step)
                self.stop = self.stop or "nonfinite"
        elif is_permanent:
            self.saved, self.saw_event, run.ranked = run.step, False, {}
            run.is_requested = is_requested and not self.is_due(call.checkpoints, run.step)
            directory.permanent[run.step] = copy.copy(run)
            for step in [step for step in directory.temporary if step <= run.step]:
                del directory.temporary[step]
            for step in set(directory.permanent) - self.kept():
                del directory.permanent[step]
        else:
            directory.temporary.clear()
            directory.temporary[run.step] = copy.copy(run)

    def saved_in(self):
        kinds = self.directory.permanent, self.directory.temporary
        return next((saved for saved in kinds if self.run.step in saved), None)

    def kept(self):
        policy, permanent, run = self.call.checkpoints, self.directory.permanent, self.run
        rows = {step: saved.rows.get(step, {}) | saved.ranked for step, saved in permanent.items()}
        best = self.ranking({step: row.get(policy.best, np.nan) for step, row in rows.items()})
        every = [step for step in rows if policy.keep_every and step % policy.keep_every == 0]
        requested = [step for step in sorted(rows) if permanent[step].is_requested]
        scheduled = [step for step in sorted(rows) if step not in requested]
        latest = [*scheduled[-policy.keep :], *requested[-policy.keep :]]
        return {*latest, *best[: policy.keep_best], *every, run.step}

    def targets(self):
        request, directory = self.run.request, self.directory
        steps = [*directory.permanent, *directory.temporary]
        allowed = len(directory.skips) < request.limit
        return [step for step in steps if allowed and step <= request.skip[0] - 1]

    def go_back(self):
        """Forget later checkpoints, skip batches, and return the checkpoint to go back to."""
        run, directory, (first, stop) = self.run, self.directory, self.run.request.skip
        target = max(self.targets())
        indices, offset = self.data.indices, 1 + run.step - run.used
        directory.skips = [
            *directory.skips, (indices[first - offset], indices[stop - 1 - offset] + 1)
        ]  # fmt: skip
        for saved in (directory.permanent, directory.temporary):
            for step in [step for step in saved if step > target]:
                del saved[step]
        self.data = self.call.data(directory.skips)
        return {**directory.temporary, **directory.permanent}[target]


def delay_of(log_every):
    """How many steps after a log point its metrics are read, unless something else is due."""
    if log_every < 20:
        return log_every  # at the next log point
    return 10 if log_every % 10 == 0 or log_every % 8 else 16


def has_nonfinite_loss(metrics):
    terms = metrics["loss"].terms.values()
    return any(float(term.count) and not math.isfinite(float(term.total)) for term in terms)


def merged(steps, prefix):
    """Merge the metrics of steps exactly, and read them as numbers."""
    values = {}
    for name in steps[-1]:
        metrics = [step[name] for step in steps if name in step]
        value = _value(metrics)
        parts = {f"/{i}": x for i, x in enumerate(value)} if np.ndim(value) else {"": value}
        values |= {f"{prefix}/{name}{part}": float(x) for part, x in parts.items()}
    return values


def _value(metrics):
    if isinstance(metrics[0], TermSum):
        terms = [[m.terms[name] for m in metrics] for name in metrics[0].terms]
        means = [_value(term) for term in terms if any(float(m.count) for m in term)]
        return sum(means) if means else math.nan
    if isinstance(metrics[0], Average):
        count = math.fsum(float(m.count) for m in metrics)
        return math.fsum(float(m.total) for m in metrics) / count if count else math.nan
    return functools.reduce(lambda one, other: one.merge(other), metrics).compute()
