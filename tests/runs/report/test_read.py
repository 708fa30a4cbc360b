"""A run is read while it runs, and what is damaged is left out and counted."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.checkpoint import store as module
from stepfold.runs.report.read import CurveArrays, read_metrics_file, read_run_data, thin

from .run_files import write_run


def read(path):
    curves, _, _ = read_metrics_file(path)
    return {name: [*zip(*map(list, curve), strict=True)] for name, curve in curves.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_growing_file_is_read_as_the_writer_leaves_it(path):
    """The writer replaces the last line by one that has more, and a resume drops lines."""
    writer = sf.writers.jsonl(path)
    for step in range(10, 60, 10):
        writer.write_scalars(step, {"train/loss": step / 4})
        assert read(path) == {"train/loss": [(n, n / 4) for n in range(10, step + 1, 10)]}
    writer.write_scalars(50, {"eval/loss": 3.0})
    assert read(path)["eval/loss"] == [(50, 3.0)]
    assert [step for step, _ in read(path)["train/loss"]] == [10, 20, 30, 40, 50]
    writer.resume(20)
    assert read(path) == {"train/loss": [(10, 2.5), (20, 5.0)]}
    writer.write_scalars(30, {"train/loss": math.nan})
    assert np.isnan(read(path)["train/loss"][-1][1])
    writer.close()


def test_damaged_lines_are_counted_and_left_out(path):
    assert read(path) == {}  # there is none
    lines = ['{"step": 1, "a": 1.0}', "\x00\x00", "[1]", '{"a": 3.0}', '{"step": 2, "a": 2.0}']
    path.write_text("\n".join([*lines, '{"step": 3, "a": 3.0}', '{"step": 4, "a": 4.']))
    curves, _, damaged_lines = read_metrics_file(path)  # the last one was cut off by a kill
    assert (curves["a"].values.tolist(), damaged_lines) == ([1, 2, 3], 3)
    with path.open("a") as file:
        file.write("\n")
    assert (len(read(path)["a"]), read_metrics_file(path)[2]) == (3, 4)


def test_only_numbers_are_curves_and_hyper_parameters_are_kept(path):
    row = {"step": 1, "hparams": {"lr": 0.1}, "text": "a", "on": True, "image": {"shape": [1]}}
    path.write_text(json.dumps({**row, "a": 2}) + "\n" + json.dumps({"step": 2, "a": 3}) + "\n")
    curves, hparams, _ = read_metrics_file(path)
    assert (list(curves), hparams) == (["a"], {"lr": 0.1})


def test_a_file_that_cannot_be_read_is_an_error(path):
    path.mkdir()
    with pytest.raises(
        sf.errors.DataError, match="expected lines of metrics, got a directory instead"
    ):
        read_metrics_file(path)


VALUES = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(
    values=st.lists(VALUES, min_size=1, max_size=400),
    columns=st.integers(1, 50),
    gap=st.integers(1, 7),
)
def test_thinning_drops_no_extreme_of_any_column_and_invents_nothing(values, columns, gap):
    steps = np.arange(0.0, len(values) * gap, gap)
    span = (0.0, float(steps[-1]) or 1.0)
    whole = CurveArrays(steps, np.array(values))
    few = thin(whole, columns, span)
    at = np.searchsorted(steps, few.steps)
    np.testing.assert_array_equal(whole.steps[at], few.steps)
    np.testing.assert_array_equal(whole.values[at], few.values)
    assert np.all(np.diff(few.steps) > 0)
    assert {few.steps[0], few.steps[-1]} <= {steps[0], steps[-1]}
    assert len(few.steps) <= max(2 * columns, 3 * (columns + 1) + 2)
    column = (steps / (span[1] / columns)).astype(int)
    for number in np.unique(column):
        inside = whole.values[column == number]
        left = few.values[np.isin(at, np.flatnonzero(column == number))]
        finite, shown = inside[np.isfinite(inside)], left[np.isfinite(left)]
        if len(finite):
            assert (finite.min(), finite.max()) == (shown.min(), shown.max())
        assert np.isfinite(inside).all() == np.isfinite(left).all()


def test_all_parts_of_a_run_are_read(tmp_path):
    write_run(tmp_path, arguments={"steps": 100})
    with sf.Checkpoints(tmp_path / "checkpoints", every=10) as series:
        for step, loss in {10: 0.5, 20: 0.25}.items():
            series.save({"w": np.ones(2)}, step=step, metrics={"eval/loss": loss})
    (tmp_path / "checkpoints" / "20" / "state" / "_METADATA").unlink()
    run = read_run_data(tmp_path)
    assert run.argument("steps") == 100
    assert run.argument("epochs") is None
    assert run.curves["eval/loss"].values.tolist() == [1.5, 1.75]
    assert [(saved.step, saved.metrics) for saved in run.checkpoints] == [
        (10, {"eval/loss": 0.5}),
        (20, None),
    ]


def test_checkpoints_in_object_storage_are_read_unless_they_are_left_out(tmp_path, monkeypatch):
    sf.save(tmp_path / "there", {"w": jnp.ones(2)}, step=10)
    write_run(tmp_path / "run", arguments={"checkpoints": {"directory": "s3://bucket/run"}})
    store = module.open_store(tmp_path / "there")
    monkeypatch.setattr(module, "open_store", lambda directory: store)
    assert [saved.step for saved in read_run_data(tmp_path / "run").checkpoints] == [10]
    assert read_run_data(tmp_path / "run", remote=False).checkpoints == []
