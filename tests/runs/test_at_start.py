"""Evaluations and checkpoints before the first step."""

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf

from .runs import Cut, cut_at, rows

DATA = {"x": np.ones(40, np.float32)}
MEASURE = lambda state: {"w": float(state.params["w"])}


def run(folder, **options):
    return sf.fit(
        STEP, start(), sf.batches(DATA, 4), steps=4, run_dir=folder,
        evaluation=sf.Evaluation(MEASURE, every=2, at_start=True),
        checkpoints=sf.Checkpoints(every=2, keep=None, at_start=True), **options,
    )  # fmt: skip


def test_the_first_values_are_those_before_any_step(tmp_path):
    result = run(tmp_path)
    assert result.history["eval/w"].steps == [0, 2, 4]
    assert result.history["eval/w"][0] == float(start().params["w"])
    assert sf.checkpoint.contents(tmp_path / "checkpoints").step == 4
    assert sorted(sf.checkpoint.verify(tmp_path / "checkpoints")) == [0, 2, 4]
    assert rows(tmp_path / "metrics.jsonl") == [0, 2, 4]


def test_a_run_that_is_cut_in_its_first_step_resumes_from_the_start(tmp_path):
    seen = []
    with pytest.raises(Cut):
        run(tmp_path, hooks=cut_at(1), log_every=1)
    result = run(tmp_path, hooks=lambda event: seen.append((event.kind, event.step)))
    assert ("eval", 0) not in seen
    assert result.history["eval/w"].steps == [0, 2, 4]


def test_going_back_works_in_the_first_interval(tmp_path):
    def hook(event):
        if event.step == 1 and not back:
            back.append(event.step)
            return sf.hooks.GoBack(skip=1)
        return None

    back = []
    result = run(tmp_path, hooks=hook, log_every=1)
    assert (result.resumed, result.steps, back) == (0, 4, [1])
    assert result.history["eval/w"].steps == [0, 2, 4]


def test_at_start_is_a_flag():
    with pytest.raises(
        sf.errors.ConfigError, match="at_start: expected True or False, got str 'yes'"
    ):
        sf.Evaluation(MEASURE, at_start="yes")
    with pytest.raises(sf.errors.ConfigError, match="at_start: expected True or False, got int 1"):
        sf.Checkpoints(every=2, at_start=1)
