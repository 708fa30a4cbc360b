import math

import pytest

import stepfold as sf
from stepfold.core.validation import check_count, check_positive


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_what_is_not_a_count_is_refused(value):
    with pytest.raises(sf.ConfigError, match="size: expected an integer of at least 1, got "):
        check_count("size", value)


def test_a_count_is_returned():
    assert check_count("size", 1) == 1
    assert check_count("size", 0, minimum=0) == 0


@pytest.mark.parametrize("value", [0, -0.5, math.nan, True, "3", None])
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(sf.ConfigError, match="rate: expected a number above 0, got "):
        check_positive("rate", value)


def test_zero_may_be_allowed():
    assert check_positive("limit", 0, allow_zero=True) == 0
    with pytest.raises(sf.ConfigError, match="limit: expected seconds, a number of at least 0"):
        check_positive("limit", -1, allow_zero=True, unit="seconds")
