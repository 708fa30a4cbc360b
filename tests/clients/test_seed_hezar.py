"""The examples of the trainer that Hezar documents, with imports, model and data exchanged."""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import nn
from sklearn.datasets import load_digits
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter.hezar import Model, Trainer, TrainerConfig


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield


DIGITS = load_digits()
LENGTH = 3  # digits on a plate


class Plates:
    """Images of several digits in a row, with their classes from 1 on; 0 is the blank of CTC."""

    def __init__(self, split, size):
        self.rng = np.random.default_rng({"train": 0, "test": 1}[split])
        self.examples = [self.make() for _ in range(size)]
        self.collated = 0

    def make(self):
        chosen = self.rng.integers(0, len(DIGITS.target), LENGTH)
        image = np.concatenate([DIGITS.images[i] for i in chosen], axis=1) / 16
        return {"pixel_values": np.float32(image), "labels": DIGITS.target[chosen] + 1}

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]

    def data_collator(self, examples):
        self.collated += 1
        return {name: np.stack([each[name] for each in examples]) for name in examples[0]}


def crnn(params, pixel_values):
    """Return the logits of each column, from the eight columns around it."""
    width = pixel_values.shape[-1]
    padded = jnp.pad(pixel_values, ((0, 0), (0, 0), (4, 3)))
    windows = jnp.stack([padded[..., i : i + 8] for i in range(0, width, 4)], axis=1)
    frames = windows.reshape(*windows.shape[:2], -1)
    hidden = nn.relu(frames @ params["hidden"] + params["bias"])
    return {"logits": hidden @ params["out"]}


def ctc_loss(outputs, labels):
    logits = outputs["logits"]
    unpadded = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, unpadded[0], labels, unpadded[1])


def new_weights(key=0):
    keys = jax.random.split(jax.random.key(key))
    return {
        "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(keys[1], (64, 11)) / 8,
    }


def read_plate(model, input_batch):
    """Decode greedily: the best class of each column, without repetitions and blanks."""
    best = np.asarray(model(input_batch["pixel_values"])["logits"].argmax(-1))
    texts = []
    for row in best:
        changed = row[np.flatnonzero(np.diff(row, prepend=-1))]
        texts.append([int(column) for column in changed if column])
    return texts


class Preprocessor:
    def save(self, path):
        (path / "preprocessor_config.yaml").write_text("image_processor: 8x24")


def trained_base(path):
    """Save a model that was trained before, as those of the Hub were."""
    sf.checkpoint.export_params(path, new_weights(1))
    return str(path)


@pytest.mark.full
@shows(
    "Hezar",
    "A simple example",
    {"the script": "the [example above](#hezar): imports, `device`, the model"},
)
def test_a_simple_example(tmp_path):
    base_model_path = trained_base(tmp_path / "crnn-base")

    train_dataset = Plates("train", 128)
    eval_dataset = Plates("test", 32)

    model = Model(crnn, new_weights(), ctc_loss)
    preprocessor = Preprocessor()

    train_config = TrainerConfig(
        output_dir="crnn-plate-fa-v1",
        task="image2text",
        device="cpu",  # exchanged: "cuda"
        init_weights_from=base_model_path,
        batch_size=8,
        num_epochs=20,
        metrics=["cer"],
        metric_for_best_model="cer",
        learning_rate=1e-2,  # added, since the model is small
    )

    trainer = Trainer(
        config=train_config,
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=train_dataset.data_collator,
        preprocessor=preprocessor,
        generate=read_plate,  # added: what a model of Hezar has
    )
    for leaf, other in zip(*map(jax.tree.leaves, (trainer.model.params, new_weights(1)))):  # noqa: B905
        np.testing.assert_array_equal(leaf, other)
    before = trainer.evaluate()["cer"]
    trainer.train()

    history = trainer.result.history
    assert history["eval/cer"].steps == [*range(16, 321, 16)]
    assert trainer.evaluate()["cer"] < 0.6 * before
    best = history["eval/cer"].steps[int(np.argmin(history["eval/cer"]))]
    assert trainer.result.best == best
    assert train_dataset.collated >= 320
    assert (tmp_path / "crnn-plate-fa-v1/preprocessor/preprocessor_config.yaml").exists()


