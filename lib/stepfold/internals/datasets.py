"""Private parts of tensorflow_datasets and Hugging Face datasets, and what replaces them."""

from typing import Any

from stepfold.errors import refuse


def find_tfds_builder(name: str, data_dir: Any) -> Any:
    """Return the builder of a prepared dataset of tensorflow_datasets, or None if it is not.

    The public `tfds.builder` may return one that would have to prepare it, and imports the code of
    the dataset. Without this function, a dataset has to be opened by its directory.
    """
    import tensorflow_datasets as tfds

    try:
        find = tfds.core.read_only_builder.builder_from_files
        missing = tfds.core.DatasetNotFoundError
    except AttributeError:
        expected = "a release with tfds.core.read_only_builder.builder_from_files, to find names"
        got = f"tensorflow_datasets {tfds.__version__}"
        advice = "give the builder tfds.builder_from_directory(path), or install an earlier release"
        refuse("tfds_source", expected, got, advice)
    try:
        return find(name, data_dir=data_dir)
    except missing:
        return None


def default_tfds_directory() -> str:
    """Return where tensorflow_datasets looks by default, for messages."""
    import tensorflow_datasets as tfds

    constants = getattr(tfds.core, "constants", None)
    return str(getattr(constants, "DATA_DIR", "its default directory"))


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a Hugging Face stream may have a shuffle buffer, which a resume loses.

    The examples in the buffer would be missing from the epoch; Hugging Face only logs a warning.
    No public attribute shows it. A stream that does not show its parts counts as one with a buffer,
    so that a resume raises. If the class of the buffer had another name, it would not be found.
    """
    kind = type(dataset)
    if kind.__name__.startswith("BufferShuffled"):
        return True
    if kind.__module__.startswith("datasets.") and kind.__name__ == "IterableDataset":
        return not hasattr(dataset, "_ex_iterable") or has_shuffle_buffer(dataset._ex_iterable)
    inner = [getattr(dataset, "ex_iterable", None), *(getattr(dataset, "ex_iterables", None) or ())]
    return any(has_shuffle_buffer(part) for part in inner if part is not None)
