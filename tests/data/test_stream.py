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


@pytest.mark.parametrize("source", [lambda: range(3), {"a": 0, "b": 1, "c": 2}.values()])
def test_iterables_and_functions_restart_in_every_epoch(source):
    found = [batch.tolist() for batch in batches(source, 3, epochs=2)]
    assert found == [[0, 1, 2], [0, 1, 2]]


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


@pytest.mark.parametrize("make", [grains, loader, faces], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("wrap", "remainder"),
    [(lambda make: make(), "drop"), (lambda make: make, "pad"), (lambda make: make(), "keep")],
    ids=["iterable-drop", "function-pad", "iterable-keep"],
)
def test_real_streams_resume_at_any_step(make, wrap, remainder):
    options = {"epochs": 2, "remainder": remainder, "seed": 5, "transform": noise}
    create = lambda: batches(wrap(make), [(0, 3), (3, 4)], **options)
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


@pytest.mark.parametrize("make", [grains, loader], ids=lambda make: make.__name__)
def test_iterators_of_grain_resume(make):
    stream = batches(iter(make()), 4)
    next(stream)
    resumed = batches(iter(make()), 4)
    resumed.set_state(stream.get_state())
    all_same(list(resumed), list(stream))


def test_stream_with_set_epoch_gets_the_epoch():
    stream = Stream(faces().shuffle(seed=0, buffer_size=4))
    epochs = []
    for epoch in (0, 1, 0):
        stream.start_epoch(epoch)
        epochs.append([stream.read()["x"].item() for _ in range(13)])
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_state_can_be_set_at_any_time():
    stream = batches(grains, 4)
    beginning = stream.get_state()
    first, second = next(stream), next(stream)
    after = stream.get_state()
    third = next(stream)
    stream.set_state(after)
    same(next(stream), third)
    stream.set_state(beginning)
    all_same([next(stream), next(stream)], [first, second])


def test_number_of_epochs_may_change_on_resume():
    stream = batches(grains, 5, epochs=1)
    next(stream)
    resumed = batches(grains, 5, epochs=2)
    resumed.set_state(stream.get_state())
    assert len(list(resumed)) == 1 + 2


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
    with pytest.raises(sf.DataError, match=says):
        other.set_state(saved)
    assert next(other).tolist() == list(range(8))  # and it is where it was
    by_hand = batches(itertools.islice(iter(range(40)), saved["row"], None), 8)
    np.testing.assert_array_equal(next(by_hand), next(stream))


class Unprintable:
    def __iter__(self):
        return iter(range(8))

    def __repr__(self):
        raise AssertionError("a repr can be slow, and differ per process")


def test_position_without_a_state_names_only_the_type_of_the_stream():
    positions = []
    for _ in range(2):
        stream = batches(Unprintable(), 4)
        next(stream)
        positions.append(stream.get_state()["stream"])
    assert positions == [{"lost": "a stream of type Unprintable has no state of its own"}] * 2


def test_position_at_the_start_needs_no_state():
    saved = batches(iter(range(8)), 4).get_state()
    fresh = batches(iter(range(8)), 4)
    fresh.set_state(saved)
    assert next(fresh).tolist() == [0, 1, 2, 3]
    with pytest.raises(sf.DataError, match="got one that has been read up to step 1; an iterator"):
        fresh.set_state(saved)
    anew = batches(lambda: range(8), 4)
    next(anew)
    anew.set_state(batches(lambda: range(8), 4).get_state())
    assert next(anew).tolist() == [0, 1, 2, 3]


def test_exhausted_stream_stays_exhausted_when_resumed():
    for make in (lambda: iter(grains()), lambda: iter(range(13))):
        stream = batches(make(), 4)
        assert len(list(stream)) == 3
        resumed = batches(make(), 4)
        resumed.set_state(stream.get_state())
        assert next(resumed, None) is None


