"""`TrainingArguments`: every field is checked, documented, and comes back from JSON."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from tests.adapter.test_arguments_effects import BY_TRAINER, ROWS

import stepfold as sf
from stepfold import adapter as adapter
from stepfold.adapter import TrainingArguments
from stepfold.adapter.arguments import (
    by_any_name,
    is_changed,
    seconds,
)

FIELDS = {field.name: field for field in fields(TrainingArguments)}
HINTS = get_type_hints(TrainingArguments)
DIR = {"output_dir": "runs/a"}
SCHEDULE = optax.constant_schedule(0.1)
ALIASES = {
    "num_epochs": "num_train_epochs",
    "max_training_steps": "max_steps",
    "batch_size": "total_batch_size",
    "lr_scheduler": "scheduler",
    "lr_scheduler_kwargs": "scheduler_kwargs",
    "max_grad_norm": "clip_grad",
    "max_sequence_length": "max_length",
    "dataloader_shuffle": "shuffle_train_dataset",
    "num_dataloader_workers": "dataloader_num_workers",
    "do_evaluate": "do_eval",
    "evaluation_steps": "eval_steps",
    "patience": "early_stopping_patience",
    "save_directory": "output_dir",
    "save_dir": "output_dir",
    "logging_steps": "log_steps",
}

# Values of single fields.

# What a field needs of the others, so that any value it accepts is accepted together with them.
NEEDS = {
    "save_steps": DIR,
    "save_interval_minutes": DIR,
    "save_total_limit": DIR,
    "grain_shard_index": {"grain_shard_count": 2**40},
    "grain_shard_count": {"grain_shard_index": 0},
    "learning_rate_end": {"scheduler": "linear", "learning_rate": sys.float_info.max},
}


def stored(name, value):
    """Return a value as its field stores it."""
    others = {} if value is None else NEEDS.get(name, {})
    return getattr(TrainingArguments(**others, **{name: value}), name)


GOOD_AND_BAD = {
    "do_train": ([(True, True)], [0, 1, "yes", None]),
    "num_train_epochs": ([(3, 3)], [0, -1, 1.0, True, "3", None]),
    "steps_per_call": ([(8, 8)], [0, -1, 1.0, True, "3", None]),
    "warmup_steps": ([(0, 0), (3, 3)], [-1, 1.0, True, "3", None]),
    "seed": ([(0, 0), (2**63 - 1, 2**63 - 1)], [-1, 2**63, 1.0, True, "3", None]),
    "log_steps": ([(3, 3), (0.5, 0.5)], [0, 1.0, 0.0, -1, 1.5, True, math.nan, "1"]),
    "learning_rate": ([(1, 1.0)], [0, -1.0, math.inf, math.nan, True, "1", 10**400]),
    "weight_decay": ([(0, 0.0), (None, None)], [-0.1, True]),
    "model_name": ([("a", "a")], ["", " ", 3, None]),
    "output_dir": ([(Path("runs") / "a", "runs/a"), (None, None)], ["", 3, ["a"]]),
    "save_strategy": ([("no", "no"), (None, None)], ["No", "step", 3, []]),
    "ids_to_pop_from_dataset": ([(["a"], ("a",)), ((), ())], ["a", [""], [3], None, {"a"}]),
    "report_to": ([(["csv", "tensorboard"], ("csv", "tensorboard"))], ["csv", ["tsv"], None]),
    "sharding_array": (
        [((1, -1, 1, 1), (1, -1, 1, 1)), ([2] * 4, (2,) * 4), ("1,-1, 2,1", (1, -1, 2, 1))],
        [(), (0,), (-1, -1), (-2,), (1.0,), (True,), "a", "1,x", 3],
    ),
    "step_partition_spec": (
        [
            (PartitionSpec(("dp", "fsdp"), None), (("dp", "fsdp"), None)),
            ([["dp"], "tp"], (("dp",), "tp")),
        ],
        ["a", [3], [[]], [""], 3],
    ),
    "frozen_parameters": ([("^a", "^a"), (None, None)], ["(", "", 3]),
    "param_dtype": (
        [
            *[("bf16", "bfloat16"), (jnp.float16, "float16"), (jnp.dtype("float64"), "float64")],
            *[("fp16", "float16"), ("f32", "float32"), ("fp64", "float64"), (None, None)],
        ],
        ["int32", jnp.int8, "float", "x", 3, float],
    ),
    "loss_config": ([({"a": 1}, {"a": 1})], [[], None, {1: 2}, "a", ["label_smoothing"]]),
    "custom_scheduler": ([(SCHEDULE, SCHEDULE), (None, None)], [3, int, "cosine"]),
    "pruning_module": ([(SCHEDULE, SCHEDULE), (None, None)], [3, "prune", object()]),
    "training_time_limit": (
        [(3, 3.0), ("1h30m", "1h30m"), (None, None)],
        [0, -1, "", "1x", "1 x", "h", "0s", True, math.inf],
    ),
    "resume_from_checkpoint": (
        [(True, True), (False, False), ("runs/b", "runs/b"), (Path("a"), "a"), (None, None)],
        [3, "", 1.0],
    ),
    "max_steps": ([(None, None), (-1, None), (0, None), (3, 3)], [-2, 1.0, 1.5, "10", True, -1.0]),
    "save_steps": ([(None, None), (0, None), (0.5, 0.5)], [-1, False, 0.0]),
    "weight_distribution_log_steps": ([(None, None), (0, None), (2, 2)], [-1, False, 0.5]),
    "gradient_checkpointing": (
        [("", "none"), (None, "none"), ("none", "none")],
        ["nothing", len, 3, True],
    ),
}


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_a_field_accepts_its_values_and_nothing_else(name):
    good, bad = GOOD_AND_BAD[name]
    for value, expected in good:
        assert stored(name, value) == expected
        assert type(stored(name, value)) is type(expected)
    for value in bad:
        with pytest.raises(sf.ConfigError, match=rf"^{name}(\[0\])*: expected .+, got ") as error:
            stored(name, value)
        item = value[0] if "[0]:" in str(error.value) else value
        item = item[0] if "[0][0]:" in str(error.value) else item
        assert f"got {item!r:.80}" in str(error.value)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [object(), float("nan")], ids=["object", "nan"])
def test_every_field_refuses_nonsense_with_its_name_and_value(name, value):
    with pytest.raises(sf.ConfigError, match=rf"^{name}: expected .+, got {value!r}"):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("evaluation_strategy", "epochs", "one of no, steps, epoch, got 'epochs'; did you mean"),
        ("progress_bar_type", "tdqm", "one of tqdm, rich, json, none, got 'tdqm'; did you mean"),
        ("truncation_mode", "keep", "one of keep_end, keep_start, got 'keep'"),
        ("report_to", ["tensorbord"], r"^report_to\[0\]: .* got 'tensorbord'; did you mean 'tens"),
        ("gradient_checkpointing", "nothing", "expected one of none, nothing_saveable, "),
        ("optimizer", "adamv", "^optimizer: expected one of .* got 'adamv'; did you mean 'adam"),
        ("optimizer", 3, "^optimizer: expected a text, got 3"),
        ("scheduler", "cosin", "^scheduler: expected one of .* got 'cosin'; did you mean 'cosine'"),
        ("pruning_module", 3, r"expected .* wrap_optax\(tx\), got 3"),
        ("frozen_parameters", "(", r"a regular expression, got '\('; missing \)"),
        ("training_time_limit", "1 x", "'1h30m' or '2d', got '1 x'"),
        ("max_steps", 1.0, "an integer of at least 1, or a fraction between 0 and 1, got 1.0"),
        ("learning_rate", "0.1", "learning_rate: expected a number above 0, got '0.1'"),
        ("loss_config", ["a"], "loss_config: expected a dict with names as keys"),
        ("resume_from_checkpoint", 3, "expected True, False, or the path of a checkpoint"),
        ("save_optimizer_state", 1, "save_optimizer_state: expected True or False, got 1"),
        ("remove_ckpt_after_load", 1, "remove_ckpt_after_load: expected True or False, got 1"),
        ("save_optimizer_state", False, "^save_optimizer_state=False: .* save_pretrained or"),
        ("remove_ckpt_after_load", True, "^remove_ckpt_after_load=True: .* save_total_limit=1"),
    ],
)
def test_a_message_says_what_to_do(name, value, message):
    with pytest.raises(sf.ConfigError, match=message):
        TrainingArguments(**{name: value})


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(seed="x" * 500)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    "name",
    [
        "total_batch_size",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "eval_batch_size",
        "gradient_accumulation_steps",
        "steps_per_call",
        "num_train_epochs",
        "per_epoch_training_steps",
    ],
)
@pytest.mark.parametrize("value", [-1, 0, 1.5])
def test_a_size_below_one_is_refused(name, value):
    with pytest.raises(sf.ConfigError, match=f"{name}: expected an integer of at least 1, got"):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("45min", 2700), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400), (7, 7)],
)
def test_seconds(text, expected):
    assert seconds("field", text) == expected


def test_a_policy_of_jax_is_stored_by_its_name():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    arguments = TrainingArguments(gradient_checkpointing=policy)
    assert getattr(jax.checkpoint_policies, arguments.gradient_checkpointing) is policy
    assert arguments == TrainingArguments.from_json(arguments.to_json())


def test_an_integer_rate_equals_the_float():
    assert TrainingArguments(learning_rate=1) == TrainingArguments(learning_rate=1.0)


def test_an_object_with_wrap_optax_prunes():
    class Pruner:
        def wrap_optax(self, tx):
            return tx

    pruner = Pruner()
    assert TrainingArguments(pruning_module=pruner).pruning_module is pruner


def test_every_default_is_stored_unchanged():
    arguments = TrainingArguments()
    for name, field in FIELDS.items():
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        assert getattr(arguments, name) == default
        assert type(getattr(arguments, name)) is type(default)


def odd_values():
    """Return values of all kinds, and text that is no choice."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(),
        st.text("xyz_ ", max_size=5),
        st.lists(st.integers(-2, 2), max_size=3),
        st.dictionaries(st.integers(0, 2), st.none(), max_size=2),
        st.just(object()),
    )


