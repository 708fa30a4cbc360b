"""What can be read in order alone: begun anew, and gone on with."""

import json

import datasets
import grain
import pytest

import stepfold as sf
from stepfold.data.sources.streams import Stream


def read(stream, count=100):
    found = []
    while len(found) < count:
        try:
            found.append(stream.read())
        except StopIteration:
            break
    return found


def grains():
    return grain.MapDataset.range(10).shuffle(seed=3).to_iter_dataset()


def loader():
    sampler = grain.samplers.IndexSampler(
        num_records=10,
        shuffle=True,
        seed=0,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
    )
    return grain.DataLoader(data_source=list(range(10)), sampler=sampler, operations=[])


def faces():
    examples = datasets.Dataset.from_dict({"x": list(range(10))})
    return examples.to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("source", [lambda: range(3), {"a": 0, "b": 1, "c": 2}.values()])
def test_what_is_no_iterator_can_be_begun_anew(source):
    stream = Stream(source)
    assert not stream.once
    for epoch in range(2):
        stream.begin(epoch)
        assert read(stream) == [0, 1, 2]
    assert "no state of its own" in json.loads(stream.position())["lost"]


def test_an_iterator_is_read_from_where_it_is():
    iterator = iter(range(5))
    next(iterator)
    stream = Stream(iterator)
    assert stream.once
    assert read(stream) == [1, 2, 3, 4]


@pytest.mark.parametrize("make", [grains, loader, faces], ids=lambda make: make.__name__)
@pytest.mark.parametrize("wrap", [lambda make: make(), lambda make: make], ids=["it", "function"])
@pytest.mark.parametrize("count", [0, 1, 6, 10])
def test_real_streams_go_on_where_they_were(make, wrap, count):
    whole = read_all(make)
    stream = Stream(wrap(make))
    stream.begin(0)
    assert read(stream, count) == whole[:count]
    position = json.loads(stream.position())
    read(stream)
    resumed = Stream(wrap(make))
    resumed.go_to(0, position)
    assert read(resumed) == whole[count:]
    resumed.begin(1)  # the next epoch is whole again
    assert len(read(resumed)) == 10
    stream.go_to(0, position)  # back, in the same one
    assert read(stream) == whole[count:]


def read_all(make):
    stream = Stream(make)
    stream.begin(0)
    return read(stream)


@pytest.mark.parametrize("make", [grains, loader], ids=lambda make: make.__name__)
def test_an_iterator_of_grain_goes_on_too(make):
    stream = Stream(iter(make()))
    first = read(stream, 4)
    position = json.loads(stream.position())
    rest = read(stream)
    resumed = Stream(iter(make()))
    resumed.go_to(0, position)
    assert first + read(resumed) == first + rest


def test_a_stream_that_shuffles_by_epoch_is_told_the_epoch():
    stream = Stream(faces().shuffle(seed=0, buffer_size=4))
    epochs = []
    for epoch in (0, 1, 0):
        stream.begin(epoch)
        epochs.append([example["x"] for example in read(stream)])
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_what_was_sent_on_in_place_cannot_be_begun_in_the_same_epoch():
    source = faces()
    stream = Stream(source)
    stream.begin(0)
    read(stream, 4)
    stream.go_to(0, json.loads(stream.position()))
    with pytest.raises(sf.DataError, match="to begin epoch 0 anew, got one that was sent on"):
        stream.begin(0)


@pytest.mark.parametrize(("made", "says"), [(None, "makes NoneType None"), (3, "makes int 3")])
def test_a_function_has_to_make_something_to_read(made, says):
    with pytest.raises(sf.DataError, match=f"got one that {says}; let it return what is to be"):
        Stream(lambda: made).begin(0)


def test_a_position_of_a_stream_with_a_state_does_not_fit_one_without():
    with pytest.raises(sf.DataError, match="a stream with a state of its own, .* got gene"):
        Stream(x for x in [1]).go_to(0, {"json": {"next_index": 3}})
