"""What the trainers of EasyDeL, qurious and Hezar promise, line by line, on real images.

A row is a line of what they document: what is called, and what is observed. Nothing of stepfold's
is replaced by a mock.
"""

import csv
import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec
from tests.adapter.digits import (
    TEST,
    TRAIN,
    arguments,
    bits,
    init,
    logits_of,
    loss_fn,
    plain_loss,
    trainer,
)
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter import (
    BaseTrainerProtocol,
    StopTraining,
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
    TrainingArguments,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


ROWS = []


def row(section, line, *, is_full=False):
    """Keep the function of a line; `is_full` leaves it to `--full`."""

    def keep(function):
        marks = [pytest.mark.full] if is_full else []
        ROWS.append(pytest.param(function, id=f"{section}: {line}", marks=marks))
        return function

    return keep


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of 20 steps, two epochs, that was evaluated and saved every five."""
    place = tmp_path_factory.mktemp("ran")
    options = {"evaluation_strategy": "steps", "eval_steps": 5, "save_steps": 5}
    with jax.numpy_dtype_promotion("standard"):
        made = trainer(
            output_dir=place,
            report_to=("jsonl",),
            metric_for_best_model="accuracy",
            scheduler="linear",
            track_memory=True,
            **options,
        )
        made.output = made.train()
    made.place = place
    return made


@functools.cache
def plain_run():
    """The state after a run with nothing else to do."""
    return trainer().train().state


def expected_loss(params, data):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, data), data["label"])
    return float(nll.mean())


def saved_steps(place):
    return sorted(int(path.name) for path in (place / "checkpoints").iterdir())


# A. EasyDeL


@shows("BaseTrainer", "Key methods", {"`__init__(arguments, …)`": "the same"})
@shows(
    "API reference",
    "Constructor",
    {
        "seven arguments by position, from `arguments` to `finetune`": "the same",
        "`arguments=None`": "refused; give `TrainingArguments()`",
    },
)
@row("A", "constructor")
def _(ran, place):
    names = ["arguments", "model_state", "model", "dataset_train", "dataset_eval"]
    given = [arguments(), init(jax.random.key(0)), object(), TRAIN, TEST, None, True]
    made = Trainer(*given, loss_fn=loss_fn, devices=jax.devices()[:1])
    assert [getattr(made, name) is not None for name in names] == [True] * 5
    with pytest.raises(
        sf.errors.ConfigError, match=r"no 'datset_train'; did you mean 'dataset_train'"
    ):
        Trainer(arguments(), datset_train=TRAIN)
    with pytest.raises(
        sf.errors.ConfigError, match=r"loss_fn: expected a loss function .* got None"
    ):
        trainer(given={"loss_fn": None})
    with pytest.raises(
        sf.errors.ConfigError, match=r"arguments: expected TrainingArguments, got dict"
    ):
        Trainer({})
    with pytest.raises(
        sf.errors.ConfigError, match=r"arguments: expected TrainingArguments, got NoneType"
    ):
        Trainer()
    with pytest.raises(
        sf.errors.ConfigError, match=r"model, model_state: expected a function key -> par"
    ):
        trainer(given={"model": None})


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {
        "`train(model_parameters, state)`": "the same",
        "resumes from `state`": "the same, with the bits of a run without a break",
        "`model_parameters`": "parameters to start with",
    },
)
@shows("BaseTrainer", "Core concepts", {"`train()` is the whole loop": "the same"})
@shows("BaseTrainer", "Key methods", {'`train(ckpt_path="path")`': "the same"})
@shows("API reference", "Methods and properties", {"`train` returns a `TrainerOutput`": "the same"})
@row("A", "train()")
def _(ran, place):
    assert isinstance(ran.output, TrainerOutput)
    assert int(ran.output.state.step) == 20
    assert ran.output.stopped == "all 20 steps were done"
    assert ran.history["train/loss"][-1] < ran.history["train/loss"][0]
    params = init(jax.random.key(7))
    begun = trainer(max_steps=1).train(model_parameters=params)
    apart = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), begun.state.params, params)
    assert 0 < max(map(float, jax.tree.leaves(apart))) < 0.02
    half = trainer(max_steps=10, num_train_epochs=2)
    state = half.train().state
    path = half.save_pretrained(place / "half")
    whole = trainer()
    from_state, from_path = whole.train(state=state), trainer().train(ckpt_path=path)
    assert bits(from_state.state) == bits(from_path.state) == bits(plain_run())
    with pytest.raises(sf.errors.ConfigError, match="one of model_parameters, state and ckpt_path"):
        whole.train(params, state)


@shows(
    "BaseTrainer",
    "Key methods",
    {
        "`eval(state)` returns a dict": "`evaluate(state)` does; `eval` yields one for each "
        "batch, as in the reference"
    },
)
@shows(
    "API reference",
    "Methods and properties",
    {"`eval` yields the metrics of each step": "the same"},
)
@row("A", "eval(model_state)")
def _(ran, place):
    each = list(ran.eval(ran.state))
    assert len(each) == 5
    assert np.mean([found["eval_loss"] for found in each]) == pytest.approx(
        ran.evaluate()["eval_loss"]
    )
    assert not isinstance(ran.eval(ran.state), list)


@shows(
    "Trainer Protocol",
    "Required methods: evaluate",
    {
        "`evaluate(state, metric_calculator)`": "the same, both optional",
        "iterates, runs a jitted step and aggregates": "exact over all examples, also if the last "
        "batch is smaller",
        "`metric_calculator`": "a function of state and batch, or of the numbers by name",
        'keys `"eval_loss"`, `"accuracy"`': "`eval_loss`, `eval_accuracy`: every name has the "
        "prefix",
    },
)
@row("A", "evaluate(state, metric_calculator)")
def _(ran, place):
    uneven = trainer(eval_batch_size=32, given={"loss_fn": plain_loss})
    found = uneven.evaluate(uneven.state)["eval_loss"]
    assert found == pytest.approx(expected_loss(uneven.state.params, TEST), rel=1e-5)
    assert ran.evaluate().keys() == {"eval_loss", "eval_accuracy"}
    norm = lambda state, batch: {"norm": sf.mean(jnp.linalg.norm(batch["image"], axis=1))}
    found = uneven.evaluate(metric_calculator=norm)
    wanted = np.linalg.norm(TEST["image"], axis=1).mean()
    assert found["eval_norm"] == pytest.approx(wanted, rel=1e-5)
    double = uneven.evaluate(metric_calculator=lambda found: {"twice": 2 * found["eval_loss"]})
    assert double["twice"] == 2 * double["eval_loss"]


@shows(
    "Trainer Protocol",
    "Required methods: configuration",
    {"`configure_model` makes model, optimizer and state": "the same"},
)
@shows("BaseTrainer", "Core concepts", {"the state holds PRNG keys": "`state.key`"})
@shows(
    "API reference",
    "Methods and properties",
    {"`configure_model` returns model, `tx`, scheduler and config": "the same"},
)
@row("A", "configure_model()")
def _(ran, place):
    made = ran.configure_model()
    assert isinstance(made, TrainerConfigureModelOutput)
    assert (made.model, made.config) == (init, None)
    assert float(made.scheduler(20)) == 0.0
    assert int(made.state.step) == 0
    assert jnp.issubdtype(made.state.key.dtype, jax.dtypes.prng_key)
    assert made.tx.init(made.state.params) is not None


@shows(
    "Trainer Protocol",
    "Required methods: configuration",
    {"`configure_dataloaders` by the arguments and datasets": "the same"},
)
@shows("BaseTrainer", "Key methods", {"`configure_dataloaders`": "the same"})
@shows(
    "API reference",
    "Methods and properties",
    {
        "`configure_dataloaders` returns loaders and numbers of steps": "the same",
        "grain with `use_grain`": "the same",
    },
)
@row("A", "configure_dataloaders()")
def _(ran, place):
    made = ran.configure_dataloaders()
    assert isinstance(made, TrainerConfigureDataloaderOutput)
    assert (made.max_training_steps, made.max_evaluation_steps) == (20, 5)
    assert next(made.dataloader_train)["image"].shape == (20, 64)
    assert len(list(made.dataloader_eval)) == 5
    epochs = trainer(num_train_epochs=3)
    assert epochs.max_training_steps == 30
    grained = trainer(use_grain=True, given={"dataset_train": examples(TRAIN)}, max_steps=10)
    seen = [next(grained.dataloader_train)["label"] for _ in range(10)]
    assert sorted(np.concatenate(seen)) == sorted(TRAIN["label"])
    assert int(grained.train().state.step) == 10


@shows(
    "Trainer Protocol",
    "Required methods: configuration",
    {
        "`train_step_fn(state, batch)` returns state and metrics": "the same",
        "`eval_step_fn(state, batch)` returns metrics": "the same",
    },
)
@shows(
    "BaseTrainer",
    "Key methods",
    {"`configure_functions`": "the same; by default made of `loss_fn`"},
)
@shows(
    "API reference",
    "Methods and properties",
    {"`configure_functions` returns steps, mesh and checkpoint manager": "the same"},
)
@row("A", "configure_functions()")
def _(ran, place):
    made = ran.configure_functions()
    assert isinstance(made, TrainerConfigureFunctionOutput)
    assert made.train_step_fn is made.sharded_training_step_function
    assert made.mesh == ran.mesh
    assert made.checkpoint_manager.every == 5
    batch = {**{name: values[:20] for name, values in TRAIN.items()}, "mask": np.ones(20, bool)}
    fresh = trainer()
    state, metrics = fresh.train_step_fn(fresh.state, batch)
    assert int(state.step) == 1
    assert float(metrics["loss"].compute()) > 0
    assert float(fresh.eval_step_fn(state, batch)["loss"].compute()) > 0


@shows("BaseTrainer", "Core concepts", {"automatic checkpoints of the state": "the same"})
@row("A", "TrainerOutput")
def _(ran, place):
    made = ran.output
    assert made.mesh == ran.mesh
    assert made.last_save_file_name == "20"
    assert made.checkpoint_path == str(ran.place / "checkpoints" / "20")
    assert bits(sf.restore(ran.place / "checkpoints", made.state).state) == bits(made.state)


def examples(data):
    return [
        {name: values[index] for name, values in data.items()}
        for index in range(len(data["label"]))
    ]


@shows("BaseTrainer", "Key methods", {"`create_collect_function()`": "the same"})
@shows(
    "API reference",
    "Methods and properties",
    {
        "`create_collect_function`": "the same",
        "`create_grain_collect_function`": "the same",
        "`create_tfds_collect_function`": "the same",
        "`truncation_mode` of `keep_end` or `keep_start`": "the same",
    },
)
@row("A", "create_collect_function and its two kin")
def _(ran, place):
    ragged = [{"ids": [1, 2, 3, 4, 5]}, {"ids": [6]}]
    assert ran.create_collect_function()(ragged[:1])["ids"].tolist() == [[1, 2, 3, 4, 5]]
    for name in ("create_collect_function", "create_grain_collect_function"):
        padded = getattr(ran, name)(max_sequence_length=3, truncation_mode="keep_end")(ragged)
        assert padded["ids"].tolist() == [[3, 4, 5], [6, 0, 0]]
        assert padded["mask"].tolist() == [[True] * 3, [True, False, False]]
    cut = ran.create_tfds_collect_function(3, "keep_start")({"ids": [[1, 2, 3, 4], [5]]})
    assert cut["ids"].tolist() == [[1, 2, 3], [5, 0, 0]]
    with pytest.raises(sf.errors.ConfigError, match="truncat"):
        ran.create_collect_function(3, "keep_middle")
    with pytest.raises(sf.errors.DataError):  # never silently dropped
        ran.create_collect_function(3, "keep_end")([{"ids": [1], "text": "a"}])


@shows(
    "API reference",
    "Methods and properties",
    {
        "`create_progress_bar` of tqdm, rich or JSON": "the same",
        "`disabled=True` returns a `NullProgressBar`": "the same",
    },
)
@row("A", "create_progress_bar(total, desc, disabled)")
def _(ran, place):
    for kind in ("tqdm", "rich", "json", "none"):
        bar = trainer(max_steps=2, progress_bar_type=kind).create_progress_bar(10, desc="digits")
        bar.set_postfix(loss=1.0)
        bar.update(5)
        bar.close()
    off = ran.create_progress_bar(10, disabled=True)
    assert type(off).__name__ == "NullProgressBar"


@row("A", "log_weight_distribution(state, step)", is_full=True)
def _(ran, place):
    made = trainer(weight_distribution_pattern="kernel", weight_distribution_log_steps=10)
    found = made.log_weight_distribution(made.state, 10)
    kernel = np.asarray(made.state.params["kernel"])
    assert found["weights/kernel/mean"] == pytest.approx(kernel.mean(), abs=1e-6)
    assert found["weights/kernel/max"] == pytest.approx(kernel.max())
    assert not [name for name in found if "bias" in name]


@shows(
    "BaseTrainer",
    "Customization",
    {
        "`on_step_start`": "the same; a run waits for each step",
        "`on_step_end`": "the same; it may return state and metrics",
        "`on_log`": "the same, at each log point",
    },
)
@shows(
    "API reference",
    "Methods and properties",
    {
        "`on_step_end(state, metrics, step)`": "the same",
        "`on_step_start(state, step)`": "the same",
        "`start_evaluation_hook`": "the same",
        "`start_training_hook`": "the same",
    },
)
@row("A", "on_step_start, on_step_end, on_log and the other hooks")
def _(ran, place):
    told = []

    class Told(Trainer):
        def start_training_hook(self):
            told.append("training")

        def start_evaluation_hook(self):
            told.append("evaluation")

        def on_step_start(self, state, step):
            told.append(("start", step))
            return state

        def on_step_end(self, state, metrics, step):
            told.append(("end", step, float(metrics["loss"]) > 0))
            return state, {**metrics, "twice": 2 * metrics["loss"]}

        def on_log(self, metrics, step):
            told.append(("log", step, "train/twice" in metrics))

    made = trainer(Told, max_steps=2, log_steps=1)
    made.train()
    assert told[:4] == ["training", ("start", 0), ("end", 1, True), ("start", 1)]
    assert ("log", 2, True) in told
    assert "evaluation" in told
    assert made.history["train/twice"][0] == pytest.approx(2 * made.history["train/loss"][0])

    class Fails(Trainer):
        def on_step_end(self, state, metrics, step):
            if step == 7:
                raise TypeError("seven")

    failing = trainer(Fails, output_dir=place)
    with pytest.raises(TypeError, match="seven"):
        failing.train()
    assert saved_steps(place) == [7]
    assert int(failing.state.step) == 7


@shows("Trainer Protocol", "Required methods: train", {"executes a jitted step": "compiled once"})
@shows("API reference", "Methods and properties", {"`compile_aot`": "the same"})
@shows("API reference", "Attributes", {"`train_tracker`": "counts compilations"})
@row("A", "compile_aot()")
def _(ran, place):
    made = trainer(max_steps=2)
    assert made.compile_aot() is True
    assert made.train_tracker.compilations == 1
    made.train()
    assert made.train_tracker.compilations == 1


@shows("API reference", "Methods and properties", {"`calculate_number_total_flops`": "the same"})
@row("A", "calculate_number_total_flops(params, is_training)")
def _(ran, place):
    made = trainer()
    params = made.state.params
    assert made.calculate_number_total_flops(params) == 6 * 650 * 20
    assert made.calculate_number_total_flops(params, is_training=False) == 2 * 650 * 20
    made.compile_aot()
    assert made.calculate_number_total_flops(params) == 2 * 2 * 20 * 64 * 10
    assert made.calculate_number_total_flops(params, is_training=False) == 2 * 20 * 64 * 10


@shows(
    "Trainer Protocol",
    "Required methods: save_pretrained",
    {
        "`save_pretrained(ckpt_path, state=None)`": "the same",
        "model parameters": "in the checkpoint",
        "optimizer state, `state.tx_state`": "in the checkpoint; its name is `state.opt_state`",
        "training arguments": "`arguments.json`, read by `TrainingArguments.from_json`",
        "without a state, that of the trainer": "the same",
    },
)
@shows(
    "API reference",
    "Methods and properties",
    {
        "`save_pretrained(state, save_directory)`": "the same",
        "`to_torch`": "writes safetensors with the layout of torch; `save_model` is short for it",
    },
)
@row("A", "save_pretrained in both forms")
def _(ran, place):
    made = trainer(max_steps=8)
    made.train()
    made.save_pretrained(made.state, save_directory=place / "a")
    made.save_pretrained(str(place / "b"), made.state)
    made.save_pretrained(place / "c")
    read = TrainingArguments.from_json(place / "a" / "arguments.json")
    assert read == made.arguments
    for name in "abc":
        assert bits(sf.restore(place / name, made.state).state) == bits(made.state)
    assert bits(trainer().train(ckpt_path=place / "c").state) == bits(plain_run())
    names = {"names": {"kernel": "head.weight"}}
    for folder, options, kernel in (("torch", {}, "weight"), ("named", names, "head.weight")):
        made.save_pretrained(
            made.state, place / folder, to_torch=True, easystate_to_huggingface_model_kwargs=options
        )
        found = safetensors.numpy.load_file(place / folder / "model.safetensors")
        assert sorted(found) == ["bias", kernel]
        np.testing.assert_array_equal(found[kernel], np.asarray(made.state.params["kernel"]).T)
        assert found[kernel].flags.c_contiguous


@shows("API reference", "Methods and properties", {"`save_information(output_path)`": "the same"})
@row("A", "save_information(output_path)")
def _(ran, place):
    ran.save_information(place / "card.md")
    text = (place / "card.md").read_text()
    for part in ("# model", "all 20 steps were done", "learning_rate", "kernel", "| jax |", "█"):
        assert part in text
    assert "clip_grad" not in text  # which is None
    heads = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["Notes", "Results", "Arguments", "Parameters", "Devices", "Versions"]
    ran.save_information(place)
    assert (place / "README.md").read_text() == text


@shows(
    "Trainer Protocol",
    "Required properties",
    {"`model`": "the object that was given, or that `configure_model` returns"},
)
@shows(
    "API reference",
    "Methods and properties",
    {
        "`evaluation_batch_size`": "over all devices",
        "`training_batch_size`": "over all devices",
        "`mesh`": "the same",
        "`model`": "the same",
        "`specs_to_name_sharding(tree, mesh)`": "the same",
    },
)
@row("A", "specs_to_name_sharding and the properties")
def _(ran, place):
    spec = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}
    found = ran.specs_to_name_sharding(spec)
    assert found["w"].spec == PartitionSpec("fsdp")
    assert found["b"].mesh == ran.mesh
    other = sf.make_mesh()
    assert ran.specs_to_name_sharding(spec, other)["w"].mesh == other
    assert (ran.training_batch_size, ran.evaluation_batch_size) == (20, 20)
    assert (ran.is_process_zero, ran.is_enable) == (True, True)
    assert ran.model is init


@shows(
    "API reference",
    "Methods and properties",
    {
        "`finish`": "the same, idempotent",
        "`initialize_trainer_utils` and its order": "the same",
    },
)
@row("A", "initialize_trainer_utils() and finish()")
def _(ran, place):
    order = []

    class Ordered(Trainer):
        def configure_dataloaders(self):
            order.append("dataloaders")
            return super().configure_dataloaders()

        def configure_model(self):
            order.append("model")
            return super().configure_model()

        def configure_functions(self):
            order.append("functions")
            return super().configure_functions()

    made = trainer(Ordered, max_steps=2, output_dir=place)
    assert order == ["dataloaders", "model", "functions"]
    made.train()
    made.finish()
    made.finish()
    assert saved_steps(place) == [2]


ATTRIBUTES = (
    *("arguments", "checkpoint_manager", "checkpoint_path", "dataloader_eval", "dataloader_train"),
    *("dataset_eval", "dataset_train", "dtype", "evalu_tracker", "finetune", "memory_monitor"),
    *("max_evaluation_steps", "max_training_steps", "model_state", "param_dtype", "scheduler"),
    *("sharded_evaluation_step_function", "sharded_training_step_function", "state", "timer"),
    *("state_named_sharding", "state_partition_spec", "state_shape", "state_shardings", "tx"),
    *("train_tracker", "_model_state", "optimizer", "mesh", "model"),
)


@shows(
    "Trainer Protocol",
    "Required properties",
    {
        "`arguments`": "a `TrainingArguments`",
        "`dataset_train`": "the same",
        "`dataset_eval`": "the same",
    },
)
@shows(
    "API reference",
    "Attributes",
    {
        "`arguments`": "a `TrainingArguments`",
        "`checkpoint_manager`": "an `sf.Checkpoints`, or None without an `output_dir`",
        "`checkpoint_path`": "the folder of the newest checkpoint, or None",
        "`dataloader_train`": "an iterator of batches",
        "`dataset_eval`": "the same",
        "`dataset_train`": "the same",
        "`dtype`": "the same",
        "`evalu_tracker`": "counts compilations",
        "`finetune`": "the same",
        "`max_evaluation_steps`": "the same",
        "`max_training_steps`": "the same",
        "`memory_monitor`": "a function of an event that measures the memory in use",
        "`param_dtype`": "the same",
        "`pruning_module`": "the same",
        "`scheduler`": "the same",
        "`state`": "an `sf.TrainState`, or that of `configure_model`",
        "`state_named_sharding`": "the sharding of each leaf",
        "`state_partition_spec`": "the partition spec of each leaf",
        "`state_shape`": "the shape and dtype of each leaf",
        "`timer`": "`timer.seconds` by name",
        "`tx`": "the same",
    },
)
@row("A", "attributes")
def _(ran, place):
    assert [name for name in ATTRIBUTES if getattr(ran, name) is None] == []
    for name in ("config", "data_collator", "pruning_module", "wandb_runtime"):
        assert getattr(ran, name) is None  # nothing was given
    assert ran.dtype == ran.param_dtype == jnp.float32
    assert ran.state_partition_spec.params["kernel"] == PartitionSpec()
    assert ran.state_named_sharding.params["kernel"].spec == PartitionSpec()
    assert ran.state_shape.params["kernel"].shape == (64, 10)
    assert ran.memory_monitor(sf.Event(1, None, {}, None))["memory/host"] > 0
    assert ran.timer.seconds["train"] > 0
    assert ran.train_tracker.compilations >= 1
    assert ran.evalu_tracker.compilations >= 1
    assert isinstance(ran, BaseTrainerProtocol)


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {
        "`state.step` is consistent": "counts the updates",
        "out-of-memory errors": "raised with a note on which arguments to change",
        "logs loss and learning rate": "`train/loss`, and `train/learning_rate` if there is a "
        "schedule",
        "logs memory": "`track_memory=True`",
        "`logging_steps`": "the same",
    },
)
@shows(
    "BaseTrainer", "Key methods", {"`train` evaluates": "at the end, and by `evaluation_strategy`"}
)
@row("A", "best practices")
def _(ran, place):
    assert int(ran.state.step) == 20
    names = {"train/loss", "train/accuracy", "train/learning_rate", "memory/host", "eval/loss"}
    assert names <= ran.history.keys()
    assert ran.history["train/loss"].steps[:2] == [5, 10]
    assert ran.history["train/learning_rate"][-1] < ran.history["train/learning_rate"][0]
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    class Full(Trainer):
        def on_step_end(self, state, metrics, step):
            raise error

    with pytest.raises(RuntimeError) as caught:
        trainer(Full).train()
    assert "raise gradient_accumulation_steps" in caught.value.__notes__[0]


# B. qurious


@row("B", "any model, any loss; (inputs, targets) or dict batches", is_full=True)
def _(ran, place):
    def of_pairs(params, batch, key):
        return plain_loss(params, {"image": batch[0], "label": batch[1]}, key)

    pairs = (TRAIN["image"], TRAIN["label"])
    made = trainer(given={"dataset_train": pairs, "loss_fn": of_pairs, "dataset_eval": None})
    made.train()
    assert made.history["train/loss"][-1] < made.history["train/loss"][0]


@row("B", "history: dict of lists per epoch")
def _(ran, place):
    made = trainer(num_train_epochs=3, evaluation_strategy="epoch", log_steps=4)
    made.train()
    assert {name: len(values) for name, values in made.epoch_history.items()} == dict.fromkeys(
        made.epoch_history, 3
    )
    assert made.epoch_history["eval_loss"][2] < made.epoch_history["eval_loss"][0]


@shows("Trainer Protocol", "Best practices for implementation", {"`save_total_limit`": "the same"})
@shows(
    "BaseTrainer",
    "Core concepts",
    {"a limit on the number of checkpoints": "`save_total_limit`, in addition to the best one"},
)
@row("B", "save_dir, save_freq in epochs, best model by metric")
def _(ran, place):
    made = trainer(
        num_train_epochs=4,
        save_dir=place,
        save_strategy="epoch",
        save_total_limit=1,
        evaluation_strategy="epoch",
        metric_for_best_model="accuracy",
    )
    made.train()
    curve = made.history["eval/accuracy"]
    best = curve.steps[int(np.argmax(curve))]
    assert saved_steps(place) == sorted({best, 40})
    assert made.best == best
    assert int(made.best_state.step) == best


@row("B", "early stopping patience")
def _(ran, place):
    made = trainer(
        max_steps=200,
        evaluation_strategy="steps",
        eval_steps=2,
        early_stopping_patience=2,
        greater_is_better=True,
        metric_for_best_model="evaluation.loss",
    )
    assert "eval/loss has not become better than" in made.train().stopped
    assert int(made.best_state.step) == 2
    assert int(made.state.step) == 6


@row("B", "callbacks (trainer, epoch, metrics)")
def _(ran, place):
    told = []

    def tell(trainer, epoch, metrics):
        told.append((int(trainer.state.step), epoch, sorted(metrics)[:1]))
        if epoch == 1:
            raise OSError("second epoch")

    made = trainer(num_train_epochs=3, output_dir=place, given={"callbacks": [tell]})
    with pytest.raises(OSError, match="second epoch"):
        made.train()
    assert told == [(10, 0, ["train_accuracy"]), (20, 1, ["train_accuracy"])]
    assert saved_steps(place) == [20]


@row("B", "load_checkpoint(path, load_optimizer, load_scheduler)")
def _(ran, place):
    fresh = lambda: trainer(scheduler="linear")
    everything, weights, rate = fresh(), fresh(), fresh()
    assert everything.load_checkpoint(ran.place)["step"] == 20
    assert bits(everything.state) == bits(ran.state)
    weights.load_checkpoint(ran.place, load_optimizer=False, load_scheduler=False)
    assert bits(weights.state.params) == bits(ran.state.params)
    assert bits(weights.state.opt_state) == bits(fresh().state.opt_state)
    rate.load_checkpoint(ran.place / "checkpoints" / "10", load_optimizer=False)
    counts = {int(leaf) for leaf in jax.tree.leaves(rate.state.opt_state) if leaf.ndim == 0}
    assert counts == {0, 10}


@row("B", "device detection")
def _(ran, place):
    assert Trainer(
        TrainingArguments(max_steps=1), model=init, dataset_train=TRAIN, loss_fn=loss_fn
    ).mesh.size == len(jax.devices())


# C. Hezar


@row("C", "any dataset with __len__ and __getitem__", is_full=True)
def _(ran, place):
    class Digits:
        def __len__(self):
            return 200

        def __getitem__(self, index):
            return {name: values[index] for name, values in TRAIN.items()}

    made = trainer(given={"dataset_train": Digits()})
    assert bits(made.train().state) == bits(plain_run())


@row("C", "init_weights_from")
def _(ran, place):
    larger = lambda key: {**init(key), "head": jnp.zeros((10, 3))}
    made = trainer(init_weights_from=str(ran.place), given={"model": larger})
    assert bits(made.state.params["kernel"]) == bits(ran.state.params["kernel"])
    assert int(made.state.step) == 0
    assert made.loaded == ["params/bias", "params/kernel"]
    assert list(made.not_loaded) == ["params/head"]
    sf.checkpoint.export_params(place, ran.state.params)
    made = trainer(init_weights_from=place)
    assert bits(made.state.params) == bits(ran.state.params)
    other = lambda key: {"other": jnp.ones(3)}
    with pytest.raises(sf.errors.TreeMismatchError, match="none that fits"):
        trainer(init_weights_from=str(ran.place), given={"model": other})


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {
        "resumes by the arguments": "from the newest checkpoint in `output_dir`, or "
        "`resume_from_checkpoint=`"
    },
)
@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {
        "checkpoints hold all that a resume needs": "state, data position, metrics: a resumed run "
        "has the bits of one without a break"
    },
)
@row("C", "resume_from_checkpoint True or path", is_full=True)
def _(ran, place):
    whole = trainer(num_train_epochs=3).train().state

    class Cut(Trainer):
        def on_log(self, metrics, step):
            if step == 15:
                raise StopTraining("cut")

    cut = trainer(Cut, num_train_epochs=3, output_dir=place)
    assert cut.train().stopped.startswith("cut; stopped at step")
    for options in (
        {"output_dir": place / "b", "resume_from_checkpoint": str(place)},
        {"output_dir": place, "resume_from_checkpoint": True},
    ):
        resumed = trainer(num_train_epochs=3, **options)
        assert bits(resumed.train().state) == bits(whole)


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"`save_strategy`, `save_steps`, epochs": "the same"},
)
@row("C", "checkpoints each epoch and each save_steps, named by global step", is_full=True)
def _(ran, place):
    trainer(num_train_epochs=2, save_steps=4, save_strategy="epoch", output_dir=place).train()
    assert saved_steps(place) == [4, 8, 10, 12, 16, 20]


@row("C", "mixed_precision bf16, fp16, full", is_full=True)
def _(ran, place):
    for name in ("bf16", "fp16", "full"):
        made = trainer(mixed_precision=name)
        made.train()
        assert made.history["train/loss"][-1] < made.history["train/loss"][0]
        assert hasattr(made.state.opt_state, "scale") == (name == "fp16")


@shows(
    "Trainer Protocol",
    "Required methods: evaluate",
    {"distributed evaluation": "the numbers of one device"},
)
@shows(
    "BaseTrainer",
    "Core concepts",
    {
        "several devices with few changes": "`sharding_array`, which needs no change of your "
        "functions"
    },
)
@row("C", "distributed", is_full=True)
def _(ran, place):
    spread = trainer(
        sharding_array=(1, -1, 2, 1),
        total_batch_size=16,
        given={"rules": [("kernel", PartitionSpec("fsdp", "tp"))]},
    )
    assert len(spread.train().state.params["kernel"].sharding.device_set) == 8
    assert spread.state_partition_spec.params["kernel"] == PartitionSpec("fsdp", "tp")
    alone = trainer(total_batch_size=16)
    alone.train()
    for a, b in zip(*(jax.tree.leaves(t.state.params) for t in (spread, alone)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert spread.evaluate() == pytest.approx(alone.evaluate(), rel=1e-5)


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"configurable logging, TensorBoard": '`report_to=("csv", "tensorboard")`'},
)
@row("C", "TensorBoard and CSV logs; a resume appends", is_full=True)
def _(ran, place):
    options = {"output_dir": place, "report_to": ("csv", "tensorboard")}
    trainer(max_steps=10, **options).train()
    trainer(max_steps=20, **options).train()
    with (place / "logs" / "metrics.csv").open() as file:
        steps = [int(line["step"]) for line in csv.DictReader(file)]
    assert steps == sorted(steps)
    assert sorted(set(steps)) == [5, 10, 15, 20]
    assert list((place / "logs" / "tensorboard").iterdir())


@row("C", "running loss average in the progress bar, kept over a resume", is_full=True)
def _(ran, place):
    averages = []

    class Shown(Trainer):
        def on_log(self, metrics, step):
            known = self.progress_bar.get_state()
            averages.append((step, known["sum"]))

    options = {"progress_bar_type": "json", "output_dir": place, "do_eval": False}
    trainer(Shown, max_steps=10, **options).train()
    before = averages[-1]
    trainer(Shown, max_steps=15, **options).train()
    assert before[0] == 10
    assert averages[-1][0] == 15
    alone = trainer(Shown, max_steps=15, progress_bar_type="json", do_eval=False)
    alone.train()
    assert averages[-1] == averages[2]


@row("C", "seed, workers, shuffle", is_full=True)
def _(ran, place):
    state = lambda **changes: bits(trainer(**changes).train().state)
    assert state(seed=1, dataloader_num_workers=2) == state(seed=1) != bits(plain_run())
    in_order = trainer(shuffle_train_dataset=False)
    assert next(in_order.dataloader_train)["label"].tolist() == TRAIN["label"][:20].tolist()
    loader = trainer().dataloader_train
    orders = [[next(loader)["label"].tolist() for _ in range(10)] for _ in range(2)]
    assert orders[0] != orders[1]


@row("A", "Ctrl-C")
def _(ran, place):
    class Interrupted(Trainer):
        def on_log(self, metrics, step):
            if step == 10:
                os.kill(os.getpid(), signal.SIGINT)

    made = trainer(Interrupted, output_dir=place)
    with pytest.raises(KeyboardInterrupt, match="SIGINT at step"):
        made.train()
    assert saved_steps(place) == [int(made.state.step)]
    assert made.stopped.startswith("SIGINT at step")


@pytest.mark.parametrize("check", ROWS)
def test_documented_feature(check, ran, tmp_path):
    check(ran, tmp_path)
