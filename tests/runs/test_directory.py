"""`RunDirectory`, and the arguments of `fit` that moved there or to `start_distributed`."""

import dataclasses
import inspect
import json
import typing
from pathlib import Path

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.runs.directory import Moved

BATCHES = [{"x": np.ones(4, np.float32)}] * 4


def fit(**options):
    return sf.fit(STEP, start(), BATCHES, hooks=sf.progress("none"), **options)


@pytest.mark.parametrize("make", [str, Path, sf.RunDirectory])
def test_a_run_takes_a_path_or_a_directory(make, tmp_path):
    fit(run_dir=make(tmp_path))
    assert {"run.json", "metrics.jsonl", "report.html"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_a_directory_is_a_value_and_touches_no_disk(tmp_path):
    directory = sf.RunDirectory(tmp_path / "a", config={"rate": 0.1})
    assert directory == sf.RunDirectory(tmp_path / "a", config={"rate": 0.1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        directory.path = tmp_path
    assert [*tmp_path.iterdir()] == []


def test_without_a_path_writers_get_the_config_and_no_file_is_written(tmp_path, monkeypatch):
    class Keep(sf.writers.Writer):
        def write_hparams(self, hparams):
            kept.append(dict(hparams))

    kept = []
    monkeypatch.chdir(tmp_path)
    directory = sf.RunDirectory(config={"rate": 0.1})
    sf.fit(STEP, start(), BATCHES, run_dir=directory, hooks=sf.log_to(Keep()))
    assert kept == [{"rate": 0.1}]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("path", [3, "", b"runs", "s3://bucket/run"])
def test_a_refusal_names_the_argument_as_it_was_written(path):
    with pytest.raises(sf.errors.ConfigError, match="^path: expected a path"):
        sf.RunDirectory(path)
    with pytest.raises(sf.errors.ConfigError, match="^run_dir: expected a path"):
        fit(run_dir=path)


def test_a_name_that_tensorstore_refuses_is_one_of_run_dir(tmp_path):
    for run_dir in (tmp_path / "a\\b", sf.RunDirectory(tmp_path / "a\\b")):
        with pytest.raises(
            sf.errors.ConfigError, match="^run_dir: expected a path without a backslash"
        ):
            fit(run_dir=run_dir)


# Arguments that moved


def test_fit_takes_at_most_14_arguments():
    parameters = inspect.signature(sf.fit).parameters.values()
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    assert len(named) <= 14, named
    assert not {*named} & typing.get_type_hints(Moved).keys()


@pytest.mark.parametrize(
    ("moved", "new"),
    [
        ({"config": {"rate": 0.1}}, "config=…"),
        ({"compilation_cache": False}, "compilation_cache=…"),
        ({"upload": "file://{top}/copy", "config": None}, "upload=…, config=…"),
    ],
)
def test_an_argument_that_moved_still_works_and_says_what_to_write(moved, new, tmp_path):
    if "upload" in moved:
        moved = {**moved, "upload": moved["upload"].format(top=tmp_path)}
    with pytest.warns(DeprecationWarning, match="RunDirectory") as caught:
        fit(run_dir=tmp_path / "run", **moved)
    (warning,) = caught
    names = ", ".join(moved)
    assert str(warning.message) == (
        f"{names}: moved from fit to RunDirectory; "
        f"write run_dir=sf.RunDirectory({str(tmp_path / 'run')!r}, {new})"
    )
    assert warning.filename == __file__
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["config"] == moved.get("config")
    assert written["arguments"]["upload"] == moved.get("upload")
    assert (tmp_path / "copy" / "run.json").exists() is ("upload" in moved)


def test_without_a_directory_it_says_to_give_the_config_alone():
    with pytest.warns(DeprecationWarning, match=r"write run_dir=sf\.RunDirectory\(config=…\)$"):
        fit(config={"rate": 0.1})


@pytest.mark.parametrize("seconds", [60.0, None])
def test_patience_of_fit_is_one_of_the_processes(seconds):
    with pytest.warns(DeprecationWarning, match=r"write sf\.start_distributed\(patience=…\)$"):
        fit(patience=seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience: expected seconds, a number above 0, got 0"),
        ({"upload": "runs/a", "run_dir": "x"}, "upload: expected a URL"),
        ({"upload": "s3://bucket/run"}, "upload: expected the path of a directory to copy"),
        ({"config": [1]}, "config: expected a mapping or a dataclass"),
        (
            {"run_dir": sf.RunDirectory("x"), "config": {}, "upload": None},
            "config, upload: moved from fit to RunDirectory; give them to the RunDirectory",
        ),
    ],
)
def test_what_moved_is_checked_as_before(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.errors.ConfigError, match=f"^{message}"):
        fit(**options)
    assert [*tmp_path.iterdir()] == []


def test_other_keywords_are_refused_as_python_does():
    with pytest.raises(TypeError, match=r"fit\(\) got an unexpected keyword argument 'stesp'"):
        fit(stesp=3)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "60", True])
def test_patience_of_the_processes_is_a_number_of_seconds(seconds):
    with pytest.raises(
        sf.errors.ConfigError, match="^patience: expected seconds, a number above 0"
    ):
        sf.start_distributed(patience=seconds)


def test_one_process_may_be_given_any_patience():
    assert sf.start_distributed(patience=None).processes == 1


def test_the_files_of_an_earlier_run_are_moved_aside_whoever_writes_them(tmp_path):
    class Writes:
        writes_metrics = True

        def __call__(self, event):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": event.step, "own": 1.0}) + "\n")

    run = lambda: sf.fit(STEP, start(), BATCHES, run_dir=tmp_path, hooks=Writes(), log_every=2)
    run()
    with pytest.warns(UserWarning, match="its files are now in .*previous-1"):
        run()
    for folder in (tmp_path, tmp_path / "previous-1"):
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [2, 4]
