"""`TrainingArguments`: names of fields, JSON, and a standard dataclass with documented fields."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest
from tests.adapter.test_arguments_effects import BY_TRAINER, ROWS
from tests.clients.rows import shows

import stepfold as sf
from stepfold import adapter as adapter
from stepfold.adapter import TrainingArguments
from stepfold.adapter.arguments import by_any_name

FIELDS = {field.name: field for field in fields(TrainingArguments)}
HINTS = get_type_hints(TrainingArguments)
ALIASES = {
    "num_epochs": "num_train_epochs",
    "max_training_steps": "max_steps",
    "batch_size": "total_batch_size",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
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
        sf.errors.ConfigError,
        match=r"max_steps, max_training_steps: expected one value, .* got 3 and 4",
    ):
        TrainingArguments(max_steps=3, max_training_steps=4)
    assert TrainingArguments(max_steps=3, max_training_steps=3).max_steps == 3


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rat", "; did you mean 'learning_rate'?"),
        ("max_trainin_steps", "; did you mean 'max_training_steps'?"),
        ("device", "jax chooses devices"),
        ("metrics", "the loss function returns them"),
        ("evaluate_with_generate", "any function of the state"),
        ("lr", "; write learning_rate=…"),
        ("deepspeed", "; sharding_array shards the state"),
        ("fsdp", "; sharding_array shards the state"),
        ("eval_on_start", "; write evaluations=[sf.Evaluation(…, at_start=True)]"),
        ("auto_find_batch_size", "; sf.inspect.choose finds what fits"),
        ("disable_tqdm", "; write progress_bar_type='none'"),
        ("torch_compile", "; a step is always compiled"),
        ("zzzzz", None),
    ],
)
def test_an_unknown_name_says_where_to_look(name, advice):
    with pytest.raises(sf.errors.ConfigError) as error:
        TrainingArguments(**{name: 1})
    start = f"{name}: TrainingArguments has no such field"
    assert str(error.value).startswith(start)
    assert advice in str(error.value) if advice else str(error.value) == start


def test_all_unknown_names_are_listed_at_once():
    habits = {"load_best_model_at_end": True, "adam_beta2": 0.95, "label_smoothing_factor": 0.1}
    with pytest.raises(sf.errors.ConfigError) as error:
        TrainingArguments(**habits, learning_rate=0.1, lerning_rate=0.1)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [*habits, "lerning_rate"]
    assert "best_state" in lines[0]
    assert "'b2'" in lines[1]


def test_positional_arguments_are_refused():
    with pytest.raises(sf.errors.ConfigError, match="expected fields by name, .* got 'runs/a'"):
        TrainingArguments("runs/a")


@shows(
    "BaseTrainer",
    "Core concepts",
    {"`TrainingArguments` is a dataclass": "a frozen one; `arguments.replace(…)` changes fields"},
)
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
    with pytest.raises(
        sf.errors.ConfigError, match="bet: More has no such field; did you mean 'beta'"
    ):
        More(bet=1.0)
    with pytest.raises(sf.errors.ConfigError, match="seed: expected an integer from 0"):
        More(seed=-1)


@by_any_name
@dataclass(frozen=True, kw_only=True)
class Other(TrainingArguments):
    """Arguments with other defaults."""

    max_steps: int | float | None = 100
    """Steps to train."""
    eval_steps: int | None = None
    """Steps between two evaluations."""


def test_a_subclass_that_changes_a_default_keeps_the_rest_of_the_field():
    assert Other().max_steps == 100
    assert Other(max_training_steps=-1).max_steps is None
    with pytest.raises(
        sf.errors.ConfigError, match="max_steps: expected an integer of at least 1, or a f"
    ):
        Other(max_training_steps=1.5)
    with pytest.raises(
        sf.errors.ConfigError, match="eval_steps=3 has no effect with do_eval=False"
    ):
        Other(evaluation_steps=3, do_eval=False)


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
    do_last_save resume_if_possible logging_steps
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
}


@pytest.mark.parametrize("name", ROWS)
def test_each_field_comes_back_from_json(name):
    value, where, *rest = ROWS[name]
    base = {} if not rest or name == "sharding_array" else rest[0]
    value = ALONE.get(name, value)
    if isinstance(where, str) and where is not BY_TRAINER:
        return  # its only value is the default
    arguments = TrainingArguments(**{**base, name: value})
    if callable(value):
        with pytest.raises(
            sf.errors.ConfigError, match=rf"{name}: .* JSON gives back .*replace\({name}="
        ):
            arguments.to_json()
        return
    back = TrainingArguments.from_json(arguments.to_json())
    assert back == arguments
    assert getattr(back, name) == value


def test_json_goes_to_a_file_and_comes_from_one(tmp_path):
    config = {"a": 1, "b": 0.1, "c": None, "d": True, "e": "ü", "f": {"x": [1]}}
    arguments = TrainingArguments(sharding_array=(2, -1, 1, 1), loss_config=config)
    path = tmp_path / "arguments.json"
    text = arguments.to_json(path)
    assert json.loads(text) == json.loads(path.read_text())
    assert "ü" in text
    for source in (text, path, str(path)):
        assert TrainingArguments.from_json(source) == arguments
    aliased = TrainingArguments.from_json('{"logging_steps": 3, "report_to": ["csv"]}')
    assert aliased == TrainingArguments(log_steps=3, report_to=("csv",))


@pytest.mark.parametrize(
    ("name", "legal"), [("save_optimizer_state", True), ("remove_ckpt_after_load", False)]
)
def test_a_field_of_version_0_2_with_one_legal_value_is_accepted(name, legal):
    with pytest.warns(DeprecationWarning, match=f"{name}: leave it out, .* {legal}$") as caught:
        arguments = TrainingArguments(**{name: legal}, max_steps=3)
    assert caught[0].filename == __file__
    assert arguments == TrainingArguments(max_steps=3)
    assert name not in arguments.to_dict()
    assert TrainingArguments.from_json(json.dumps({name: legal, "max_steps": 3})) == arguments
    with pytest.raises(sf.errors.ConfigError, match=f"{name}={not legal}: "):
        TrainingArguments.from_dict({name: not legal})

    @by_any_name
    @dataclass(frozen=True, kw_only=True)
    class Other(TrainingArguments):
        save_optimizer_state: bool = False
        remove_ckpt_after_load: bool = True

    assert getattr(Other.from_dict({name: legal}), name) is legal


def test_invalid_names_and_values_in_json_are_refused(tmp_path):
    with pytest.raises(sf.errors.ConfigError, match="log_step: .* did you mean 'log_steps'"):
        TrainingArguments.from_json('{"log_step": 3}')
    with pytest.raises(
        sf.errors.ConfigError, match="learning_rate: expected a number above 0, got '1'"
    ):
        TrainingArguments.from_json('{"learning_rate": "1"}')
    (tmp_path / "arguments.json").write_text("[1]")
    for make, values in (
        (TrainingArguments.from_dict, 3),
        (TrainingArguments.from_dict, {1: 2}),
        (TrainingArguments.from_json, tmp_path / "arguments.json"),
    ):
        with pytest.raises(
            sf.errors.ConfigError, match=r"a dict with names as keys, got (3|\{1|\[1\])"
        ):
            make(values)


@pytest.mark.parametrize("value", [len, float("nan"), (1, 2), {1: 2}, object()])
def test_a_value_that_json_changes_is_refused_by_name(value):
    arguments = TrainingArguments(loss_config={"x": value})
    message = r"^loss_config: .* JSON gives back unchanged, got .* arguments\.replace\(loss_config="
    with pytest.raises(sf.errors.ConfigError, match=message):
        arguments.to_json()


def test_the_advice_about_a_value_without_json_can_be_followed():
    arguments = TrainingArguments(loss_config={"x": len}, custom_scheduler=lambda step: step)
    with pytest.raises(sf.errors.ConfigError, match=r"arguments\.replace\(custom_scheduler=None\)"):
        arguments.replace(loss_config={}).to_json()
    with pytest.raises(sf.errors.ConfigError, match=r"arguments\.replace\(loss_config=\{\}\)"):
        arguments.replace(custom_scheduler=None).to_json()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"a":' * 100_000, "expected JSON, .*recursion"),
        ("{", "expected JSON, .* got '{'; "),
        (3, "expected JSON, .* got 3; "),
        ("no/such/file.json", "expected JSON, or the path of a file of it, .*No such file"),
    ],
)
def test_a_source_that_is_not_json_is_refused(source, message):
    with pytest.raises(sf.errors.ConfigError, match=f"source: {message}"):
        TrainingArguments.from_json(source)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", "{}".encode("utf-16"), b"", b"{"])
def test_a_file_that_is_not_json_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "arguments.json"
    path.write_bytes(content)
    with pytest.raises(sf.errors.ConfigError, match="arguments.json"):
        TrainingArguments.from_json(path)


# A frozen standard dataclass.


def test_it_is_replaced_copied_and_pickled_and_never_changed():
    arguments = TrainingArguments(max_steps=10, extra_optimizer_kwargs={"b1": 0.5})
    assert arguments.replace(max_training_steps=20).max_steps == 20
    assert dataclasses.replace(arguments, max_steps=30).max_training_steps == 30
    with pytest.raises(sf.errors.ConfigError, match="max_steps: expected .* got -5"):
        arguments.replace(max_steps=-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        arguments.max_steps = 3
    arguments.to_dict()["extra_optimizer_kwargs"]["b1"] = 0.9
    assert (arguments.max_steps, arguments.extra_optimizer_kwargs) == (10, {"b1": 0.5})
    assert copy.deepcopy(arguments) == pickle.loads(pickle.dumps(arguments)) == arguments
    assert arguments != TrainingArguments(max_steps=11)
    TrainingArguments().loss_config["a"] = 1  # defaults are not shared
    assert TrainingArguments().loss_config == {}


@shows(
    "BaseTrainer",
    "Configuration example",
    {
        "the block as printed": "the same",
        "`total_batch_size`": "the same: the examples of an update",
        "`max_steps=-1`": "the same; a positive number overrides the epochs",
        "`logging_steps`": "another name of `log_steps`",
    },
)
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
    assert (arguments.max_steps, arguments.log_steps) == (None, 10)
    assert arguments.save_directory == "runs/my_model_run"
    for devices in (1, 4, 8):
        sizes = adapter.compute_sizes(arguments, 3_200, 320, devices)
        assert (sizes.train_batch, sizes.steps, sizes.save_steps) == (32, 300, 100)


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


@pytest.mark.full
def test_importing_imports_neither_the_arguments_nor_a_validation_library():
    code = """
import sys, stepfold
print([name for name in sys.modules if name.startswith("stepfold.adapter")])
import stepfold.adapter
print([name for name in ("pydantic", "tyro", "simple_parsing") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.split() == [b"[]", b"[]"]
