"""`TrainingArguments`: every field has help, is checked, comes back, and does something."""

import ast
import copy
import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.adapter import digits

import stepfold as sf
from stepfold import adapter
from stepfold.adapter import TrainingArguments, running
from stepfold.adapter.overriding import chosen_collect

FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
PARAMS = {"embed": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}


# What is seen of arguments, part by part. A row below says which part a field is seen in.


def numbers(a):
    return adapter.plan(a, 1_000, 100, 8)


def rates(a):
    schedule = adapter.make_schedule(a, 100)
    with jax.numpy_dtype_promotion("standard"):
        return [float(schedule(step)) for step in (0, 1, 5, 50, 99)]


def updates(a):
    tx = adapter.make_optimizer(a, adapter.make_schedule(a, 100))
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    loss_fn = lambda params, batch, key: sum((3 * leaf).sum() for leaf in jax.tree.leaves(params))
    new, _ = sf.make_train_step(loss_fn, tx)(state, None)
    forms = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(state.opt_state)]
    return forms, [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(new.params)]


def mesh(a):
    return dict(adapter.make_mesh(a, jax.devices()[:1]).shape)


def dtypes(a):
    return adapter.precision(a).compute.name, adapter.cast_params(a, PARAMS)["w"].dtype.name


def series(a):
    return repr(adapter.checkpoints(a, numbers(a)))


def files(a):
    writer = adapter.writers(a)
    if writer is None:
        return None
    writer.write_scalars(1, {"train/loss": 1.0})
    writer.close()
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def shown(a, held, capsys):
    """Show a trainer's hooks some events, and give what they print, measure and say."""
    found = []
    hooks = running.hooks_of(held, running.evaluations_of(held))
    for hook in hooks:
        if hasattr(hook, "open"):
            hook.open(0, 100)
    for step in range(5, 41, 5):
        scalars = {"train/loss": 1.0, "train/grad_norm": 2.0, "train/hits": 3.0}
        for metrics in (scalars, {"eval/loss": 1.0 + step}):
            event, said = sf.Event(step, 100, metrics, held.state), []
            for hook in hooks:
                answer = hook(event)
                said += sorted(answer) if isinstance(answer, dict) else [answer]
            found.append(said)
    held.finish()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    return found, [line.split('"seconds_left"')[-1] for line in lines]


def loss(a):
    def loss_fn(params, batch, key, scale=1.0):
        return {"ce": (batch @ params * scale).sum(), "aux_z": params.sum()}

    made = adapter.make_loss(a, loss_fn, sf.make_mesh((1,), ("dp",), devices=jax.devices()[:1]))
    arrays = jnp.ones((2, 2)), jnp.ones((2, 2))
    return str(jax.make_jaxpr(lambda p, b: made(p, b, None))(*arrays))


def example(a):
    change = adapter.transform(a) or (lambda example: example)
    return change({"id": 1, "text": "a", "tokens": [1]})


def batch(a, held, capsys):
    collate = chosen_collect(held, adapter.Trainer, "")
    return None if collate is None else collate([{"x": [1, 2, 3]}])["x"].tolist()


@pytest.fixture(scope="module")
def held():
    """A trainer, whose arguments are changed here as no user can."""
    return digits.trainer()


def halves(steps):
    return optax.linear_schedule(1.0, 0.5, steps)


def still(tx):
    return optax.chain(tx, optax.scale(0.0))


