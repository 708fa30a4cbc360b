"""Which of a trainer's methods a subclass has written anew, and how they are called."""

import inspect
from collections.abc import Callable
from typing import Any

from stepfold.adapter.collecting import Collect, columns


def is_overridden(instance: Any, parent: type, name: str) -> bool:
    """Tell whether a method of an object is another than that of a class above it.

    >>> is_overridden(True, int, "bit_length"), is_overridden(True, int, "__repr__")
    (False, True)
    """
    own = getattr(instance, "__dict__", {})
    return name in own or getattr(type(instance), name) is not getattr(parent, name)


def call_with(function: Callable[..., Any], **options: Any) -> Any:
    """Call a function with those of the keywords that it takes.

    >>> call_with(lambda mode: mode, length=4, mode="keep_end")
    'keep_end'
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**options)
    return function(**{name: value for name, value in options.items() if name in parameters})


def chosen_collect(trainer: Any, parent: type, kind: str) -> Collect | None:
    """Choose what makes a batch of examples for a trainer.

    A collect function of a subclass is given what `data_collator` makes of the examples, or their
    columns. Otherwise it is `data_collator`; or what pads to `max_length`; or, with neither, None:
    examples are stacked.

    Args:
      trainer: the trainer.
      parent: the class whose methods are the default ones.
      kind: which of the three methods is asked: "", "grain_" or "tfds_".
    """
    arguments = trainer.arguments
    names = [f"create_{kind}collect_function", "create_collect_function"]
    mine = next((name for name in names if is_overridden(trainer, parent, name)), None)
    if mine is None and trainer.data_collator is not None:
        return trainer.data_collator  # type: ignore[no-any-return]
    if mine is None and arguments.max_length is None:
        return None
    make = getattr(trainer, mine or names[0])
    collect = call_with(
        make,
        max_sequence_length=arguments.max_length,
        truncation_mode=arguments.truncation_mode,
    )
    if mine is None:
        return collect  # type: ignore[no-any-return]
    first = columns if trainer.data_collator is None else trainer.data_collator
    return lambda examples: collect(first(examples))
