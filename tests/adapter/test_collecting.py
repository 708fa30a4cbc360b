import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter.collecting import collect_function, columns, stacked


def test_without_a_length_examples_are_stacked():
    batch = collect_function(None, "keep_end")([{"x": [1, 2]}, {"x": [3, 4]}])
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(sf.DataError, match="expected one shape and dtype to stack"):
        stacked([{"x": [1]}, {"x": [1, 2]}])


def test_rows_and_columns_come_to_the_same():
    collect = collect_function(3, "keep_start")
    rows = collect([{"ids": [1, 2, 3, 4], "label": 0}, {"ids": [5], "label": 1}])
    assert rows["ids"].tolist() == [[1, 2, 3], [5, 0, 0]]
    as_columns = collect({"ids": [[1, 2, 3, 4], [5]], "label": [0, 1]})
    assert {name: values.tolist() for name, values in as_columns.items()} == {
        name: values.tolist() for name, values in rows.items()
    }


@pytest.mark.parametrize("length", [0, -1, 2.5, "4"])
def test_a_length_that_is_none_is_refused(length):
    with pytest.raises(sf.ConfigError, match="max_sequence_length"):
        collect_function(length, "keep_end")


def test_columns_of_one_shape_are_arrays_and_others_lists():
    found = columns([{"x": np.ones(2), "ids": [1]}, {"x": np.ones(2), "ids": [2, 3]}])
    assert found["x"].shape == (2, 2)
    assert found["ids"] == [[1], [2, 3]]
    assert columns([1.0, 2.0]).tolist() == [1.0, 2.0]
