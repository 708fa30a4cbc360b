"""Every field of `TrainingArguments` changes a part of the run, or is refused."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.adapter import digits
from tests.clients.rows import shows
from tests.small import ones

import stepfold as sf
from stepfold import adapter as adapter
from stepfold.adapter import TrainingArguments, from_arguments, loading, run, setup
from stepfold.hooks.objects import as_hook

FIELDS = [field.name for field in dataclasses.fields(TrainingArguments)]
PARAMS = {"embed": ones((4, 4)), "w": ones((4, 4))}


# One function for each part of a run. A row below names the part that a field changes.


def numbers(a):
    return adapter.compute_sizes(a, 1_000, 100, 8)


def rates(a):
    schedule = adapter.make_schedule(a, 100)
    with jax.numpy_dtype_promotion("standard"):
        return [float(schedule(step)) for step in (0, 1, 5, 50, 99)]


def updates(a):
    tx = adapter.make_optimizer(a, adapter.make_schedule(a, 100))
    forms = [(x.shape, x.dtype.name) for x in jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))]

    @jax.jit
    def update():
        gradients = jax.tree.map(lambda leaf: 3 * leaf, PARAMS)
        return tx.update(gradients, tx.init(PARAMS), PARAMS)[0]

    with jax.numpy_dtype_promotion("standard"):
        return forms, [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(update())]


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
    """Pass events to a trainer's hooks, and return what they print and return."""
    found = []
    given = run.make_hooks(held._parts, held, evaluations=[sf.Evaluation(len, every=5)])
    hooks = [as_hook(hook) for hook in given]
    states = [hook.init for hook in hooks]
    for hook in hooks:
        if hasattr(hook.source, "open"):
            hook.source.open(0, 100)
    for step in range(5, 41, 5):
        scalars = {"train/loss": 1.0, "train/grad_norm": 2.0, "train/hits": 3.0}
        for metrics in (scalars, {"eval/loss": 1.0 + step}):
            event, answers = sf.Event(step, 100, metrics, held.state), []
            for index, hook in enumerate(hooks):
                states[index], answer = hook.update(states[index], event)
                answers += sorted(answer) if isinstance(answer, dict) else [answer]
            found.append(answers)
    held.finish()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    return found, [line.split('"seconds_left"')[-1] for line in lines]


def loss(a):
    def loss_fn(params, batch, key, scale=1.0):
        return {"ce": (batch @ params * scale).sum(), "aux_z": params.sum()}

    made = adapter.make_loss(a, loss_fn, sf.make_mesh((1,), ("dp",), devices=jax.devices()[:1]))
    arrays = jnp.ones((2, 2)), jnp.ones((2, 2))
    return str(jax.make_jaxpr(lambda p, b: made(p, b, None))(*arrays))


def gradients(a):
    tx = optax.sgd(0.1)
    state = jax.eval_shape(lambda: sf.init_state(PARAMS, tx, jax.random.key(0)))
    loss_fn = lambda params, batch, key: (params["w"] @ params["w"]).sum()
    train_step, _ = setup.make_steps(digits.parts(a, loss_fn=loss_fn, tx=tx))
    return str(jax.make_jaxpr(train_step)(state, None))


def order(a):
    loader = loading.training_batches(a, adapter.compute_sizes(a), np.arange(100), None)
    return [next(loader).tolist() for _ in range(2)]


def example(a):
    change = adapter.transform(a) or (lambda example: example)
    return change({"id": 1, "text": "a", "tokens": [1]})


def batch(a, held, capsys):
    collate = held._collect_of(digits.TRAIN)
    return None if collate is None else collate([{"x": [1, 2, 3]}])["x"].tolist()


@pytest.fixture(scope="module")
def held():
    """Return a trainer whose arguments the tests replace."""
    return digits.trainer()


def halves(steps):
    return optax.linear_schedule(1.0, 0.5, steps)


def still(tx):
    return optax.chain(tx, optax.scale(0.0))