DIR = {"output_dir": "runs/a"}
JSON = {"progress_bar_type": "json"}
PRINTED = {"progress_bar_type": "none", "verbose": True}
BY_TRAINER = "read by the Trainer, and by no part"
ROWS = {
    "num_train_epochs": (3, numbers),
    "max_steps": (7, numbers),
    "per_epoch_training_steps": (7, numbers),
    "step_start_point": (7, BY_TRAINER),
    "training_time_limit": ("1h", numbers),
    "total_batch_size": (8, numbers),
    "per_device_train_batch_size": (2, numbers),
    "gradient_accumulation_steps": (2, numbers),
    "eval_batch_size": (7, numbers),
    "per_device_eval_batch_size": (7, numbers),
    "optimizer": ("sgd", updates),
    "extra_optimizer_kwargs": ({"b1": 0.5, "nesterov": True}, updates),
    "learning_rate": (0.1, rates),
    "learning_rate_end": (1e-6, rates, {"scheduler": "linear"}),
    "scheduler": ("cosine", rates),
    "scheduler_kwargs": ({"power": 3.0}, rates, {"scheduler": "polynomial"}),
    "custom_scheduler": (halves, rates),
    "warmup_steps": (10, rates),
    "weight_decay": (0.5, updates),
    "clip_grad": (0.5, updates, {"optimizer": "sgd"}),
    "tx_mu_dtype": ("bfloat16", updates),
    "frozen_parameters": ("embed", updates),
    "pruning_module": (still, updates),
    "init_tx": (False, BY_TRAINER),
    "sharding_array": ((1, 1, 1), mesh, {"sharding_axis_names": ("dp", "fsdp", "tp", "sp")}),
    "sharding_axis_names": (("a", "b", "c", "d"), mesh),
    "sharding_dcn_axis_dims": ((2, 1, 1, 1), mesh),
    "step_partition_spec": (("dp",), loss),
    "auto_shard_states": (False, lambda a: repr(adapter.sharding_rules(a))),
    "jax_distributed_config": ({"num_process": 2}, adapter.start_processes),
    "dtype": ("bfloat16", dtypes),
    "param_dtype": ("bfloat16", dtypes),
    "mixed_precision": ("bf16", dtypes),
    "gradient_checkpointing": ("nothing_saveable", adapter.remat),
    "use_fast_kernels": (False, loss),
    "max_length": (2, batch),
    "truncation_mode": ("keep_start", batch, {"max_length": 2}),
    "shuffle_train_dataset": (False, adapter.shuffle_seed),
    "shuffle_seed_train": (3, adapter.shuffle_seed),
    "seed": (3, adapter.shuffle_seed),
    "use_grain": (True, BY_TRAINER),
    "grain_shard_index": (1, BY_TRAINER, {"grain_shard_count": 3}),
    "grain_shard_count": (3, BY_TRAINER, {"grain_shard_index": 0}),
    "dataloader_num_workers": (2, BY_TRAINER),
    "ids_to_pop_from_dataset": (("id",), example),
    "remove_unused_columns": (True, example),
    "do_train": (False, BY_TRAINER),
    "do_eval": (False, numbers),
    "evaluation_strategy": ("epoch", numbers),
    "eval_steps": (5, numbers),
    "max_evaluation_steps": (2, numbers),
    "per_epoch_evaluation_steps": (2, numbers),
    "metric_for_best_model": ("train.loss", series, DIR),
    "greater_is_better": (True, series, {**DIR, "metric_for_best_model": "loss"}),
    "early_stopping_patience": (1, shown, JSON),
    "aux_loss_enabled": (False, loss),
    "loss_config": ({"scale": 2.0}, loss),
    "model_name": ("tiny", adapter.wandb_options, {"use_wandb": True}),
    "output_dir": ("runs/a", series),
    "checkpoints_dir": ("kept", series, DIR),
    "save_strategy": ("epoch", series, DIR),
    "save_steps": (5, series, DIR),
    "save_interval_minutes": (5.0, series, DIR),
    "save_total_limit": (5, series, DIR),
    "save_optimizer_state": (False, "a checkpoint holds the whole state"),
    "do_last_save": (False, series, DIR),
    "remove_ckpt_after_load": (True, "is the only one until the next"),
    "resume_if_possible": (False, BY_TRAINER),
    "resume_from_checkpoint": ("runs/b", BY_TRAINER),
    "init_weights_from": ("runs/b", BY_TRAINER),
    "log_steps": (20, shown, {**JSON, "report_steps": 10}),
    "report_steps": (20, shown, PRINTED),
    "report_metrics": (False, files, DIR),
    "report_to": (("csv",), files, DIR),
    "logs_dir": ("kept", files, DIR),
    "log_all_workers": (True, files, DIR),
    "process_zero_is_admin": (False, files, DIR),
    "log_grad_norms": (False, shown, PRINTED),
    "progress_bar_type": ("json", shown, {"progress_bar_type": "none"}),
    "metrics_to_show_in_rich_pbar": (("train/hits",), shown, JSON),
    "verbose": (True, shown, JSON),
    "performance_mode": (True, files, DIR),
    "track_memory": (True, shown, JSON),
    "weight_distribution_pattern": (
        "bias",
        shown,
        {**PRINTED, "weight_distribution_log_steps": 10},
    ),
    "weight_distribution_log_steps": (10, shown, PRINTED),
    "use_wandb": (True, lambda a: type(adapter.writers(a)).__name__),
    "wandb_entity": ("team", adapter.wandb_options, {"use_wandb": True}),
    "wandb_name": ("run", adapter.wandb_options, {"use_wandb": True}),
    "trainer_prefix": ("sft", adapter.wandb_options, {"use_wandb": True}),
}


def test_every_field_has_a_row():
    assert FIELDS.keys() == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_every_field_is_seen_in_a_part_or_says_why_not(name, tmp_path, monkeypatch, capsys, held):
    value, where, *rest = ROWS[name]
    base = rest[0] if rest else {}
    if where is BY_TRAINER:
        check_that_the_trainer_reads(name)
        return
    if isinstance(where, str):
        with pytest.raises(sf.ConfigError, match=f"^{name}={value}: .*{where}"):
            TrainingArguments(**base, **{name: value})
        return

    def see(fields, folder):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        try:
            arguments = TrainingArguments(**fields)
            if where not in (shown, batch):
                return where(arguments)
            held.arguments, held.plan = arguments, adapter.plan(arguments, 200, 100, 1)
            held.writer = adapter.writers(arguments)
            return where(arguments, held, capsys)
        except (sf.ConfigError, sf.ShardingError) as error:
            return f"{type(error).__name__}: {error}"

    plain, changed = see(base, "plain"), see({**base, name: value}, "changed")
    assert not str(plain).startswith("ConfigError"), plain
    assert changed != plain
    assert not str(changed).startswith("ConfigError") or name in (
        "jax_distributed_config",  # which has a wrong key here, so as to start nothing
        "sharding_array",  # whose names do not fit any more
    )


