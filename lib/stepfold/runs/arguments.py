"""The checks of the arguments of `fit`, before anything is opened."""

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.leaves import check_values
from stepfold.core.validation import read_instance, read_integer, spell_call, suggest, takes
from stepfold.errors import refuse, warn
from stepfold.hooks.stop import on_nonfinite
from stepfold.hooks.stop import time_limit as stop_at_time_limit
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Event, GoBack, Nonfinite, Stop
from stepfold.loop.feed import BatchFeed
from stepfold.loop.fold import Part
from stepfold.loop.hook import EVENTS_WITHOUT_METRICS, Hook, Sink, read_hook
from stepfold.loop.metrics import History
from stepfold.loop.step_runner import StepRunner
from stepfold.tree import describe_value


def check_numbers(
    step: Any, lengths: Mapping[str, Any], log_every: Any, steps_per_call: Any
) -> StepRunner:
    """Check the numbers among the arguments, and the step that has to fit them."""
    set_lengths = {name: read_integer(name, n) for name, n in lengths.items() if n is not None}
    if len(set_lengths) > 1:
        values = " and ".join(map(str, set_lengths.values()))
        refuse(", ".join(set_lengths), "one of them", f"{values}")
    read_integer("log_every", log_every)
    runner = StepRunner(step)
    if read_integer("steps_per_call", steps_per_call) > 1 and runner.is_compiled:
        expected = "a step that is neither jitted nor compiled, to compile several of them as one"
        refuse(f"steps_per_call={steps_per_call}", expected, step)
    return runner


def check_resume(resume: Any) -> tuple[str, ...] | None:
    """Return the parts of the state to restore, if a resume is to restore some only."""
    if isinstance(resume, list | tuple) and resume and all(isinstance(p, str) for p in resume):
        return tuple(resume)
    if not isinstance(resume, bool):
        got = describe_value(resume)
        refuse("resume", "True, False, or parts such as ('params', 'step', 'key')", got)
    return None


def check_checkpoints(checkpoints: Any, evaluations: Sequence[Evaluation]) -> None:
    """Refuse anything but a policy, and none if another process evaluates checkpoints."""
    if checkpoints is not None:
        read_instance("checkpoints", checkpoints, Checkpoints, "sf.Checkpoints(every=…)")
    remote = [evaluation.name for evaluation in evaluations if evaluation.remote]
    if checkpoints is None and remote:
        argument, expected = f"{remote[0]}: remote=True", "checkpoints=… to evaluate"
        refuse(argument, expected, "none", "give sf.Checkpoints(), or leave remote out")


def with_default_hooks(hooks: Sequence[Hook], time_limit: Any) -> list[Hook]:
    """Add hooks that stop at a NaN and at the time limit."""
    is_guarded = any(hook.declares(Nonfinite) for hook in hooks)
    all_hooks = [*([] if is_guarded else [on_nonfinite()]), *hooks]
    return [*all_hooks, *([] if time_limit is None else [stop_at_time_limit(time_limit)])]


def write_config(sinks: Sequence[Sink], config: Any) -> None:
    """Pass the config to sinks that are open."""
    from stepfold.runs.info import flatten_config, read_config  # lazy: a plain run has none

    for sink in sinks:
        sink.write_config(flatten_config(read_config(config)))


