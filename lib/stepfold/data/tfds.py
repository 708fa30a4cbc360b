"""Read datasets prepared by tensorflow_datasets, without TensorFlow."""

from collections.abc import Callable
from typing import Any

from stepfold import tree
from stepfold.core.validation import read_instance
from stepfold.data.order import Rows
from stepfold.data.sources import SequenceSource
from stepfold.errors import DataError, refuse
from stepfold.internals.datasets import default_tfds_directory, find_tfds_builder

_PREPARE = "prepare it once, with builder.download_and_prepare(file_format='array_record')"


def tfds_source(dataset: Any, split: str, *, data_dir: Any = None) -> "TfdsSource":
    """Open a dataset prepared by tensorflow_datasets, without TensorFlow.

    The dataset must be prepared as array_record, the only format with random access. `tfds_source`
    never downloads or prepares data, so that a job on a thousand machines does not start by doing
    so. A saved position is only valid for the same name, config, version and split.

    Args:
      dataset: a name, such as "mnist", "mnist:3.0.1" or "glue/cola:2.0.0" (by default the newest
        version), or a builder, such as that from `tfds.builder_from_directory(path)`.
      split: a split, such as "train" or "train[:90%]".
      data_dir: the directory of prepared datasets; by default that of tensorflow_datasets.

    Returns:
      A source whose examples are dicts of numpy arrays and numbers, with text as `str`. Images are
      decoded by opencv or pillow, depending on which is installed.

    Raises:
      ConfigError: if an argument is invalid, or the split does not exist or is empty.
      DataError: if the dataset is not prepared, or in another format.

    >>> import stepfold as sf
    >>> sf.tfds_source("mnist", "train", data_dir="/nowhere")
    Traceback (most recent call last):
    ...
    stepfold.errors.DataError: tfds_source: no dataset or version 'mnist' is prepared ...
    """
    expected = "one split, such as 'train[:90%]'"
    read_instance("tfds_source", split, str, expected, "open each split by itself")
    if isinstance(dataset, str):
        builder = _find(dataset, data_dir)
    else:
        builder = dataset
        if not hasattr(builder, "as_data_source") or data_dir is not None:
            expected = "the name of a dataset, or a builder and no data_dir"
            got = f"{tree.describe_value(dataset)} and data_dir={data_dir!r}"
            refuse("tfds_source", expected, got)
        if not builder.is_prepared():
            where = f"{builder.info.full_name} is not prepared in {builder.data_dir}"
            raise DataError(f"tfds_source: {where}; {_PREPARE}")
    _check_format(builder)
    try:
        source = builder.as_data_source(split, file_format="array_record")
    except ValueError as error:
        splits = ", ".join(builder.info.splits)
        expected = f"a split of {builder.info.full_name} that is not empty, of {splits}"
        refuse("tfds_source", expected, repr(split), cause=error)
    return TfdsSource(source, builder.info, split)


def _find(name: str, data_dir: Any) -> Any:
    """Return the builder of a prepared dataset, never one that would have to prepare it."""
    builder = find_tfds_builder(name, data_dir)
    if builder is None:
        where = default_tfds_directory() if data_dir is None else data_dir
        make = f"builder = tfds.builder({name!r}, data_dir=…)"
        raise DataError(
            f"tfds_source: no dataset or version {name!r} is prepared in {where}; {_PREPARE} of "
            f"{make}, or give its directory as data_dir=…"
        )
    return builder


def _check_format(builder: Any) -> None:
    formats = sorted(form.value for form in builder.info.available_file_formats())
    if "array_record" in formats:
        return
    why = {
        "parquet": "of which tensorflow_datasets reads only a part if there are several files",
        "tfrecord": "which only TensorFlow reads, and only in order",
    }
    got = ", ".join(f"{form}, {why[form]}" if form in why else form for form in formats)
    expected = f"{builder.info.full_name} as array_record"
    stream = "give sf.batches the pipeline that tfds.load makes, which is a stream"
    advice = f"in another data_dir, {_PREPARE}; or {stream}"
    refuse("tfds_source", expected, got or "none", advice, kind=DataError)


class TfdsSource(SequenceSource):
    """A split of a prepared dataset, returned by `tfds_source`."""

    def __init__(self, source: Any, info: Any, split: str) -> None:
        super().__init__(source)
        self._decode = _decoder(info.features) or (lambda example: example)
        self.name = f"{info.full_name} {split}"
        self.fingerprint = {"tfds": info.full_name, "split": split}

    def __repr__(self) -> str:
        return f"tfds_source({self.name}: {self.length} examples)"

    def examples(self, rows: Rows) -> list[Any]:
        return [self._decode(example) for example in super().examples(rows)]


def _decoder(feature: Any) -> Callable[[Any], Any] | None:
    """Make a function that decodes text features from bytes to `str`; None if there are none."""
    from tensorflow_datasets import features

    if isinstance(feature, features.Text):
        return _text
    if isinstance(feature, features.Sequence) and not isinstance(feature, features.Dataset):
        return _decoder(feature.feature)
    if not isinstance(feature, features.FeaturesDict):
        return None
    decoders = {name: _decoder(inner) for name, inner in feature.items()}
    texts = {name: decode for name, decode in decoders.items() if decode is not None}
    if not texts:
        return None
    return lambda value: value | {name: decode(value[name]) for name, decode in texts.items()}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else [_text(item) for item in value]
