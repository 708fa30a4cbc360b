"""Batches of streams: as batches of a list of the same, but for order and seeking."""

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
def test_they_are_the_batches_of_a_list_in_order(count, stretches, epochs, remainder):
    steps = itertools.accumulate((steps for steps, _ in stretches), initial=0)
    sizes = [(step, min(size, count)) for step, (_, size) in zip(steps, stretches, strict=False)]
    options = {"epochs": epochs, "remainder": remainder}
    expected = list(batches(numbered(count), sizes, **options))
    all_same(list(batches(lambda: iter(numbered(count)), sizes, **options)), expected)


def noise(example, rng):
    return {**example, "noise": rng.normal()}


@given(st.integers(1, 20), st.integers(1, 4), st.sampled_from([2, 4]), REMAINDERS)
def test_the_shares_are_the_global_batch(count, share, processes, remainder):
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


def grains():
    return grain.MapDataset.source(numbered(22)).shuffle(seed=3).to_iter_dataset()


def loader():
    sampler = grain.samplers.IndexSampler(
        num_records=22,
        shuffle=True,
        seed=0,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
    )
    return grain.DataLoader(data_source=numbered(22), sampler=sampler, operations=[])


def faces():
    examples = datasets.Dataset.from_dict({"x": list(range(22)), "ids": [[1, 2]] * 22})
    return examples.to_iterable_dataset(num_shards=3).with_format("numpy")


@pytest.mark.parametrize("make", [grains, loader, faces], ids=lambda make: make.__name__)
@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_real_streams_resume_at_any_step(make, remainder):
    options = {"epochs": 2, "remainder": remainder, "seed": 5, "transform": noise}
    whole = list(batches(make(), [(0, 4), (3, 5)], **options))
    stream = batches(make(), [(0, 4), (3, 5)], **options)
    for step in range(len(whole) + 1):
        saved = json.loads(json.dumps(stream.get_state()))
        assert saved["step"] == step
        resumed = batches(make(), [(0, 4), (3, 5)], **options)
        resumed.set_state(saved)
        assert resumed.get_state() == saved
        all_same(list(resumed), whole[step:])
        next(stream, None)


def test_they_can_be_sent_back_in_place():
    stream = batches(grains, 4)
    beginning = stream.get_state()
    first, second = next(stream), next(stream)
    after = stream.get_state()
    third = next(stream)
    stream.set_state(after)
    same(next(stream), third)
    stream.set_state(beginning)
    all_same([next(stream), next(stream)], [first, second])


def test_a_run_may_be_prolonged():
    stream = batches(grains, 5, epochs=1)
    next(stream)
    resumed = batches(grains, 5, epochs=2)
    resumed.set_state(stream.get_state())
    assert len(list(resumed)) == 3 + 4


def test_one_begun_anew_goes_on_for_ever_and_an_iterator_ends():
    assert len(list(itertools.islice(batches(lambda: range(4), 3), 10))) == 10
    assert len(list(batches(iter(range(7)), 3))) == 2
    assert len(list(batches(iter(range(7)), 3, epochs=1, remainder="keep"))) == 3


def test_a_stream_without_a_state_is_saved_and_not_resumed():
    stream = batches((x for x in range(40)), 8)
    next(stream), next(stream)
    saved = json.loads(json.dumps(stream.get_state()))
    assert "generator" in saved["stream"]["lost"]
    other = batches((x for x in range(40)), 8)
    says = (
        "got step 2 of a stream of which is known: generator .* has no state of its own; .* the 16 "
        r"examples of epoch 0 that were read, as in sf.batches\(itertools.islice\(stream, 16, None"
    )
    with pytest.raises(sf.DataError, match=says):
        other.set_state(saved)
    assert next(other).tolist() == list(range(8))  # and it is where it was
    by_hand = batches(itertools.islice(iter(range(40)), saved["row"], None), 8)
    np.testing.assert_array_equal(next(by_hand), next(stream))


def test_where_nothing_was_read_there_is_nothing_to_resume():
    saved = batches(iter(range(8)), 4).get_state()
    fresh = batches(iter(range(8)), 4)
    fresh.set_state(saved)
    assert next(fresh).tolist() == [0, 1, 2, 3]
    with pytest.raises(sf.DataError, match="expected a position that can be gone to, got step 0"):
        fresh.set_state(saved)
    anew = batches(lambda: range(8), 4)
    next(anew)
    anew.set_state(batches(lambda: range(8), 4).get_state())
    assert next(anew).tolist() == [0, 1, 2, 3]


def test_what_is_over_is_over_when_resumed():
    for make in (lambda: iter(grains()), lambda: iter(range(22))):
        stream = batches(make(), 4)
        assert len(list(stream)) == 5
        resumed = batches(make(), 4)
        resumed.set_state(stream.get_state())
        assert next(resumed, None) is None


def test_a_stream_with_a_shuffle_buffer_is_not_resumed():
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
def test_a_position_in_other_batches_is_refused(other, says):
    options = {"source": grains(), "batch_size": 4}
    stream = batches(**options)
    next(stream)
    with pytest.raises(sf.DataError, match=says):
        batches(**{**options, **other}).set_state(stream.get_state())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 0}, "seed: a stream has an order of its own, got seed=0; shuffle it where it is"),
        ({"seed": 0, "transform": abs}, "seed: a stream has an order of its own"),
        (
            {"start": 2},
            "start: a stream is not read .* got start=2; .* set_state.*islice",
        ),
        (
            {"epochs": 2},
            "epochs: what can be read only once has one epoch, got epochs=2; give",
        ),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit_a_stream_are_refused(options, says):
    with pytest.raises(sf.ConfigError, match=says):
        batches(**{"source": iter(range(8)), "batch_size": 4, **options})


def test_an_epoch_that_makes_no_batch_is_refused():
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


def test_a_batch_that_does_not_divide_is_refused_and_not_lost():
    share = {"process_index": 0, "process_count": 2}
    with pytest.raises(sf.DataError, match="expected a multiple of the 2 processes, got 3 from"):
        next(batches(iter(range(9)), 3, **share))
    stream = batches(iter(range(7)), 4, remainder="keep", **share)
    next(stream)
    for _ in range(2):
        with pytest.raises(sf.DataError, match="got 3 rows at step 1; use remainder='pad'"):
            next(stream)


def test_processes_are_asked_for_when_the_first_batch_is_made(monkeypatch):
    stream = batches(iter(range(8)), 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert next(stream).tolist() == [2, 3]