def kinds(name):
    """Return the types that a field is declared to accept."""
    hint = HINTS[name]
    parts = getattr(hint, "__args__", ()) if "|" in str(hint) or "Opt" in str(hint) else (hint,)
    types = set()
    for part in parts:
        origin = getattr(part, "__origin__", part)
        types.add(str if "Literal" in str(part) and origin not in (tuple, dict) else origin)
    return types


NUMERIC = [name for name in FIELDS if kinds(name) & {int, float} and bool not in kinds(name)]


@pytest.mark.parametrize("name", NUMERIC)
@given(value=odd_values())
def test_no_invalid_number_is_accepted(name, value):
    try:
        kept = stored(name, value)
    except sf.ConfigError as error:
        assert re.match(rf"{name}: expected .*, got ", str(error))  # noqa: PT017
        return
    if kept is None:
        assert type(None) in kinds(name)
        assert value is None or (name, value) in {
            *(("max_steps", -1), ("max_steps", 0), ("save_steps", 0)),
            ("weight_distribution_log_steps", 0),
        }
    elif not isinstance(kept, str):
        assert type(kept) in kinds(name)
        assert math.isfinite(kept)
        assert kept >= 0
        assert kept == value
        assert not isinstance(value, bool)


CHOICES = [
    *("optimizer", "scheduler", "mixed_precision", "gradient_checkpointing", "truncation_mode"),
    *("evaluation_strategy", "save_strategy", "progress_bar_type", "dtype", "param_dtype"),
    "tx_mu_dtype",
]
FLAGS = [name for name in FIELDS if kinds(name) <= {bool, type(None)}]


