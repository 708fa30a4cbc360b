"""Batches of streams equal those of a list, and resume from the state of the stream."""

import itertools
import json

import datasets
import grain
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import full_but

import stepfold as sf
from stepfold.data.batches import batches
from stepfold.data.stream import Stream

REMAINDERS = st.sampled_from(["drop", "pad", "keep"])


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def all_same(ones, twos):
    for one, two in zip(ones, twos, strict=True):
        same(one, two)


def numbered(count):
    return [{"x": index, "y": np.full(2, index / 2)} for index in range(count)]


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(1, 3),
    REMAINDERS,
)
def test_batches_equal_those_of_a_list(count, segments, epochs, remainder):
    steps = itertools.accumulate((steps for steps, _ in segments), initial=0)
    sizes = [(step, min(size, count)) for step, (_, size) in zip(steps, segments, strict=False)]
    options = {"epochs": epochs, "remainder": remainder}
    expected = list(batches(numbered(count), sizes, **options))
    all_same(list(batches(lambda: iter(numbered(count)), sizes, **options)), expected)


def noise(example, rng):
    return {**example, "noise": rng.normal()}


@given(st.integers(1, 20), st.integers(1, 4), st.sampled_from([2, 4]), REMAINDERS)
def test_shards_form_the_global_batch(count, share, processes, remainder):
    count, size = count * processes, share * processes
    if size > count and remainder == "drop":
        return
    options = {"epochs": 2, "remainder": remainder, "seed": 1, "transform": noise}
    make = lambda: iter(numbered(count))
    shares = [
        batches(make, size, process_index=index, process_count=processes, **options)
        for index in range(processes)
    ]
    whole = batches(make, size, **options)
    for parts in zip(*shares, strict=True):
        same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), next(whole))
    assert next(whole, None) is None


def test_iterables_repeat_and_iterators_end():
    assert len(list(itertools.islice(batches(lambda: range(4), 3), 10))) == 10
    assert len(list(batches(iter(range(7)), 3))) == 2
    assert len(list(batches(iter(range(7)), 3, epochs=1, remainder="keep"))) == 3
    iterator = iter(range(5))
    next(iterator)
    assert [batch.tolist() for batch in batches(iterator, 2)] == [[1, 2], [3, 4]]


# Resuming


def grains():
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return grain.MapDataset.source(numbered(13)).shuffle(seed=3).to_iter_dataset(options)


def loader():
    sampler = grain.samplers.IndexSampler(
        num_records=13,
        shuffle=True,
        seed=0,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
    )
    return grain.DataLoader(data_source=numbered(13), sampler=sampler, operations=[])


def faces():
    examples = datasets.Dataset.from_dict({"x": list(range(13)), "ids": [[1, 2]] * 13})
    return examples.to_iterable_dataset(num_shards=3).with_format("numpy")


STREAMS = {make.__name__: make for make in (grains, loader, faces)}


@pytest.mark.parametrize(
    ("name", "remainder"),
    full_but(
        [("grains", "keep"), ("faces", "drop")],
        itertools.product(STREAMS, ("drop", "pad", "keep")),
    ),
)
def test_real_streams_resume_at_any_step(name, remainder):
    make = STREAMS[name]
    options = {"epochs": 2, "remainder": remainder, "seed": 5, "transform": noise}
    wrapped = make if remainder == "pad" else make()
    create = lambda: batches(wrapped if callable(wrapped) else make(), [(0, 3), (3, 4)], **options)
    whole = list(create())
    stream = create()
    for step in range(len(whole) + 1):
        saved = json.loads(json.dumps(stream.get_state()))
        assert saved["step"] == step
        resumed = create()
        resumed.set_state(saved)
        assert resumed.get_state() == saved
        all_same(list(resumed), whole[step:])
        next(stream, None)


def test_stream_with_set_epoch_gets_the_epoch_and_cannot_start_one_that_was_restored():
    stream = Stream(faces().shuffle(seed=0, buffer_size=4))
    epochs = []
    for epoch in (0, 1, 0):
        stream.start(epoch)
        epochs.append([stream.read()["x"].item() for _ in range(13)])
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    restored = Stream(faces())
    restored.read()
    restored.restore(0, json.loads(restored.position()))
    restored.start(0)
    with pytest.raises(
        sf.errors.DataError, match="starts epoch 0 from its beginning, got one that was r"
    ):
        restored.read()