def test_stream_with_a_shuffle_buffer_is_not_resumed():
    stream = batches(faces().shuffle(seed=0, buffer_size=8), 4)
    next(stream)
    with pytest.raises(sf.DataError, match="the examples in its shuffle buffer are no part of its"):
        batches(faces().shuffle(seed=0, buffer_size=8), 4).set_state(stream.get_state())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"source": faces}, "expected the batches .*: stream was 'grain' and is 'builtins'"),
        ({"batch_size": 5}, "batch_size was 4 and is 5; make them as they were$"),
        ({"remainder": "keep"}, "remainder was 'drop' and is 'keep'"),
        ({"source": list(range(8))}, "with step, pipeline, got dict .* another kind of iterator"),
    ],
)
def test_position_of_other_batches_is_refused(other, says):
    options = {"source": grains(), "batch_size": 4}
    stream = batches(**options)
    next(stream)
    with pytest.raises(sf.DataError, match=says):
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
    stream = batches(kind(state), 2)
    next(stream)
    source = kind(None)
    resumed = batches(source, 2)
    resumed.set_state(json.loads(json.dumps(stream.get_state())))
    assert (source.state, type(source.state)) == (state, type(state))


def test_saved_state_is_a_copy():
    source = Counter({"index": [1]})
    stream = batches(source, 2)
    next(stream)
    source.state["index"][0] = 2
    assert stream.get_state()["stream"] == {"json": {"index": [1]}}


@pytest.mark.parametrize("state", [object(), {"a": {1, 2}}, b"\xff"])
def test_state_that_json_cannot_hold_is_not_resumed(state):
    stream = batches(Counter(state), 2)
    next(stream)
    saved = stream.get_state()
    assert saved["stream"]["lost"].startswith("its state cannot be written as JSON: ")
    with pytest.raises(sf.DataError, match="but its state cannot be written as JSON"):
        batches(Counter(state), 2).set_state(saved)


def test_error_while_a_state_is_set_names_the_setter():
    stream = batches(grains(), 4)
    next(stream)
    saved = stream.get_state()
    with pytest.raises(KeyError, match="next_index") as caught:
        stream.set_state({**saved, "stream": {"json": {"another": 1}}})
    assert caught.value.__notes__ == ["setting the state of the stream with its own set_state()"]
    other = batches(grains(), 4)
    next(other)
    same(next(stream), next(other))  # the position has not changed


def test_shuffle_buffer_of_hugging_face_is_found_in_nested_datasets():
    # Its examples would be missing from the epoch after a resume, with no more than a warning.
    plain = datasets.Dataset.from_dict({"x": list(range(9))}).to_iterable_dataset()
    shuffled = plain.shuffle(seed=0, buffer_size=4)
    mixed = datasets.interleave_datasets([plain, shuffled.map(lambda example: example)])
    for source, key in ((shuffled, "lost"), (mixed, "lost"), (plain, "json")):
        stream = batches(source, 2)
        next(stream)
        assert list(stream.get_state()["stream"]) == [key]


def test_restored_stream_cannot_start_the_same_epoch():
    source = faces()
    stream = Stream(source)
    stream.start_epoch(0)
    stream.read()
    stream.restore(0, json.loads(stream.position()))
    with pytest.raises(sf.DataError, match="starts epoch 0 from its beginning, got one that was r"):
        stream.start_epoch(0)


def test_position_of_a_stream_with_a_state_is_refused_by_one_without():
    stream = batches((x for x in range(4)), 2)
    position = {**stream.get_state(), "stream": {"json": {"next_index": 3}}}
    with pytest.raises(sf.DataError, match="a stream with its own state, .* got generator"):
        stream.set_state(position)


# Errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"seed": 0},
            "seed: expected none for a stream, which has its own order, got 0; shuffle it where",
        ),
        ({"seed": 0, "transform": abs}, "seed: expected none for a stream"),
        (
            {"start": 2},
            "start: expected 0 for a stream.* got 2; .* set_state.*islice",
        ),
        (
            {"epochs": 2},
            "epochs: expected 1 for an iterator, .* only once, got 2; give",
        ),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
    ],
)
def test_arguments_that_a_stream_cannot_have_are_refused(options, says):
    with pytest.raises(sf.ConfigError, match=says):
        batches(**{"source": iter(range(8)), "batch_size": 4, **options})


