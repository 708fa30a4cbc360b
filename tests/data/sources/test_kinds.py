"""What is a source, what is a stream, and what is neither."""

from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.data.sources.arrays import Arrays
from stepfold.data.sources.examples import Examples
from stepfold.data.sources.kinds import is_stream, read_source

X = np.arange(24).reshape(8, 3)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("text", "got str 'text'; cut the text into a list of examples"),
        (b"text", "cut the text"),
        ({1, 2}, "got set {1, 2}; a set has no order: give a list of it, sorted"),
        ((x for x in X), "got generator .* read in order alone cannot be mixed: give a list of"),
        ({"a": 1}.keys(), "got dict_keys .* give a list of it"),
        (lambda: X, "got function .* give a list of it"),
        (MappingProxyType({"train": X, "test": X}), "one of its values, .* called 'train', 'test'"),
        ({"train": [1, 2], "test": 3}, "or give a list of examples, or one source alone"),
        (3, "got int 3; give it __len__ and __getitem__"),
        (None, "got NoneType None; give it"),
        ([], r"source: expected examples, got none: list \[\]"),
        ({}, "source: expected examples, got none: dict {}"),
        (X[:0], r"source: expected examples, got none: int64\[0,3\]"),
        ({"x": X, "y": X[:5]}, r"got source/x int64\[8,3\], source/y int64\[5,3\]; give arrays"),
        ({"x": X, "y": 3}, "source/y: expected an array .* got int 3; convert it with np.asarray"),
        ({"x": X, "y": np.array(3)}, r"source/y: .* got the scalar int64\[\]; give every example"),
        ({"x": np.ma.masked_array(X)}, "source/x: expected an array whose leading axis"),
        ({"x": "text"}, "source/x: .* got str 'text'"),
    ],
)
def test_what_is_no_source_is_refused(source, says):
    with pytest.raises(sf.DataError, match=says):
        read_source(source)


class Indexed:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(3))


class InOrder:
    """What has `[i]` and no length is no source, as a streaming Hugging Face dataset is none."""

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(3))


def test_arrays_and_what_has_an_index_are_sources():
    for source in (X, jnp.asarray(X), {"x": X}, (X, X)):
        assert isinstance(read_source(source), Arrays)
        assert not is_stream(source)
    for source in ([1, 2], range(3), Indexed()):
        assert isinstance(read_source(source), Examples)
        assert not is_stream(source)
    mixture = sf.mix([(X, 1)])
    assert read_source(mixture) is mixture
    assert not is_stream(mixture)


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (iter([1]), True),
        ((x for x in [1]), True),
        ({"a": 1}.values(), True),
        (InOrder(), True),
        (lambda: [1], True),
        (Indexed, True),
        ("text", False),
        (b"text", False),
        ({1, 2}, False),
        (None, False),
        (3, False),
    ],
)
def test_what_can_be_read_in_order_alone_is_a_stream(thing, expected):
    assert is_stream(thing) is expected