DIR = {"output_dir": "runs/a"}
JSON = {"progress_bar_type": "json"}
PRINTED = {"progress_bar_type": "none", "verbose": True}
BY_TRAINER = "only the Trainer reads it"
ROWS = {
    "num_train_epochs": (3, numbers),
    "max_steps": (7, numbers),
    "per_epoch_training_steps": (7, numbers),
    "step_start_point": (7, order),
    "training_time_limit": ("1h", numbers),
    "total_batch_size": (8, numbers),
    "per_device_train_batch_size": (2, numbers),
    "gradient_accumulation_steps": (2, numbers),
    "steps_per_call": (2, BY_TRAINER),
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
    "gradient_checkpointing": ("nothing_saveable", gradients),
    "use_fast_kernels": (False, loss),
    "max_length": (2, batch),
    "truncation_mode": ("keep_start", batch, {"max_length": 2}),
    "shuffle_train_dataset": (False, order),
    "shuffle_seed_train": (3, order),
    "seed": (3, order),
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
    "model_name": ("tiny", from_arguments.wandb_options, {"use_wandb": True}),
    "output_dir": ("runs/a", series),
    "checkpoints_dir": ("kept", series, DIR),
    "save_strategy": ("epoch", series, DIR),
    "save_steps": (5, series, DIR),
    "save_interval_minutes": (5.0, series, DIR),
    "save_total_limit": (5, series, DIR),
    "do_last_save": (False, series, DIR),
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
    "wandb_entity": ("team", from_arguments.wandb_options, {"use_wandb": True}),
    "wandb_name": ("run", from_arguments.wandb_options, {"use_wandb": True}),
    "trainer_prefix": ("sft", from_arguments.wandb_options, {"use_wandb": True}),
}


def test_every_field_has_a_row():
    assert {*FIELDS} == ROWS.keys()


@shows(
    "BaseTrainer",
    "Configuration example",
    {
        "`model_name`": "a name in logs and cards; `model_name_or_path` loads weights",
        "`num_train_epochs`": "the same",
        "`learning_rate`": "the same",
        "`gradient_accumulation_steps`": "the same; the result is that of the whole batch",
        "`weight_decay`": "the same",
        "`gradient_checkpointing`": "the same, any policy of `jax.checkpoint_policies`",
        "`sharding_array`": "the same",
        "`use_fast_kernels`": "the precision of matrix products; XLA chooses the kernels",
        "`save_steps`": "the same",
        "`save_total_limit`": "the same",
        "`evaluation_strategy`": "the same",
        "`eval_steps`": "the same",
        "`output_dir`": "the same",
    },
)
@pytest.mark.parametrize("name", ROWS)
def test_every_field_changes_a_part(name, tmp_path, monkeypatch, capsys, held):
    value, where, *rest = ROWS[name]
    base = rest[0] if rest else {}
    if where is BY_TRAINER:
        check_that_the_trainer_reads(name)
        return

    def see(fields, folder):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        try:
            arguments = TrainingArguments(**fields)
            if where not in (shown, batch):
                return where(arguments)
            held.arguments, held.sizes = arguments, adapter.compute_sizes(arguments, 200, 100, 1)
            held.writer = adapter.writers(arguments)
            return where(arguments, held, capsys)
        except (sf.errors.ConfigError, sf.errors.ShardingError) as error:
            return f"{type(error).__name__}: {error}"

    plain, changed = see(base, "plain"), see({**base, name: value}, "changed")
    assert not str(plain).startswith("ConfigError"), plain
    assert changed != plain
    assert not str(changed).startswith("ConfigError") or name in (
        "jax_distributed_config",  # whose key is wrong here, so that nothing is started
        "sharding_array",  # whose names do not fit any more
    )


def check_that_the_trainer_reads(name):
    """Look for `.name` in the modules above the arguments."""
    folder = Path(adapter.__file__).parent
    read = {
        node.attr
        for path in folder.rglob("*.py")
        if path.name not in ("arguments.py", "validation.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert name in read