def test_stream_without_a_state_is_saved_but_not_resumed():
    stream = batches((x for x in range(40)), 8)
    next(stream), next(stream)
    saved = json.loads(json.dumps(stream.get_state()))
    assert "generator" in saved["stream"]["lost"]
    other = batches((x for x in range(40)), 8)
    says = (
        "got step 2 of a stream, but a stream of type generator has no state of its own; .* the 16 "
        r"examples of epoch 0 that were read, as in sf.batches\(itertools.islice\(stream, 16, None"
    )
    with pytest.raises(sf.errors.DataError, match=says):
        other.set_state(saved)
    assert next(other).tolist() == list(range(8))  # and it is where it was
    by_hand = batches(itertools.islice(iter(range(40)), saved["row"], None), 8)
    np.testing.assert_array_equal(next(by_hand), next(stream))


def test_position_at_the_start_and_at_the_end_needs_no_state():
    saved = batches(iter(range(8)), 4).get_state()
    fresh = batches(iter(range(8)), 4)
    fresh.set_state(saved)
    assert next(fresh).tolist() == [0, 1, 2, 3]
    with pytest.raises(
        sf.errors.DataError, match="got one that has been read up to step 1; an iterator"
    ):
        fresh.set_state(saved)
    assert len(list(fresh)) == 1
    ended = batches(iter(range(8)), 4)
    ended.set_state(fresh.get_state())
    assert next(ended, None) is None
    again = batches(lambda: range(8), 4)
    next(again)
    again.set_state(batches(lambda: range(8), 4).get_state())
    assert next(again).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"source": faces}, "expected the batches .*: stream was 'grain' and is 'builtins'"),
        ({"batch_size": 5}, "batch_size was 4 and is 5; make them as they were$"),
        ({"source": list(range(8))}, "with step, pipeline, got dict .* another kind of iterator"),
    ],
)
def test_position_of_other_batches_is_refused(other, says):
    options = {"source": grains(), "batch_size": 4}
    stream = batches(**options)
    next(stream)
    with pytest.raises(sf.errors.DataError, match=says):
        batches(**{**options, **other}).set_state(stream.get_state())


class Counter:
    """Numbers from 0, with a state of any type."""

    def __init__(self, state):
        self.state, self.number = state, -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Stateful(Counter):
    state_dict, load_state_dict = Counter.get_state, Counter.set_state
    get_state = set_state = property()


@pytest.mark.parametrize("kind", [Counter, Stateful])
@pytest.mark.parametrize("state", [{"a": [1, None, "x"]}, b'{"seen": 3}', 7])
def test_state_of_a_stream_is_serialized_as_json(kind, state):
    stream, source = batches(kind(state), 2), kind(None)
    next(stream)
    resumed = batches(source, 2)
    resumed.set_state(json.loads(json.dumps(stream.get_state())))
    assert (source.state, type(source.state)) == (state, type(state))
    for lost in (object(), {"a": {1, 2}}, b"\xff"):
        stream = batches(kind(lost), 2)
        next(stream)
        with pytest.raises(sf.errors.DataError, match="but its state cannot be written as JSON: "):
            batches(kind(lost), 2).set_state(stream.get_state())


def test_error_while_a_state_is_set_names_the_setter():
    stream, other = batches(grains(), 4), batches(grains(), 4)
    next(stream), next(other)
    saved = stream.get_state()
    with pytest.raises(KeyError, match="next_index") as caught:
        stream.set_state({**saved, "stream": {"json": {"another": 1}}})
    assert caught.value.__notes__ == ["setting the state of the stream with its own set_state()"]
    same(next(stream), next(other))  # the position has not changed
    plain = batches((x for x in range(4)), 2)
    with pytest.raises(sf.errors.DataError, match="a stream with its own state, .* got generator"):
        plain.set_state({**plain.get_state(), "stream": {"json": {"next_index": 3}}})


