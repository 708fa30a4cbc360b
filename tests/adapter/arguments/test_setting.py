"""How a field is declared."""

from dataclasses import dataclass, field, fields

import pytest

import stepfold as sf
from stepfold.adapter.arguments.readers import integer, mapping
from stepfold.adapter.arguments.setting import is_changed, read_fields, setting


@dataclass(frozen=True, kw_only=True)
class Example:
    size: int = setting(1, integer(1), "How large.")
    options: dict = setting({}, mapping, "What else.")
    plain: str = "as it is"
    made: list = field(default_factory=list)


def test_fields_are_read_in_place():
    example = Example(size=2)
    read_fields(example)
    assert example.size == 2
    with pytest.raises(sf.ConfigError, match="size: expected an integer of at least 1, got 0"):
        read_fields(Example(size=0))


def test_defaults_are_not_shared():
    Example().options["a"] = 1
    assert Example().options == {}


def test_a_change_is_seen():
    assert [name.name for name in fields(Example) if is_changed(Example(size=2), name.name)] == [
        "size"
    ]
    assert is_changed(Example(options={"a": 1}), "options")


def test_help_is_where_command_line_makers_look():
    assert fields(Example)[0].metadata["help"] == "How large."
