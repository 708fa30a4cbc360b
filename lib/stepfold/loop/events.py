"""What hooks see and what they return: events, reasons to stop, and requests."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stepfold.errors import ConfigError


class Stop(NamedTuple):
    """Why a run stops: `kind` is a short name for programs, `message` a sentence for people.

    A string that a hook returns is short for `Stop("hook", string)`. The other kinds are
    `completed` (all steps are done), `exhausted` (the batches ended), `already_completed`,
    `nonfinite`, `early_stop`, `spike`, `corrupt`, `time_limit`, `signal` and `error`.

    >>> import stepfold as sf
    >>> str(sf.Stop("plateau", "the loss is flat"))
    'the loss is flat'
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


class GoBack(NamedTuple):
    """A request of a hook: restore an earlier checkpoint, skip some batches, and continue.

    The run then has the bits and the history of one that has skipped these batches from the start.
    It needs `checkpoints`, and batches with `without`, such as those of `sf.batches`. Later
    checkpoints are deleted, writers with `resume` drop the metrics of later steps, and hooks
    continue as after a resume. The skipped batches are noted next to the checkpoints, so that a
    resume skips them too, in `run.json` and in the report. With several processes, all go back.

    Attributes:
      skip: the steps whose batches to skip, a half-open pair (first, stop) of numbers as in
        `Event.step`; or a number n, for the last n steps up to the event.
      to: the latest step to go back to; None for the newest checkpoint before those steps.
      why: a sentence for people.
      limit: how often a run goes back before it stops with the reason instead.

    >>> import stepfold as sf
    >>> def hook(event):
    ...     if event.metrics.get("eval/loss", 0.0) > 10:
    ...         return sf.hooks.GoBack(skip=100, why=f"eval/loss is too high at step {event.step}")
    >>> hook(sf.Event(1000, None, {"eval/loss": 12.0}, state=None)).skip
    100
    """

    to: int | None = None
    skip: int | tuple[int, int] = 1
    why: str = "a hook let the run go back"
    limit: int = 3


class Replace(NamedTuple):
    """A request of a hook: continue with another state, and say why.

    Use it for changes between two steps: reset dead units, prune weights, or reduce a rate of
    `optax.inject_hyperparams` when an evaluation does not improve. The new state has the structure,
    shapes and dtypes of `event.state`, and its step. Later hooks see it. Checkpoints hold it, so a
    resumed run has the same bits. `run.json` notes the step and the reason.

    After an evaluation the state is exact. At a log point it may be of a later step, so the hook
    has to be a `Hook` with `exact=True` there. With several processes, it needs
    `returns=(Replace,)`, and all processes have to return the same. The last evaluation of a run
    that stops early comes after its state is saved, and replaces nothing.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> def hook(event):
    ...     if event.kind == "eval" and event.metrics["eval/loss"] > 2:
    ...         opt_state = event.state.opt_state
    ...         rates = {"learning_rate": 0.5 * opt_state.hyperparams["learning_rate"]}
    ...         opt_state = opt_state._replace(hyperparams={**opt_state.hyperparams, **rates})
    ...         state = event.state._replace(opt_state=opt_state)
    ...         return sf.hooks.Replace(state, "eval/loss is high")
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> event = sf.Event(100, None, {"eval/loss": 3.0}, state, kind="eval")
    >>> float(hook(event).state.opt_state.hyperparams["learning_rate"])
    0.05000000074505806
    """

    state: Any
    why: str


