"""Text from Hugging Face's `datasets` and `tokenizers`, padded or packed: Python's own manual."""

from functools import partial
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from datasets import Dataset
from tests.laws.network import bits
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import stepfold as sf

pytestmark = pytest.mark.usefixtures("standard_promotion")

LENGTH, VOCABULARY, WIDTH, STEPS = 96, 400, 32, 40


@pytest.fixture(scope="module")
def examples():
    """Give the paragraphs of the manual as ids of tokens, and the tokens that follow them."""
    paragraphs = [part for text in topics.values() for part in text.split("\n\n")]
    texts = Dataset.from_dict({"text": [part for part in paragraphs if len(part) > 40][:800]})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts["text"], trainer)

    def shifted(example):
        ids = tokenizer.encode(example["text"]).ids[: LENGTH + 1]
        return {"ids": ids[:-1], "labels": ids[1:]}

    return texts.map(shifted, remove_columns="text")


def init(key):
    shapes = {
        "tokens": (VOCABULARY, WIDTH),
        "positions": (LENGTH, WIDTH),
        "attention": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, VOCABULARY),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / WIDTH**0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(params, batch, key):
    """Predict the next token by one layer of attention, of rows that are padded or packed."""
    segments = batch.get("segment_ids", batch["mask"].astype(jnp.int32))
    positions = batch.get("positions", jnp.arange(LENGTH))
    x = params["tokens"][batch["ids"]] + params["positions"][positions]
    query, keys, values = jnp.split((x @ params["attention"])[:, :, None], 3, -1)
    mask = sf.data.block_diagonal_mask(segments, causal=True)[:, None]
    x += jax.nn.dot_product_attention(query, keys, values, mask=mask)[:, :, 0]
    nll = optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], batch["labels"])
    return sf.mean(nll, batch["mask"])


TX = optax.adam(1e-2)
STEP = sf.make_train_step(loss_fn, TX)
MEASURE = jax.jit(sf.make_eval_step(loss_fn))
start = lambda: sf.init_state(init, TX, jax.random.key(0))
pad = partial(sf.collate, length=LENGTH)


@pytest.mark.full
def test_padded_text_is_learned_and_resumes(examples, tmp_path):
    def run(steps, folder, checkpoints):
        batches = sf.batches(examples, 32, seed=0, collate=pad)
        return sf.fit(STEP, start(), batches, steps=steps, run_dir=folder, checkpoints=checkpoints)

    whole = run(STEPS, None, None)
    curve = whole.history["train/loss"]
    assert abs(curve[0] - np.log(VOCABULARY)) < 1
    assert curve[-1] < 5
    for steps in (STEPS // 2, STEPS):
        parts = run(steps, tmp_path, sf.Checkpoints(every=STEPS // 2))
    assert bits(parts.state) == bits(whole.state)


@pytest.mark.full
def test_packed_text_is_learned_in_fewer_rows(examples):
    rows = list(sf.pack(examples, length=LENGTH))
    assert np.mean([row["mask"] for row in rows]) > 0.97
    assert np.mean([pad([example])["mask"] for example in examples]) < 0.8
    result = sf.fit(STEP, start(), sf.batches(rows, 32, seed=0), steps=STEPS)
    assert result.history["train/loss"][-1] < 5


@pytest.mark.full
def test_loss_does_not_depend_on_padding_packing_or_batch_size(examples):
    state = start()
    once = {"epochs": 1, "remainder": "pad"}
    padded = sf.evaluate(MEASURE, state, sf.batches(examples, 64, collate=pad, **once))
    rows = list(sf.pack(examples, length=LENGTH))
    for size in (16, 50):
        packed = sf.evaluate(MEASURE, state, sf.batches(rows, size, **once))
        np.testing.assert_allclose(packed["loss"], padded["loss"], rtol=1e-6)