def test_epoch_without_a_batch_is_refused():
    says = "at most the 3 examples of the stream, got 4, and remainder='drop' .* remainder='pad'"
    with pytest.raises(sf.DataError, match=says):
        next(batches(lambda: range(3), 4))
    with pytest.raises(sf.DataError, match="expected examples, got none in epoch 0 of the stream"):
        next(batches(iter([]), 4))
    used = iter(range(4))
    stream = batches(lambda: used, 4)
    next(stream)
    with pytest.raises(sf.DataError, match="none in epoch 1 of the stream; if it can be read only"):
        next(stream)


def test_batch_that_does_not_divide_is_refused_and_not_lost():
    share = {"process_index": 0, "process_count": 2}
    with pytest.raises(sf.DataError, match="expected a multiple of the 2 processes, got 3 from"):
        next(batches(iter(range(9)), 3, **share))
    stream = batches(iter(range(7)), 4, remainder="keep", **share)
    next(stream)
    for _ in range(2):
        with pytest.raises(sf.DataError, match="got 3 rows at step 1; use remainder='pad'"):
            next(stream)


def test_process_of_jax_is_read_with_the_first_batch(monkeypatch):
    stream = batches(iter(range(8)), 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert next(stream).tolist() == [2, 3]


@pytest.mark.parametrize(("made", "says"), [(None, "makes NoneType None"), (3, "makes int 3")])
def test_function_has_to_return_an_iterable(made, says):
    with pytest.raises(sf.DataError, match=f"got one that {says}; return an iterable"):
        next(batches(lambda: made, 2))


# Batches that are left out


class Fallible:
    """A stream with a position that fails once at an example."""

    def __init__(self, bad):
        self.next, self.bad = 0, bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.bad:
            self.bad = None
            raise OSError("bad disk")
        self.next += 1
        return self.next - 1

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


def test_an_error_in_a_batch_that_is_left_out_can_be_retried():
    skipped = [(2, 6)]
    stream = batches(Fallible(9), 2).without(skipped)
    assert [next(stream).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="bad disk"):
        next(stream)
    saved = json.loads(json.dumps(stream.get_state()))
    assert (saved["step"], saved["index"], saved["stream"]) == (2, 4, {"json": 8})
    assert next(stream).tolist() == [12, 13]
    resumed = batches(Fallible(None), 2).without(skipped)
    resumed.set_state(saved)
    assert next(resumed).tolist() == [12, 13]
    with pytest.raises(sf.DataError, match=r"that skip \[\(2, 6\)\] before batch 4.* skip \[\]"):
        batches(Fallible(None), 2).set_state(saved)


def test_batches_that_were_read_cannot_be_left_out():
    stream = batches(lambda: range(20), 2)
    assert [next(stream).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(sf.ConfigError, match=r"expected ranges from batch 2 on, .* got \[\(1, 3\)"):
        stream.without([(1, 3)])
    assert next(stream.without([(2, 4)])).tolist() == [8, 9]


def test_sizes_change_at_the_batch_index_as_those_of_a_list():
    sizes, skipped = [(0, 2), (4, 5), (6, 3)], [(1, 3), (5, 6)]
    streams = batches(lambda: iter(numbered(40)), sizes, epochs=1).without(skipped)
    listed = batches(numbered(40), sizes, epochs=1).without(skipped)
    assert streams.batch_sizes == listed.batch_sizes == [(0, 2), (2, 5), (3, 3)]
    all_same(list(streams), list(listed))


def test_an_error_in_a_batch_of_a_stream_names_its_step_and_examples():
    def collate(examples):
        if 5 in examples:
            raise ValueError("five")
        return examples

    stream = sf.batches(lambda: iter(range(8)), 2, collate=collate, epochs=1)
    for _ in range(2):
        next(stream)
    with pytest.raises(ValueError, match="five") as caught:
        next(stream)
    assert "making the batch of step 2: examples 4 to 5 of epoch 0" in caught.value.__notes__
