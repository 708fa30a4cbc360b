from pathlib import Path

import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.report.reading import names_of, read_run

from . import made


def test_all_that_there_is_is_read(tmp_path):
    made.run(tmp_path, arguments={"steps": 100})
    with sf.Checkpoints(tmp_path / "checkpoints", every=10) as series:
        for step, loss in {10: 0.5, 20: 0.25}.items():
            series.save({"w": np.ones(2)}, step=step, metrics={"eval/loss": loss})
    (tmp_path / "checkpoints" / "20" / "state" / "_METADATA").unlink()
    run = read_run(tmp_path)
    assert run.argument("steps") == 100
    assert run.argument("epochs") is None
    assert run.curves["eval/loss"].values.tolist() == [1.5, 1.75]
    assert [(one.step, one.metrics, one.whole) for one in run.checkpoints] == [
        (10, {"eval/loss": 0.5}, True),
        (20, {}, False),
    ]


def test_checkpoints_may_be_elsewhere(tmp_path):
    with sf.Checkpoints(tmp_path / "there", every=10) as series:
        series.save({"w": np.ones(2)}, step=10)
    made.run(tmp_path / "run", arguments={"checkpoints": {"directory": str(tmp_path / "there")}})
    assert [one.step for one in read_run(tmp_path / "run").checkpoints] == [10]


def test_an_empty_directory_is_an_empty_run(tmp_path):
    run = read_run(tmp_path)
    assert (run.record, run.curves, run.checkpoints, run.attempts) == ({}, {}, [], ())


def test_a_damaged_record_is_told(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(sf.DataError, match="run.json: expected JSON"):
        read_run(tmp_path)


def test_runs_are_called_by_as_much_of_a_path_as_is_needed():
    places = [Path(place) for place in ("/a/x/run", "/a/y/run", "/a/y/other")]
    assert names_of(places) == ["x/run", "y/run", "y/other"]
    assert names_of([Path("/")]) == ["/"]
