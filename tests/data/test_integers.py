import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.data.integers import read_integer


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2), jax.numpy.int32(2)])
def test_any_librarys_integer_becomes_pythons(value):
    read = read_integer("size", value, 2)
    assert (read, type(read)) == (2, int)


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 1.0, "2", None, np.ones(2, int)])
def test_what_is_none_or_too_small_is_refused(value):
    with pytest.raises(sf.ConfigError, match="pack: rows: expected an integer of at least 1, got"):
        read_integer("pack: rows", value, 1)
