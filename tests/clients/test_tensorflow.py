"""Pipelines of tf.data."""

import itertools

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

import stepfold as sf

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

DIGITS = load_digits()


class Digits(tfds.core.GeneratorBasedBuilder):
    """The handwritten digits that scikit-learn brings along, as pictures."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=10),
            "name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for index, (image, label) in enumerate(zip(DIGITS.images, DIGITS.target, strict=True)):
            image = np.uint8(image)[..., None]
            yield index, {"image": image, "label": int(label), "name": f"digit {index}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    Digits(data_dir=folder, file_format="tfrecord").download_and_prepare()
    return folder


def numbers(example):
    return {"image": np.float32(example["image"]) / 16, "label": np.int32(example["label"])}


def test_dataset_of_tfds_load_is_a_stream(folder):
    pipeline = tfds.load("digits", split="train", data_dir=folder)
    stream = sf.batches(pipeline, 128, epochs=2, remainder="pad", transform=numbers)
    found = list(stream)
    assert len(found) == 2 * 15
    for epoch in (found[:15], found[15:]):
        rows = [
            (int(label), image.tobytes())
            for batch in epoch
            for image, label, real in zip(
                batch["image"], batch["label"], batch["mask"], strict=True
            )
            if real
        ]
        images = np.float32(DIGITS.images)[..., None] / 16
        wanted = [(int(n), image.tobytes()) for n, image in zip(DIGITS.target, images, strict=True)]
        assert sorted(rows) == sorted(wanted)


def test_processes_share_the_rows_of_a_pipeline(folder):
    pipeline = tfds.load("digits", split="train[:100]", data_dir=folder)
    options = {"epochs": 1, "remainder": "keep", "transform": numbers}
    whole = sf.batches(pipeline, 20, **options)
    shares = [
        sf.batches(pipeline, 20, process_index=index, process_count=2, **options)
        for index in range(2)
    ]
    for batch, one, two in zip(whole, *shares, strict=True):
        np.testing.assert_array_equal(batch["image"], np.concatenate([one["image"], two["image"]]))


def test_pipeline_yields_numpy_and_restarts():
    pipeline = tf.data.Dataset.range(10).map(lambda x: {"x": x, "y": (tf.cast(x, tf.float32),)})
    batch = next(sf.batches(pipeline, 4))
    assert type(batch["x"]) is type(batch["y"][0]) is np.ndarray
    assert batch["y"][0].dtype == np.float32
    stream = sf.batches(pipeline, 4)
    assert [b["x"][0] for b in itertools.islice(stream, 5)] == [0, 4, 0, 4, 0]
    assert [b["x"].tolist() for b in sf.batches(iter(pipeline), 6)] == [[0, 1, 2, 3, 4, 5]]


def test_pipeline_can_be_saved_but_not_resumed():
    pipeline = tf.data.Dataset.range(10)
    stream = sf.batches(pipeline, 4)
    next(stream)
    with pytest.raises(
        sf.errors.DataError, match="no state of its own; .* the 4 examples of epoch 0"
    ):
        sf.batches(pipeline, 4).set_state(stream.get_state())
    by_hand = sf.batches(pipeline.skip(stream.get_state()["row"]), 4)
    assert next(by_hand).tolist() == next(stream).tolist()


def test_text_is_refused():
    pipeline = tf.data.Dataset.from_tensor_slices(["a", "bc"])
    with pytest.raises(sf.errors.DataError, match="expected numbers, got bytes b'a' at index 0"):
        next(sf.batches(pipeline, 2))
    assert next(sf.batches(pipeline, 2, transform=len)).tolist() == [1, 2]


def test_tfrecord_is_refused_for_random_access(folder):
    with pytest.raises(sf.errors.DataError, match="got tfrecord, which only TensorFlow reads"):
        sf.tfds_source("digits", "train", data_dir=folder)


def test_images_encoded_by_tensorflow_are_read_by_index(tmp_path):
    Digits(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    source = sf.tfds_source("digits", "train", data_dir=tmp_path)
    for example in itertools.islice(source, 50):
        index = int(example["name"].removeprefix("digit "))
        np.testing.assert_array_equal(example["image"][..., 0], DIGITS.images[index])
        assert example["label"] == DIGITS.target[index]
