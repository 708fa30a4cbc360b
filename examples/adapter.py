"""Train a classifier of digits with a trainer object and arguments from the command line.

Run it with `python examples/adapter.py`, and again to see it resume. Any field of the arguments can
be set, as in `python examples/adapter.py --num_train_epochs 6 --optimizer lion`. Since
`TrainingArguments` is a dataclass, tyro and simple-parsing can do the same.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments

DEFAULTS = {
    "output_dir": "runs/adapter",
    "num_train_epochs": 4,
    "total_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "scheduler": "cosine",
    "evaluation_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "metric_for_best_model": "accuracy",
    "sharding_array": (1, -1, 1, 1),
}


def init(key):
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"kernel": glorot(keys[0], (64, 128)), "bias": jnp.zeros(128)},
        "output": {"kernel": glorot(keys[1], (128, 10)), "bias": jnp.zeros(10)},
    }


def loss_fn(params, batch, _key):
    """Compute the masked means of the cross-entropy and the accuracy."""
    hidden = batch["image"] @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    logits = jax.nn.relu(hidden) @ params["output"]["kernel"] + params["output"]["bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def parse(words):
    """Parse `--name value` pairs as fields; a value that is not JSON is text."""
    fields = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        try:
            fields[name.removeprefix("--")] = json.loads(value)
        except ValueError:
            fields[name.removeprefix("--")] = value
    return TrainingArguments(**DEFAULTS | fields)


def print_epoch(_trainer, epoch, metrics):
    """Print the metrics of an epoch."""
    loss, accuracy = metrics["train_loss"], metrics["eval_accuracy"]
    print(f"epoch {epoch}  loss {loss:.4f}  test accuracy {accuracy:.4f}", flush=True)


def main(*words):
    """Train or resume, save for torch, and write a card."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [1437])
    train, test = ({name: values[split] for name, values in data.items()} for split in rows)

    trainer = Trainer(
        parse(words),
        model=init,
        dataset_train=train,
        dataset_eval=test,
        loss_fn=loss_fn,
        callbacks=[print_epoch],
    )
    output = trainer.train()
    print(f"{output.stopped}; the last checkpoint is {output.checkpoint_path}")

    folder = trainer.arguments.output_dir
    trainer.save_pretrained(output.state, f"{folder}/torch", to_torch=True)
    trainer.save_information(folder)
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.4f}; there is a card in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
