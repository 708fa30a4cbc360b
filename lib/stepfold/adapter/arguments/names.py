"""What fields are called: other names for the same, misspelt names, and names of nothing."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from stepfold.adapter.arguments.readers import nearest
from stepfold.errors import ConfigError

Class = TypeVar("Class", bound=type)

_ELSEWHERE = {
    "task": "the loss function says what the task is",
    "device": "jax chooses devices (JAX_PLATFORMS=cpu), and sharding_array arranges them",
    "use_cpu": "jax chooses devices: set JAX_PLATFORMS=cpu in the environment",
    "distributed": "give jax_distributed_config={}, and start the script once in each process",
    "metrics": "the loss function returns them: (loss, {'accuracy': sf.mean(hit)})",
    "evaluate_with_generate": "give sf.Evaluation any function of the state, such as one that "
    "generates text",
    "lr": "write learning_rate=…",
    "model": "it is an argument of the Trainer",
    "fp16": "write mixed_precision='fp16'",
    "bf16": "write mixed_precision='bf16'",
}


class OtherName:
    """Another name by which a field can be given, and read.

    >>> class Example:
    ...     max_steps = 10
    ...     max_training_steps = OtherName("max_steps")
    >>> Example().max_training_steps
    10
    """

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, instance: Any, owner: type) -> Any:
        """Read the field."""
        return self if instance is None else getattr(instance, self.field)


def other_names(cls: type) -> dict[str, str]:
    """List the other names that a class and those above it declare, with the fields meant."""
    found = [vars(parent) for parent in cls.__mro__]
    return {
        name: value.field
        for variables in found
        for name, value in variables.items()
        if isinstance(value, OtherName)
    }


def read_names(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Give values by the names of fields.

    Raises:
      ConfigError: if a name is none, or two names of one field are given with two values.
    """
    others = other_names(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value in given.items():
        field = others.get(name, name)
        if field not in fields:
            advice = _ELSEWHERE.get(name) or nearest(name, [*fields, *others])
            raise ConfigError(
                f"{name}: {cls.__name__} has no such field" + f"; {advice}" * bool(advice)
            )
        if field in found and (found[field] != value or type(found[field]) is not type(value)):
            raise ConfigError(
                f"{said[field]}, {name}: two names of one field, expected one value, got "
                f"{found[field]!r} and {value!r}; give one of them"
            )
        found[field], said[field] = value, name
    return found


def by_any_name(cls: Class) -> Class:
    """Let a dataclass be built by its fields' other names, and name the nearest of a wrong one.

    It stays a plain dataclass: `dataclasses.fields`, its signature and all that builds upon them,
    such as command-line makers, see each field once. Put it above `@dataclass`, on a subclass too.

    >>> from dataclasses import dataclass
    >>> from stepfold.adapter import TrainingArguments, by_any_name
    >>> @by_any_name
    ... @dataclass(frozen=True, kw_only=True)
    ... class Mine(TrainingArguments):
    ...     temperature: float = 1.0
    >>> Mine(temperature=0.5, max_training_steps=10).max_steps
    10
    """
    build: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(build)
    def by_name(self: Any, *positional: Any, **given: Any) -> None:
        if positional:
            raise ConfigError(
                f"{type(self).__name__}: expected fields by name, as num_train_epochs=3, got "
                f"{positional[0]!r:.60}"
            )
        build(self, **read_names(type(self), given))

    cls.__init__ = by_name  # type: ignore[misc]
    return cls


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that are not known.

    Raises:
      ConfigError: with the nearest name, if one is near.

    >>> refuse_unknown("Trainer", ["dataset_trian"], ["dataset_train", "dataset_eval"])
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: Trainer: there is no 'dataset_trian'; did you mean 'dataset_train'?
    """
    for name in given:
        if name not in known:
            advice = nearest(name, known) or f"there are {', '.join(known)}"
            raise ConfigError(f"{what}: there is no {name!r}; {advice}")
