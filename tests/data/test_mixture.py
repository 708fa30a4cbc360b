"""Mixtures have exact proportions in every window, and random access to any example."""

import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.batches import batches
from stepfold.data.mixture import mix

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def named(counts):
    """Make sources where example k of source s is 1000 s + k."""
    return [1000 * number + np.arange(count) for number, count in enumerate(counts)]


def which(mixture, first, last):
    return mixture.locate(np.arange(first, last))[0]


def test_orders_do_not_change_between_versions():
    # A resumed run would have other batches.
    mixture = mix([(np.arange(5), 1), (10 + np.arange(7), 2)], seed=3)
    order = [16, 0, 14, 10, 1, 12, 15, 3, 11, 13, 2, 10, 16, 4, 15, 13, 1, 14, 11, 0, 12, 14, 3, 13]
    assert [int(mixture[index]) for index in range(24)] == order


@given(WEIGHTS, st.integers(1, 40), st.integers(0, 50))
def test_batches_of_a_mixture_are_its_examples_in_order(weights, size, step):
    sources = named([3, 50, 7, 1, 20])
    mixture = mix(list(zip(sources, weights, strict=False)), seed=1)
    expected = [int(mixture[i]) for i in range(step * size, (step + 1) * size)]
    assert next(batches(mixture, size, start=step)).tolist() == expected
    listed = mix([(list(s), w) for s, w in zip(sources, weights, strict=False)], seed=1)
    assert next(batches(listed, size, start=step)).tolist() == expected
    parts = [
        next(batches(mixture, 2 * size, start=step, process_index=index, process_count=2))
        for index in range(2)
    ]
    assert np.concatenate(parts).tolist() == batches(mixture, 2 * size).at(step).tolist()


def test_order_depends_on_the_seed_the_source_and_the_pass():
    def passes(seed):
        mixture = mix([(np.arange(20), 1), (np.arange(20), 1)], seed=seed)
        found = [mixture[i].item() for i in range(80)]
        return [tuple(found[k : k + 40 : 2]) for k in (0, 1, 40, 41)]

    assert len({*passes(0), *passes(1)}) == 8
    assert set(passes(None)) == {tuple(range(20))}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([Fraction(1, 7), Fraction(2, 7)], [1, 2]),
        ([np.float64(1.5), np.int32(3)], [1, 2]),
        ([1e-3, 1e3], [1, 10**6]),
    ],
)
def test_weights_are_read_exactly(weights, expected):
    assert mix([([0], weight) for weight in weights]).fingerprint["weights"] == expected


@pytest.mark.parametrize("weights", [[np.pi, np.e], [0.3, 0.123456789123, 1 / 7, 1e-7]])
def test_weights_without_a_short_period_are_accurate_to_a_billionth(weights):
    mixture = mix([([0], weight) for weight in weights])
    got = np.array(mixture.fingerprint["weights"]) / sum(mixture.fingerprint["weights"])
    np.testing.assert_allclose(got, np.array(weights) / sum(weights), rtol=0, atol=2e-9)
    far = which(mixture, 2**61, 2**61 + 1000)
    near = np.bincount(far, minlength=len(weights)) / 1000
    np.testing.assert_allclose(near, got, atol=3e-3)


def test_mixtures_nest():
    inner = mix([(np.zeros(3, int), 1), (np.ones(3, int), 1)], seed=0)
    outer = mix([(inner, 2), (np.full(3, 2), 1)], seed=0)
    assert len(outer) == sys.maxsize
    assert next(batches(outer, 300)).tolist() == [outer[i] for i in range(300)]
    assert Counter(next(batches(outer, 300)).tolist()) == {0: 100, 1: 100, 2: 100}


