import copy
import functools
import json
import runpy
import sys

import pytest

from stepfold.loop.command import main

from .report import made


@pytest.fixture
def says(capsys):
    def run(*arguments):
        code = main([*map(str, arguments)])
        told = capsys.readouterr()
        return code, (told.out + told.err).strip()

    return run


def test_the_page_of_a_run_is_written_into_it(tmp_path, says):
    made.run(tmp_path / "a")
    assert says("report", tmp_path / "a") == (0, str(tmp_path / "a" / "report.html"))
    assert "<h1>a</h1>" in (tmp_path / "a" / "report.html").read_text()
    assert not (tmp_path / "report.html").exists()


def test_several_runs_are_compared_beside_them_or_where_it_is_said(tmp_path, says):
    for name in "ab":
        made.run(tmp_path / name)
    assert says("report", tmp_path / "a", tmp_path / "b") == (0, str(tmp_path / "report.html"))
    assert "<h1>2 runs</h1>" in (tmp_path / "report.html").read_text()
    out = tmp_path / "b" / "mine.html"
    assert says("report", tmp_path / "a", tmp_path / "b", "--out", out) == (0, str(out))
    assert "<h1>2 runs</h1>" in out.read_text()


def test_a_run_given_twice_is_one(tmp_path, says):
    made.run(tmp_path / "a")
    assert says("report", tmp_path / "a", tmp_path / "a" / ".")[1].endswith("a/report.html")


def test_one_that_was_killed_while_it_wrote_has_a_page(tmp_path, says):
    place = made.run(tmp_path / "a", attempts=[made.attempt(ended=None, stopped=None)])
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "train/lo')
    assert says("report", place)[0] == 0
    assert "Nothing was heard for" in (place / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none",), "none: expected the directory of a run, got nothing there; look at the path"),
        (("file",), "file: expected the directory of a run, got a file"),
        (("a", "--out", "a"), "--out: expected a file in a directory that is there, got a"),
        (("a", "--out", "no/page.html"), "--out: expected a file in a directory that is there"),
    ],
)
def test_a_wrong_question_is_answered_in_words(tmp_path, says, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    made.run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    code, told = says("report", *arguments)
    assert code == 2
    assert words in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"for', "expected JSON, got something damaged"),
        ('{"format": 7}', "a later stepfold wrote"),
    ],
)
def test_a_record_that_cannot_be_read_is_told(tmp_path, says, text, words):
    (made.run(tmp_path / "a") / "run.json").write_text(text)
    code, told = says("report", tmp_path / "a")
    assert code == 1
    assert words in told
    assert not (tmp_path / "a" / "report.html").exists()


def edits(value, path=()):
    """List each place in a record, with the record in which something else is there."""
    for key in value if isinstance(value, dict) else range(len(value[:2])):
        for other in (None, "x", [-1.5]):
            yield (*path, key), other
        if isinstance(value[key], dict | list):
            yield from edits(value[key], (*path, key))


def test_whatever_was_edited_in_a_record_there_is_a_page_or_a_sentence(tmp_path, says):
    error = {"type": "OSError", "message": "no"}
    attempts = [made.attempt(error=error), made.attempt(ended=None)]
    facts = {
        "program": "train.py",
        "arguments": {
            "evaluations": [{"name": "eval", "every": 10}],
            "checkpoints": {"directory": None, "best": "eval/loss", "mode": None},
        },
        "devices": {"kind": "cpu", "count": 1},
        "parameters": {"count": 6, "bytes": 24, "leaves": [["w", [2, 3], "float32", 6]]},
    }
    place = made.run(tmp_path / "a", attempts=attempts, **facts)
    record = json.loads((place / "run.json").read_text())
    codes = set()
    for (*way, last), other in edits(record):
        edited = copy.deepcopy(record)
        functools.reduce(lambda inner, key: inner[key], way, edited)[last] = other
        (place / "run.json").write_text(json.dumps(edited))
        code, told = says("report", place)
        codes.add(code)
        assert (place.name in told, told.count("\n")) == (True, 0)
    assert codes == {0, 1}


def test_it_is_a_command(tmp_path, monkeypatch, capsys):
    made.run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["", "report", str(tmp_path / "a")])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_module("stepfold.loop", run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'report.html'}\n"
