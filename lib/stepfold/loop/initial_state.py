"""The state that `fit` starts with, which a resume only describes if it is given as a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from stepfold import tree
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.state import check_not_donated, step_of, strengthen
from stepfold.errors import refuse
from stepfold.internals.jax import evaluate_outputs, output_shardings
from stepfold.sharding.place import committed_sharding

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
