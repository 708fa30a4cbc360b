"""Arguments as JSON, and back."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.arguments.written import read_text, written


def test_values_come_back():
    values = {"a": 1, "b": 0.1, "c": None, "d": True, "e": "ü", "f": {"x": [1]}}
    assert read_text(written(values)) == values
    assert read_text(written({"g": (1, (2, "x"))})) == {"g": [1, [2, "x"]]}


@pytest.mark.parametrize("value", [len, float("nan"), {"x": (1, 2)}, {1: 2}, {"x": object()}])
def test_what_does_not_come_back_is_refused_by_name(value):
    with pytest.raises(sf.ConfigError, match=r"field: expected a value that JSON gives back"):
        written({"good": 1, "field": value})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "expected JSON, got '{'"),
        (3, "expected JSON, got 3"),
        ("no/such/file.json", "or a file of it: .*No such file"),
    ],
)
def test_what_is_no_json(text, why):
    with pytest.raises(sf.ConfigError, match=f"from_json: .*{why}"):
        read_text(text)


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(sf.ConfigError, match=r"from_json: expected values by name, got \[1\]"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize("content", [b"\xff\xfe{}", "{}".encode("utf-16")])
def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "arguments.json"
    path.write_bytes(content)
    with pytest.raises(sf.ConfigError, match="arguments.json"):
        TrainingArguments.from_json(path)
