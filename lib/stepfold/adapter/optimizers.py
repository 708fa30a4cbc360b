"""Schedules and optimizers by name."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from stepfold import tree
from stepfold.core.optimizer import as_optimizer, find_nodes
from stepfold.core.validation import read_integer, read_positive, suggest
from stepfold.errors import refuse
from stepfold.loop.events import Event, Replace
from stepfold.loop.hook import AnyHook

# Schedules: functions of the peak, the end value, and the number of steps between them.


def _cosine(peak: float, end: float, steps: int, *, exponent: float = 1.0) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=end / peak, exponent=exponent)


def _cosine_restarts(peak: float, end: float, steps: int, *, cycles: int = 4) -> optax.Schedule:
    if type(cycles) is not int or not 1 <= cycles <= steps:
        refuse("scheduler_kwargs['cycles']", f"an integer from 1 to {steps}", repr(cycles))
    bounds = [round(steps * cycle / cycles) for cycle in range(cycles + 1)]
    lengths = [after - before for before, after in pairwise(bounds)]
    return optax.join_schedules([_cosine(peak, end, n) for n in lengths], bounds[1:-1])


def _wsd(peak: float, end: float, steps: int, *, decay: float = 0.1) -> optax.Schedule:
    """Warmup-stable-decay: constant, then linear over the last `decay` of the steps."""
    if decay > 1:
        refuse("scheduler_kwargs['decay']", "at most 1", repr(decay))
    decay_steps = max(1, round(decay * steps))
    schedules = [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay_steps)]
    return optax.join_schedules(schedules, [steps - decay_steps])


SCHEDULES: Mapping[str, Callable[..., optax.Schedule]] = MappingProxyType(
    {
        "constant": lambda peak, _end, _steps: optax.constant_schedule(peak),
        "linear": optax.linear_schedule,
        "cosine": _cosine,
        "polynomial": lambda peak, end, steps, *, power=2.0: optax.polynomial_schedule(
            peak, end, power, steps
        ),
        "exponential": lambda peak, end, steps: optax.exponential_decay(
            peak, steps, end / peak, end_value=end
        ),
        "inverse_sqrt": lambda peak, end, _steps, *, timescale=1000: (
            lambda count: jnp.maximum(end, peak * jnp.sqrt(timescale / (timescale + count)))
        ),
        "wsd": _wsd,
        "cosine_restarts": _cosine_restarts,
    }
)
"""Schedules by name: functions `(peak, end, steps, **options)`."""

ENDLESS = ("constant", "inverse_sqrt")
"""Schedules that do not depend on the number of steps."""

_ALIASES = {
    "none": "constant",
    "constant_with_warmup": "warmup_constant",
    "reduce_on_plateau": "constant",  # and `scale_on_plateau` after the optimizer
    "reduce_lr_on_plateau": "constant",
    "cosine_with_restarts": "cosine_restarts",
    "warmup_stable_decay": "wsd",
}


def parse_scheduler(
    name: str, argument: str = "scheduler", other: str = "custom_scheduler=…"
) -> tuple[str, bool]:
    """Return the name of a schedule in `SCHEDULES`, and whether a warmup is required.

    `other` is the argument for another schedule.
    """
    full_name = _ALIASES.get(name, name)
    schedule = re.sub("^warm_?up_", "", full_name)
    wants_warmup = schedule != full_name
    schedule = _ALIASES.get(schedule, schedule)
    if schedule not in SCHEDULES:
        names = ["none", *SCHEDULES, "reduce_on_plateau"]
        names += [f"warmup_{known}" for known in names[1:]]
        advice = suggest(name, names) or f"give {other} for another schedule"
        refuse(argument, f"one of {', '.join(names)}", repr(name), advice)
    return schedule, wants_warmup


def check_scheduler_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that a schedule takes the options, and that they are numbers above 0."""
    parameters = inspect.signature(SCHEDULES[parse_scheduler(name)[0]]).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    known = [*_PLATEAU_OPTIONS] if is_plateau(name) else known
    _check_known("scheduler_kwargs", name, options, known)
    for option, value in options.items():
        read_positive(f"scheduler_kwargs[{option!r}]", value)
    if is_plateau(name):
        for option in options.keys() & {"patience", "cooldown"}:
            read_integer(f"scheduler_kwargs[{option!r}]", options[option])
        try:
            contrib.reduce_on_plateau(**options)
        except ValueError as error:
            refuse("scheduler_kwargs", f"options of {name}", f"{options}: {error}", cause=error)


