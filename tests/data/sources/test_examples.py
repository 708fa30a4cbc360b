"""Anything with `len()` and `[i]` as a source."""

import sys

import datasets
import grain
import numpy as np
import pytest

import stepfold as sf
from stepfold.data.sources.examples import Examples


class Loaded:
    """A source with `len()` and `[i]`, as `tfds.data_source` is one."""

    def __init__(self, examples):
        self.examples, self.asked = examples, []

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.examples[index]


class AtOnce(Loaded):
    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self.examples[index] for index in indices]


X = np.arange(24).reshape(8, 3)
INDICES = np.array([6, 0, 6])


@pytest.mark.parametrize("kind", [list, Loaded, AtOnce])
def test_examples_are_stacked(kind):
    source = kind([{"x": row, "y": (int(row[0]), 0.5), "ids": row.tolist()} for row in X])
    batch = Examples(source).take(INDICES)
    np.testing.assert_array_equal(batch["x"], X[INDICES])
    np.testing.assert_array_equal(batch["ids"], X[INDICES])
    np.testing.assert_array_equal(batch["y"][0], X[INDICES, 0])
    assert batch["y"][1].dtype == np.float64


def test_indices_are_python_integers_and_are_asked_at_once_where_that_works():
    one, several = Loaded(list(X)), AtOnce(list(X))
    Examples(one).take(INDICES)
    Examples(several).take(slice(2, 5))
    assert (one.asked, several.asked) == ([6, 0, 6], [[2, 3, 4]])
    assert {type(index) for index in one.asked + several.asked[0]} == {int}


def test_missing_examples_are_refused():
    with pytest.raises(
        sf.DataError, match="expected an example at index 6, got None; leave out .*to_iter_dataset"
    ):
        Examples([0, 1, 2, 3, 4, 5, None]).take(INDICES)


def test_a_source_that_answers_too_little_is_refused():
    source = AtOnce(list(X))
    source.__class__ = type("Short", (AtOnce,), {"__getitems__": lambda self, indices: [X[0]]})
    says = r"expected 3 examples of __getitems__\(\[6, 0, 6\]\), got 1"
    with pytest.raises(sf.DataError, match=says):
        Examples(source).take(INDICES)


def test_a_source_of_another_length_is_noticed():
    examples = list(X)
    rows = Examples(examples)
    rows.check()
    examples.append(X[0])
    with pytest.raises(sf.DataError, match="expected the 8 examples .* got 9; make new batches"):
        rows.check()


def test_an_error_of_the_source_says_where():
    with pytest.raises(KeyError) as caught:
        Examples(Loaded({0: X[0], 1: X[1]})).take(np.array([1, 5]))
    assert caught.value.__notes__ == ["reading index 5 of the source, row 1 of those asked for"]
    with pytest.raises(KeyError) as caught:
        Examples(AtOnce({0: X[0], 1: X[1]})).take(np.arange(20))
    assert caught.value.__notes__ == [
        "reading indices [0, 1, 2, 3, 4, 5, 6, 7, …] of the source at once"
    ]


FACES = datasets.Dataset.from_dict(
    {"x": list(range(8)), "ids": [[i, i + 1] for i in range(8)], "text": list("abcdefgh")}
)


@pytest.mark.parametrize("form", [None, "numpy", "jax"])
def test_a_dataset_of_hugging_face_is_asked_at_once(form):
    source = FACES.select_columns(["x", "ids"]).with_format(form)
    batch = Examples(source).take(INDICES)
    assert batch["x"].tolist() == [6, 0, 6]
    assert batch["ids"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert type(batch["ids"]) is np.ndarray
    stream = sf.batches(source, 3, seed=0, epochs=1, remainder="pad")
    assert sorted(x for b in stream for x in b["x"][b["mask"]].tolist()) == list(range(8))


def test_text_of_hugging_face_is_made_numbers_by_the_user():
    encode = lambda example: {"code": ord(example["text"])}
    assert next(sf.batches(FACES, 3, transform=encode))["code"].tolist() == [97, 98, 99]
    with pytest.raises(sf.DataError, match="text: expected numbers, got str 'a' at index 0"):
        next(sf.batches(FACES, 3))
    splits = datasets.DatasetDict(train=FACES, test=FACES)
    with pytest.raises(sf.DataError, match="give one of its values, which are called 'train', 't"):
        sf.batches(splits, 3)


def test_a_dataset_of_grain_is_a_source():
    squares = grain.MapDataset.range(10).map(lambda x: {"x": x * x})
    assert Examples(squares).take(INDICES)["x"].tolist() == [36, 0, 36]
    assert len(list(sf.batches(squares, 4, seed=0, epochs=2, remainder="keep"))) == 6
    mixture = sf.mix([(squares, 1), (squares, 1)], seed=1)
    assert next(sf.batches(mixture, 4))["x"].shape == (4,)


def test_an_endless_dataset_of_grain_has_an_order_of_its_own():
    endless = grain.MapDataset.range(10).shuffle(seed=4).repeat()
    assert Examples(endless).length == sys.maxsize
    stream = sf.batches(endless, 5, start=10**9)
    assert next(stream).tolist() == [endless[5 * 10**9 + i] for i in range(5)]
    with pytest.raises(sf.ConfigError, match="no epochs and an order of its own, got seed=0"):
        sf.batches(endless, 5, seed=0)
    noisy = sf.batches(endless, 5, seed=0, transform=lambda x, rng: rng.normal(x))
    assert next(noisy).shape == (5,)


def test_what_grain_filters_out_is_no_example():
    even = grain.MapDataset.range(10).filter(lambda x: x % 2 == 0)
    with pytest.raises(sf.DataError, match="example at index 1, got None; .*to_iter_dataset"):
        next(sf.batches(even, 4))
    assert next(sf.batches(even.to_iter_dataset(), 4)).tolist() == [0, 2, 4, 6]
