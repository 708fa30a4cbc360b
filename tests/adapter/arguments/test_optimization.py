"""Fields: the optimizer and its schedule."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


@pytest.mark.parametrize("value", [3, "prune", object()])
def test_pruning_is_a_function_or_has_wrap_optax(value):
    with pytest.raises(sf.ConfigError, match=r"pruning_module: expected .* wrap_optax\(tx\), got"):
        TrainingArguments(pruning_module=value)


def test_an_integer_rate_is_the_float():
    assert TrainingArguments(learning_rate=1) == TrainingArguments(learning_rate=1.0)
    for value in (0, -1e-3, float("nan"), float("inf"), "0.1"):
        with pytest.raises(sf.ConfigError, match="learning_rate: expected a number above 0"):
            TrainingArguments(learning_rate=value)


def test_an_optimizer_that_there_is_not():
    with pytest.raises(sf.ConfigError, match="optimizer: expected one of .* got 'adamv'; did you"):
        TrainingArguments(optimizer="adamv")
    with pytest.raises(sf.ConfigError, match="optimizer: expected a text, got 3"):
        TrainingArguments(optimizer=3)
