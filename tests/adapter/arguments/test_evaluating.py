"""Fields: when it is evaluated."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


def test_a_strategy_that_there_is_not():
    with pytest.raises(sf.ConfigError, match="one of no, steps, epoch, got 'epochs'; did you mean"):
        TrainingArguments(evaluation_strategy="epochs")


def test_a_configuration_of_the_loss_has_names():
    with pytest.raises(sf.ConfigError, match="loss_config: expected a dict with names as keys"):
        TrainingArguments(loss_config=["label_smoothing"])
