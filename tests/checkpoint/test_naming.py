"""Names in a file: dots by default, a function otherwise, and never one name for two arrays."""

import re

import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.naming import named_arrays

PARAMS = {"layers": [{"kernel": np.ones((2, 3))}, {"kernel": np.ones(4)}], "none": None}


def test_names_are_paths_with_dots():
    leaves = named_arrays("params", PARAMS, None)
    assert [(leaf.path, leaf.name) for leaf in leaves] == [
        ("layers/0/kernel", "layers.0.kernel"),
        ("layers/1/kernel", "layers.1.kernel"),
    ]
    assert [leaf.spec.size for leaf in leaves] == [48, 32]


def test_a_function_names_them_otherwise():
    leaves = named_arrays("params", PARAMS, lambda path: path.replace("kernel", "weight"))
    assert [leaf.name for leaf in leaves] == ["layers/0/weight", "layers/1/weight"]


@pytest.mark.parametrize(
    ("params", "names", "words"),
    [
        ({"a": {"b": 1}, "a.b": 2}, None, "params: a/b and a.b would both be called 'a.b'; give"),
        ({"a": 1, "b": 2}, lambda path: "x", "params: a and b would both be called 'x'"),
        (np.ones(3), None, "expected a name for the array at '', got '', which names none in"),
        ({"__metadata__": 1}, None, "expected a name for the array at '__metadata__', got"),
        ({"a": 1}, {}.get, "expected a name for the array at 'a', got None"),
        ({"a": 1}, {"a": "b"}, "names: expected a function of a path, got dict {'a': 'b'}"),
        ({"a": None}, None, "params: expected arrays, got none: dict {'a': None}"),
    ],
)
def test_what_has_no_name_is_refused(params, names, words):
    with pytest.raises(sf.ConfigError, match=re.escape(words)):
        named_arrays("params", params, names)
