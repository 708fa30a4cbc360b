"""The sizes and intervals of a run."""

import jax
import pytest
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.sizes import compute_sizes


def sizes_for(train=None, evaluation=None, devices=8, **fields):
    return compute_sizes(TrainingArguments(**fields), train, evaluation, devices)


@shows(
    "BaseTrainer",
    "Configuration example",
    {
        "`per_device_train_batch_size`": "with `total_batch_size`, the most on a device at once; "
        "alone, it sets the batch"
    },
)
@pytest.mark.parametrize(
    ("fields", "batch", "accumulate"),
    [
        ({}, 32, 1),
        ({"total_batch_size": 64}, 64, 1),
        ({"per_device_train_batch_size": 2}, 16, 1),
        ({"total_batch_size": 64, "gradient_accumulation_steps": 4}, 64, 4),
        # With a total, the size per device is the most that one takes at once.
        ({"total_batch_size": 64, "per_device_train_batch_size": 2}, 64, 4),
        ({"total_batch_size": 32, "per_device_train_batch_size": 8}, 32, 1),
        ({"total_batch_size": 64, "per_device_train_batch_size": 3}, 64, 4),
    ],
)
def test_a_batch_is_over_all_devices_and_microbatches(fields, batch, accumulate):
    sizes = sizes_for(**fields)
    assert (sizes.train_batch, sizes.accumulate) == (batch, accumulate)


def test_devices_default_to_those_of_jax():
    arguments = TrainingArguments(per_device_train_batch_size=2)
    assert compute_sizes(arguments).train_batch == 2 * jax.device_count()
    assert compute_sizes(arguments, devices=jax.devices()[:3]).train_batch == 6
    for none in ([], 0):
        with pytest.raises(sf.errors.ConfigError, match="devices: expected at least one, got"):
            compute_sizes(arguments, devices=none)


def test_an_accumulation_that_does_not_fit_is_refused():
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"gradient_accumulation_steps: .* batch of 32 .* got 5; give one of 1, 2, 4",
    ):
        sizes_for(gradient_accumulation_steps=5)
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"gradient_accumulation_steps: expected at least 8, .* 8 devices .* at most "
        r"per_device_train_batch_size=1 of total_batch_size=64 at once, got 2; leave out one",
    ):
        sizes_for(total_batch_size=64, per_device_train_batch_size=1, gradient_accumulation_steps=2)


@shows("BaseTrainer", "Configuration example", {"`per_device_eval_batch_size`": "the same"})
def test_evaluation_batch():
    assert sizes_for(total_batch_size=64).eval_batch == 64
    assert sizes_for(per_device_eval_batch_size=3).eval_batch == 24
    assert sizes_for(eval_batch_size=24, per_device_eval_batch_size=3).eval_batch == 24
    with pytest.raises(
        sf.errors.ConfigError,
        match="eval_batch_size: expected per_device_eval_batch_size=3 times 8 devices, 24, got 10",
    ):
        sizes_for(eval_batch_size=10, per_device_eval_batch_size=3)


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {"iterates over epochs and steps": "by `num_train_epochs` or `max_steps`"},
)
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
def test_steps(fields, epoch_steps, steps):
    sizes = sizes_for(1_000, **fields)
    assert (sizes.epoch_steps, sizes.steps) == (epoch_steps, steps)


def test_without_a_length_fractions_are_refused():
    sizes = sizes_for()
    assert (sizes.epoch_steps, sizes.steps, sizes.eval_steps) == (None, None, None)
    for name in ("log_steps", "max_steps", "save_steps"):
        with pytest.raises(
            sf.errors.ConfigError, match=rf"{name}: expected an integer, .* got 0.1; give max_steps"
        ):
            sizes_for(output_dir="a", **{name: 0.1})


def test_a_batch_needs_enough_examples():
    with pytest.raises(
        sf.errors.ConfigError, match="total_batch_size: expected at most the 20 training .* got 32"
    ):
        sizes_for(20)
    assert sizes_for(20, per_epoch_training_steps=3).epoch_steps == 3


