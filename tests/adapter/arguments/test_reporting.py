"""Fields: what a run shows and writes."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


def test_kinds_of_files_are_known():
    assert TrainingArguments(report_to=["csv", "tensorboard"]).report_to == ("csv", "tensorboard")
    with pytest.raises(sf.ConfigError, match=r"report_to\[0\]: .* got 'tensorbord'; did you mean"):
        TrainingArguments(report_to=["tensorbord"])


def test_a_bar_that_there_is_not():
    with pytest.raises(sf.ConfigError, match="one of tqdm, rich, json, none, got 'tdqm'; did you"):
        TrainingArguments(progress_bar_type="tdqm")


def test_no_distance_by_any_word_for_it():
    for value in (0, None):
        arguments = TrainingArguments(weight_distribution_log_steps=value)
        assert arguments.weight_distribution_log_steps is None
