"""The examples of the trainer that qurious documents, with imports, model and data exchanged."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import nn
from tests.adapter.digits import TEST, TRAIN
from tests.clients.rows import shows

from stepfold.adapter.qurious import Model, Trainer


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield


def batches_of(*arrays, batch_size):
    """Make a list of batches, the last of which is incomplete."""
    starts = range(0, len(arrays[0]), batch_size)
    return [tuple(array[i : i + batch_size] for array in arrays) for i in starts]


def linear(params, x):
    return x @ params["kernel"] + params["bias"]


def mlp(params, x):
    return linear(params[1], nn.relu(linear(params[0], x)))


def dense(key, inputs, outputs):
    kernel = jax.random.normal(key, (inputs, outputs)) / np.sqrt(inputs)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


@pytest.mark.full
@shows(
    "qurious",
    "Advanced usage",
    {"basic usage": "the [example above](#qurious): imports, model and optimizer are those of JAX"},
)
def test_basic_usage(capsys):
    # 1. Define your model
    keys = jax.random.split(jax.random.key(0), 4)
    model = Model(mlp, [dense(keys[0], 10, 64), dense(keys[1], 64, 1)])

    # 2. Prepare your dataset and dataloader
    x = jax.random.normal(keys[2], (1000, 10))
    y = jax.random.normal(keys[3], (1000, 1))
    dataloader = batches_of(x, y, batch_size=32)

    # 3. Define optimizer and loss function
    optimizer = optax.adam(0.001)
    loss_fn = lambda outputs, targets: jnp.mean(optax.squared_error(outputs, targets))

    # 4. Initialize trainer
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn
    )  # fmt: skip

    # 5. Train the model
    history = trainer.train(
        train_dataloader=dataloader,
        num_epochs=5,
        save_dir="./checkpoints"
    )  # fmt: skip

    print(f"Training history: {history}")

    assert capsys.readouterr().out.startswith("Training history: {'train_")
    assert len(history["train_loss"]) == 5
    assert history["train_loss"][-1] < history["train_loss"][0]
    again = Trainer(model=model, optimizer=optimizer, loss_fn=loss_fn)
    assert again.load_checkpoint("./checkpoints")["step"] == 5 * len(dataloader)


# What torch has besides tensors.
torch = types.SimpleNamespace(
    max=lambda x, axis: (x.max(axis), x.argmax(axis)), no_grad=contextlib.nullcontext
)


class ClassificationTrainer(Trainer):
    def eval_step(self, batch):
        inputs, targets = self._prepare_batch(batch)
        outputs = self._forward_pass(inputs)
        loss = self._compute_loss(outputs, targets)

        # Calculate accuracy
        _, predicted = torch.max(outputs, 1)
        correct = (predicted == targets).sum().item()
        total = targets.shape[0]  # exchanged: `size` is a number of an array
        accuracy = correct / total

        return {
            'loss': loss.item(),
            'accuracy': accuracy
        }  # fmt: skip

    def evaluate(self, dataloader):
        self.model.eval()
        total_loss = 0.0
        total_accuracy = 0.0
        steps = 0

        with torch.no_grad():
            for batch in dataloader:
                step_result = self.eval_step(batch)
                total_loss += step_result['loss']  # fmt: skip
                total_accuracy += step_result['accuracy']  # fmt: skip
                steps += 1

        return {
            'loss': total_loss / steps if steps > 0 else 0,
            'accuracy': total_accuracy / steps if steps > 0 else 0
        }  # fmt: skip


def cross_entropy(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def classifier(kind=Trainer):
    model = Model(linear, dense(jax.random.key(0), 64, 10))
    return kind(model, optax.adam(0.01), cross_entropy)


def digits():
    train = batches_of(TRAIN["image"], TRAIN["label"], batch_size=40)
    return train, batches_of(TEST["image"], TEST["label"], batch_size=40)


@pytest.mark.full
@shows(
    "qurious",
    "Advanced usage",
    {
        "`ClassificationTrainer` with `eval_step` and `evaluate`": "the same, but for "
        "`outputs.argmax(1)`, `targets.shape[0]` and no `torch.no_grad()`; its means of batches "
        "are its own; or metrics next to the loss, as [above](#subclasses)"
    },
)
def test_custom_metrics_for_classification():
    train_dataloader, eval_dataloader = digits()
    trainer = classifier(ClassificationTrainer)
    history = trainer.train(train_dataloader, 10, eval_dataloader)
    assert history["eval_loss"][-1] < history["eval_loss"][0]
    assert history["eval_accuracy"][-1] > history["eval_accuracy"][0]
    measured = trainer.evaluate(eval_dataloader)
    assert measured == {"loss": history["eval_loss"][-1], "accuracy": history["eval_accuracy"][-1]}
    hits = [np.mean(trainer.model(x).argmax(1) == labels) for x, labels in eval_dataloader]
    assert measured["accuracy"] == pytest.approx(np.mean(hits))


def log_metrics_callback(trainer, epoch, metrics):
    """Custom callback to log metrics"""
    print(f"Epoch {epoch+1} metrics: {metrics}")  # fmt: skip

    # You could also log to TensorBoard or other tracking systems
    # writer.add_scalar('Loss/train', metrics['train_loss'], epoch)
    # if 'eval_loss' in metrics:
    #     writer.add_scalar('Loss/eval', metrics['eval_loss'], epoch)


@shows(
    "qurious", "Advanced usage", {"`callback(trainer, epoch, metrics)`": "the same, epochs from 0"}
)
def test_training_with_callbacks(capsys):
    trainer = classifier()
    train_dataloader, eval_dataloader = digits()

    # Use the callback during training
    trainer.train(
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        num_epochs=10,
        callbacks=[log_metrics_callback]
    )  # fmt: skip

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" metrics: ")[0] for line in lines] == [f"Epoch {n}" for n in range(1, 11)]
    assert all("'train_loss'" in line and "'eval_loss'" in line for line in lines)


def causal_lm(params, input_ids, attention_mask, labels=None):
    """A language model with the arguments and the outputs of transformers."""
    logits = params["embedding"][input_ids] @ params["embedding"].T
    loss = None
    if labels is not None:
        nll = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels[:, 1:])
        loss = jnp.average(nll, weights=attention_mask[:, 1:].astype(nll.dtype))
    return types.SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.full
@shows(
    "qurious",
    "Advanced usage",
    {
        "Hugging Face models, `loss_fn=None`": "the same, with a `Model` whose outputs have a "
        "`loss`, which it computes of `labels`"
    },
)
def test_fine_tuning_hugging_face_models():
    # Load model and tokenizer
    model = Model(causal_lm, {"embedding": jax.random.normal(jax.random.key(0), (20, 16))})

    # Prepare your dataset (example)
    ids = np.random.default_rng(0).integers(0, 20, (24, 8))
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    train_dataloader = [{name: x[i : i + 8] for name, x in rows.items()} for i in (0, 8, 16)]
    eval_dataloader = train_dataloader[:1]

    # Configure optimizer with weight decay
    optimizer = optax.adamw(
        5e-2,
        weight_decay=0.01
    )  # fmt: skip

    # Initialize trainer
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn=None,  # Not needed as HF models calculate loss internally
    )

    # Train
    history = trainer.train(
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        num_epochs=3,
        save_dir="./checkpoints"
    )  # fmt: skip

    assert len(history["eval_loss"]) == 3
    assert history["eval_loss"][-1] < history["eval_loss"][0]