class Reweight(NamedTuple):
    """A request of a hook: change the weights of the mixture that the batches are made of.

    The batches have to be those of `sf.batches(sf.mix(…), …)`, prefetched or not. After an
    evaluation, the next batch is the first with the new weights. At a log point it is later,
    because metrics are read while later steps run: at the next log point, evaluation, save or end
    of the run, or 10 or 16 batches later. It does not depend on `steps_per_call`, nor on where an
    interrupted run resumes. The change is part of the position of the batches. So a resumed run has
    it, and one that goes back to a checkpoint before it does not. `run.json` notes the step and the
    reason.

    With several processes, the hook has to be a `Hook` with `returns=(Reweight,)`, and all of them
    have to return the same.

    Attributes:
      weights: the weights of all sources, by name or in their order; 0 leaves out a source.
      why: a sentence for people.

    >>> import stepfold as sf
    >>> def hook(event):
    ...     if event.metrics.get("train/loss/code", 9.0) < 1:
    ...         return sf.hooks.Reweight({"web": 3, "code": 1}, "the loss of code is low")
    >>> hook(sf.Event(100, None, {"train/loss/code": 0.5}, state=None)).weights
    {'web': 3, 'code': 1}
    """

    weights: Any
    why: str


class Event(NamedTuple):
    """What a hook sees at a log point and after an evaluation.

    Attributes:
      step, total: the number of steps done, and at the end of the run, or None if unknown.
      metrics: numbers by name: `train/loss` over the steps since the last log point, `eval/loss`.
        A hook cannot change them; it returns more numbers, under other names.
      state: the state. At a log point it may be up to 19 steps ahead, because metrics are read
        while later steps run; a `Hook` with `exact=True` gets the state of `step`.
        Its containers are the event's own, so that writing into them does not change the training;
        return a `Replace` for that.
      per_step: the train metrics of each step since the last log point; empty for an evaluation.
      batch: the last batch that was pulled, as the step got it; None before the first one.
      data_wait_seconds: the seconds spent waiting for batches since `fit` was called, up to `step`.
      hook_seconds: those spent in hooks.
      weights: the weights of `per_step`; 0 for a skipped step, whose value is NaN.
      time: when the step was done, on the clock of `time.perf_counter`, or None.
      kind: `"train"`, or the name of the evaluation. Hooks that ask for them also see `"start"`,
        before the first step of this call, and `"epoch"`, at the end of an epoch after its other
        events; both have no metrics.
      is_late: whether it is an evaluation of an earlier step, which another process has made. The
        state is then that of the step at which its result arrived.
      epoch: the number of the epoch that has ended, from 0, in an event of kind `"epoch"`.

    >>> import stepfold as sf
    >>> sf.Event(100, None, {"eval/loss": 12.0}, state=None, kind="eval")
    Event('eval', step=100, total=None, metrics={eval/loss: 12})
    """

    step: int
    total: int | None
    metrics: Mapping[str, float]
    state: Any
    per_step: Mapping[str, np.ndarray] = {}
    batch: Any = None
    data_wait_seconds: float = 0.0
    weights: Mapping[str, np.ndarray] = {}
    time: float | None = None
    kind: str = "train"
    hook_seconds: float = 0.0
    is_late: bool = False
    epoch: int | None = None

    @property
    def is_train(self) -> bool:
        return self.kind == "train"

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in self.metrics.items())
        return f"Event({self.kind!r}, step={self.step}, total={self.total}, metrics={{{metrics}}})"


class EventMetrics(dict[str, float]):
    """The metrics of an event, which hooks, history and files share; a copy is a plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "event.metrics is read-only; return {name: number} from the hook to add numbers, or "
            "change dict(event.metrics)"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Nonfinite(NamedTuple):
    """A step, counted from 1, with a NaN or inf in a metric, and all metrics of that step.

    `before` holds the metrics of the previous step, if they are known.

    >>> import stepfold as sf
    >>> sf.hooks.Nonfinite(3, "loss", {"loss": float("nan"), "grad_norm": 9.0}).before
    {}
    """

    step: int
    metric: str
    metrics: dict[str, float]
    before: dict[str, float] = {}  # noqa: RUF012  a default of a NamedTuple, never changed


HookRequest = Stop | GoBack | Replace | Reweight
Returned = str | HookRequest | Mapping[str, Any] | None
"""What a hook may return: a reason to stop, a request, or numbers by name."""