def check_end(feed: BatchFeed, limits: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse a run that nothing can end."""
    has_limit = any(limit is not None for limit in limits)
    if feed.endless and not has_limit and not any(hook.may_return(Stop) for hook in hooks):
        epochs = f" or epochs=… (an epoch has {feed.epoch_steps} steps)" if feed.epoch_steps else ""
        expected = "one of them for batches without an end"
        refuse("steps, epochs", expected, "neither", f"give steps=…{epochs}")


def check_evaluations(evaluation: Any, state: Any) -> list[Evaluation]:
    """Return the evaluations, each with its own name."""
    evaluations = list(evaluation) if isinstance(evaluation, list | tuple) else [evaluation]
    for item in evaluations:
        read_instance("evaluation", item, Evaluation, "sf.Evaluation(…)")
        item.check_state(state)
    names = [item.name for item in evaluations]
    taken = "train", *EVENTS_WITHOUT_METRICS
    if len(set(names)) < len(names) or any(name.split("/")[0] in taken for name in names):
        expected = f"different names, none of them {', '.join(taken)}"
        refuse("evaluation", expected, f"{names}", "give name=…")
    return evaluations


def check_batches(feed: BatchFeed, evaluations: Sequence[Evaluation], steps_per_call: int) -> None:
    """Refuse batches that do not fit the other arguments."""
    if feed.reads_state and steps_per_call > 1:
        refuse("steps_per_call", "1 for batches that read the state", f"{steps_per_call}")
    for evaluation in evaluations:  # it would move the position of the training data
        if evaluation.batches is feed.batches and feed.is_iterator:
            advice = "give each its own sf.batches(…)"
            refuse("evaluation", "other batches than those of the training", "the same", advice)


_EFFECTS = (
    *("open", "rewind", "write_config", "end_run", "flush", "close"),
    *("shows_progress", "writes_metrics"),
)


def read_hooks(hooks: Any) -> tuple[list[Part], list[Hook], list[Sink]]:
    """Separate parts of a run, which have `next` and `is_due`, hooks and sinks."""
    parts, pure, sinks = list[Part](), list[Hook](), list[Sink]()
    is_several = isinstance(hooks, list | tuple) and not isinstance(hooks, Hook)
    for hook in hooks if is_several else [hooks]:
        if isinstance(hook, Sink):
            sinks.append(hook)
        elif hasattr(hook, "next") and hasattr(hook, "is_due"):
            parts.append(hook)
        else:
            is_pure = isinstance(hook, Hook)
            _check_callable(hook.update if is_pure else hook, 2 if is_pure else 1)
            read = read_hook(hook)
            if read is None:
                from stepfold.hooks.objects import from_object  # lazy: a plain run has none

                read = from_object(hook)
            pure.append(read)
            if any(hasattr(read.source, name) for name in _EFFECTS):
                from stepfold.hooks.objects import ObjectEffects  # lazy: a plain run has none

                sinks.append(ObjectEffects(read.source))
    return parts, pure, sinks


def _check_callable(hook: Any, count: int) -> None:
    """Refuse anything but a function of an event, or of a state and an event."""
    # Functions of this package that make hooks; those that are hooks say what they provide.
    is_maker = isinstance(hook, type) or (
        inspect.isfunction(hook)
        and (hook.__module__ or "").startswith(("stepfold.hooks.", "stepfold.writers."))
        and not hasattr(hook, "provides")
        and count == 1
    )
    if callable(hook) and not is_maker and takes(hook, count):
        return
    got, advice = describe_value(hook), ""
    if is_maker:
        advice = f"call it with its arguments, as in {spell_call(hook)}"
    elif callable(getattr(hook, "write_scalars", None)):
        advice = "sf.log_to(writer) makes a hook of a writer"
    elif callable(hook):
        got += f", which takes {spell_call(hook)}"
        advice = "sf.Hook(init, hook) has a state" if takes(hook, 2) else ""
    is_pure = count == 2
    expected = "a function of a state and an event" if is_pure else "functions of an event"
    refuse("hooks: update" if is_pure else "hooks", expected, got, advice)


def check_kinds(hooks: Sequence[Hook], evaluations: Sequence[Evaluation]) -> None:
    """Refuse a hook that would never be called, and warn of one that would stop nothing."""
    kinds = ["train", *(evaluation.name for evaluation in evaluations)]
    at_end = {each.name for each in evaluations if not (each.every or each.every_epochs)}
    for hook in hooks:
        for kind in hook.only or ():
            if kind not in kinds:
                is_wrapper = "every" in hook.name.split()
                argument = "every: kind" if is_wrapper else f"{hook.label}: only"
                refuse(argument, f"one of {', '.join(kinds)}", repr(kind))
        metric = hook.metric or ""
        if hook.may_return(Stop) and metric.partition("/")[0] in at_end:
            warn(
                f"{hook.label} stops nothing, since {metric} is only measured at the end of the "
                "run; give sf.Evaluation(…, every=…)",
            )


def check_epochs(feed: BatchFeed, recurring: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse schedules by epoch if the batches do not know the length of an epoch."""
    if feed.epoch_ends is not None:
        return
    expected = "batches that know how many steps an epoch has"
    if any(item is not None and item.every_epochs for item in recurring):
        refuse("every_epochs", expected, feed.batches, "give every=…, or sf.batches(data, …)")
    if any("epoch" in hook.also for hook in hooks):
        expected += ", for a hook that is called after epochs"
        refuse("hooks", expected, feed.batches, "give sf.batches(data, …)")


def check_resumable(
    checkpoints: Checkpoints | None, feed: BatchFeed, hooks: Sequence[Hook]
) -> None:
    """Check before the first step that a checkpoint can hold the data position and hook state."""
    for hook in hooks:
        if hook.declares(GoBack) and hook.declares(Stop):
            feed.skippable()
            if checkpoints is None:
                argument, advice = f"hooks: {hook.label}", "give sf.Checkpoints(every=…)"
                refuse(argument, "checkpoints=… to go back to", "none", advice)
    if checkpoints is None:
        return
    if not feed.is_resumable:
        warn(
            "batches: expected get_state and set_state, to resume from a checkpoint, got "
            f"{describe_value(feed.batches)}; the state is saved, but a resume will be "
            "refused: give sf.batches(data, …)",
        )
    check_values(feed.position(feed.first_used), "batches: get_state()")
    feed.check_next_position = feed.is_resumable
    for hook in hooks:
        argument = f"hooks: {hook.label}"
        source, saves = hook.source, hasattr(hook.source, "get_state")
        state = source.get_state() if saves else hook.init
        check_values(state, f"{argument}: get_state()" if saves else f"{argument}: init")
        set_state = getattr(source, "set_state", None)
        if saves and state is not None and not callable(set_state):
            expected, got = "set_state next to get_state, to be resumed", describe_value(set_state)
            refuse(argument, expected, got, "add it, or drop get_state")


def watch_metrics(
    hooks: Sequence[Hook], checkpoints: Checkpoints | None, evaluations: Sequence[Evaluation]
) -> "WatchedMetrics | None":
    """Check the names of metrics that hooks and `Checkpoints(best=…)` depend on, if any."""
    named = {hook.metric: "hooks" for hook in hooks if hook.metric}
    if checkpoints is not None and checkpoints.best is not None:
        named[checkpoints.best] = "Checkpoints(best=…)"
    return WatchedMetrics(named, hooks, evaluations) if named else None


class WatchedMetrics:
    """Metrics, each with the argument of `fit` that needs it: check that they are measured."""

    def __init__(
        self, named: Mapping[str, str], hooks: Sequence[Hook], evaluations: Sequence[Evaluation]
    ) -> None:
        self.unseen = {**named}
        self.saw_event = False
        # Their results may come after the end of the run.
        self._remote = tuple(f"{each.name}/" for each in evaluations if each.remote)
        provided = [hook.provides for hook in hooks]
        self._knows_names = None not in provided
        prefixes = ["train/", *(f"{evaluation.name}/" for evaluation in evaluations)]
        prefixes += [prefix for names in provided for prefix in names or ()]
        for metric, argument in self.unseen.items() if self._knows_names else ():
            if not metric.startswith(tuple(prefixes)):
                expected = f"one of {', '.join(f'{prefix}…' for prefix in prefixes)}"
                advice = "add evaluation=sf.Evaluation(…) for eval/…"
                if evaluations:  # 'val_loss' may be meant as 'eval/loss'
                    name = re.split("[/_]", metric, maxsplit=1)[-1]
                    advice = suggest(metric, [f"{each.name}/{name}" for each in evaluations])
                refuse(argument, expected, metric, advice)

    def check(self, event: Event) -> None:
        """Refuse a metric that this kind of event should have, if all names are known."""
        self.saw_event = True
        for metric, argument in self.unseen.items():
            is_own_kind = metric.rpartition("/")[0] == event.kind
            if is_own_kind and metric not in event.metrics and self._knows_names:
                near = get_close_matches(metric, event.metrics, n=1, cutoff=0.9)
                advice = f"did you mean {near[0]!r}?" if near else ""
                refuse(argument, f"one of {', '.join(sorted(event.metrics))}", metric, advice)
        unseen = self.unseen.items()
        self.unseen = {metric: arg for metric, arg in unseen if metric not in event.metrics}

    def warn_of_unseen(self, history: History) -> None:
        """Warn of metrics that were never measured, before a resume either."""
        for metric, argument in self.unseen.items() if self.saw_event else ():
            if not history.curve(metric) and not metric.startswith(self._remote):
                warn(
                    f"{argument}: {metric} was never measured, so it had no effect; the metrics "
                    f"are {', '.join(sorted(history))}",
                )
