from hypothesis import given
from hypothesis import strategies as st

from stepfold.data.fitting import plan_rows

SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=60)


def first_fit_decreasing(lengths, length):
    left = []
    for n in sorted(lengths, reverse=True):
        row = next((i for i, free in enumerate(left) if free >= n), None)
        if row is None:
            left.append(length - n)
        else:
            left[row] -= n
    return len(left)


@given(SIZES, st.integers(16, 40))
def test_each_comes_once_and_none_over_the_end(lengths, length):
    plan = plan_rows(lengths, length)
    assert sorted(index for row in plan for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= length for row in plan)
    assert all(row == sorted(row) for row in plan)


@given(SIZES, st.integers(16, 40))
def test_rows_are_at_most_as_many_as_first_fit_decreasing_takes(lengths, length):
    assert len(plan_rows(lengths, length)) <= first_fit_decreasing(lengths, length)


def test_rows_are_those_of_first_fit_where_best_fit_takes_more():
    lengths = [26, 24, 24, 22, 18, 16, 15, 15, 14, 14, 13, 11, 8, 5, 3, 3, 2]
    assert len(plan_rows(lengths, 39)) == 6
