"""How a field is declared: its default, a line of help, and what reads it."""

import dataclasses
from typing import Any

from stepfold.adapter.arguments.readers import Reader


def setting(default: Any, read: Reader, help: str) -> Any:  # noqa: A002  as command-line makers say
    """Declare a field of a dataclass.

    Args:
      default: what it is unless given.
      read: what checks a value, and says how it is kept.
      help: a sentence, which command-line makers show.
    """
    metadata = {"help": help, "read": read}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read_fields(arguments: Any) -> None:
    """Read every field of a frozen dataclass in place, once, when it is built.

    Raises:
      ConfigError: at the first field whose value is not as it has to be.
    """
    for field in dataclasses.fields(arguments):
        read: Reader | None = field.metadata.get("read")
        if read is not None:
            object.__setattr__(
                arguments, field.name, read(field.name, getattr(arguments, field.name))
            )


def is_changed(arguments: Any, name: str) -> bool:
    """Tell whether a field has another value than by default."""
    field = next(field for field in dataclasses.fields(arguments) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return bool(getattr(arguments, name) != field.default_factory())
    return bool(getattr(arguments, name) != field.default)
