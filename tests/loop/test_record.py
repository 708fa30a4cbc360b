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
        {"format": 1},
        {"format": 1, "attempts": [{"began": ""}]},
        {"format": 1, "attempts": [], "arguments": 3},
    ],
)
def test_other_json_is_refused(tmp_path, record):
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(sf.DataError, match="run.json: expected what fit writes, .* got other JSON"):
        read_record(tmp_path)


def test_one_of_a_later_version_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 2, "tries": {}}')
    with pytest.raises(sf.DataError, match="format 1 or earlier, got 2, which a later stepfold"):
        read_record(tmp_path)


def test_what_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path / "page", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_what_cannot_be_encoded_leaves_no_half_written_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        replace(tmp_path / "report.html", "\udcff")  # as in the name of a folder that is not UTF-8
    assert list(tmp_path.iterdir()) == []
