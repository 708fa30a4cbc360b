"""The same training in torch, from the same weights, on the same batches: step by step the same."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import stepfold as sf

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DIGITS = load_digits()
DATA = {
    "image": np.float32(DIGITS.images)[:, None] / 16,
    "label": np.int32(DIGITS.target),
}
STEPS, WARMUP, PEAK, DECAY, NORM = 100, 10, 3e-3, 0.01, 1.0


def digits():
    """Give batches of which each 29th has 5 rows, and 59 that only fill it up."""
    stream = sf.batches(DATA, 64, seed=0, remainder="pad")
    return itertools.islice(stream, STEPS)


def torch_model(*, norm):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        # No bias, of which a norm leaves nothing: Adam would blow up what rounding makes of it.
        torch.nn.Conv2d(1, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8) if norm else torch.nn.Identity(),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )


def in_torch(model):
    """Train as a loop of torch does; give the losses, and the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: (
            i / WARMUP
            if i < WARMUP
            else (1 + math.cos(math.pi * (i - WARMUP) / (STEPS - WARMUP))) / 2
        ),
    )
    seen = []
    for batch in digits():
        batch = {name: torch.from_numpy(leaf) for name, leaf in batch.items()}
        logits, labels = model(batch["image"]), batch["label"].long()
        nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (nll * batch["mask"]).sum() / batch["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        schedule.step()
        seen.append([loss.item(), norm.item()])
    return np.array(seen).T


def numbers(tensors):
    return {name: jnp.asarray(one.detach().numpy().copy()) for name, one in tensors}


def convolved(x, kernel):
    names = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=names)


def over_channels(vector):
    return vector[:, None, None]


def normed(x, params, running):
    """Norm by the batch's own statistics, and keep running ones, of the unbiased variance."""
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    count = x.size / x.shape[1]
    new = {
        "1.running_mean": 0.9 * running["1.running_mean"] + 0.1 * mean,
        "1.running_var": 0.9 * running["1.running_var"] + 0.1 * var * (count / (count - 1)),
    }
    x = (x - over_channels(mean)) * over_channels(jax.lax.rsqrt(var + 1e-5))
    return x * over_channels(params["1.weight"]) + over_channels(params["1.bias"]), new


def loss_fn(params, batch, key, running):
    x = convolved(batch["image"], params["0.weight"])
    if running:
        x, running = normed(x, params, running)
    x = convolved(jax.nn.relu(x), params["3.weight"]) + over_channels(params["3.bias"])
    x = jax.nn.relu(x).reshape(len(x), -1)
    logits = x @ params["6.weight"].T + params["6.bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll, batch["mask"]), {}, running


def in_stepfold(params, running, accumulate):
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS)
    tx = optax.chain(optax.clip_by_global_norm(NORM), optax.adamw(rate, weight_decay=DECAY))
    state = sf.init_state((params, running), tx, jax.random.key(0), stateful=True)
    step = sf.make_train_step(loss_fn, tx, accumulate=accumulate, stateful=True)
    step = jax.jit(step, donate_argnums=0)
    seen = []
    for state, metrics in sf.iterate(step, state, digits()):
        seen.append([float(metrics[name].compute()) for name in ("loss", "grad_norm")])
    return state, np.array(seen).T


@pytest.mark.parametrize(("norm", "accumulate"), [(True, 1), (False, 1), (False, 4)])
def test_a_hundred_steps_are_those_of_torch(norm, accumulate):
    model = torch_model(norm=norm)
    running = numbers(model.named_buffers())
    running.pop("1.num_batches_tracked", None)
    params = numbers(model.named_parameters())
    wanted, wanted_norms = in_torch(model)
    state, (losses, norms) = in_stepfold(params, running, accumulate)
    assert wanted[-20:].mean() < wanted[0] / 4  # there was something to learn
    np.testing.assert_allclose(losses, wanted, atol=1e-4, rtol=0)
    np.testing.assert_allclose(norms, wanted_norms, rtol=2e-3)
    found = numbers(model.named_parameters())
    assert found.keys() == state.params.keys()
    for name, array in found.items():
        np.testing.assert_allclose(state.params[name], array, atol=2e-4, err_msg=name)
    for name, array in state.model_state.items():
        theirs = dict(model.named_buffers())[name].numpy()
        np.testing.assert_allclose(array, theirs, rtol=1e-3, atol=1e-5, err_msg=name)
