"""Datasets written and read by tensorflow_datasets without TensorFlow."""

import pydoc_data.topics
import sys
from typing import ClassVar

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

import stepfold as sf

DIGITS = load_digits()
MANUAL = sorted(pydoc_data.topics.topics.items())[:20]


class Digits(tfds.core.GeneratorBasedBuilder):
    """The handwritten digits that scikit-learn brings along."""

    VERSION = tfds.core.Version("1.0.0")
    SUPPORTED_VERSIONS: ClassVar = [tfds.core.Version("1.1.0")]

    def _info(self):
        image = tfds.features.Tensor(shape=(8, 8), dtype=np.float32)
        features = {"image": image, "label": tfds.features.ClassLabel(num_classes=10)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {
            "train": self._generate_examples(0, 1500),
            "test": self._generate_examples(1500, 1530),
        }

    def _generate_examples(self, start, stop):
        for index in range(start, stop):
            image, label = np.float32(DIGITS.images[index]), int(DIGITS.target[index])
            yield index, {"image": image, "label": label}


class Manual(tfds.core.GeneratorBasedBuilder):
    """Python's manual, in the shapes that text comes in."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        features = {
            "topic": text,
            "page": {"text": text, "length": np.int64},
            "words": tfds.features.Sequence(text),
            "lines": tfds.features.Sequence({"text": text, "length": np.int64}),
            "raw": tfds.features.Tensor(shape=(), dtype=np.object_),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"pages": self._generate_examples()}

    def _generate_examples(self):
        for topic, text in MANUAL:
            lines = [{"text": line, "length": len(line)} for line in text.splitlines()[:5]]
            page, words = {"text": text, "length": len(text)}, text.split()[:3]
            example = {"topic": topic, "page": page, "words": words, "lines": lines}
            yield topic, {**example, "raw": text.encode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (Digits, Manual):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    Digits(data_dir=folder, version="1.1.0", file_format="array_record").download_and_prepare()
    assert "tensorflow" not in sys.modules
    return folder


def test_every_example_is_read_once_per_epoch(folder):
    source = sf.tfds_source("digits", "train", data_dir=folder)
    assert (len(source), sum(1 for _ in source)) == (1500, 1500)
    assert repr(source) == "tfds_source(digits/1.1.0 train: 1500 examples)"
    found = [
        (label, image.tobytes())
        for batch in sf.batches(source, 128, seed=0, epochs=1, remainder="pad")
        for label, image, real in zip(batch["label"], batch["image"], batch["mask"], strict=True)
        if real
    ]
    wanted = [(DIGITS.target[i], np.float32(DIGITS.images[i]).tobytes()) for i in range(1500)]
    assert sorted(found) == sorted(wanted)
    assert (source[-1]["image"] == source[1499]["image"]).all()
    with pytest.raises(IndexError, match="digits/1.1.0 train: expected an index below 1500, got"):
        source[1500]


def test_text_features_are_decoded(folder):
    source = sf.tfds_source("manual", "pages", data_dir=folder)
    pages = dict(MANUAL)
    assert len(source) == len(pages)
    for example in source:
        text = pages.pop(example["topic"])
        assert example["page"] == {"text": text, "length": len(text)}
        assert example["words"] == text.split()[:3]
        assert example["lines"]["text"] == text.splitlines()[:5]
        assert list(example["lines"]["length"]) == [len(x) for x in text.splitlines()[:5]]
        assert example["raw"] == text.encode()
    assert not pages


def test_versions_splits_and_builders(folder, tmp_path):
    old = sf.tfds_source("digits:1.0.0", "train[:10%]", data_dir=str(folder))
    assert repr(old) == "tfds_source(digits/1.0.0 train[:10%]: 150 examples)"
    builder = tfds.builder_from_directory(folder / "digits" / "1.0.0")
    assert (sf.tfds_source(builder, "train")[7]["image"] == old[7]["image"]).all()
    with pytest.raises(
        sf.errors.DataError, match="digits/1.0.0 is not prepared in .*; prepare it once"
    ):
        sf.tfds_source(Digits(data_dir=tmp_path), "train")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (("digits:1.0.0", "train"), "source was {'tfds': 'digits/1.1.0', .* 'digits/1.0.0'"),
        (("digits", "train[:1500]"), r"'split': 'train'} and is .*'split': 'train\[:1500\]'}"),
    ],
)
def test_position_of_another_version_or_split_is_refused(folder, other, says):
    saved = sf.batches(sf.tfds_source("digits", "train", data_dir=folder), 32).get_state()
    sf.batches(sf.tfds_source("digits:1.1.0", "train", data_dir=folder), 32).set_state(saved)
    with pytest.raises(sf.errors.DataError, match=says):
        sf.batches(sf.tfds_source(*other, data_dir=folder), 32).set_state(saved)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mnist", "no dataset or version 'mnist' is prepared in .*; prepare it once, with builder"),
        ("digits:9.0.0", "no dataset or version 'digits:9.0.0' is prepared in"),
    ],
)
def test_missing_dataset_is_refused_and_not_prepared(folder, name, says):
    with pytest.raises(sf.errors.DataError, match=says):
        sf.tfds_source(name, "train", data_dir=folder)
    assert not (folder / "mnist").exists()


def test_parquet_is_refused(tmp_path):
    builder = Digits(data_dir=tmp_path, file_format="parquet")
    shards = tfds.download.DownloadConfig(num_shards=2)
    builder.download_and_prepare(download_config=shards)
    assert len(builder.as_data_source("train")) < 1500  # why
    says = "expected digits/1.0.0 as array_record, got parquet, of which .* reads only a part"
    for dataset, options in (("digits", {"data_dir": tmp_path}), (builder, {})):
        with pytest.raises(sf.errors.DataError, match=says):
            sf.tfds_source(dataset, "train", **options)


def test_tfrecord_is_refused(folder, tmp_path):
    # It cannot be written without TensorFlow, but its metadata can be.
    copy = tmp_path / "digits" / "1.0.0"
    copy.mkdir(parents=True)
    for path in (folder / "digits" / "1.0.0").iterdir():
        text = path.read_bytes().replace(b"array_record", b"tfrecord")
        (copy / path.name.replace("array_record", "tfrecord")).write_bytes(text)
    says = "got tfrecord, which only TensorFlow reads, .* the pipeline that tfds.load makes"
    with pytest.raises(sf.errors.DataError, match=says):
        sf.tfds_source("digits", "train", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("digits", "validation"), "split of digits/1.1.0 .*, of train, test, got 'validation'"),
        (("digits", "train[5:5]"), "that is not empty, .* got 'train.5:5.'"),
        (("digits", ["train"]), r"expected one split, such as 'train.:90%.', got list \['train'\]"),
        (("digits", None), "expected one split, .* got NoneType None; open each split by itself"),
        ((3, "train"), "expected the name of a dataset, or a builder and no data_dir, got int 3"),
    ],
)
def test_invalid_arguments_are_refused(folder, arguments, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        sf.tfds_source(*arguments, data_dir=folder)