@pytest.mark.parametrize("name", [*CHOICES, *FLAGS])
@given(value=odd_values())
def test_no_invalid_choice_is_accepted(name, value):
    assume(value not in ("", None) and not (name in FLAGS and isinstance(value, bool)))
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(**{name: value})
    assert name in str(error.value)
    assert "expected" in str(error.value)


# Names of fields.


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_either_name_sets_and_reads_the_value(alias, name):
    values = {"output_dir": "a", "scheduler_kwargs": {"power": 1.0}, "scheduler": "cosine"}
    flags = {"shuffle_train_dataset": False, "do_eval": False}
    value = {**values, **flags}.get(name, 3)
    also = {"scheduler": "polynomial"} if name == "scheduler_kwargs" else {}
    arguments = TrainingArguments(**{alias: value}, **also)
    assert getattr(arguments, name) == getattr(arguments, alias) == value
    assert arguments == TrainingArguments(**{name: value}, **also)
    assert name in arguments.to_dict()
    assert alias not in arguments.to_dict()


def test_two_names_that_disagree():
    with pytest.raises(
        sf.ConfigError, match=r"max_steps, max_training_steps: two names .* got 3 and 4"
    ):
        TrainingArguments(max_steps=3, max_training_steps=4)
    assert TrainingArguments(max_steps=3, max_training_steps=3).max_steps == 3


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rat", "did you mean 'learning_rate'?"),
        ("max_trainin_steps", "did you mean 'max_training_steps'?"),
        ("device", "jax chooses devices"),
        ("metrics", "the loss function returns them"),
        ("evaluate_with_generate", "any function of the state"),
    ],
)
def test_an_unknown_name_says_where_to_look(name, advice):
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(**{name: 1})
    assert str(error.value).startswith(f"{name}: TrainingArguments has no such field; ")
    assert advice in str(error.value)


