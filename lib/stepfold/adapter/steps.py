"""Training and evaluation steps of the trainer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.loss import count_examples, mean
from stepfold.core.optimizer import as_optimizer
from stepfold.core.state import TrainState
from stepfold.core.validation import read_instance, spell_call, takes
from stepfold.errors import TreeMismatchError, refuse
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.loop.evaluate import evaluate
from stepfold.loop.metrics import merge_metrics, metric_values

if TYPE_CHECKING:
    from clu.metrics import Metric

Step = Callable[[Any, Any], Any]


def make_state_type(tx: optax.GradientTransformation) -> type[TrainState]:
    """Make a subclass of `TrainState` with flax's `apply_gradients`."""
    update = as_optimizer(tx).update

    class State(TrainState):
        __slots__ = ()
        replace = TrainState._replace

        def apply_gradients(self, *, grads: Any, **changes: Any) -> Any:
            """Return the state after an update, with other fields changed, such as `key`."""
            updates, opt_state = update(grads, self.opt_state, self.params)
            params = optax.apply_updates(self.params, updates)
            return self._replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)

    return State


# Metrics that are numbers


def as_train_step(step: Step) -> Step:
    """Turn the numbers of a training step into metrics weighted by the examples of the batch."""
    if isinstance(step, CompiledStep):  # its metrics are weighted already
        return step

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, "Metric"]]:
        new_state, metrics = read_pair("train_step_fn", step(state, batch))
        if isinstance(state, TrainState) and type(new_state) is TrainState:
            new_state = type(state)(*new_state)  # of the same class, with `apply_gradients`
        weight = count_examples(batch)
        return new_state, as_metrics(metrics, "train_step_fn", weight=weight)

    return train_step


def as_eval_step(step: Step) -> Step:
    """Turn the numbers of an evaluation step into metrics weighted by the examples of the batch.

    A prefix `eval_` or `eval/` of a name is dropped.
    """

    def eval_step(state: Any, batch: Any) -> dict[str, "Metric"]:
        metrics = as_metrics(step(state, batch), "eval_step_fn", weight=count_examples(batch))
        return {name_in_run(name): metric for name, metric in metrics.items()}

    return eval_step


def name_in_run(name: str) -> str:
    """Return the name of a metric of an evaluation without `eval_` or `eval/`."""
    return name.removeprefix("eval_").removeprefix("eval/")


def as_metrics(metrics: Any, argument: str, *, weight: Any = 1) -> dict[str, "Metric"]:
    """Turn a dict, dataclass or NamedTuple of numbers and metrics into metrics; drop None."""
    from clu.metrics import Metric

    converted: dict[str, Metric] = {}
    for name, value in by_name(metrics, argument).items():
        if isinstance(value, Metric):
            converted[name] = value
        elif tree.is_data(value) and jnp.shape(value) == ():
            converted[name] = mean(value, jnp.float32(weight))
        else:
            expected = "a number, or a metric such as sf.mean(values)"
            refuse(f"{argument}: {name}", expected, tree.describe_value(value))
    return converted


def by_name(metrics: Any, argument: str) -> dict[str, Any]:
    """Read the metrics of a dict, dataclass or NamedTuple; drop None."""
    from clu.metrics import Metric

    if is_dataclass(metrics) and not isinstance(metrics, type | Metric):
        metrics = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    elif hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()
    if not isinstance(metrics, Mapping):
        refuse(argument, "metrics by name", tree.describe_value(metrics))
    return {name: value for name, value in metrics.items() if value is not None}


# Functions around a step


def with_update(
    tx: optax.GradientTransformation, method: str, update: Callable[..., Any]
) -> optax.GradientTransformation:
    """Replace the update of an optimizer by a method `(grads, opt_state, params)` of a subclass."""
    if not takes(update, 3):
        expected = "a method (grads, opt_state, params) -> (updates, opt_state)"
        refuse(method, expected, spell_call(update))

    def checked(grads: Any, opt_state: Any, params: Any = None) -> tuple[Any, Any]:
        returned = read_pair(method, update(grads, opt_state, params), "(updates, opt_state)")
        differences = tree.diff(params, returned[0], "updates")
        if differences:
            raise TreeMismatchError(
                f"{method}: expected updates like the parameters, got\n  "
                + "\n  ".join(differences)
            )
        return returned

    return optax.GradientTransformation(tx.init, checked)


