import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.replaying.rereading import Mark, can_reread, reread

DATA = np.arange(40)


def test_batches_are_given_again_and_stand_where_they_stood():
    batches = sf.batches(DATA, 4, seed=0)
    seen = [next(batches) for _ in range(6)]
    position = sf.batches(DATA, 4, seed=0, start=2).get_state()
    with reread(batches, Mark(2, position), began=0) as again:
        assert [next(again).tolist() for _ in range(2)] == [b.tolist() for b in seen[2:4]]
    assert next(batches).tolist() == sf.batches(DATA, 4, seed=0).at(6).tolist()


def test_they_are_put_back_after_an_error_too():
    batches = sf.batches(DATA, 4, seed=0, start=5)
    with pytest.raises(KeyError), reread(batches, Mark(0, {**batches.get_state(), "step": 0}), 0):
        raise KeyError
    assert batches.get_state()["step"] == 5


def test_a_list_begins_where_the_run_began_and_goes_round():
    with reread([10, 11, 12], Mark(7, None), began=5) as again:
        assert [next(again) for _ in range(3)] == [12, 10, 11]


def test_they_end_where_they_end():
    batches = sf.batches(DATA, 4, epochs=1, start=9)
    with reread(batches, Mark(9, batches.get_state()), began=0) as again:
        assert len(list(again)) == 1


@pytest.mark.parametrize(
    ("batches", "position"), [(iter(DATA), None), (sf.batches(DATA, 4), None), (iter(DATA), {})]
)
def test_what_cannot_be_asked_again_is_refused(batches, position):
    words = "batches: expected some that can be asked again, a list, or with get_state and"
    with pytest.raises(sf.DataError, match=words), reread(batches, Mark(3, position), began=0):
        pass


def test_what_can_be_asked_again():
    assert can_reread([1])
    assert can_reread(sf.batches(DATA, 4))
    assert not can_reread(iter(DATA))
