"""Packed rows hold each document once per epoch, in the same rows wherever a run is cut."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.test_workers import Counter

import stepfold as sf
from stepfold.data.packing import Packed

pytestmark = pytest.mark.not_optimized

LENGTH, MOST = 8, 40


class Documents(Counter):
    """A stream of documents that knows its position."""

    def __init__(self, documents):
        super().__init__(len(documents))
        self.documents = documents

    def __next__(self):
        return self.documents[int(super().__next__()["x"])]


def numbered(lengths):
    """Make documents whose tokens are all different, and are never 0."""
    stops = np.cumsum([1, *lengths])
    return [np.arange(a, b) for a, b in itertools.pairwise(stops)]


@st.composite
def pipelines(draw):
    """Return a function that makes batches of packed rows, and the documents in them."""
    documents = numbered(draw(st.lists(st.integers(1, 20), min_size=1, max_size=30)))
    options = {"length": LENGTH, "window": draw(st.integers(1, 12)), "split": True}
    kind = draw(st.sampled_from(["list", "shuffled", "stream", "mixture"]))
    epochs, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if kind == "shuffled":
        options["seed"] = draw(st.integers(0, 3))
    source = lambda: Documents(documents) if kind == "stream" else documents
    if kind == "mixture":
        mixture = sf.mix([(Items(documents), 2), (Items(documents), 1)], seed=0)
        source = lambda: Head(mixture, 25)
    make = lambda pack: sf.batches(
        lambda: pack(source(), **options), size, epochs=epochs, remainder="keep"
    )
    return make, documents if kind != "mixture" else [source()[i] for i in range(25)], epochs


class Items:
    """Documents with `len()` and `[i]` that are not taken for a tree of arrays."""

    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        return self.documents[index]


class Head(Items):
    """The first examples of a mixture, which has no end."""

    def __init__(self, mixture, count):
        super().__init__(mixture.examples(slice(0, count)))


def bits(batches, most=MOST):
    return [
        {name: (leaf.dtype, leaf.shape, leaf.tobytes()) for name, leaf in batch.items()}
        for batch in itertools.islice(batches, most)
    ]


def tokens(batches):
    return sorted(np.concatenate([batch["tokens"][batch["mask"]] for batch in batches]).tolist())


def check(make, documents, epochs, cuts):
    """Cut a run after some batches, and resume from a position that went through JSON."""
    whole = list(make())
    assert tokens(whole) == sorted(np.concatenate(documents * epochs).tolist())
    whole, made, state = bits(whole, None), [], None
    for cut in [*cuts, len(whole)]:
        stream = make()
        if state is not None:
            stream.set_state(json.loads(state))
            assert json.loads(state) == stream.get_state()
        made += bits(stream, cut)
        state = json.dumps(stream.get_state())
    assert made == whole


@given(pipelines(), st.lists(st.integers(0, 12), max_size=4))
def test_every_document_is_in_the_same_rows_wherever_it_is_cut(pipeline, cuts):
    make, documents, epochs = pipeline
    check(lambda: make(sf.pack), documents, epochs, cuts)


@given(pipelines(), st.integers(0, 12), st.sampled_from([sf.prefetch, sf.workers]))
def test_reading_ahead_keeps_rows_and_positions(pipeline, cut, wrap):
    make, documents, epochs = pipeline
    options = (0,) if wrap is sf.workers else ()
    check(lambda: wrap(make(sf.pack), *options), documents, epochs, [cut])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 12), st.data())
def test_batches_that_pack_makes_resume_too(lengths, window, data):
    rows, cut = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 12))
    options = {"length": LENGTH, "window": window, "split": True, "rows": rows}
    check(lambda: sf.pack(numbered(lengths), **options), numbered(lengths), 1, [cut])


class LosesOpen(Packed):
    """Save the position after the window, whose other documents are lost."""

    def get_state(self):
        state = super().get_state()
        return {**state, "examples": json.loads(self._reader.position()), "row": 0}


class Twice(Packed):
    """Save the start of the window, whose first documents come twice."""

    def get_state(self):
        return {**super().get_state(), "row": 0}


class RowTwice(Packed):
    """Return the last row of an epoch twice."""

    last = None

    def __next__(self):
        try:
            self.last = super().__next__()
        except StopIteration:
            if self.last is None:
                raise
            last, self.last = self.last, None
            return last
        return self.last


class OtherOrder(Packed):
    """Read the order of the first epoch in all epochs after a resume."""

    def set_state(self, state):
        super().set_state(state)
        self._reader._epoch = 0


@pytest.mark.parametrize("mutant", [LosesOpen, Twice, RowTwice, OtherOrder])
def test_what_is_nearly_right_fails_the_same_law(mutant):
    documents = numbered([3, 7, 2, 5, 8, 1, 19, 4, 4, 6])

    def pack(kind):
        packed = sf.pack(documents, length=LENGTH, window=5, split=True, seed=0)
        return kind(packed._reader, packed._source, packed._packer, packed._settings)

    make = lambda kind: sf.batches(lambda: pack(kind), 2, epochs=2, remainder="keep")
    check(lambda: make(Packed), documents, 2, [1, 6])
    with pytest.raises(AssertionError):
        check(lambda: make(mutant), documents, 2, [1, 6])


def test_a_resumed_run_has_the_same_bits(tmp_path):
    documents = numbered([3, 7, 2, 5, 8, 1, 19, 4, 4, 6])

    def loss_fn(params, batch, key):
        tokens, positions = (batch[name].astype(jnp.float32) for name in ("tokens", "positions"))
        error = params["w"] * jnp.sin(tokens) - positions
        return sf.mean(error**2, batch["mask"])

    tx = optax.adam(0.1)
    step = sf.make_train_step(loss_fn, tx)

    def run(folder, steps):
        state = sf.init_state(lambda key: {"w": jnp.ones(LENGTH)}, tx, jax.random.key(0))
        make = lambda: sf.pack(documents, length=LENGTH, window=5, split=True, seed=0)
        options = {"run_dir": folder, "checkpoints": sf.Checkpoints(every=3), "log_every": 3}
        return sf.fit(step, state, sf.batches(make, 2), steps=steps, **options).state

    whole = run(tmp_path / "whole", 12)
    run(tmp_path / "cut", 5)
    resumed = run(tmp_path / "cut", 12)
    assert int(resumed.step) == 12
    leaves = zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)