class StepWithHooks:
    """Call `before(state, step)` and `after(state, metrics, step)` around each step.

    `before` returns a state, `after` a state and metrics; None changes nothing. Metrics are passed
    as numbers, and those that `after` adds or changes are weighted by the examples of the batch. A
    step that is not jitted is compiled at the first batch. An exception of `after` is raised before
    the next step or by `raise_pending`, so that the caller can save the state of this step.
    `restart` is called before the first step, and again if the run goes back.
    """

    def __init__(self, step: Step, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._step, self._before, self._after = step, before, after
        is_compiled = isinstance(step, CompiledStep) or hasattr(step, "lower")
        self._call: Step | None = step if is_compiled else None
        self._steps_done: int | None = None
        self._names: list[str] | None = None  # of the metrics of the first step
        self._compute = jax.jit(lambda metrics: {n: m.compute() for n, m in metrics.items()})
        self._pending: BaseException | None = None

    def restart(self, step: int) -> None:
        """Start counting at a step."""
        self._steps_done = step

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the step without the functions, as a jitted function does."""
        return jax.jit(self._step).lower(state, batch)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self.raise_pending()
        if self._steps_done is None:  # read once, since reading waits for the device
            self._steps_done = int(getattr(state, "step", 0))
        replaced = self._before(state, self._steps_done)
        state = state if replaced is None else replaced
        if self._call is None:
            self._call = compile_step(self._step, state, batch)
        state, metrics = self._call(state, batch)
        self._steps_done += 1
        try:
            return self._call_after(state, metrics, batch)
        except BaseException as error:  # noqa: BLE001  raised when the caller has the state
            self._pending = error
            return state, metrics

    def _call_after(self, state: Any, metrics: Any, batch: Any) -> tuple[Any, Any]:
        numbers = self._compute(metrics)
        returned = self._after(state, dict(numbers), self._steps_done)
        if returned is None:
            return state, metrics
        state, replaced = read_pair("on_step_end", returned, "(state, metrics) or None")
        if replaced is None:
            return state, metrics
        # Unchanged numbers keep their metric and its weight.
        kept = {n: metrics[n] for n, x in replaced.items() if n in numbers and x is numbers[n]}
        changed = {name: value for name, value in replaced.items() if name not in kept}
        new = kept | as_metrics(changed, "on_step_end", weight=count_examples(batch))
        self._names = sorted(new) if self._names is None else self._names
        if sorted(new) != self._names:
            expected = f"the metrics of the first step, {', '.join(self._names)}, in each step"
            advice = "return NaN for one that is missing"
            refuse("on_step_end", expected, ", ".join(sorted(new)), advice)
        return state, new

    def raise_pending(self) -> None:
        """Raise the exception of `after`, if there is one."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error


def read_pair(name: str, returned: Any, expected: str = "(state, metrics)") -> tuple[Any, Any]:
    """Return the state and the metrics that a function returned."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        refuse(name, f"it to return {expected}", tree.describe_value(returned))
    return returned


# Evaluation


def evaluate_with(
    step: Step, state: Any, batches: Iterable[Any], calculator: Callable[..., Any] | None = None
) -> dict[str, float]:
    """Evaluate a state, with `eval_` before each name.

    `calculator` is a function `(state, batch) -> metrics`, merged over batches like those of the
    step, or a function from the merged numbers by name to further ones.
    """
    if calculator is not None and not callable(calculator):
        expected = "a function (state, batch) -> metrics, or of numbers by name"
        refuse("metric_calculator", expected, tree.describe_value(calculator))

    def eval_step(state: Any, batch: Any) -> Any:
        further = calculator(state, batch)  # type: ignore[misc]
        further = as_metrics(further, "metric_calculator", weight=count_examples(batch))
        return {**step(state, batch), **further}

    takes_batch = calculator is not None and not takes(calculator, 1)
    merged = evaluate(eval_step if takes_batch else step, state, batches)
    numbers = {f"eval_{name}": value for name, value in merged.items()}
    if calculator is None or takes_batch:
        return numbers
    further = calculator(dict(numbers))
    read_instance("metric_calculator", further, Mapping, "it to return numbers by name")
    return numbers | metric_values(further)


def call_evaluate(trainer: Any, state: Any, *data: Any, method: str = "evaluate") -> dict[str, Any]:
    """Evaluate a state in a run by a method of a trainer, which may be that of a subclass.

    `eval` may yield metrics for each batch, which are averaged.
    """
    trainer.state = state
    metrics = getattr(trainer, method)(*data)
    if method == "eval" and not isinstance(metrics, Mapping):
        measured = [as_metrics(each, "eval") for each in metrics]
        metrics = merge_metrics(measured) if measured else None
    read_instance(method, metrics, Mapping, "it to return metrics by name")
    return {name_in_run(name): value for name, value in metrics.items()}
