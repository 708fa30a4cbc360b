"""Every error is a `StepfoldError`, and reads by one pattern."""

import inspect
import re

import numpy as np
import pytest

import stepfold
from stepfold import errors

ALL = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if error.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_a_stepfold_error_and_a_builtin_error(error):
    assert issubclass(error, errors.StepfoldError)
    if error is not errors.StepfoldError:
        assert issubclass(error, ValueError | OSError | TypeError | MemoryError)


def test_a_refusal_describes_a_value_and_takes_text_as_it_is():
    with pytest.raises(errors.ConfigError) as caught:
        errors.refuse("x", "a scalar", np.ones(3))
    assert str(caught.value) == "x: expected a scalar, got float64[3]"
    with pytest.raises(errors.DataError) as caught:
        errors.refuse("x", "a batch", "none", "give one", kind=errors.DataError)
    assert str(caught.value) == "x: expected a batch, got none; give one"


def test_a_refusal_has_the_cause_that_is_given():
    cause = OSError("disk")
    with pytest.raises(errors.ConfigError) as caught:
        errors.refuse("x", "a file", "none", cause=cause)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("old", "new"), [("value_and_grad", "make_grad"), ("stop_after", "fit(time_limit=…)")]
)
def test_a_renamed_function_gives_its_new_name(old, new):
    with pytest.raises(AttributeError, match=re.escape(f"stepfold: {old} is now {new}")):
        getattr(stepfold, old)
    with pytest.raises(ImportError, match=re.escape(f"stepfold: {old} is now {new}")):
        exec(f"from stepfold import {old}", {})
    assert not hasattr(stepfold, old)
    assert old not in dir(stepfold)


def test_a_removed_class_says_what_to_write():
    says = "stepfold: Elastic is gone; .*`python -m stepfold launch`.*temporary=Temporary"
    with pytest.raises(AttributeError, match=says):
        _ = stepfold.Elastic
    with pytest.raises(ImportError, match=says):
        exec("from stepfold import Elastic", {})


def test_an_unknown_name_is_not_there():
    with pytest.raises(AttributeError, match="module 'stepfold' has no attribute 'missing'"):
        _ = stepfold.missing
    with pytest.raises(ImportError, match="cannot import name 'missing'"):
        exec("from stepfold import missing", {})