def test_a_name_close_to_none():
    with pytest.raises(sf.ConfigError, match="^zzzzz: TrainingArguments has no such field$"):
        TrainingArguments(zzzzz=1)


def test_the_name_of_the_rate_in_torch_suggests_ours():
    with pytest.raises(sf.ConfigError, match="^lr: .* no such field; write learning_rate=…$"):
        TrainingArguments(lr=1e-3)


def test_positional_arguments_are_refused():
    with pytest.raises(sf.ConfigError, match="expected fields by name, .* got 'runs/a'"):
        TrainingArguments("runs/a")


def test_it_is_a_standard_dataclass():
    names = [*FIELDS]
    assert list(inspect.signature(TrainingArguments).parameters) == names
    assert len({*names}) == len(names)
    assert not ALIASES.keys() & {*names}
    assert all(field.kw_only for field in FIELDS.values())
    assert all(HINTS[name] is not None for name in names)


@by_any_name
@dataclass(frozen=True, kw_only=True)
class More(TrainingArguments):
    """Arguments with one more field."""

    beta: float = 0.1
    """Weight of the prior."""


def test_a_subclass_has_the_aliases_and_the_checks():
    more = More(beta=0.2, max_training_steps=7)
    assert (more.beta, more.max_steps, more.max_training_steps) == (0.2, 7, 7)
    assert More.from_json(more.to_json()) == more
    assert more.replace(beta=0.3, num_epochs=2) == More(beta=0.3, max_steps=7, num_train_epochs=2)
    assert copy.deepcopy(more) == pickle.loads(pickle.dumps(more)) == more
    with pytest.raises(sf.ConfigError, match="bet: More has no such field; did you mean 'beta'"):
        More(bet=1.0)
    with pytest.raises(sf.ConfigError, match="seed: expected an integer from 0"):
        More(seed=-1)


def test_the_fields_of_easydel_and_hezar_are_known():
    easydel = """
    model_name num_train_epochs learning_rate learning_rate_end total_batch_size
    per_device_train_batch_size per_device_eval_batch_size eval_batch_size
    gradient_accumulation_steps optimizer extra_optimizer_kwargs scheduler custom_scheduler
    warmup_steps weight_decay clip_grad tx_mu_dtype max_steps max_training_steps
    max_evaluation_steps per_epoch_training_steps per_epoch_evaluation_steps training_time_limit
    step_start_point gradient_checkpointing sharding_array sharding_axis_names
    sharding_dcn_axis_dims step_partition_spec jax_distributed_config dtype param_dtype
    use_fast_kernels max_length truncation_mode shuffle_train_dataset shuffle_seed_train use_grain
    grain_shard_index grain_shard_count dataloader_num_workers ids_to_pop_from_dataset
    remove_unused_columns do_train do_eval evaluation_strategy eval_steps evaluation_steps
    output_dir save_directory save_strategy save_steps save_interval_minutes save_total_limit
    save_optimizer_state do_last_save resume_if_possible remove_ckpt_after_load logging_steps
    log_steps report_steps report_metrics log_all_workers log_grad_norms progress_bar_type
    metrics_to_show_in_rich_pbar use_wandb wandb_entity wandb_name trainer_prefix
    weight_distribution_pattern weight_distribution_log_steps track_memory performance_mode
    process_zero_is_admin verbose pruning_module frozen_parameters init_tx auto_shard_states
    aux_loss_enabled loss_config
    """
    hezar = """
    output_dir num_epochs init_weights_from resume_from_checkpoint max_steps num_dataloader_workers
    dataloader_shuffle seed optimizer learning_rate weight_decay lr_scheduler lr_scheduler_kwargs
    batch_size eval_batch_size gradient_accumulation_steps mixed_precision do_evaluate
    metric_for_best_model save_steps log_steps checkpoints_dir logs_dir
    """
    known = FIELDS.keys() | ALIASES.keys()
    assert {*easydel.split(), *hezar.split()} <= known


