"""JSON that may be damaged raises only ValueError, and no file blocks."""

import os

import pytest

from stepfold.json_files import has_form, is_count, is_range, parse_json, read_json


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 10_000, b"1" * 400, b'{"a": 1e999}', b"\xff", b'"\\ud800"'],
    ids=["empty", "cut", "deep", "large", "overflow", "bytes", "surrogate"],
)
def test_damage_is_a_value_error_or_a_plain_value(content):
    try:
        value = parse_json(content)
    except ValueError:
        return
    assert value in ({"a": float("inf")}, "?")


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ValueError, OSError)):
        read_json(tmp_path / "pipe")


def test_a_form_describes_json():
    assert has_form({"a": [1, 2], "b": "x"}, {"a": [is_count], "b": str})
    assert not has_form({"a": [1, "2"]}, {"a": [is_count]})
    assert not has_form([1], {"a": is_count})
    assert is_range([1, 3])
    assert not is_range([3, 1])
