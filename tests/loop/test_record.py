import json

import pytest

import stepfold as sf
from stepfold.loop.record import read_record, replace, write_record

ATTEMPT = {"began": "2026-03-01T10:00:00+00:00", "from": 0, "to": 3}


def test_what_was_written_is_read(tmp_path):
    write_record(tmp_path, {"attempts": [ATTEMPT], "mesh": None})
    assert read_record(tmp_path) == {"format": 1, "attempts": [ATTEMPT], "mesh": None}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_where_nothing_was_written_nothing_is_known(tmp_path):
    assert read_record(tmp_path) == {}


@pytest.mark.parametrize("text", ["", '{"format": 1, "att', "\x00\x01"])
def test_a_damaged_one_is_told(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(
        sf.DataError, match="run.json: expected JSON, got something damaged: .*move"
    ):
        read_record(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        [],
        {},
        {"format": "1", "attempts": []},
    ],
)
def test_other_json_is_refused(tmp_path, record):
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(sf.DataError, match="run.json: expected what fit writes, .* got other JSON"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"attempts": None}, "attempts: expected a list, got NoneType None"),
        (
            {"attempts": [{"began": ""}]},
            "attempts/0/began: expected a time, as 2026-.*, got str ''",
        ),
        ({"attempts": [ATTEMPT | {"began": "2026-03-01"}]}, "attempts/0/began: expected a time"),
        (
            {"attempts": [ATTEMPT, ATTEMPT | {"to": -1}]},
            "attempts/1/to: expected an integer from 0",
        ),
        ({"attempts": [ATTEMPT | {"clock": [[0, 0]]}]}, "attempts/0/clock/0: expected a list of 3"),
        ({"attempts": [ATTEMPT | {"pause": 1e999}]}, "attempts/0/pause: expected a number, got"),
        ({"attempts": [ATTEMPT | {"error": {}}]}, "attempts/0/error/type: expected a text, got No"),
        ({"arguments": 3, "attempts": []}, "arguments: expected an object, got int 3"),
        (
            {"arguments": {"checkpoints": {"mode": "up"}}},
            "checkpoints/mode: expected 'min' or 'max'",
        ),
    ],
)
def test_what_is_of_another_kind_is_named(tmp_path, record, words):
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, **record}))
    with pytest.raises(sf.DataError, match=f"run.json: .*{words}.*; mend it, or move it away"):
        read_record(tmp_path)


def test_what_is_not_known_may_be_missing_or_null(tmp_path):
    known = {"format": 1, "attempts": [ATTEMPT | {"total": None, "error": None}], "devices": None}
    (tmp_path / "run.json").write_text(json.dumps(known))
    assert read_record(tmp_path) == known


def test_one_of_a_later_version_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 2, "tries": {}}')
    with pytest.raises(sf.DataError, match="format 1 or earlier, got 2, which a later stepfold"):
        read_record(tmp_path)


def test_what_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path / "page", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_what_cannot_be_encoded_is_written_as_a_question_mark(tmp_path):
    replace(tmp_path / "report.html", "<h1>\udcff</h1>")  # the name of a folder that is not UTF-8
    assert (tmp_path / "report.html").read_text() == "<h1>?</h1>"
