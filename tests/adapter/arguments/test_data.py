"""Fields: what examples are made of."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


def test_columns_are_names():
    assert TrainingArguments(ids_to_pop_from_dataset=["a"]).ids_to_pop_from_dataset == ("a",)
    for value in ("a", [3], None):
        with pytest.raises(sf.ConfigError, match="ids_to_pop_from_dataset"):
            TrainingArguments(ids_to_pop_from_dataset=value)


def test_an_end_that_there_is_not():
    with pytest.raises(
        sf.ConfigError, match="truncation_mode: .* keep_end, keep_start, got 'keep'"
    ):
        TrainingArguments(max_length=3, truncation_mode="keep")
