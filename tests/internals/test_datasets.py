"""A release of tensorflow_datasets or Hugging Face datasets that lacks what stepfold uses."""

import datasets
import pytest
import tensorflow_datasets as tfds

import stepfold as sf
from stepfold.internals.datasets import default_tfds_directory, has_shuffle_buffer


@pytest.mark.parametrize("name", ["read_only_builder", "DatasetNotFoundError"])
def test_a_name_is_not_found_without_the_function(monkeypatch, name):
    monkeypatch.delattr(tfds.core, name)
    with pytest.raises(
        sf.errors.ConfigError, match="tfds_source: expected a release .* got tensorflow_d"
    ):
        sf.tfds_source("mnist", "train", data_dir="/nowhere")


def test_the_default_directory_may_be_unknown(monkeypatch):
    with pytest.raises(sf.errors.DataError, match=f"is prepared in {tfds.core.constants.DATA_DIR}"):
        sf.tfds_source("no_such_dataset", "train")
    monkeypatch.delattr(tfds.core.constants, "DATA_DIR")
    assert default_tfds_directory() == "its default directory"


def test_a_stream_that_does_not_show_its_parts_cannot_be_resumed():
    plain = datasets.Dataset.from_dict({"x": [1, 2, 3, 4]}).to_iterable_dataset()
    assert not has_shuffle_buffer(plain)
    assert has_shuffle_buffer(plain.shuffle(buffer_size=2))
    del plain._ex_iterable
    assert has_shuffle_buffer(plain)
