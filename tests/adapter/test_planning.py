"""The numbers of a run."""

import jax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments, plan


def planned(train=None, evaluation=None, devices=8, **fields):
    return plan(TrainingArguments(**fields), train, evaluation, devices)


@pytest.mark.parametrize(
    ("fields", "batch", "accumulate"),
    [
        ({}, 32, 1),
        ({"total_batch_size": 64}, 64, 1),
        ({"per_device_train_batch_size": 2}, 16, 1),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 16, 4),
        ({"total_batch_size": 64, "gradient_accumulation_steps": 4}, 64, 4),
        # Beside the whole, a device's is the most that it takes at once.
        ({"total_batch_size": 64, "per_device_train_batch_size": 2}, 64, 4),
        ({"total_batch_size": 32, "per_device_train_batch_size": 8}, 32, 1),
    ],
)
def test_the_batch_is_of_all_devices_and_microbatches(fields, batch, accumulate):
    found = planned(**fields)
    assert (found.train_batch, found.accumulate) == (batch, accumulate)


def test_devices_are_counted_or_asked_of_jax():
    arguments = TrainingArguments(per_device_train_batch_size=2)
    assert plan(arguments).train_batch == 2 * jax.device_count()
    assert plan(arguments, devices=jax.devices()[:3]).train_batch == 6
    with pytest.raises(sf.ConfigError, match=r"devices: expected at least one, got \[\]"):
        plan(arguments, devices=[])


def test_an_accumulation_that_does_not_fit_is_refused():
    with pytest.raises(sf.ConfigError, match=r"cut the batch of 32 .* got 5; give one of 1, 2, 4"):
        planned(gradient_accumulation_steps=5)
    with pytest.raises(sf.ConfigError, match=r"4 examples at once .*=1; accumulate 8"):
        planned(total_batch_size=64, per_device_train_batch_size=1, gradient_accumulation_steps=2)


def test_the_batch_of_the_evaluation():
    assert planned(total_batch_size=64).eval_batch == 64
    assert planned(per_device_eval_batch_size=3).eval_batch == 24
    assert planned(eval_batch_size=24, per_device_eval_batch_size=3).eval_batch == 24
    with pytest.raises(sf.ConfigError, match="on 8 devices these are 10 and 24 examples"):
        planned(eval_batch_size=10, per_device_eval_batch_size=3)


@pytest.mark.parametrize(
    ("fields", "epoch_steps", "steps"),
    [
        ({}, 31, 31),
        ({"num_train_epochs": 3}, 31, 93),
        ({"num_train_epochs": 3, "max_steps": -1}, 31, 93),
        ({"num_train_epochs": 3, "max_steps": 500}, 31, 500),
        ({"num_train_epochs": 3, "max_steps": 0.5}, 31, 46),
        ({"num_train_epochs": 3, "per_epoch_training_steps": 10}, 10, 30),
    ],
)
def test_the_steps_of_a_run(fields, epoch_steps, steps):
    found = planned(1_000, **fields)
    assert (found.epoch_steps, found.steps) == (epoch_steps, steps)


def test_what_nobody_knows_is_none():
    found = planned()
    assert (found.epoch_steps, found.steps, found.eval_steps) == (None, None, None)
    with pytest.raises(sf.ConfigError, match=r"log_steps: expected a count .* got 0.1; give max_s"):
        planned(log_steps=0.1)


def test_too_few_examples_for_a_batch():
    with pytest.raises(sf.ConfigError, match="at most the 20 examples .* batches of 32"):
        planned(20)


def test_fractions_are_of_all_steps():
    found = planned(max_steps=200, save_steps=0.25, log_steps=0.1, output_dir="a")
    assert (found.save_steps, found.log_steps) == (50, 20)
    assert planned(max_steps=5, log_steps=0.1).log_steps == 1


def test_the_batches_of_an_evaluation():
    assert planned(None, 100).eval_steps == 4  # the rest makes a batch, too
    assert planned(None, 100, max_evaluation_steps=2).eval_steps == 2
    assert planned(None, None, per_epoch_evaluation_steps=7).eval_steps == 7
    assert planned(None, 100, do_eval=False).eval_steps is None


def test_when_it_is_evaluated():
    def when(**fields):
        found = planned(**fields)
        return found.evaluates, found.evaluation_every, found.evaluation_every_epochs

    assert when() == (True, None, None)
    assert when(eval_steps=5) == (True, 5, None)
    assert when(evaluation_strategy="steps", eval_steps=5) == (True, 5, None)
    assert when(evaluation_strategy="epoch") == (True, None, 1)
    assert when(evaluation_strategy="epoch", per_epoch_training_steps=9) == (True, 9, None)
    assert when(evaluation_strategy="no") == (False, None, None)
    assert when(do_eval=False) == (False, None, None)


def test_when_it_is_saved():
    def when(**fields):
        found = planned(output_dir="a", **fields)
        return found.save_steps, found.save_epochs

    assert when() == (None, None)
    assert when(save_steps=0) == (None, None)
    assert when(save_steps=10) == (10, None)
    assert when(save_strategy="epoch") == (None, 1)
    assert when(save_strategy="epoch", save_steps=10) == (10, 1)  # both, as Hezar does
    assert when(save_strategy="epoch", per_epoch_training_steps=7) == (7, None)
    with pytest.raises(sf.ConfigError, match="expected one distance from save to save"):
        when(save_strategy="epoch", per_epoch_training_steps=7, save_steps=10)


def test_what_is_shown_and_written_meet_at_log_points():
    found = planned(log_steps=20, report_steps=30)
    assert (found.log_every, found.log_steps, found.report_steps) == (10, 20, 30)
    assert planned(log_steps=7).report_steps == 7


@pytest.mark.parametrize("name", ["warmup_steps", "step_start_point"])
def test_what_goes_beyond_the_end_is_refused(name):
    with pytest.raises(sf.ConfigError, match=f"{name}: expected fewer than the 31 steps"):
        planned(1_000, **{name: 31})
    assert planned(1_000, **{name: 30}).steps == 31


def test_a_time_limit_is_in_seconds():
    assert planned(training_time_limit="1h30m").seconds == 5400.0
    assert planned().seconds is None