def test_changes_from_the_defaults():
    assert [name for name in FIELDS if is_changed(TrainingArguments(batch_size=2), name)] == [
        "total_batch_size"
    ]
    assert is_changed(TrainingArguments(loss_config={"a": 1}), "loss_config")


def test_defaults_are_not_shared():
    TrainingArguments().loss_config["a"] = 1
    assert TrainingArguments().loss_config == {}


# Fields that do not go together.

CLASHES = [
    ({"custom_scheduler": SCHEDULE, "scheduler": "linear"}, "sets the whole learning rate"),
    ({"custom_scheduler": SCHEDULE, "learning_rate": 0.1}, "sets the whole learning rate"),
    ({"custom_scheduler": SCHEDULE, "warmup_steps": 3}, "sets the whole learning rate"),
    ({"scheduler": "warmup_cosine"}, "warmup_steps=0 .* write warmup_steps of at least 1"),
    ({"learning_rate_end": 0.0}, "a constant rate ends where it begins"),
    ({"scheduler": "linear", "learning_rate_end": 1.0}, "a rate that rises"),
    ({"scheduler": "exponential"}, "never gets to 0"),
    ({"scheduler": "linear", "scheduler_kwargs": {"power": 2}}, "linear takes none"),
    ({"optimizer": "sgd", "extra_optimizer_kwargs": {"b1": 0.1}}, "sgd takes momentum"),
    (
        {"weight_decay": 0.1, "extra_optimizer_kwargs": {"weight_decay": 0.1}},
        "set the weight decay",
    ),
    ({"optimizer": "adagrad", "tx_mu_dtype": "bf16"}, "takes no dtype for a first moment"),
    ({"tx_mu_dtype": "bf16", "extra_optimizer_kwargs": {"mu_dtype": "float16"}}, "set the dtype"),
    ({"optimizer": "sgd", "tx_mu_dtype": "bf16"}, "without momentum there is no first moment"),
    ({"sharding_axis_names": ("a", "a", "b", "c")}, "expected names that differ"),
    ({"sharding_array": (1, -1)}, "one size for each name"),
    ({"sharding_dcn_axis_dims": (1, -1)}, "one size for each name"),
    ({"step_partition_spec": ("zz",)}, "name axes of the mesh, each once"),
    ({"step_partition_spec": ("dp", "dp")}, "name axes of the mesh, each once"),
    ({"mixed_precision": "bf16", "dtype": "float16"}, "both set the same dtype"),
    ({"grain_shard_index": 0}, "write both or neither"),
    ({"grain_shard_index": 2, "grain_shard_count": 2}, "the first shard is 0"),
    ({"shuffle_train_dataset": False, "shuffle_seed_train": 3}, "has no effect with shuffle_train"),
    ({"truncation_mode": "keep_start"}, "has no effect with max_length=None; change max_length"),
    ({"do_train": False, "do_eval": False}, "the run would do nothing"),
    ({"max_steps": 5, "step_start_point": 5}, "there would be no step"),
    ({"evaluation_strategy": "steps"}, "write eval_steps"),
    ({"evaluation_strategy": "epoch", "eval_steps": 3}, "no effect .* change evaluation_strategy"),
    ({"evaluation_strategy": "no", "eval_steps": 3}, "no effect .* change evaluation_strategy"),
    ({"do_eval": False, "evaluation_strategy": "epoch"}, "there are no evaluations"),
    ({"do_eval": False, "eval_batch_size": 3}, "has no effect with do_eval=False"),
    ({"do_eval": False, "metric_for_best_model": "f1"}, "name a metric train"),
    ({"do_eval": False, "early_stopping_patience": 3}, "metric_for_best_model='train.loss'"),
    ({"greater_is_better": True}, "write metric_for_best_model"),
    ({"save_strategy": "no", "save_steps": 3, **DIR}, "has no effect with save_strategy"),
    ({"save_strategy": "steps", **DIR}, "write save_steps"),
    ({"save_steps": 3}, "has no effect with output_dir=None; change output_dir"),
    ({"save_strategy": "epoch"}, "write where to save, as output_dir"),
    ({"save_steps": 3, "do_last_save": False, **DIR}, "a run that saves also saves its end"),
    ({"resume_from_checkpoint": True, "resume_if_possible": False}, "leave one out"),
    ({"resume_from_checkpoint": "a", "init_weights_from": "b"}, "start from one of them"),
    ({"wandb_name": "a"}, "has no effect with use_wandb=False; change use_wandb"),
    ({"report_metrics": False, "use_wandb": True}, "has no effect with report_metrics"),
    ({"performance_mode": True, "track_memory": True}, "has no effect with performance_mode"),
    (
        {"performance_mode": True, "progress_bar_type": "json"},
        "has no effect with performance_mode",
    ),
    ({"checkpoints_dir": "kept"}, "has no effect with output_dir=None; change output_dir"),
    ({"weight_distribution_pattern": "a"}, "has no effect with weight_distribution_log_steps=None"),
    (
        {"progress_bar_type": "none", "metrics_to_show_in_rich_pbar": ("a",)},
        "no effect with progress_bar",
    ),
]


