"""The command `python -m stepfold report` writes the page of runs, or says why not."""

import copy
import functools
import json
import os
import runpy
import sys

import pytest

from stepfold.__main__ import main

from .run_files import Page, attempt, write_run


@pytest.fixture
def command(capsys):
    def run(*arguments):
        code = main([*map(str, arguments)])
        output = capsys.readouterr()
        return code, (output.out + output.err).strip()

    return run


def data_of(path):
    """Return the data of a page."""
    return Page(path.read_text()).data


def test_the_page_of_a_run_is_written_into_its_directory_unless_a_file_is_given(tmp_path, command):
    folder = write_run(tmp_path / "a")
    before = sorted(folder.iterdir())
    assert command("report", folder, "--out", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page.html").exists()
    assert sorted(folder.iterdir()) == before
    for arguments in ([folder], [folder, folder / "."]):  # named twice, it is one
        assert command("report", *arguments) == (0, str(folder / "report.html"))
    assert data_of(folder / "report.html")["title"] == "a"
    assert not (tmp_path / "report.html").exists()


def test_a_name_that_is_not_utf8_has_a_page(tmp_path, command):
    folder = write_run(tmp_path / os.fsdecode(b"run-\xff"))
    assert command("report", folder, "--out", tmp_path / "page.html")[0] == 0
    assert "<title>run-?</title>" in (tmp_path / "page.html").read_text()


def test_several_runs_are_compared_in_their_parent_directory_or_in_a_file(tmp_path, command):
    for name in "ab":
        write_run(tmp_path / name)
    assert command("report", tmp_path / "a", tmp_path / "b") == (0, str(tmp_path / "report.html"))
    assert len(data_of(tmp_path / "report.html")["runs"]) == 2
    out = tmp_path / "b" / "mine.html"
    assert command("report", tmp_path / "a", tmp_path / "b", "--out", out) == (0, str(out))
    assert len(data_of(out)["runs"]) == 2


def test_a_comparison_links_to_the_pages_of_the_runs(tmp_path, command):
    for name in "ab":
        command("report", write_run(tmp_path / name))
    command("report", tmp_path / "a", tmp_path / "b")
    files = data_of(tmp_path / "report.html")["files"]
    assert files["runs"] == [["a", "./a/report.html"], ["b", "./b/report.html"]]
    command("report", tmp_path / "a")
    assert data_of(tmp_path / "a" / "report.html")["files"]["output"][1] == "./../report.html"


def test_a_run_that_was_killed_while_it_wrote_has_a_page_and_a_csv(tmp_path, command):
    rows = {1: {"train/loss": 2.0}, 2: {"eval/loss": 0.1}}
    folder = write_run(tmp_path / "a", rows, attempts=[attempt(ended=None, stop=None)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    assert command("report", folder)[0] == 0
    assert data_of(folder / "report.html")["reason"].startswith("No update for")
    assert (folder / "metrics.csv").read_text() == "step,train/loss,eval/loss\n1,2.0,\n2,,0.1\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("none",),
            "none: expected the directory of a run, got a path that does not exist; check the path",
        ),
        (("file",), "file: expected the directory of a run, got a file; check the path"),
        (("a", "--out", "a"), "--out: expected a file in an existing directory, got a"),
        (("a", "--out", "no/page.html"), "--out: expected a file in an existing directory, got no"),
    ],
)
def test_a_wrong_argument_is_explained(tmp_path, command, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    code, output = command("report", *arguments)
    assert code == 2
    assert words in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"for', "expected JSON, got a damaged file"),
        ('{"format": 7}', "of a later stepfold"),
    ],
)
def test_a_run_info_that_cannot_be_read_is_an_error(tmp_path, command, text, words):
    (write_run(tmp_path / "a") / "run.json").write_text(text)
    code, output = command("report", tmp_path / "a")
    assert code == 1
    assert words in output
    assert not (tmp_path / "a" / "report.html").exists()


def edits(value, path=()):
    """List each entry of a run info with other values for it."""
    for key in value if isinstance(value, dict) else range(len(value[:2])):
        for other in (None, "x", [-1.5]):
            yield (*path, key), other
        if isinstance(value[key], dict | list):
            yield from edits(value[key], (*path, key))


def test_an_edited_run_info_gives_a_page_or_one_line_of_error(tmp_path, command):
    parts = [["start", 1.5], ["steps", 2]]
    stop = {"kind": "error", "message": "no"}
    attempts = [attempt(stop=stop, parts=parts), attempt(ended=None)]
    metadata = {
        "program": "train.py",
        "arguments": {
            "evaluations": [{"name": "eval", "every": 10}],
            "checkpoints": {"directory": None, "best": "eval/loss", "mode": None},
        },
        "devices": {"kind": "cpu", "count": 1},
        "parameters": {"count": 6, "bytes": 24, "leaves": [["w", [2, 3], "float32", 6]]},
    }
    folder = write_run(tmp_path / "a", attempts=attempts, **metadata)
    info = json.loads((folder / "run.json").read_text())
    codes = set()
    for (*path, last), other in edits(info):
        edited = copy.deepcopy(info)
        functools.reduce(lambda inner, key: inner[key], path, edited)[last] = other
        (folder / "run.json").write_text(json.dumps(edited))
        code, output = command("report", folder)
        codes.add(code)
        assert (folder.name in output, output.count("\n")) == (True, 0)
    assert codes == {0, 1}


def test_it_is_a_command(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["", "report", str(tmp_path / "a")])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_module("stepfold.loop", run_name="__main__")  # as in version 0.2
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'a' / 'report.html'}\n"
    assert output.err == "python -m stepfold.loop report is now python -m stepfold report\n"