def _check_known(field: str, name: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    for option in options:
        if option not in known:
            advice = f"{name} takes {', '.join(known) or 'none'}"
            if option == "learning_rate":
                advice += "; set the rate with learning_rate and scheduler"
            elif suggestion := suggest(option, known):
                advice += f"; {suggestion}"
            refuse(field, f"options of {name}", repr(option), advice)


# A rate that reacts to evaluations

_PLATEAU_OPTIONS = ("factor", "patience", "rtol", "atol", "cooldown", "min_scale")


def is_plateau(name: str | None) -> bool:
    """Whether a scheduler reduces the rate if the loss of an evaluation does not improve."""
    return re.fullmatch("(warm_?up_)?reduce_(lr_)?on_plateau", name or "") is not None


def scale_on_plateau(options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Scale updates as `optax.contrib.reduce_on_plateau` does, by the loss of evaluations.

    The one of optax takes the loss of each step. Here `plateau_hook` changes the state, after each
    evaluation.
    """
    plateau = contrib.reduce_on_plateau(**options)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        return optax.tree.scale(state.scale, updates), state

    return optax.GradientTransformation(plateau.init, update)


def plateau_hook(options: Mapping[str, Any], metric: str = "eval/loss") -> AnyHook:
    """Make a hook that updates the state of `scale_on_plateau` after each evaluation."""
    plateau: Any = as_optimizer(contrib.reduce_on_plateau(**options))
    is_node: Any = lambda node: isinstance(node, contrib.ReduceLROnPlateauState)
    advance: Any = jax.jit(lambda old, value: plateau.update({}, old, value=value)[1])

    def reduce_on_plateau(event: Event) -> Replace | None:
        if event.is_train or metric not in event.metrics:
            return None
        value = event.metrics[metric]
        nodes = find_nodes(event.state.opt_state, contrib.ReduceLROnPlateauState)
        if len(nodes) != 1:
            advice = "leave the scheduler out, or the optimizer to the arguments"
            refuse("scheduler", "the optimizer of the arguments", "another one", advice)
        new = advance(nodes[0], np.float32(value))
        change = lambda node: new if is_node(node) else node
        opt_state = jax.tree.map(change, event.state.opt_state, is_leaf=is_node)
        why = f"the learning rate is scaled by {float(new.scale):.3g} after {metric} {value:.4g}"
        return Replace(event.state._replace(opt_state=opt_state), why)

    reduce_on_plateau.replaces_state = True  # type: ignore[attr-defined]
    reduce_on_plateau.provides = ()  # type: ignore[attr-defined]
    return reduce_on_plateau


# Optimizers

MOMENT_DTYPES = ("mu_dtype", "accumulator_dtype", "dtype_momentum")
"""The names that optimizers of optax have for the dtype of their first moment."""

_NOT_BY_NAME = {
    "dpsgd": "it takes the gradient of each example; give make_train_step a grad=… that returns it",
    "schedule_free": "it wraps an optimizer; use schedule_free_adamw or schedule_free_sgd, or give "
    "tx=…",
}
# Their schedule follows the count of their moments, which cannot start at another step.
_COUNTS_ITSELF = ("dadapt_adamw", "madgrad", "momo", "momo_adam", "prodigy")


def optimizer_names() -> list[str]:
    """List the optimizers of optax and optax.contrib that can be built by name."""
    names = {*vars(optax), *vars(contrib)} - _NOT_BY_NAME.keys()
    return sorted(name for name in names if _find(name) is not None)


def _find(name: str) -> Callable[..., optax.GradientTransformation] | None:
    rates = {"learning_rate", "max_learning_rate"}
    for module in (optax, contrib):
        build: Any = vars(module).get(name)  # `getattr` warns at deprecated names
        is_public = inspect.isfunction(build) and not name.startswith(("_", "scale_by_"))
        if is_public and rates & inspect.signature(build).parameters.keys():
            return build  # type: ignore[no-any-return]
    return None


def find_optimizer(name: str, other: str = "tx=…") -> Callable[..., optax.GradientTransformation]:
    """Return the function of optax or optax.contrib that builds an optimizer.

    `other` is the argument for another optimizer.
    """
    if name in _NOT_BY_NAME:
        refuse("optimizer", "one that can be built by name", repr(name), _NOT_BY_NAME[name])
    if (build := _find(name)) is None:
        names = optimizer_names()
        advice = suggest(name, names) or f"give {other} for another optimizer"
        refuse("optimizer", f"one of {', '.join(names)}", repr(name), advice)
    return build


def optimizer_options(name: str) -> dict[str, Any]:
    """Return the options of an optimizer except its learning rate, with their defaults."""
    parameters = inspect.signature(find_optimizer(name)).parameters
    return {key: value.default for key, value in parameters.items() if key != "learning_rate"}


def check_optimizer_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that an optimizer takes the options, and requires no others and no loss function."""
    known, field = optimizer_options(name), "extra_optimizer_kwargs"
    _check_known(field, name, options, known)
    empty = inspect.Parameter.empty
    missing = [key for key, default in known.items() if default is empty and key not in options]
    if missing:
        expected = f"{', '.join(missing)}, which {name} requires"
        refuse(field, expected, ", ".join(options) or "none", f"add {missing[0]!r}")
    needed = None
    if name == "lbfgs" and options.get("linesearch", "default") is not None:
        needed = "linesearch=None"
    elif name == "sophia" and "hessian_diagonal_fn" not in options:
        needed = "hessian_diagonal_fn=…"
    if needed is not None:
        advice = (
            "its default calls the loss function, which a train step does not pass to optimizers"
        )
        refuse(field, f"{needed} for {name}", f"{options}", advice)


def build_optimizer(
    name: str, schedule: optax.Schedule, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Build an optimizer by name, with a schedule as its learning rate."""
    build = find_optimizer(name)
    parameters = inspect.signature(build).parameters
    if "learning_rate" not in parameters:  # polyak_sgd scales its own rate
        return build(scaling=schedule, **options)
    types = get_args(parameters["learning_rate"].annotation)
    if {*types} >= {*get_args(optax.ScalarOrSchedule)} and name not in _COUNTS_ITSELF:
        return build(learning_rate=schedule, **options)
    # The wrapper passes the rate of each step as a number.
    static = tuple(option for option in parameters if option != "learning_rate")
    return optax.inject_hyperparams(build, static_args=static)(learning_rate=schedule, **options)


def freeze(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """Freeze the parameters whose path matches a regular expression.

    They have no optimizer state, and do not count in a global norm.
    """

    def label_params(params: Any) -> Any:
        def label(path: tuple[Any, ...], _: Any) -> str:
            return "frozen" if re.search(pattern, tree.path_name(path)) else "trained"

        labels = jax.tree_util.tree_map_with_path(label, params)
        unique = set(jax.tree.leaves(labels))
        if unique != {"frozen", "trained"}:
            paths = [path for path, _ in tree.named_leaves(params)]
            expected = "a pattern that matches some parameters but not all"
            some = f"{'all' if 'frozen' in unique else 'none'} of {', '.join(paths[:5])}"
            got = f"{pattern!r}, which matches {some}{', …' * (len(paths) > 5)}"
            refuse("frozen_parameters", expected, got, "give a part of some paths")
        return labels

    # -0.0, because adding 0.0 would change the sign bit of a parameter that is -0.0.
    zero = optax.stateless(lambda updates, _: jax.tree.map(lambda u: -jnp.zeros_like(u), updates))
    return optax.multi_transform({"trained": tx, "frozen": zero}, label_params)


# The step counts of schedules in an optimizer's state


def schedule_paths(opt_state: Any) -> list[str]:
    """List the paths of the step counts of schedules."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_schedule_state)
    names = [tree.path_name(path) for path, node in nodes if _is_schedule_state(node)]
    return ["/".join(filter(None, ("opt_state", name, "count"))) for name in names]


def with_schedule_at(opt_state: Any, step: int) -> Any:
    """Set the step counts of schedules."""

    def move(node: Any) -> Any:
        is_schedule = _is_schedule_state(node)
        return node._replace(count=jnp.full_like(node.count, step)) if is_schedule else node

    return jax.tree.map(move, opt_state, is_leaf=_is_schedule_state)


def learning_rate_of(schedule: optax.Schedule) -> Callable[[Any], jax.Array]:
    """Make a function from a train state to the learning rate of the update that produced it.

    It reads the optimizer's count, which skipped steps do not increment, and the scale of
    `scale_on_plateau`.
    """

    def learning_rate(state: Any) -> jax.Array:
        nodes = jax.tree.leaves(state.opt_state, is_leaf=_is_schedule_state)
        counts = [node.count for node in nodes if _is_schedule_state(node)]
        rate = jnp.asarray(schedule((counts[0] if counts else state.step) - 1), jnp.float32)
        plateaus = find_nodes(state.opt_state, contrib.ReduceLROnPlateauState)
        return rate * plateaus[0].scale.astype(jnp.float32) if plateaus else rate

    return learning_rate


def _is_schedule_state(node: Any) -> bool:
    # `scale_by_schedule`, `inject_hyperparams` and a scheduled `add_decayed_weights` keep a named
    # tuple with only a count. optax exports only the first of these types.
    return isinstance(node, tuple) and getattr(node, "_fields", None) == ("count",)