IDS = [",".join(values) for values, _ in CLASHES]


@pytest.mark.parametrize(("values", "message"), CLASHES, ids=IDS)
def test_conflicts_are_refused_with_the_fields_and_what_to_do(values, message):
    with pytest.raises(sf.ConfigError, match=message) as error:
        TrainingArguments(**values)
    assert any(name in str(error.value) for name in values)


@pytest.mark.parametrize(
    "values",
    [
        {"mixed_precision": "bf16", "dtype": "bfloat16"},
        {"do_eval": False, "metric_for_best_model": "train.loss"},
        {"do_eval": False, "evaluation_strategy": "no"},
        {"save_strategy": "epoch", "save_steps": 10, **DIR},
        {"save_strategy": "steps", "save_interval_minutes": 10, **DIR},
        {"do_last_save": False, **DIR},
        {"early_stopping_patience": 3, "greater_is_better": True},
        {"scheduler": "warmup_cosine", "warmup_steps": 3, "learning_rate_end": 1e-6},
        {"num_train_epochs": 3, "max_steps": 100},
    ],
)
def test_fields_that_go_together_are_accepted(values):
    TrainingArguments(**values)


# JSON.

# A value of each field that goes with the defaults of the others and comes back from JSON.
ALONE = {
    name: row[0]
    for name, row in ROWS.items()
    if not callable(row[0]) and not isinstance(row[1], str | None) and len(row) == 2
    if name not in ("sharding_array", "use_wandb")
} | {
    "sharding_array": (2, -1, 1, 1),
    "extra_optimizer_kwargs": {"b1": 0.25, "mask": None},
    "step_partition_spec": (("dp", "fsdp"), None, "sp"),
    "use_wandb": True,
    "dataloader_num_workers": 3,
    "init_weights_from": "weights/a",
    "resume_from_checkpoint": True,
}
OPEN = {
    "learning_rate": st.floats(1e-12, 10.0),
    "seed": st.integers(0, 2**63 - 1),
    "model_name": st.text(min_size=1).filter(str.strip),
    "weight_decay": st.floats(0, 10),
    "total_batch_size": st.integers(1, 2**40),
    "log_steps": st.one_of(st.integers(1, 10_000), st.floats(0.001, 0.999)),
}


@given(st.data())
def test_any_fields_come_back_from_json_exactly(data):
    names = data.draw(st.sets(st.sampled_from([*ALONE])))
    values = {name: ALONE[name] for name in names}
    values |= {name: data.draw(strategy) for name, strategy in OPEN.items()}
    try:
        arguments = TrainingArguments(**values)
    except sf.ConfigError as error:
        assume("do not go together" not in str(error) and "has no effect" not in str(error))
        raise
    back = TrainingArguments.from_json(arguments.to_json())
    assert back == arguments
    assert back.to_json() == arguments.to_json()
    for name in FIELDS:
        assert type(getattr(back, name)) is type(getattr(arguments, name))
    assert TrainingArguments.from_dict(arguments.to_dict()) == arguments


