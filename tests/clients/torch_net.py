"""A network of torch for digits, and the same network as a loss function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits

import stepfold as sf

_DIGITS = load_digits()
_DATA = {"image": np.float32(_DIGITS.data / 16), "labels": _DIGITS.target}
TRAIN = {name: values[:1500] for name, values in _DATA.items()}
TEST = {name: values[1500:] for name, values in _DATA.items()}


class Rows(torch.utils.data.Dataset):
    """The examples of a dict of columns."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


def make_net():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.SiLU(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(*layers)


def params_of(net):
    """Return the parameters of `make_net`, also if it is part of another module."""
    found = {name: jnp.array(leaf.detach().numpy()) for name, leaf in net.named_parameters()}
    return {name.removeprefix("net."): leaf for name, leaf in found.items()}


def logits_of(params, image):
    hidden = jax.nn.silu(image @ params["0.weight"].T + params["0.bias"])
    return hidden @ params["2.weight"].T + params["2.bias"]


def loss_fn(params, batch, key):
    """Divide by the number of labels that are not -100, as torch does."""
    logits, labels = logits_of(params, batch["image"]), batch["labels"]
    mask = batch["mask"] & (labels >= 0)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return sf.mean(nll, mask), {"accuracy": sf.mean(logits.argmax(-1) == labels, mask)}


def difference(net, params):
    """Return the largest difference of a weight."""
    theirs = params_of(net)
    assert theirs.keys() == params.keys()
    return max(float(np.abs(theirs[name] - params[name]).max()) for name in theirs)
