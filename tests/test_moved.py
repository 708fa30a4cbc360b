"""Names of version 0.2 work, and say where they are now."""

import importlib
import warnings

import pytest

import stepfold as sf
from stepfold.moved import MOVED

# What `stepfold` had in version 0.2.
NAMES_OF_0_2 = (
    "BaseHook Batches Capsule CheckpointError Checkpoints CompiledStep ConfigError Contents "
    "DataError EvalFn Evaluation Event FitResult GoBack GradFn Hook LossError LossFn NameMap "
    "NameRule OutOfMemoryError PeerTimeoutError Precision Replace Replay Report Restored "
    "RetraceError Reweight RunEvaluation Series ShardingError StepFn StepfoldError Stop Temporary "
    "TrainState TreeMismatchError Writer async_writer average_checkpoints batches "
    "block_diagonal_mask callback check_step choose choose_remat clip_by_ordered_norm collate "
    "compile_step console_writer contents csv_writer describe devices_of dynamic_loss_scale "
    "ema_params evaluate evaluate_run every export_params files fit fsdp get_ema init_state "
    "iterate jsonl_writer latest_step linear_cross_entropy load_params log_to low_precision "
    "make_eval_step make_grad make_mesh make_sharding make_train_step mean mean_by memory_use mix "
    "multi_writer observe only_warn ordered ordered_norm pack parameter_table perplexity place "
    "predict prefetch profile progress read_capsule reduce_once replay restore "
    "roll_back_on_nonfinite roll_back_on_spike save shard_batch sharding_table skip_spikes "
    "start_distributed stop_early stop_on_corruption stop_on_nonfinite stop_on_spike stragglers "
    "tensorboard_writer tfds_source throughput trackio_writer verify wandb_writer watchdog "
    "weight_statistics workers"
)


@pytest.mark.parametrize("name", NAMES_OF_0_2.split())
def test_a_name_of_0_2_is_there_or_warns_of_its_new_place(name):
    with warnings.catch_warnings(record=True, action="always") as caught:
        value = getattr(sf, name)
    if name in sf.__all__:
        assert not caught
        return
    (warning,) = caught
    assert (warning.category, warning.filename) == (DeprecationWarning, __file__)
    assert f"sf.{name} is now sf.{MOVED[name]}" in str(warning.message)
    module, _, attribute = MOVED[name].rpartition(".")
    assert getattr(importlib.import_module(f"stepfold.{module}"), attribute) is value


def test_an_import_of_an_old_name_warns_at_its_line():
    with pytest.warns(DeprecationWarning, match="sf.hooks.stop_early is now sf.hooks") as caught:
        from stepfold import stop_early  # noqa: F401
    assert caught[0].filename == __file__


def test_the_names_at_the_top_are_few():
    assert len(sf.__all__) <= 60
    assert not {*sf.__all__} & MOVED.keys()
