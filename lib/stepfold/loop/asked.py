"""What `fit` is asked for, read before anything is begun."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.retention import read_best
from stepfold.core.signatures import spell_call, takes
from stepfold.errors import ConfigError
from stepfold.inspect.caching import check_cache
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.event import Hook
from stepfold.loop.feed import Feed
from stepfold.loop.hooks.around import innermost
from stepfold.loop.hooks.log_to import log_to
from stepfold.loop.hooks.profile import profile
from stepfold.loop.hooks.progress import progress
from stepfold.loop.hooks.stopping import stop_after, stop_early, stop_on_nonfinite
from stepfold.loop.hooks.watchdog import watchdog
from stepfold.loop.stepper import Stepper


class Asked(NamedTuple):
    """What a fold needs, all of it as it has to be."""

    step: Stepper
    feed: Feed
    steps: int | None
    evaluations: list[Evaluation]
    hooks: list[Hook]
    log_every: int
    steps_per_call: int
    looked_for: list[str]


def read_arguments(
    step: Callable[[Any, Any], tuple[Any, Any]],
    batches: Iterable[Any],
    *,
    steps: int | None,
    epochs: int | None,
    evaluation: Evaluation | Sequence[Evaluation],
    checkpoints: Checkpoints | None,
    hooks: Sequence[Hook],
    log_every: int,
    steps_per_call: int,
    time_limit: float | None,
    compilation_cache: Any,
) -> Asked:
    """Read the arguments of `fit`, and make of them what they stand for.

    Raises:
      ConfigError: if one is not as it has to be, or if they do not fit together.
    """
    if _positive("steps", steps) is not None and epochs is not None:
        raise ConfigError(f"steps, epochs: expected one of them, got {steps} and {epochs}")
    evaluations = _evaluations(evaluation)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise ConfigError(
            f"checkpoints: expected sf.Checkpoints(every=…), got {tree.spell(checkpoints)}"
        )
    stepper = Stepper(step, check_cache(compilation_cache))
    if compilation_cache is not None and not stepper.scans:
        raise ConfigError(
            f"compilation_cache={str(compilation_cache)!r}: expected a step that is neither jitted "
            f"nor compiled, got {tree.spell(step)}; give the cache to sf.compile_step"
        )
    at_once = _positive("steps_per_call", steps_per_call, needed=True) or 1
    if at_once > 1 and not stepper.scans:
        raise ConfigError(
            f"steps_per_call={at_once}: expected a step that is neither jitted nor compiled, to "
            f"compile several of them as one, got {tree.spell(step)}"
        )
    log_at = _positive("log_every", log_every, needed=True) or 1
    feed = Feed(batches, _positive("epochs", epochs))
    shown = _hooks(hooks, time_limit)
    if feed.endless and steps is epochs is time_limit is None and not hooks:
        raise ConfigError(
            f"steps, epochs: expected one of them for batches that have no end, got neither; give "
            f"steps=…, or epochs=… of {feed.epoch_steps or 'so many'} steps each"
        )
    looked_for = _looked_for(hooks, checkpoints, evaluations)
    if not feed.epoch_steps:
        _refuse_epochs(batches, (*evaluations, checkpoints), shown)
    return Asked(stepper, feed, steps, evaluations, shown, log_at, at_once, looked_for)


def _evaluations(given: Any) -> list[Evaluation]:
    evaluations = list(given) if isinstance(given, list | tuple) else [given]
    for one in evaluations:
        if not isinstance(one, Evaluation):
            raise ConfigError(f"evaluation: expected sf.Evaluation(…), got {tree.spell(one)}")
    names = [one.name for one in evaluations]
    if len(set(names)) < len(names) or any(name.split("/")[0] == "train" for name in names):
        raise ConfigError(
            f"evaluation: expected a name of its own for each, other than train, got {names}"
        )
    return evaluations


def _hooks(given: Any, time_limit: Any) -> list[Hook]:
    """Read hooks, and add those that other arguments and the good of all stand for."""
    hooks = list(given) if isinstance(given, list | tuple) else [given]
    for hook in hooks:
        if not callable(hook) or isinstance(hook, type) or not takes(hook, 1):
            raise ConfigError(
                f"hooks: expected functions of an event, got {tree.spell(hook)}{_advice_on(hook)}"
            )
    if time_limit is not None:
        if not isinstance(time_limit, int | float) or time_limit < 0:
            raise ConfigError(
                f"time_limit: expected seconds, a number of at least 0, got {time_limit!r}"
            )
        hooks.append(stop_after(time_limit))
    if not any(isinstance(innermost(hook), stop_on_nonfinite) for hook in hooks):
        hooks.insert(0, stop_on_nonfinite())
    return hooks


def _advice_on(hook: Any) -> str:
    if isinstance(hook, type):
        return f"; call it with its arguments, as in {spell_call(hook)}"
    if callable(getattr(hook, "write_scalars", None)):
        return "; sf.log_to(writer) makes one of a writer"
    return f", which takes {spell_call(hook)}" if callable(hook) else ""


_SILENT = (log_to, profile, progress, stop_early, stop_on_nonfinite, watchdog)


def _looked_for(
    hooks: Any, checkpoints: Checkpoints | None, evaluations: Sequence[Evaluation]
) -> list[str]:
    """List the metrics that are looked for, if nothing but steps and evaluations gives any.

    Raises:
      ConfigError: if neither steps nor an evaluation give one.
    """
    given = hooks if isinstance(hooks, list | tuple) else [hooks]
    if not all(isinstance(hook, _SILENT) for hook in given):
        return []  # a hook of one's own may give numbers by any name
    found = [hook.metric for hook in given if isinstance(hook, stop_early)]
    best = None if checkpoints is None else read_best(checkpoints.best, checkpoints.mode)
    found += [] if best is None else [best[0]]
    kinds = ["train", *(one.name for one in evaluations)]
    for metric in found:
        if not metric.startswith(tuple(f"{kind}/" for kind in kinds)):
            raise ConfigError(
                f"{metric}: expected a metric that is measured; they are called "
                f"{', '.join(f'{kind}/…' for kind in kinds)}"
                + "; evaluation=sf.Evaluation(…) measures eval/…"
                * (not evaluations)
            )
    return found


def _refuse_epochs(batches: Any, due: Sequence[Any], hooks: Sequence[Hook]) -> None:
    """Refuse what is to be done by epochs, where nobody can say how many steps one has."""
    got = tree.spell(batches)
    if any(what is not None and what.every_epochs for what in due):
        raise ConfigError(
            "every_epochs: expected batches that know how many steps an epoch has, got "
            f"{got}; give every=…, or sf.batches(data, …)"
        )
    if any(hasattr(hook, "end_epoch") for hook in hooks):
        raise ConfigError(
            "hooks: expected batches that know how many steps an epoch has, for one that is called "
            f"after epochs, got {got}; give sf.batches(data, …)"
        )


def _positive(name: str, value: Any, *, needed: bool = False) -> int | None:
    if (needed or value is not None) and (type(value) is not int or value < 1):
        raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value
