"""Real images, a small model, and trainers of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments
from stepfold.adapter.setup import make_parts

_DIGITS = load_digits()
_DATA = {"image": np.float32(_DIGITS.data / 16), "label": np.int32(_DIGITS.target)}
TRAIN = {name: values[:200] for name, values in _DATA.items()}
TEST = {name: values[200:300] for name, values in _DATA.items()}
QUIET = {"progress_bar_type": "none"}


def init(key):
    return {"kernel": jax.random.normal(key, (64, 10)) / 8, "bias": jnp.zeros(10)}


def logits_of(params, batch):
    return batch["image"] @ params["kernel"] + params["bias"]


def loss_fn(params, batch, key):
    logits = logits_of(params, batch)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def plain_loss(params, batch, key):
    """The mean over the examples as a number, as most write it, without a mask."""
    logits = logits_of(params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def arguments(**changes):
    usual = {"total_batch_size": 20, "learning_rate": 1e-2, "max_steps": 20, "log_steps": 5}
    if {"num_train_epochs"} & changes.keys():
        del usual["max_steps"]
    if not changes.get("performance_mode"):  # which shows nothing anyway
        usual |= QUIET
        if {"output_dir", "save_dir"} & changes.keys():
            usual["report_to"] = ()  # to write the page of a run takes as long as all its steps
    return TrainingArguments(**usual | changes)


def trainer(kind=Trainer, given=None, **changes):
    """Make a trainer; `changes` are fields of the arguments, `given` are other keywords."""
    usual = {"model": init, "dataset_train": TRAIN, "dataset_eval": TEST, "loss_fn": loss_fn}
    if "tx" in (given or {}):  # which says the rate itself
        changes = {"learning_rate": 5e-5, **changes}
    if "sharding_array" not in changes:
        usual["devices"] = jax.devices()[:1]
    return kind(arguments(**changes), **usual | (given or {}))


def train_only(kind=Trainer, given=None, **changes):
    """Make a trainer that compiles no evaluation, for tests that do not look at one."""
    return trainer(kind, {"dataset_eval": None, **(given or {})}, **changes)


def parts(arguments=None, devices=None, **given):
    """Make the parts of a trainer that need no method, for tests of a function of them."""
    arguments = TrainingArguments() if arguments is None else arguments
    devices = jax.devices()[:1] if devices is None else devices
    return make_parts(arguments, devices=devices, **given)


def bits(tree):
    """Give every bit of a tree."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaves.append(np.asarray(leaf).tobytes())
    return leaves
