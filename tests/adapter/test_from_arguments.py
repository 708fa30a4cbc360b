"""The parts of a run that are made from its arguments, except the sizes and the optimizer."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import (
    best_metric,
    cast_params,
    checkpoints,
    make_loss,
    make_mesh,
    precision,
    start_processes,
    transform,
    wandb_options,
    writers,
)
from stepfold.adapter.sizes import compute_sizes

# Processes, mesh and sharding


def test_a_mesh_that_does_not_fit_the_devices_or_the_names_is_refused():
    for fields, message in (
        ({"sharding_array": (3, 1, 1, 1)}, "does not fit the 8 devices there are; nearest"),
        ({"sharding_array": (1, -1)}, r"dims: expected one size for each of \('dp', "),
        ({"sharding_dcn_axis_dims": (1, -1)}, r"dcn_dims: expected one size for each of \('dp', "),
        ({"sharding_axis_names": ("a", "a", "b", "c")}, "expected names that differ"),
    ):
        with pytest.raises(sf.errors.ShardingError, match=message):
            make_mesh(TrainingArguments(**fields))


def test_processes_are_started_only_with_a_config_of_known_keys():
    start = lambda **config: start_processes(TrainingArguments(jax_distributed_config=config))
    assert start_processes(TrainingArguments()) is None
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"jax_distributed_config: .*num_process'.* mean 'num_processes'\?",
    ):
        start(coordinator="a:1", num_process=2)
    with pytest.raises(sf.errors.ConfigError, match="coordinator: expected an address with a port"):
        start(coordinator_address="localhost", num_processes=2, process_id=0)  # names of jax
    assert start().processes == 1  # without a launcher


# Precision and rematerialization


def test_float64_is_refused_unless_jax_has_it_enabled():
    for name, make in (("dtype", precision), ("param_dtype", lambda a: cast_params(a, {}))):
        with pytest.raises(
            sf.errors.ConfigError,
            match=f"{name}: .* jax has float64 disabled, got 'float64'; set JAX_",
        ):
            make(TrainingArguments(**{name: "float64"}))
    with jax.enable_x64(True):
        assert precision(TrainingArguments(dtype="float64")).compute == jnp.float64


# The loss


def two_terms(params, batch, key, scale=1.0):
    return {"ce": params.sum() * scale, "aux_router": params.sum() * 10}, {"hits": sf.mean(params)}


def loss_of(loss_fn=two_terms, mesh=None, **fields):
    return make_loss(TrainingArguments(**fields), loss_fn, mesh)


def test_loss_config_is_passed_by_keyword():
    terms, metrics = loss_of(loss_config={"scale": 3.0})(jnp.ones(2), None, None)
    assert float(terms["ce"]) == 6.0
    assert metrics.keys() == {"hits"}
    with pytest.raises(
        sf.errors.ConfigError,
        match="loss_config: expected keywords of two_terms, got smooth; add them",
    ):
        loss_of(loss_config={"smooth": 3.0})
    with pytest.raises(sf.errors.ConfigError, match="loss_fn: expected a function, got int 3"):
        loss_of(3)
    any_keyword = lambda params, batch, key, **config: config["smooth"]
    assert loss_of(any_keyword, loss_config={"smooth": 3.0})(1, 2, 3) == 3.0


def test_auxiliary_terms_are_dropped():
    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(2), tx, jax.random.key(0))
    for enabled, total in ((True, 22.0), (False, 2.0)):
        step = sf.make_train_step(loss_of(aux_loss_enabled=enabled), tx)
        assert float(jax.jit(step)(state, None)[1]["loss"].compute()) == total
    loss = loss_of(lambda *_: {"ce": 1.0, "aux": 2.0}, aux_loss_enabled=False)
    assert loss(1, 2, 3) == {"ce": 1.0}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "expected a loss function that returns a dict of terms, .* got float 1.0"),
        ({"aux": 1.0}, "expected .* a dict of terms, .* to drop those named aux…, got aux; name"),
    ],
)
def test_without_auxiliary_terms_others_have_to_be_left(result, message):
    with pytest.raises(sf.errors.ConfigError, match=f"aux_loss_enabled: {message}"):
        loss_of(lambda params, batch, key: result, aux_loss_enabled=False)(1, 2, 3)


def test_a_batch_is_sharded_by_as_many_dimensions_as_it_has():
    mesh, seen = sf.make_mesh((1, 4, 1, 2)), {}

    def loss_fn(params, batch, key):
        for name in ("x", "y"):
            jax.debug.inspect_array_sharding(
                batch[name], callback=lambda sharding, name=name: seen.update({name: sharding})
            )
        return params.sum() * (batch["x"].sum() + batch["y"].sum()) * batch["scale"]

    loss = loss_of(loss_fn, mesh, step_partition_spec=(("dp", "fsdp"), "sp"))
    arrays = sf.shard_batch({"x": jnp.ones((8, 6)), "y": jnp.ones(8)}, mesh)
    on_batch = jax.jit(lambda params, batch: loss(params, {**batch, "scale": 2.0}, None))
    on_batch(jnp.ones(2), arrays).block_until_ready()
    assert seen["x"].shard_shape((8, 6)) == (2, 3)
    assert seen["y"].shard_shape((8,)) == (2,)


# Examples

ROWS = [{"id": n, "text": "a", "none": None, "x": np.float32(n), "t": [n]} for n in range(4)]


def columns(**fields):
    drop_columns = transform(TrainingArguments(**fields))
    return sorted(next(sf.batches(ROWS, 2, transform=drop_columns)))


def test_columns_are_dropped_before_a_batch_is_made():
    assert columns(remove_unused_columns=True) == ["id", "t", "x"]
    assert columns(ids_to_pop_from_dataset=("id", "text", "none")) == ["t", "x"]
    assert transform(TrainingArguments()) is None


def test_an_example_without_columns_is_refused():
    drop_columns = transform(TrainingArguments(remove_unused_columns=True))
    with pytest.raises(
        sf.errors.DataError,
        match="expected examples that are dicts of columns, got int 3; leave out",
    ):
        drop_columns(3)


# Checkpoints


def checkpoints_of(**fields):
    arguments = TrainingArguments(**fields)
    return checkpoints(arguments, compute_sizes(arguments))


def test_the_former_name_of_sizes_warns_of_the_new_one():
    arguments = TrainingArguments(output_dir="runs/a", max_steps=200, save_steps=0.25)
    with pytest.warns(DeprecationWarning, match="checkpoints: plan=… is now sizes=…"):
        assert checkpoints(arguments, plan=compute_sizes(arguments)).every == 50


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {"saves checkpoints by the arguments": "the same"},
)
def test_checkpoints_have_the_directory_and_intervals_of_the_arguments():
    series = checkpoints_of(
        output_dir="runs/a",
        checkpoints_dir="kept",
        max_steps=100,
        save_steps=0.1,
        save_interval_minutes=5,
        save_total_limit=2,
    )
    assert series.directory == Path("runs/a/kept").absolute()
    assert (series.every, series.every_epochs) == (10, None)
    assert (series.every_minutes, series.keep) == (5.0, 2)
    by_epoch = checkpoints_of(output_dir="runs/a", save_strategy="epoch")
    assert (by_epoch.every_epochs, by_epoch.keep) == (1, None)  # without a limit
    assert checkpoints_of() is None
    assert checkpoints_of(output_dir="runs/a", do_last_save=False) is None


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("cer", "eval/cer"),
        ("evaluation.f1", "eval/f1"),
        ("evaluation/f1", "eval/f1"),
        ("eval.f1", "eval/f1"),
        ("eval_loss", "eval/loss"),
        ("eval/loss", "eval/loss"),
        ("evaluation_cost", "eval/evaluation_cost"),
        ("train.accuracy", "train/accuracy"),
        ("train_loss", "train/loss"),
        ("train/accuracy", "train/accuracy"),
        ("generated/cer", "generated/cer"),
        (None, None),
    ],
)
def test_the_best_metric_has_a_prefix(metric, name):
    arguments = TrainingArguments(metric_for_best_model=metric)
    assert best_metric(arguments) == (name, None)


@pytest.mark.parametrize(("greater", "mode"), [(True, "max"), (False, "min"), (None, None)])
def test_the_best_mode(greater, mode):
    fields = {"metric_for_best_model": "cer", "greater_is_better": greater}
    assert best_metric(TrainingArguments(**fields)) == ("eval/cer", mode)
    series = checkpoints_of(**fields, output_dir="a")
    assert (series.best, series.mode) == ("eval/cer", mode)


# Writers


def write(**fields):
    writer = writers(TrainingArguments(**fields))
    writer.write_scalars(1, {"train/loss": 0.5})
    writer.close()


def test_files_are_in_the_directory_of_logs(tmp_path):
    write(output_dir=str(tmp_path), report_to=("jsonl", "csv", "tensorboard"))
    logs = tmp_path / "logs"
    assert json.loads((logs / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 0.5}
    assert (logs / "metrics.csv").read_text() == "step,train/loss\n1,0.5\n"
    assert [*(logs / "tensorboard").iterdir()]
    write(output_dir=tmp_path, log_all_workers=True, logs_dir="metrics")
    assert (tmp_path / "metrics" / "process_0" / "metrics.csv").exists()


def test_nothing_is_written_without_a_directory_or_if_switched_off(tmp_path):
    assert writers(TrainingArguments()) is None
    assert writers(TrainingArguments(report_to=())) is None
    assert writers(TrainingArguments(output_dir=tmp_path, report_metrics=False)) is None
    assert writers(TrainingArguments(output_dir=tmp_path, performance_mode=True)) is None
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"report_to=\('csv',\) has no directory to write to; give output_dir",
    ):
        writers(TrainingArguments(report_to=("csv",)))


def test_wandb_options_name_the_run():
    arguments = TrainingArguments(
        output_dir="runs/a",
        use_wandb=True,
        wandb_entity="team",
        wandb_name="first",
        trainer_prefix="sft",
    )
    options = wandb_options(arguments)
    assert options.pop("config")["learning_rate"] == arguments.learning_rate
    assert options == {
        "project": "sft-model",
        "entity": "team",
        "name": "first",
        "dir": str(Path("runs/a").absolute()),
    }


@pytest.mark.full
def test_wandb_is_written_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(output_dir=tmp_path, use_wandb=True, report_to=())
    assert [*(tmp_path / "wandb").glob("offline-run-*")]
