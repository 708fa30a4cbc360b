"""Check loss functions and `grad=` functions: their signatures and their results.

All checks run at construction or while jax traces, so they cost nothing in a compiled step.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.errors import ConcretizationTypeError, TracerArrayConversionError

from stepfold import tree
from stepfold.core.loss import LossFn, Metrics, Terms
from stepfold.core.optimizer import takes_any_keyword
from stepfold.core.validation import spell_call, takes
from stepfold.errors import ConfigError, LossError, StepfoldError, TreeMismatchError

if TYPE_CHECKING:
    from clu.metrics import Average


def checked(loss_fn: LossFn, *, stateful: bool = False) -> LossFn:
    """Wrap a loss function to check the contract and normalize its result.

    The result returns `(terms, metrics)`, or `(terms, metrics, model_state)` if stateful; `terms`
    is a dict of `Average`s in at least float32. A wrong signature raises here, a wrong result while
    tracing. Idempotent.
    """
    _check_signature(loss_fn, stateful=stateful)

    def loss_in_form(params: Any, batch: Any, key: Any, *model_state: Any) -> tuple[Any, ...]:
        try:
            returned = loss_fn(params, batch, key, *model_state)
        except Exception as error:
            advice = _advice_on(error, batch)
            # A StepfoldError has its own advice. A function that is checked twice gets here twice.
            if not isinstance(error, StepfoldError) and advice not in _notes(error):
                error.add_note(advice)
            raise
        if stateful:
            loss, metrics, new_state = _three(returned)
            _check_same(model_state[0], new_state)
            return read_terms(loss), read_metrics(metrics), new_state
        loss, metrics = _two(returned)
        return read_terms(loss), read_metrics(metrics)

    return loss_in_form


def _check_signature(loss_fn: LossFn, *, stateful: bool) -> None:
    names = ["params", "batch", "key", "model_state"]
    wanted = f"loss_fn({', '.join(names[: 3 + stateful])})"
    if not callable(loss_fn):
        raise LossError(f"expected a function {wanted}, got {tree.spell(loss_fn)}")
    if not takes(loss_fn, 3 + stateful):
        other = "leave out stateful=True" if stateful else "give stateful=True, for a model state"
        advice = f"; {other}" if takes(loss_fn, 4 - stateful) else ""
        raise LossError(f"expected {wanted}, got {spell_call(loss_fn)}{advice}")


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def _advice_on(error: Exception, batch: Any) -> str:
    """Return advice on an exception in a loss function."""
    if isinstance(error, ConcretizationTypeError | TracerArrayConversionError):
        return (
            "loss_fn: it is traced, and its arrays have no values yet; keep to jax.numpy, return "
            "arrays without float() or .item(), and choose by jnp.where instead of if"
        )
    if isinstance(error, TypeError) and "'Average'" in str(error):
        return (
            "loss_fn: sf.mean gives a total and a weight, to be divided when the whole batch is "
            'seen; scale the values in it, and return several as {"a": sf.mean(…), "b": sf.mean(…)}'
        )
    leaves = [f"{name} {tree.spell(leaf)}" for name, leaf in tree.named_leaves(batch, "batch")]
    given = ", ".join(leaves[:8]) + ", …" * (len(leaves) > 8)
    no_mask = isinstance(error, KeyError) and "mask" in error.args
    advice = '; sf.batches(…, remainder="pad") and sf.collate add a mask' * no_mask
    return f"loss_fn was given {given}{advice}"


def _two(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2:
        raise LossError(
            f"expected the loss or (loss, metrics), got {_spell(returned)}"
            + ("; a loss that returns model_state needs stateful=True" * (len(returned) == 3))
        )
    return returned[0], returned[1]


def _three(returned: Any) -> tuple[Any, Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 3:
        got = _spell(returned)
        raise LossError(f"stateful=True: expected (loss, metrics, model_state), got {got}")
    return returned[0], returned[1], returned[2]


def _spell(returned: Any) -> str:
    return f"a tuple of {len(returned)}" if isinstance(returned, tuple) else tree.spell(returned)


def _check_same(old: Any, new: Any) -> None:
    lines = tree.diff(old, new, "model_state")
    if lines:
        raise LossError(
            "model_state: expected the structure, shapes and dtypes that went in, got\n  "
            + "\n  ".join(lines)
            + f"\n{_advice(old, new)}"
        )


def _advice(old: Any, new: Any) -> str:
    structures: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    if structures[0] != structures[1]:
        return "Return every leaf that went in, in the same containers, and no other."
    shapes = [[getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(s)] for s in (old, new)]
    if shapes[0] != shapes[1]:
        return "A state keeps its shapes: make room in init for what grows."
    return "Cast what is computed in another dtype back before returning it."


def read_terms(loss: Any) -> Terms:
    """Convert a loss of any allowed form to a dict of terms."""
    if not isinstance(loss, Mapping):
        return {"loss": _read_term("loss", loss)}
    if not loss:
        raise LossError("loss: expected at least one term, got an empty dict")
    bad = [name for name in loss if not isinstance(name, str)]
    if bad:
        raise LossError(f"loss: expected the terms' names as strings, got {bad}")
    return {name: _read_term(f"loss/{name}", term) for name, term in loss.items()}


def _read_term(path: str, term: Any) -> "Average":
    from clu.metrics import Average

    if isinstance(term, Average):
        total = _scalar(path + ".total", term.total)
        if not tree.is_real(term.count) or jnp.shape(term.count) != ():
            raise LossError(f"{path}.count: expected a real scalar, got {tree.spell(term.count)}")
        return Average(total=total, count=jnp.asarray(term.count).astype(total.dtype))
    total = _scalar(path, term)
    return Average(total=total, count=jnp.ones_like(total))


def _scalar(path: str, value: Any) -> Any:
    advice = "return sf.mean(values, mask), a floating scalar, or a dict of those"
    if not tree.is_data(value):
        raise LossError(f"{path}: expected a number, got {tree.spell(value)}; {advice}")
    value = jnp.asarray(value)
    if value.shape != ():
        raise LossError(f"{path}: expected a scalar, got {tree.spell(value)}; {advice}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(f"{path}: expected a floating number, got {tree.spell(value)}; {advice}")
    return value.astype(tree.widen(value.dtype))


def read_metrics(metrics: Any) -> Metrics:
    """Check the metrics of a loss function, and return them as a dict."""
    from clu.metrics import Metric

    if not isinstance(metrics, Mapping):
        raise LossError(
            f"metrics: expected a dict of clu.metrics.Metric, got {tree.spell(metrics)}; return "
            '(loss, metrics) in this order, as in loss, {"accuracy": sf.mean(hit)}'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise LossError(f"metrics: expected names as strings, got {name!r}")
        if not isinstance(metric, Metric):
            raise LossError(
                f"metrics/{name}: expected a clu.metrics.Metric, got {tree.spell(metric)}; wrap "
                "values as sf.mean(values, mask), so that they merge exactly"
            )
        if jax.tree_util.all_leaves([metric]):
            raise LossError(
                f"metrics/{name}: expected a metric that is a pytree, got {tree.spell(metric)}; "
                "make its class a flax.struct.dataclass, or register it with jax"
            )
    return dict(metrics)


_PLAIN = {"accumulate": 1, "stateful": False}


def options_of(grad: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Select the options that `grad` accepts; refuse a non-default one that it does not."""
    if not callable(grad):
        raise ConfigError(f"grad: expected a function of a loss function, got {tree.spell(grad)}")
    if takes_any_keyword(grad):
        return options
    parameters = inspect.signature(grad).parameters
    for name, value in options.items():
        if name not in parameters and value != _PLAIN[name]:
            raise ConfigError(
                f"grad: {getattr(grad, '__name__', grad)} was asked for {name}={value!r} and takes "
                f"no such keyword; let it take {name}=, as sf.value_and_grad does"
            )
    return {name: value for name, value in options.items() if name in parameters}


def read_gradients(returned: Any, params: Any) -> tuple[Any, Terms, Metrics, Any]:
    """Check and normalize the result of a `GradFn`."""
    if not isinstance(returned, tuple) or len(returned) != 4:
        got = _spell(returned)
        raise ConfigError(f"grad: expected (grads, loss, metrics, model_state), got {got}")
    grads, loss, metrics, model_state = returned
    lines = tree.diff(params, grads, "grads")
    if lines:
        raise TreeMismatchError(
            "grad: expected gradients in the form of the parameters, got\n  " + "\n  ".join(lines)
        )
    return jax.tree.map(jnp.asarray, grads), read_terms(loss), read_metrics(metrics), model_state
