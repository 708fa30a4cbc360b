"""Steps as trainers write them: numbers for metrics, and functions to call before and after."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.core.loss import mean
from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep, compile_step

if TYPE_CHECKING:
    from clu.metrics import Metric

Step = Callable[[Any, Any], Any]


def as_train_step(step: Step) -> Step:
    """Let the metrics of a step be plain numbers, each of which weighs one step.

    >>> step = as_train_step(lambda state, batch: (state, {"loss": jnp.mean(batch)}))
    >>> _, metrics = step((), jnp.arange(4.0))
    >>> float(metrics["loss"].compute())
    1.5
    """

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, "Metric"]]:
        made = step(state, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ConfigError(
                "train_step_fn: expected (state, metrics) from it, got "
                f"{tree.spell(made)}; return both"
            )
        return made[0], as_metrics(made[1], "train_step_fn")

    return train_step


def as_eval_step(step: Step) -> Step:
    """Let the metrics of an evaluation be plain numbers, each weighed by the examples of its batch.

    So their mean over batches is that over examples, whatever the last batch is. `eval_loss` and
    such are called `loss`.

    >>> step = as_eval_step(lambda state, batch: {"eval_loss": jnp.mean(batch)})
    >>> float(step((), jnp.arange(4.0))["loss"].count)
    4.0
    """

    def eval_step(state: Any, batch: Any) -> dict[str, "Metric"]:
        made = as_metrics(step(state, batch), "eval_step_fn", weight=rows_of(batch))
        return {name.removeprefix("eval_").removeprefix("eval/"): x for name, x in made.items()}

    return eval_step


def weighed_by_rows(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let a loss that is a plain number weigh as much as its batch has examples.

    A number is taken for the mean over the examples. An `Average` says what it weighs by itself.

    >>> loss_fn = weighed_by_rows(lambda params, batch, key: batch.mean())
    >>> float(loss_fn((), jnp.arange(4.0), None).count)
    4.0
    """

    def weighed(params: Any, batch: Any, *rest: Any) -> Any:
        made = loss_fn(params, batch, *rest)
        loss, *others = made if isinstance(made, tuple) else (made,)
        rows = rows_of(batch)
        if isinstance(loss, Mapping):
            loss = {name: _weighed(term, rows) for name, term in loss.items()}
        else:
            loss = _weighed(loss, rows)
        return (loss, *others) if isinstance(made, tuple) else loss

    return weighed


def _weighed(loss: Any, rows: int) -> Any:
    from clu.metrics import Metric

    is_number = tree.is_data(loss) and jnp.shape(loss) == () and not isinstance(loss, Metric)
    return mean(loss, jnp.asarray(rows, jnp.float32)) if is_number else loss


def rows_of(batch: Any) -> int:
    """Count the examples of a batch."""
    sizes = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)]
    return int(sizes[0]) if sizes else 1


def as_metrics(metrics: Any, what: str, *, weight: int = 1) -> dict[str, "Metric"]:
    """Make metrics of numbers by name, of a dict or of a record; None is none.

    Raises:
      ConfigError: if one of them is no number.
    """
    from clu.metrics import Metric

    if dataclasses.is_dataclass(metrics) and not isinstance(metrics, type | Metric):
        metrics = {name.name: getattr(metrics, name.name) for name in dataclasses.fields(metrics)}
    elif hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{what}: expected metrics by name, got {tree.spell(metrics)}")
    there = {name: value for name, value in metrics.items() if value is not None}
    return {name: _as_metric(f"{what}: {name}", value, weight) for name, value in there.items()}


def _as_metric(name: str, value: Any, weight: int) -> "Metric":
    from clu.metrics import Metric

    if isinstance(value, Metric):
        return value
    if not tree.is_data(value) or jnp.shape(value) != ():
        raise ConfigError(
            f"{name}: expected a number, or a metric such as sf.mean(values), got "
            f"{tree.spell(value)}"
        )
    return mean(value, jnp.asarray(weight, jnp.float32))


class HookedStep:
    """Call a function before each step, and one after it, in Python.

    It is for `fit`, which takes it as it is. The step itself is compiled once, when it first sees
    a batch. What the functions return takes the place of what they were given; None changes
    nothing. A number that is changed, or new, is a metric that weighs one step.

    What the second one raises is raised before the next step, or by `raise_pending`: by then the
    state of this step is where it can be saved.

    >>> import numpy as np, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, batch, key: sf.mean(params * batch), tx)
    >>> def after(state, metrics, step):
    ...     print(step, float(metrics["loss"]))
    >>> step = HookedStep(step, lambda state, step: None, after)
    >>> state, _ = step(state, np.ones(4, np.float32))
    1 1.0
    """

    def __init__(self, step: Step, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._step, self._before, self._after = step, before, after
        self._compiled: CompiledStep | None = step if isinstance(step, CompiledStep) else None
        self._done: int | None = None
        self._read = jax.jit(_numbers)
        self._pending: BaseException | None = None

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the step alone, as a jitted function does."""
        return jax.jit(self._step).lower(state, batch)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Do a step."""
        self.raise_pending()
        if self._done is None:  # counted here from then on: to read it would wait for the device
            self._done = int(getattr(state, "step", 0))
        changed = self._before(state, self._done)
        state = state if changed is None else changed
        if self._compiled is None:
            self._compiled = compile_step(self._step, state, batch)
        state, metrics = self._compiled(state, batch)
        self._done += 1
        try:
            return self._heard(state, metrics)
        except BaseException as error:  # noqa: BLE001  raised as soon as the state is at hand
            self._pending = error
            return state, metrics

    def _heard(self, state: Any, metrics: Any) -> tuple[Any, Any]:
        given = self._read(metrics)
        said = self._after(state, dict(given), self._done)
        if said is None:
            return state, metrics
        if not isinstance(said, tuple) or len(said) != 2:
            raise ConfigError(
                f"on_step_end: expected (state, metrics), or None, from it, got {tree.spell(said)}"
            )
        return said[0], _merged(metrics, given, said[1])

    def raise_pending(self) -> None:
        """Raise what the second function raised."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error


def _numbers(metrics: Mapping[str, "Metric"]) -> dict[str, Any]:
    return {name: metric.compute() for name, metric in metrics.items()}


def _merged(metrics: Any, given: Any, shown: Any) -> dict[str, "Metric"]:
    """Keep the metrics that were left as they are, with their weights."""
    if shown is None:
        return dict(metrics)
    kept = [name for name, value in shown.items() if value is given.get(name)]
    changed = {name: value for name, value in shown.items() if name not in kept}
    return {name: metrics[name] for name in kept} | as_metrics(changed, "on_step_end")