def test_shuffle_buffer_of_hugging_face_is_found_in_nested_datasets():
    # Its examples would be missing from the epoch after a resume, with no more than a warning.
    plain = datasets.Dataset.from_dict({"x": list(range(9))}).to_iterable_dataset()
    shuffled = plain.shuffle(seed=0, buffer_size=4)
    mixed = datasets.interleave_datasets([plain, shuffled.map(lambda example: example)])
    for source, key in ((shuffled, "lost"), (mixed, "lost"), (plain, "json")):
        stream = batches(source, 2)
        next(stream)
        assert list(stream.get_state()["stream"]) == [key]
        if key == "lost":
            with pytest.raises(sf.errors.DataError, match="the examples in its shuffle buffer"):
                batches(source, 2).set_state(stream.get_state())


# Errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 0}, "seed: expected none for a stream, .* own order, got 0; shuffle it where"),
        ({"seed": 0, "transform": abs}, "seed: expected none for a stream"),
        ({"start": 2}, "start: expected 0 for a stream.* got 2; .* set_state.*islice"),
        ({"epochs": 2}, "epochs: expected 1 for an iterator, .* only once, got 2; give"),
    ],
)
def test_arguments_that_a_stream_cannot_have_are_refused(options, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        batches(**{"source": iter(range(8)), "batch_size": 4, **options})


def test_epoch_without_a_batch_is_refused():
    says = "at most the 3 examples of the stream, got 4, and remainder='drop' .* remainder='pad'"
    with pytest.raises(sf.errors.DataError, match=says):
        next(batches(lambda: range(3), 4))
    with pytest.raises(
        sf.errors.DataError, match="expected examples, got none in epoch 0 of the stream"
    ):
        next(batches(iter([]), 4))
    used = iter(range(4))
    stream = batches(lambda: used, 4)
    next(stream)
    with pytest.raises(
        sf.errors.DataError, match="none in epoch 1 of the stream; if it can be read only"
    ):
        next(stream)
    with pytest.raises(sf.errors.DataError, match="got one that makes int 3; return an iterable"):
        next(batches(lambda: 3, 2))


def test_batch_that_does_not_divide_or_fails_is_refused_and_not_lost():
    share = {"process_index": 0, "process_count": 2}
    with pytest.raises(
        sf.errors.DataError, match="expected a multiple of the 2 processes, got 3 from"
    ):
        next(batches(iter(range(9)), 3, **share))
    stream = batches(iter(range(7)), 4, remainder="keep", **share)
    next(stream)
    for _ in range(2):
        with pytest.raises(sf.errors.DataError, match="got 3 rows at step 1; use remainder='pad'"):
            next(stream)
    stream = batches(iter(range(8)), 4, collate=lambda examples: 1 // examples[0])
    with pytest.raises(ZeroDivisionError) as caught:
        next(stream)
    assert "making the batch of step 0: examples 0 to 3 of epoch 0" in caught.value.__notes__


# Batches that are left out


class Fallible(Counter):
    """A stream with a position that fails once at an example."""

    def __init__(self, bad):
        self.number, self.bad = -1, bad

    def __next__(self):
        if self.number + 1 == self.bad:
            self.bad = None
            raise OSError("bad disk")
        return super().__next__()

    def get_state(self):
        return self.number

    def set_state(self, state):
        self.number = state


def test_an_error_in_a_batch_that_is_left_out_can_be_retried():
    skipped = [(2, 6)]
    stream = batches(Fallible(9), 2).without(skipped)
    assert [next(stream).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="bad disk") as caught:
        next(stream)
    assert "reading example 9 of epoch 0 of the stream" in caught.value.__notes__[0]
    saved = json.loads(json.dumps(stream.get_state()))
    assert (saved["step"], saved["index"], saved["stream"]) == (2, 4, {"json": 7})
    assert next(stream).tolist() == [12, 13]
    resumed = batches(Fallible(None), 2).without(skipped)
    resumed.set_state(saved)
    assert next(resumed).tolist() == [12, 13]
    with pytest.raises(
        sf.errors.DataError, match=r"that skip \[\(2, 6\)\] before batch 4.* skip \[\]"
    ):
        batches(Fallible(None), 2).set_state(saved)


def test_batches_that_were_read_cannot_be_left_out():
    stream = batches(lambda: range(20), 2)
    assert [next(stream).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(
        sf.errors.ConfigError, match=r"expected ranges from batch 2 on, .* got \[\(1, 3\)"
    ):
        stream.without([(1, 3)])
    assert next(stream.without([(2, 4)])).tolist() == [8, 9]
