"""`TrainingArguments`: all the groups of fields as one frozen dataclass."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stepfold.adapter.arguments.contradictions import check_together
from stepfold.adapter.arguments.data import Data
from stepfold.adapter.arguments.devices import Devices
from stepfold.adapter.arguments.evaluating import Evaluating
from stepfold.adapter.arguments.length import Length
from stepfold.adapter.arguments.names import by_any_name, read_names
from stepfold.adapter.arguments.optimization import Optimization
from stepfold.adapter.arguments.reporting import Reporting
from stepfold.adapter.arguments.saving import Saving
from stepfold.adapter.arguments.setting import read_fields
from stepfold.adapter.arguments.written import read_text, written
from stepfold.errors import ConfigError


# Of several parents, dataclasses take the fields of the last one first.
@by_any_name
@dataclass(frozen=True, kw_only=True)
class TrainingArguments(Reporting, Saving, Evaluating, Data, Devices, Optimization, Length):
    """Say all of a training run that can be said in words and numbers.

    It is a plain frozen dataclass, so tyro, simple-parsing and their like make a command line of
    it. Every field is read when it is built, alone and with the others; what is of no use is
    refused, and so is a misspelt name. The functions beside it make the parts of a run from it, and
    each can be used alone: `plan`, `make_schedule`, `make_optimizer`, `make_mesh`, `precision`,
    `remat`, `checkpoints`, `writers`.

    Some fields have two names, as `max_steps` and `max_training_steps`. Either can be given and
    read; the first is the one that is written. A subclass that is a dataclass itself takes them by
    both names if it is decorated with `by_any_name`, too.

    >>> from stepfold.adapter import TrainingArguments
    >>> arguments = TrainingArguments(learning_rate=3e-4, max_training_steps=1_000)
    >>> arguments.max_steps, TrainingArguments.from_json(arguments.to_json()) == arguments
    (1000, True)
    >>> TrainingArguments(learning_rat=3e-4)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: learning_rat: TrainingArguments has no such field; did you mean ...
    >>> TrainingArguments(total_batch_size=-1)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: total_batch_size: expected an integer of at least 1, got -1
    """

    def __post_init__(self) -> None:
        """Read every field, and hold them against each other."""
        read_fields(self)
        check_together(self)

    def to_dict(self) -> dict[str, Any]:
        """Give every field's value by its name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: {**v} if isinstance(v, dict) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build arguments of values by name; those that are not there are as by default."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"from_dict: expected values by name, got {values!r:.60}")
        for name in values:
            if not isinstance(name, str):
                raise ConfigError(f"from_dict: expected names of fields, got {name!r:.60}")
        return cls(**values)

    def to_json(self, path: str | Path | None = None) -> str:
        """Give every field as JSON, and write it to a file, if there is to be one.

        Raises:
          ConfigError: if a field is a function, or holds what JSON does not give back.
        """
        text = written(self.to_dict())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, given: str | Path) -> Self:
        """Read arguments from JSON, or from a file of it."""
        return cls.from_dict(read_text(given))

    def replace(self, **changes: Any) -> Self:
        """Give the same arguments but for some fields, by any of their names."""
        return type(self)(**{**self.to_dict(), **read_names(type(self), changes)})