def check_that_the_trainer_reads(name):
    """Look for `.name` in what stands above the parts."""
    folder = Path(adapter.__file__).parent
    read = {
        node.attr
        for path in folder.rglob("*.py")
        if "arguments" not in path.relative_to(folder).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert name in read


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_every_field_has_help_in_a_sentence_and_a_reader(field):
    text = field.metadata["help"]
    assert text[0].isupper()
    assert text.endswith(".")
    assert callable(field.metadata["read"])
    assert field.kw_only


def test_every_default_is_read_as_it_is():
    for name, value in TrainingArguments().to_dict().items():
        again = FIELDS[name].metadata["read"](name, value)
        assert again == value
        assert type(again) is type(value)


def odd_values():
    """Give values of all kinds, and text that no choice is called by."""
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
    """List the types that a field is declared to take."""
    hint = get_type_hints(TrainingArguments)[name]
    parts = (
        getattr(hint, "__args__", ()) if "|" in str(hint) or "Optional" in str(hint) else (hint,)
    )
    found = set()
    for part in parts:
        origin = getattr(part, "__origin__", part)
        found.add(str if "Literal" in str(part) and origin not in (tuple, dict) else origin)
    return found


NUMERIC = [name for name in FIELDS if kinds(name) & {int, float} and bool not in kinds(name)]


@pytest.mark.parametrize("name", NUMERIC)
@given(value=odd_values())
def test_no_number_that_makes_no_sense_is_taken_silently(name, value):
    try:
        kept = FIELDS[name].metadata["read"](name, value)
    except sf.ConfigError as error:
        refused = str(error)
        kept = ...
    if kept is ...:
        assert re.match(rf"{name}: expected .*, got ", refused)
    elif kept is None:
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
def test_no_choice_that_there_is_not_is_taken_silently(name, value):
    assume(value not in ("", None) and not (name in FLAGS and isinstance(value, bool)))
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(**{name: value})
    assert name in str(error.value)
    assert "expected" in str(error.value)


# A valid value for each field that goes with the default of the others, and comes back from JSON.
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
        assume("do not go together" not in str(error))
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
        return  # it has no other value than that by default, which is tested with all
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


def test_a_file_with_a_field_too_many_is_refused():
    with pytest.raises(sf.ConfigError, match="log_step: .* did you mean 'log_steps'"):
        TrainingArguments.from_json('{"log_step": 3}')
    with pytest.raises(sf.ConfigError, match="from_dict: expected values by name, got 3"):
        TrainingArguments.from_dict(3)


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
        found = adapter.plan(arguments, 3_200, 320, devices)
        assert (found.train_batch, found.steps, found.save_steps) == (32, 300, 100)


COMMAND = """
import sys
from stepfold.adapter import TrainingArguments, running
from stepfold.adapter.overriding import chosen_collect
if sys.argv[1] == "tyro":
    import tyro
    a = tyro.cli(TrainingArguments, args=sys.argv[2:])
else:
    import simple_parsing
    a = simple_parsing.parse(TrainingArguments, args=sys.argv[2:])
print(a.max_steps, a.sharding_array, a.scheduler, a.evaluation_strategy, a.do_eval, a.learning_rate)
"""


@pytest.mark.parametrize(
    ("maker", "dash", "do_eval"), [("tyro", "-", ["--no-do-eval"]), ("simple_parsing", "_", None)]
)
def test_makers_of_command_lines_take_it(maker, dash, do_eval):
    pytest.importorskip(maker)
    given = {"max_steps": ["0.5"], "sharding_array": ["1", "-1", "2", "1"]}
    given |= {"scheduler": ["cosine"], "evaluation_strategy": ["no"], "learning_rate": ["0.1"]}
    options = do_eval or ["--do_eval", "false"]
    for name, values in given.items():
        options += ["--" + name.replace("_", dash), *values]
    said = subprocess.run(
        [sys.executable, "-c", COMMAND, maker, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout.strip() == "0.5 (1, -1, 2, 1) cosine no False 0.1", said.stderr
    helped = subprocess.run(
        [sys.executable, "-c", COMMAND, maker, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Into how many microbatches" in " ".join(helped.stdout.split())


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(sf.ConfigError, match="1"):
        TrainingArguments.from_dict({1: 2})
