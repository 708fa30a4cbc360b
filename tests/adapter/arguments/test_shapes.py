"""Shapes of schedules by name."""

import pytest

import stepfold as sf
from stepfold.adapter.arguments.shapes import check_shape_options, read_scheduler, shape_of


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("none", ("constant", False)),
        ("linear", ("linear", False)),
        ("warm_up_linear", ("linear", True)),
        ("warmup_cosine", ("cosine", True)),
        ("constant_with_warmup", ("constant", True)),
        ("cosine_with_restarts", ("cosine_restarts", False)),
        ("warmup_stable_decay", ("wsd", False)),
    ],
)
def test_names_of_shapes(name, shape):
    assert shape_of(name) == shape
    assert read_scheduler("scheduler", name) == name


def test_a_name_that_is_none():
    with pytest.raises(sf.ConfigError, match=r"one of none, constant, .* did you mean 'cosine'"):
        shape_of("cosin")
    with pytest.raises(sf.ConfigError, match="custom_scheduler= a function"):
        shape_of("qqqq")
    with pytest.raises(sf.ConfigError, match="scheduler: expected a text, got 3"):
        read_scheduler("scheduler", 3)


def test_options_of_another_shape():
    check_shape_options("polynomial", {"power": 1.0})
    with pytest.raises(sf.ConfigError, match="linear takes none, got 'power'"):
        check_shape_options("linear", {"power": 1.0})
    with pytest.raises(sf.ConfigError, match="polynomial takes power, got 'cycles'"):
        check_shape_options("polynomial", {"cycles": 1.0})