@pytest.mark.full
@shows("Hezar", "Datasets and models", {"`__len__` and `__getitem__`": "the same"})
def test_any_dataset_with_a_length_and_items():
    trainer = Trainer(
        TrainerConfig(num_epochs=1),
        Model(crnn, new_weights(), ctc_loss),
        train_dataset=Plates("train", 16),
        eval_dataset=Plates("test", 8),
    )
    trainer.train()
    assert int(trainer.state.step) == 2
    assert trainer.train_dataset.collated >= 2


@shows(
    "Hezar",
    "Datasets and models",
    {"a pretrained model": "`Model(apply, sf.checkpoint.load_params(path, params), loss_fn)`"},
)
def test_a_pretrained_model(tmp_path):
    pretrained_path = trained_base(tmp_path / "base")
    model = Model(crnn, sf.checkpoint.load_params(pretrained_path, new_weights()), ctc_loss)

    trainer = Trainer(
        model=model,
        config=TrainerConfig(num_epochs=1),
        train_dataset=Plates("train", 16),
    )
    np.testing.assert_array_equal(trainer.model.params["out"], new_weights(1)["out"])


@pytest.mark.full
@shows(
    "Hezar",
    "Datasets and models",
    {
        "weights for another head": "`init_weights_from` a checkpoint: `trainer.loaded` and "
        "`not_loaded` say which were; safetensors have to fit"
    },
)
def test_weights_for_another_head(tmp_path):
    trained = Trainer(
        TrainerConfig(num_epochs=1, output_dir="crnn-base-fa"),
        Model(crnn, new_weights(1), ctc_loss),
        Plates("train", 16),
    )
    trained.train()
    base_model_path = "crnn-base-fa"
    weights = {**new_weights(), "out": jnp.zeros((64, 31))}
    model = Model(crnn, weights, ctc_loss)  # Randomly initialized model

    trainer_config = TrainerConfig(
        num_epochs=1,
        init_weights_from=base_model_path,
    )
    trainer = Trainer(
        trainer_config,
        model,
        Plates("train", 16),
    )
    assert trainer.loaded == ["params/bias", "params/hidden"]
    assert [*trainer.not_loaded] == ["params/out"]
    np.testing.assert_array_equal(trainer.model.params["hidden"], trained.model.params["hidden"])
    exported = trained_base(tmp_path / "exported")
    with pytest.raises(sf.errors.TreeMismatchError, match=r"out .*64,11.*64,31"):
        Trainer(TrainerConfig(num_epochs=1, init_weights_from=exported), model, Plates("train", 16))


def run(kind=Trainer, **changes):
    model, train, test = Model(crnn, new_weights(), ctc_loss), Plates("train", 64), None
    if changes.get("metrics"):
        test = Plates("test", 16)
    config = TrainerConfig(**{"num_epochs": 3, "learning_rate": 1e-3, "log_steps": 1} | changes)
    trainer = kind(config, model, train, test, generate=read_plate)
    return trainer, trainer.train()


def equal(trainer, other):
    leaves = map(jax.tree.leaves, (trainer.model.params, other.model.params))
    return all(bool((a == b).all()) for a, b in zip(*leaves, strict=True))


@pytest.mark.full
def test_the_inner_training_loop_returns_the_average_loss():
    averages = []

    class Own(Trainer):
        def inner_training_loop(self, epoch_num):
            averages.append(super().inner_training_loop(epoch_num))
            return averages[-1]

    trainer, average = run(Own)
    losses = trainer.result.history["train/loss"]
    whole, same = run()
    assert average == pytest.approx(same, rel=1e-12) == averages[-1]
    assert averages == pytest.approx(
        [np.mean(whole.result.history["train/loss"][: 8 * n]) for n in (1, 2, 3)], rel=1e-6
    )
    assert len(losses) > 0
    assert equal(trainer, whole)


