"""Names of version 0.2 work, and say where they are now."""

import inspect
import re
import warnings
from operator import attrgetter

import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.moved import ARGUMENTS, KEYWORDS, MOVED

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
    if name in ARGUMENTS:
        assert value.keywords == ARGUMENTS[name]
        value = value.func
    assert find(MOVED[name]) is value


def find(place):
    return attrgetter(place)(sf)


def test_an_import_of_an_old_name_warns_at_its_line():
    with pytest.warns(DeprecationWarning, match="sf.stop_early is now sf.hooks") as caught:
        from stepfold import stop_early  # noqa: F401
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("stop_on_nonfinite", "hooks.on_nonfinite"),
        ("stop_on_spike", "hooks.on_spike"),
        ("roll_back_on_nonfinite", 'hooks.on_nonfinite(action="go_back")'),
        ("roll_back_on_spike", 'hooks.on_spike(action="go_back")'),
        ("console_writer", "writers.console"),
        ("jsonl_writer", "writers.jsonl"),
        ("csv_writer", "writers.jsonl(csv=True)"),
        ("tensorboard_writer", "writers.tensorboard"),
        ("wandb_writer", "writers.wandb"),
        ("trackio_writer", 'writers.wandb(library="trackio")'),
    ],
)
def test_a_name_that_needs_an_argument_is_spelled_as_a_call(name, spelling):
    command = "`python -m stepfold rename FILES` rewrites it"
    message = f"sf.{name} is now sf.{spelling}; {command}"
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(message)}$"):
        getattr(sf, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_of_0_2_do_what_they_did(tmp_path):
    event = sf.Event(2, None, {"train/loss": np.nan}, None, {"train/loss": np.array([1.0, np.nan])})
    stop, go_back = (
        hook.update(hook.init, event)[1]
        for hook in (sf.stop_on_nonfinite(), sf.roll_back_on_nonfinite("train/loss", skip=2))
    )
    assert str(stop) == "train/loss is nan in step 2"
    assert (go_back.skip, go_back.limit) == ((2, 4), 3)
    assert sf.hooks.GoBack in sf.roll_back_on_spike(window=9).returns
    assert sf.hooks.GoBack not in sf.stop_on_spike(window=9).returns
    for writer in (
        sf.csv_writer(tmp_path / "a.csv"),
        sf.csv_writer(tmp_path / "b.txt"),
        sf.jsonl_writer(tmp_path / "c.jsonl", csv=tmp_path / "d.csv"),
        sf.jsonl_writer(tmp_path / "e.jsonl", csv=None),
        sf.multi_writer(sf.tensorboard_writer(tmp_path / "f"), sf.console_writer()),
    ):
        thread = sf.async_writer(writer)
        thread.write_scalars(1, {"a": 1})
        thread.close()
    names = ["a.csv", "a.csv.jsonl", "b.txt", "b.txt.jsonl", "c.jsonl", "d.csv", "e.jsonl", "f"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "b.txt").read_text() == "step,a\n1,1\n"
    options = {"project": "a", "mode": "offline"}
    assert type(sf.wandb_writer(**options)) is not type(sf.trackio_writer(project="a"))


@pytest.mark.parametrize("place", KEYWORDS)
def test_an_old_keyword_warns_of_its_new_name(place):
    parameters = inspect.signature(find(place)).parameters
    needed = {"Evaluation": {"measure": id}, "optim.skip_spikes": {"tx": optax.sgd(0.1)}}
    for old, new in KEYWORDS[place].items():
        assert new in parameters
        value = {"elsewhere": True, "pattern": "train/loss"}.get(old, 3.0)
        with pytest.warns(DeprecationWarning, match=f": {old}=… is now {new}=…"):
            find(place)(**{old: value}, **needed.get(place, {}))


def test_the_names_at_the_top_are_few():
    assert len(sf.__all__) <= 60
    assert not {*sf.__all__} & MOVED.keys()
