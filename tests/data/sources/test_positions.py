"""Where streams say they are, in real libraries and in what is like them."""

import json

import datasets
import grain
import pytest

from stepfold.data.sources.positions import Owner, lost


class Counter:
    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Stateful(Counter):
    state_dict, load_state_dict = Counter.get_state, Counter.set_state
    get_state = set_state = property()


@pytest.mark.parametrize("kind", [Counter, Stateful])
@pytest.mark.parametrize("state", [{"a": [1, None, "x"]}, b'{"seen": 3}', 7])
def test_a_state_goes_through_json_and_back(kind, state):
    thing = kind(state)
    owner = Owner.among(object(), thing)
    position = json.loads(owner.read())
    thing.state = None
    owner.write(position)
    assert thing.state == state
    assert type(thing.state) is type(state)


def test_what_was_read_stays_as_it_is():
    state = {"index": [1]}
    position = Owner.among(Counter(state)).read()
    state["index"][0] = 2
    assert json.loads(position) == {"json": {"index": [1]}}


@pytest.mark.parametrize("state", [object(), {"a": {1, 2}}, b"\xff"])
def test_a_state_that_json_cannot_hold_is_lost_and_says_so(state):
    position = json.loads(Owner.among(Counter(state)).read())
    assert position["lost"].startswith("its state is nothing that JSON can hold: ")


def test_what_has_no_state_owns_none():
    assert Owner.among(iter([1]), [1], object()) is None
    assert json.loads(lost("why")) == {"lost": "why"}


def test_an_error_while_a_state_is_set_says_what_was_done():
    stream = iter(grain.MapDataset.range(4).to_iter_dataset())
    with pytest.raises(KeyError, match="next_index") as caught:
        Owner.among(stream).write({"json": {"another": 1}})
    assert caught.value.__notes__ == ["setting the state of the stream with its own set_state()"]


def test_a_stream_of_hugging_face_with_a_shuffle_buffer_is_lost():
    # What was in the buffer is gone from the epoch when it is resumed, with no more than a warning.
    plain = datasets.Dataset.from_dict({"x": list(range(9))}).to_iterable_dataset()
    shuffled = plain.shuffle(seed=0, buffer_size=4)
    mixed = datasets.interleave_datasets([plain, shuffled.map(lambda example: example)])
    for stream in (shuffled, mixed):
        next(iter(stream))
        assert "shuffle buffer" in json.loads(Owner.among(stream).read())["lost"]
    next(iter(plain))
    assert "json" in json.loads(Owner.among(plain).read())
