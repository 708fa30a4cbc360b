"""Fields: how long a run is."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


def test_all_steps_by_any_word_for_it():
    for value in (None, -1, 0):
        assert TrainingArguments(max_steps=value).max_steps is None


@pytest.mark.parametrize("value", [-2, 1.0, 1.5, "10", True])
def test_steps_that_are_none(value):
    with pytest.raises(
        sf.ConfigError, match="max_steps: expected an integer of at least 1, or a fraction"
    ):
        TrainingArguments(max_steps=value)


@pytest.mark.parametrize(
    "name",
    [
        "total_batch_size",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "eval_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "per_epoch_training_steps",
    ],
)
@pytest.mark.parametrize("value", [-1, 0, 1.5])
def test_a_size_below_one_is_refused(name, value):
    with pytest.raises(sf.ConfigError, match=f"{name}: expected an integer of at least 1, got"):
        TrainingArguments(**{name: value})


def test_a_time_limit_is_kept_as_it_was_said():
    assert TrainingArguments(training_time_limit="1h30m").training_time_limit == "1h30m"
    with pytest.raises(sf.ConfigError, match="training_time_limit: .* '1h30m' or '2d', got '1 x'"):
        TrainingArguments(training_time_limit="1 x")