def test_fractions_are_of_all_steps():
    sizes = sizes_for(max_steps=200, save_steps=0.25, log_steps=0.1, output_dir="a")
    assert (sizes.save_steps, sizes.log_steps) == (50, 20)
    assert sizes_for(max_steps=5, log_steps=0.1).log_steps == 1
    assert sizes_for(max_steps=100, log_steps=0.29).log_steps == 29  # 0.29 * 100 is below 29


def test_batches_of_an_evaluation():
    assert sizes_for(None, 100).eval_steps == 4  # the last one is smaller
    assert sizes_for(None, 100, max_evaluation_steps=2).eval_steps == 2
    assert sizes_for(None, None, per_epoch_evaluation_steps=7).eval_steps == 7
    assert sizes_for(None, 100, do_eval=False).eval_steps is None


@shows("Trainer Protocol", "Required methods: train", {"evaluates by the arguments": "the same"})
def test_evaluation_intervals():
    def intervals(**fields):
        sizes = sizes_for(**fields)
        return sizes.evaluates, sizes.evaluation_every, sizes.evaluation_every_epochs

    assert intervals() == (True, None, None)
    assert intervals(eval_steps=5) == (True, 5, None)
    assert intervals(evaluation_strategy="steps", eval_steps=5) == (True, 5, None)
    assert intervals(evaluation_strategy="epoch") == (True, None, 1)
    assert intervals(evaluation_strategy="epoch", per_epoch_training_steps=9) == (True, 9, None)
    assert intervals(evaluation_strategy="no") == (False, None, None)
    assert intervals(do_eval=False) == (False, None, None)


def test_save_intervals():
    def intervals(**fields):
        sizes = sizes_for(output_dir="a", **fields)
        return sizes.save_steps, sizes.save_epochs

    assert intervals() == (None, None)
    assert intervals(save_steps=0) == (None, None)
    assert intervals(save_steps=10) == (10, None)
    assert intervals(save_strategy="epoch") == (None, 1)
    assert intervals(save_strategy="epoch", save_steps=10) == (10, 1)  # both, as in Hezar
    assert intervals(save_strategy="epoch", per_epoch_training_steps=7) == (7, None)
    assert intervals(save_strategy="epoch", per_epoch_training_steps=7, save_steps=7) == (7, None)
    with pytest.raises(
        sf.errors.ConfigError,
        match="save_steps: expected per_epoch_training_steps=7, .* got 10; leave out one",
    ):
        intervals(save_strategy="epoch", per_epoch_training_steps=7, save_steps=10)


def test_log_points_are_where_metrics_are_shown_or_written():
    sizes = sizes_for(log_steps=20, report_steps=30)
    assert (sizes.log_every, sizes.log_steps, sizes.report_steps) == (10, 20, 30)
    assert sizes_for(log_steps=7).report_steps == 7
    assert sizes_for(log_steps=7, performance_mode=True).log_every == 7


@pytest.mark.parametrize("name", ["warmup_steps", "step_start_point"])
def test_fields_beyond_the_last_step_are_refused(name):
    with pytest.raises(
        sf.errors.ConfigError, match=f"{name}: expected fewer than the 31 steps of the run, got 31"
    ):
        sizes_for(1_000, **{name: 31})
    assert sizes_for(1_000, **{name: 30}).steps == 31


def test_the_time_limit_is_in_seconds():
    assert sizes_for(training_time_limit="1h30m").seconds == 5400.0
    assert sizes_for().seconds is None


def test_the_names_of_version_0_2_warn_of_the_new_ones():
    with pytest.warns(DeprecationWarning, match="sf.adapter.plan is now sf.adapter.compute_sizes"):
        from stepfold.adapter import plan
    with pytest.warns(
        DeprecationWarning, match="sf.adapter.Plan is now sf.adapter.Sizes"
    ) as caught:
        assert isinstance(plan(TrainingArguments()), sf.adapter.Plan)
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="'stepfold.adapter' has no attribute 'plans'"):
        sf.adapter.plans  # noqa: B018