def test_batches_of_a_mixture_have_a_mask_and_refuse_another_position():
    mixture = [({"x": np.arange(5)}, 2), ([{"x": np.int64(-1)}], 1)]
    stream = batches(mix(mixture, seed=0), 4, remainder="pad")
    assert stream.at(3)["mask"].all()
    other = batches(mix([(mixture[0][0], 3), (mixture[1][0], 1)], seed=0), 4, remainder="pad")
    with pytest.raises(sf.errors.DataError, match=r"mixture: weights were \[2, 1\] and are \[3, 1"):
        other.set_state(stream.get_state())


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([np.ones((3, 2)), np.ones((3, 4))], r"expected float64\[2\], got float64\[4\]; make them"),
        ([np.ones(3), np.ones(3, int)], r"example: expected float64\[\], got int64\[\]"),
        ([[{"x": 1}], [{"z": 2.0}]], "of one structure.*example/x: missing.*example/z: unexp"),
    ],
)
def test_sources_with_other_examples_are_refused_without_a_transform(parts, says):
    mixture = mix([(part, 1) for part in parts])
    with pytest.raises(sf.errors.DataError, match=says):
        next(batches(mixture, 2))
    assert next(batches(mixture, 2, transform=lambda example: 0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([], r"mix: expected a list of pairs \(source, weight\), got none; such as \[\(old, 3"),
        ("ab", r"mix: expected a list of pairs \(source, weight\), got str"),
        ({"a": 1}, r"mix: expected a pair \(source, weight\) at 0, got int 1"),
        ({1: ([0], 1)}, "mix: expected names and a source_key that are strings, got int 1"),
        ([np.ones(3)], r"mix: expected a pair \(source, weight\) at 0, got float64\[3\]"),
        ([([0], 1), ([0], 0)], "a finite weight above 0 at 1, got 0; to use nothing of"),
        ([([0], -1)], "a finite weight above 0 at 0, got -1"),
        ([([0], float("nan"))], "a finite weight above 0 at 0, got nan"),
        ([([0], float("inf"))], "a finite weight above 0 at 0, got inf"),
        ([([0], True)], "a finite weight above 0 at 0, got True"),
        ([([0], "1")], "a finite weight above 0 at 0, got '1'"),
    ],
)
def test_invalid_sources_and_weights_are_refused(sources, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        mix(sources)


def test_invalid_seed_index_and_source_are_refused():
    with pytest.raises(
        sf.errors.ConfigError, match="mix: seed: expected an integer of at least 0, got -"
    ):
        mix([([0], 1)], seed=-1)
    with pytest.raises(IndexError, match="expected an index of at least 0, got -1: there is no en"):
        mix([([0], 1)])[-1]
    with pytest.raises(sf.errors.DataError, match="expected examples, got none") as caught:
        mix([([0], 1), ([], 1)])
    assert caught.value.__notes__ == ["reading source 1 of the mixture"]


def test_error_names_the_source():
    broken = type("Broken", (list,), {"__getitem__": lambda self, index: 1 // 0})
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches(mix([([1], 1), (broken([1]), 1)]), 2))
    assert "reading from source 1 of the mixture" in caught.value.__notes__


# the number of the source


@given(WEIGHTS, st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_each_example_has_the_number_of_its_source(weights, size, step, is_list):
    sources = {f"s{i}": i * 1000 + np.arange(5 + i) for i in range(len(weights))}
    parts = {
        name: ([{"x": x} for x in source] if is_list else {"x": source}, weight)
        for (name, source), weight in zip(sources.items(), weights, strict=True)
    }
    mixture = mix(parts, seed=1, source_key="source")
    assert mixture.names == tuple(sources)
    batch = batches(mixture, size).at(step)
    assert batch["source"].dtype == np.int32
    assert batch["source"].tolist() == (batch["x"] // 1000).tolist()
    plain = mix(list(parts.values()), seed=1)
    assert batch["x"].tolist() == batches(plain, size).at(step)["x"].tolist()
    seen = batches(mixture, size, transform=lambda e: e["source"] * 1000 + e["x"] % 1000).at(step)
    assert seen.tolist() == batch["x"].tolist()


def test_nested_mixtures_each_have_a_key_and_examples_without_keys_none():
    inner = mix([({"x": np.zeros(2)}, 1), ({"x": np.ones(2)}, 1)], source_key="inner")
    with pytest.raises(
        sf.errors.DataError, match="dicts without 'inner'.*one that has it.*another key"
    ):
        next(batches(mix([(inner, 1)], source_key="inner"), 2))
    batch = next(batches(mix([(inner, 1)], source_key="outer"), 2))
    assert {key: batch[key].tolist() for key in batch} == {
        "x": [0, 1], "inner": [0, 1], "outer": [0, 0]
    }  # fmt: skip
    for source in (np.ones(3), [1, 2, 3]):
        with pytest.raises(
            sf.errors.DataError, match="mix: source_key: expected examples that are dicts"
        ):
            next(batches(mix([(source, 1)], source_key="source"), 2))


def test_weights_of_a_stage_may_be_given_by_name():
    parts = {"a": (np.arange(4), 1), "b": (np.arange(4), 3)}
    by_name = mix(parts, stages=[(5, {"b": 0, "a": 1})])
    in_order = mix(list(parts.values()), stages=[(5, (1, 0))])
    assert which(by_name, 0, 20).tolist() == which(in_order, 0, 20).tolist()
    with pytest.raises(sf.errors.ConfigError, match="with 2 weights as there are sources"):
        mix(parts, stages=[(5, {"a": 1})])


@pytest.mark.parametrize(
    "weights",
    [
        *("x", 5, [1], [0, ["1"]], ["a", ["1", "1"]], [-1, ["1", "1"]]),
        *([4, ["1", "-1"]], [4, ["1", "1/0"]], [4, ["0", "0"]]),
    ],
)
def test_damaged_weights_in_a_position_are_refused(weights):
    weights = [weights] if isinstance(weights, list) else weights
    stream = sf.batches(sf.mix([(np.arange(9), 1), (np.arange(9), 1)]), 2)
    before = stream.get_state()
    with pytest.raises(sf.errors.DataError, match="^state: weights: expected "):
        stream.set_state({**before, "step": 1, "weights": weights})
    assert stream.get_state() == before