@pytest.mark.parametrize("name", ROWS)
def test_each_field_comes_back_from_json(name):
    value, where, *rest = ROWS[name]
    base = {} if not rest or name == "sharding_array" else rest[0]
    value = ALONE.get(name, value)
    if isinstance(where, str) and where is not BY_TRAINER:
        return  # its only value is the default
    arguments = TrainingArguments(**{**base, name: value})
    if callable(value):
        with pytest.raises(sf.ConfigError, match=rf"{name}: .* JSON gives back .*replace\({name}="):
            arguments.to_json()
        return
    back = TrainingArguments.from_json(arguments.to_json())
    assert back == arguments
    assert getattr(back, name) == value


def test_json_goes_to_a_file_and_comes_from_one(tmp_path):
    arguments, path = TrainingArguments(sharding_array=(2, -1, 1, 1)), tmp_path / "arguments.json"
    assert json.loads(arguments.to_json(path)) == json.loads(path.read_text())
    assert TrainingArguments.from_json(path) == TrainingArguments.from_json(str(path)) == arguments


def test_invalid_names_and_values_in_json_are_refused():
    with pytest.raises(sf.ConfigError, match="log_step: .* did you mean 'log_steps'"):
        TrainingArguments.from_json('{"log_step": 3}')
    with pytest.raises(sf.ConfigError, match="learning_rate: expected a number above 0, got '1'"):
        TrainingArguments.from_json('{"learning_rate": "1"}')
    for values in (3, {1: 2}):
        with pytest.raises(sf.ConfigError, match="values: expected a dict with names as keys, got"):
            TrainingArguments.from_dict(values)


def test_json_may_have_aliases():
    arguments = TrainingArguments.from_json('{"logging_steps": 3, "report_to": ["csv"]}')
    assert arguments == TrainingArguments(log_steps=3, report_to=("csv",))


def test_text_and_nested_values_come_back():
    config = {"a": 1, "b": 0.1, "c": None, "d": True, "e": "ü", "f": {"x": [1]}}
    arguments = TrainingArguments(loss_config=config)
    assert TrainingArguments.from_json(arguments.to_json()).loss_config == config
    assert "ü" in arguments.to_json()


