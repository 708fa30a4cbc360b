"""Training from the same weights on the same batches equals torch step by step."""

import functools
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
STEPS, WARMUP, PEAK, NORM = 100, 10, 3e-3, 1.0
DECAY, EPS = 0.1, 1e-4  # large enough to tell where they enter


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
        torch.nn.SiLU(),  # at the corner of a ReLU, rounding would choose another gradient
        torch.nn.Conv2d(8, 16, 3),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )


@functools.cache
def in_torch(*, norm):
    """Train as a loop of torch does; give the weights before and after, losses, and norms."""
    torch.set_num_threads(1)  # the others would wait for work in a loop
    model = torch_model(norm=norm)
    begun = weights_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY, eps=EPS)
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
    return begun, weights_of(model), np.array(seen).T


def weights_of(model):
    """Give parameters and running statistics as torch names them."""
    found = [dict(model.named_parameters()), dict(model.named_buffers())]
    found[1].pop("1.num_batches_tracked", None)
    return [{name: jnp.array(one.detach().numpy()) for name, one in some.items()} for some in found]


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
    x = convolved(jax.nn.silu(x), params["3.weight"]) + over_channels(params["3.bias"])
    x = jax.nn.silu(x).reshape(len(x), -1)
    logits = x @ params["6.weight"].T + params["6.bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll, batch["mask"]), {}, running


def in_stepfold(params, running, accumulate):
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS)
    tx = optax.chain(
        optax.clip_by_global_norm(NORM), optax.adamw(rate, weight_decay=DECAY, eps=EPS)
    )
    state = sf.init_state((params, running), tx, jax.random.key(0), stateful=True)
    step = sf.make_train_step(loss_fn, tx, accumulate=accumulate, stateful=True)
    result = sf.fit(step, state, digits(), log_every=1)
    seen = [result.history[f"train/{name}"] for name in ("loss", "grad_norm")]
    return [result.state.params, result.state.model_state], np.array(seen)


@pytest.mark.parametrize(("norm", "accumulate"), [(True, 1), (False, 1), (False, 4)])
def test_a_hundred_steps_equal_those_of_torch(norm, accumulate):
    begun, wanted, (losses, norms) = in_torch(norm=norm)
    found, (our_losses, our_norms) = in_stepfold(*begun, accumulate)
    assert losses[-20:].mean() < losses[0] / 2  # there was something to learn
    np.testing.assert_allclose(our_losses, losses, atol=1e-4, rtol=0)
    np.testing.assert_allclose(our_norms, norms, rtol=2e-4)
    assert len(our_losses) == STEPS
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=2e-5, err_msg=name)
