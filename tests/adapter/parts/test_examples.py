"""What is done to an example."""

import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments, shuffle_seed, transform

ROWS = [{"id": n, "text": "a", "none": None, "x": np.float32(n), "t": [n]} for n in range(4)]


def columns(**fields):
    change = transform(TrainingArguments(**fields))
    return sorted(next(sf.batches(ROWS, 2, transform=change)))


def test_columns_are_left_out_before_a_batch_is_made():
    assert columns(remove_unused_columns=True) == ["id", "t", "x"]
    assert columns(ids_to_pop_from_dataset=("id", "text", "none")) == ["t", "x"]
    assert transform(TrainingArguments()) is None


def test_an_example_without_columns_is_refused():
    change = transform(TrainingArguments(remove_unused_columns=True))
    with pytest.raises(sf.DataError, match="expected examples with columns by name, got int 3"):
        change(3)


def test_the_order_follows_from_a_seed_or_is_that_of_the_data():
    assert shuffle_seed(TrainingArguments()) == 42
    assert shuffle_seed(TrainingArguments(seed=1)) == 1
    assert shuffle_seed(TrainingArguments(seed=1, shuffle_seed_train=0)) == 0
    assert shuffle_seed(TrainingArguments(shuffle_train_dataset=False)) is None