@pytest.mark.parametrize("value", [len, float("nan"), (1, 2), {1: 2}, object()])
def test_a_value_that_json_changes_is_refused_by_name(value):
    arguments = TrainingArguments(loss_config={"x": value})
    message = r"^loss_config: .* JSON gives back unchanged, got .* arguments\.replace\(loss_config="
    with pytest.raises(sf.ConfigError, match=message):
        arguments.to_json()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "expected JSON, .* got '{'; "),
        (3, "expected JSON, .* got 3; "),
        ("no/such/file.json", "expected JSON, or the path of a file of it, .*No such file"),
    ],
)
def test_a_source_that_is_not_json_is_refused(source, message):
    with pytest.raises(sf.ConfigError, match=f"source: {message}"):
        TrainingArguments.from_json(source)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", "{}".encode("utf-16"), b"", b"{"])
def test_a_file_that_is_not_json_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "arguments.json"
    path.write_bytes(content)
    with pytest.raises(sf.ConfigError, match="arguments.json"):
        TrainingArguments.from_json(path)


def test_a_file_with_another_value_is_refused(tmp_path):
    path = tmp_path / "arguments.json"
    path.write_text("[1]")
    with pytest.raises(sf.ConfigError, match=r"a dict with names as keys, got \[1\]"):
        TrainingArguments.from_json(path)


# A frozen standard dataclass.


def test_replace_takes_any_name_and_checks_again():
    arguments = TrainingArguments(max_steps=10)
    assert arguments.replace(max_training_steps=20).max_steps == 20
    assert arguments.max_steps == 10
    assert dataclasses.replace(arguments, max_steps=30).max_training_steps == 30
    with pytest.raises(sf.ConfigError, match="max_steps: expected .* got -5"):
        arguments.replace(max_steps=-5)


def test_it_cannot_be_changed_in_place():
    arguments = TrainingArguments(extra_optimizer_kwargs={"b1": 0.5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        arguments.max_steps = 3
    arguments.to_dict()["extra_optimizer_kwargs"]["b1"] = 0.9
    assert arguments.extra_optimizer_kwargs == {"b1": 0.5}


def test_it_can_be_copied_and_pickled():
    arguments = TrainingArguments(max_steps=10)
    assert copy.deepcopy(arguments) == pickle.loads(pickle.dumps(arguments)) == arguments
    assert arguments != TrainingArguments(max_steps=11)


def test_the_example_of_easydel_is_taken():
    arguments = TrainingArguments(
        model_name="MyFineTunedModel",
        num_train_epochs=3,
        learning_rate=2e-5,
        total_batch_size=32,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=1,
        weight_decay=0.01,
        max_steps=-1,
        gradient_checkpointing="nothing_saveable",
        sharding_array=(1, -1, 1, 1),
        use_fast_kernels=True,
        logging_steps=10,
        save_steps=100,
        save_total_limit=2,
        evaluation_strategy="steps",
        eval_steps=100,
        output_dir="runs/my_model_run",
    )
    for devices in (1, 4, 8):
        plan = adapter.plan(arguments, 3_200, 320, devices)
        assert (plan.train_batch, plan.steps, plan.save_steps) == (32, 300, 100)


def parse_command_line(maker, kind, options):
    tool = pytest.importorskip(maker)
    parse = tool.cli if maker == "tyro" else tool.parse
    return parse(kind, args=options)


MAKERS = pytest.mark.parametrize(("maker", "dash"), [("tyro", "-"), ("simple_parsing", "_")])


@MAKERS
def test_command_line_parsers_set_fields(maker, dash):
    values = {
        "max_steps": ["0.5"],
        "sharding_array": ["1", "-1", "2", "1"],
        "scheduler": ["cosine"],
        "evaluation_strategy": ["no"],
        "learning_rate": ["0.1"],
        "steps_per_call": ["4"],
        "report_to": ["csv"],
        "output_dir": ["runs/a"],
    }
    options = [] if maker == "simple_parsing" else ["--no-do-eval"]
    if maker == "simple_parsing":
        values["do_eval"] = ["false"]
    for name, texts in values.items():
        options += ["--" + name.replace("_", dash), *texts]
    assert parse_command_line(maker, TrainingArguments, options) == TrainingArguments(
        max_steps=0.5,
        sharding_array=(1, -1, 2, 1),
        scheduler="cosine",
        evaluation_strategy="no",
        learning_rate=0.1,
        steps_per_call=4,
        report_to=("csv",),
        output_dir="runs/a",
        do_eval=False,
    )


@MAKERS
def test_command_line_parsers_show_each_field_once_with_its_help(maker, dash, capsys):
    with pytest.raises(SystemExit):
        parse_command_line(maker, More, ["--help"])
    printed = capsys.readouterr().out
    words = re.sub(r"[\s│|]+", " ", printed)
    # tyro makes no option of an open dict, and no aligned one of a tuple of anything.
    special = {name for name in FIELDS if "dict" in str(HINTS[name])} | {"step_partition_spec"}
    for name, help_text in documented(TrainingArguments) | documented(More):
        option = f"--{name}".replace("_", dash)
        shown = re.findall(rf"^[ │]*{option}(?=[ ,]|$)", printed, re.MULTILINE)
        assert len(shown) == 1 or (maker == "tyro" and name in special and not shown), name
        assert help_text in words or name in special, name
    for alias in ALIASES:
        assert f"--{alias} ".replace("_", dash) not in printed


def documented(kind):
    """Return the fields of a class, each with the text below it in the source."""
    text = r'^    (\w+): [^\n]*\n    """(.*?)"""$'
    matches = re.findall(text, inspect.getsource(kind), re.MULTILINE | re.DOTALL)
    return {(name, " ".join(help_text.split())) for name, help_text in matches}


def test_every_field_is_documented_in_a_sentence():
    texts = dict(documented(TrainingArguments))
    assert texts.keys() == FIELDS.keys()
    for text in texts.values():
        assert text[0].isupper()
        assert text.endswith(".")


@pytest.mark.parametrize("module", ["stepfold", "stepfold.adapter"])
def test_importing_does_not_import_a_validation_library(module):
    code = (
        f"import sys, {module}; print({{'pydantic', 'tyro', 'simple_parsing'}} & {{*sys.modules}})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"set()"


def test_importing_stepfold_does_not_import_the_arguments():
    code = "import sys, stepfold; print([name for name in sys.modules if 'adapter' in name])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"stepfold" not in result.stdout