@pytest.mark.full
@shows(
    "Hezar", "Distributed, precision, accumulation", {"custom trainer": "[subclasses](#subclasses)"}
)
def test_the_training_iteration():
    class Own(Trainer):
        def create_train_dataloader(self, dataset):
            return super().create_train_dataloader(dataset)

        def prepare_input_batch(self, input_batch):
            return {**input_batch, "pixel_values": input_batch["pixel_values"].astype("float32")}

        def training_step(self, input_batch):
            outputs = self.forward(input_batch)
            return self.compute_loss(outputs, input_batch["labels"])

        def optimization_step(self, grads, opt_state, params):
            return self.optimizer.update(grads, opt_state, params)

    assert equal(run(Own)[0], run()[0])


@pytest.mark.full
@shows(
    "Hezar",
    "After an epoch, resuming",
    {"results to TensorBoard and CSV": "the same, as `train/loss`, `eval/loss` and so on"},
)
def test_the_evaluation_loop():
    trainer, _ = run(metrics=["cer"], output_dir="plates")
    custom = Plates("test", 24)
    results = trainer.evaluate(custom)
    read = read_plate(trainer.model, custom.data_collator(custom.examples))
    assert {*results} == {"loss", "cer"}
    assert 0 < results["cer"] <= max(1, sum(map(len, read)))
    with open("plates/logs/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["eval/cer"]] == [8, 16, 24]
    assert [int(row["step"]) for row in rows if row["train/loss"]] == [*range(1, 25)]
    assert [*Path("plates/logs/tensorboard").glob("*tfevents*")]


@pytest.mark.full
@shows(
    "Hezar",
    "After an epoch, resuming",
    {"with `save_steps`": "the same", "names of checkpoints": "the global step"},
)
def test_resuming_training(tmp_path):
    whole, average = run()
    run(output_dir="a", max_steps=8)  # the end of an epoch
    trainer, same = run(output_dir="a", resume_from_checkpoint=True)
    assert trainer.result.resumed == 8
    assert equal(trainer, whole)
    assert same == pytest.approx(average, rel=1e-12)

    run(output_dir="b", save_steps=5, max_steps=11)  # in the middle of one
    trainer, same = run(output_dir="b", resume_from_checkpoint=True, save_steps=5)
    steps = [int(path.name) for path in (tmp_path / "b" / "checkpoints").glob("[0-9]*")]
    assert sorted(steps) == [5, 8, 10, 11, 15, 16, 20, 24]
    assert equal(trainer, whole)

    trainer, _ = run(output_dir="c", resume_from_checkpoint="b/checkpoints/10")
    assert equal(trainer, whole)


@pytest.mark.full
@shows(
    "Hezar",
    "Distributed, precision, accumulation",
    {
        "`distributed=True`": "the same on the devices of one process; with several, [start "
        "them](#what-is-different) first"
    },
)
def test_distributed_training():
    assert jax.device_count() == 8
    trainer, _ = run(distributed=True, batch_size=1)
    alone, _ = run()
    assert len(trainer.state.params["out"].sharding.device_set) == 8
    for leaf, other in zip(
        *map(jax.tree.leaves, (trainer.model.params, alone.model.params)), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=1e-4)


@pytest.mark.full
@shows("Hezar", "Distributed, precision, accumulation", {"`bf16`, `fp16`, `full`": "the same"})
@pytest.mark.parametrize("precision", ["bf16", "fp16", "full"])
def test_mixed_precision(precision):
    trainer, _ = run(
        mixed_precision=precision,  # Also accepts `fp16` and `full`
    )
    losses = trainer.result.history["train/loss"]
    assert losses[-1] < losses[0]


@pytest.mark.full
@shows(
    "Hezar",
    "Distributed, precision, accumulation",
    {
        "accumulation averages": "the same: the gradient of one batch of all examples",
        "accumulation of 1": "none",
    },
)
def test_gradient_accumulation():
    accumulated, _ = run(gradient_accumulation_steps=4, batch_size=2)
    plain, _ = run(gradient_accumulation_steps=1, batch_size=8)
    assert equal(plain, run(batch_size=8)[0])
    for leaf, other in zip(
        *map(jax.tree.leaves, (accumulated.model.params, plain.model.params)), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=1e-4)
