"""What a kind of source has to say, and what follows from it."""

import numpy as np
import pytest

from stepfold.data.sources.rows import Rows, numbers


class Squares(Rows):
    length = 100

    def examples(self, where):
        return [{"x": index**2} for index in numbers(where)]


def test_indices_are_spelled_out_as_python_integers():
    assert numbers(slice(2, 5)) == [2, 3, 4]
    assert numbers(np.array([4, 0])) == [4, 0]
    assert {type(index) for index in numbers(np.array([4, 0]))} == {int}


def test_what_gives_examples_gives_batches():
    assert Squares().take(np.array([3, 2]))["x"].tolist() == [9, 4]
    Squares().check()
    with pytest.raises(NotImplementedError):
        Rows().take(slice(0, 1))
