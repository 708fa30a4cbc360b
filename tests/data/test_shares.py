"""Which rows are whose."""

import jax
import pytest

import stepfold as sf
from stepfold.data.shares import Share, read_share


def test_the_shares_in_order_are_the_batch():
    rows = [i for process in range(4) for i in range(*Share(process, 4).rows(12))]
    assert rows == list(range(12))


def test_jax_is_asked_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert read_share(None, None) is None
    assert Share.asked_of_jax() == (2, 3)
    assert read_share(1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("index", "count", "says"),
    [
        (0, None, "expected both or neither, got 0 and None"),
        (0, 0, "process_count: expected an integer of at least 1, got 0"),
        (-1, 2, "process_index: expected an integer of at least 0, got -1"),
        (2, 2, "process_index: expected one below process_count=2, got 2"),
    ],
)
def test_what_is_no_share_is_refused(index, count, says):
    with pytest.raises(sf.ConfigError, match=says):
        read_share(index, count)


def test_sizes_that_do_not_divide_are_refused():
    Share(0, 4).check_sizes([(0, 8), (5, 12)])
    with pytest.raises(sf.DataError, match="got 6 from step 5 on; give 4 or 8"):
        Share(0, 4).check_sizes([(0, 8), (5, 6)])
    Share(0, 4).check_short(3, 8)
    with pytest.raises(sf.DataError, match="got 7 rows at step 3; use remainder='pad'"):
        Share(0, 4).check_short(3, 7)
