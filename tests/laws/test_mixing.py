"""A mixture in stages: exact shares in each, and no example lost or repeated between them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf

pytestmark = pytest.mark.not_optimized

SOURCES = 3


def sources(counts):
    """Make sources where example k of source s is 1000 s + k."""
    return [1000 * number + np.arange(count) for number, count in enumerate(counts)]


WEIGHTS = st.lists(st.integers(0, 4), min_size=SOURCES, max_size=SOURCES).filter(any)
COUNTS = st.lists(st.integers(1, 30), min_size=SOURCES, max_size=SOURCES)


@st.composite
def plans(draw):
    """Draw the weights of the first stage, and later stages."""
    firsts = sorted(draw(st.sets(st.integers(1, 60), max_size=3)))
    return draw(WEIGHTS), [(first, draw(WEIGHTS)) for first in firsts]


def mixed(counts, plan, seed):
    weights, stages = plan
    pairs = list(zip(sources(counts), weights, strict=True))
    return sf.mix(pairs, seed=seed, stages=[*stages, (10**6, [1] * SOURCES)])


def check(counts, plan, seed, make=mixed, until=100):
    found = [int(example) for example in make(counts, plan, seed).take(slice(0, until))]
    weights, stages = plan
    everything = [(0, weights), *stages]
    stops = [*(first for first, _ in stages), until]
    for (start, shares), stop in zip(everything, stops, strict=True):
        period = sum(shares)
        for first in range(start, stop - period + 1):
            window = [example // 1000 for example in found[first : first + period]]
            assert np.bincount(window, minlength=SOURCES).tolist() == shares
    for number, source in enumerate(sources(counts)):
        mine = [example for example in found if example // 1000 == number]
        plain = sf.mix([([0], 1)] * number + [(source, 1)], seed=seed)  # the same order of passes
        which, index = plain.locate(np.arange((number + 1) * len(mine) + number))
        assert mine == source[index[which == number]].tolist()[: len(mine)]


@given(COUNTS, plans(), st.none() | st.integers(0, 3))
def test_each_stage_has_its_shares_and_each_source_is_read_on(counts, plan, seed):
    check(counts, plan, seed)


class Switched:
    """Take example i of a mixture with the weights of its stage."""

    offset = 0  # from where a stage starts

    def __init__(self, counts, plan, seed):
        weights, stages = plan
        self.firsts = [0, *(first for first, _ in stages)]
        positive = [[max(w, 1e-6) for w in ws] for ws in (weights, *(ws for _, ws in stages))]
        self.mixtures = [
            sf.mix(list(zip(sources(counts), ws, strict=True)), seed=seed) for ws in positive
        ]

    def take(self, rows):
        for i in range(rows.start, rows.stop):
            stage = np.searchsorted(self.firsts, i, "right") - 1
            yield self.mixtures[stage][i - self.offset * self.firsts[stage]]


class Restarted(Switched):
    offset = 1


@pytest.mark.parametrize("mutant", [Switched, Restarted])
def test_what_is_nearly_right_fails_the_same_law(mutant):
    plan = [1, 2, 1], [(10, [2, 1, 1]), (30, [3, 1, 2])]
    check([9, 30, 4], plan, 0)
    check([9, 30, 4], ([1, 2, 1], []), 0, mutant)
    with pytest.raises(AssertionError):
        check([9, 30, 4], plan, 0, mutant)


@given(COUNTS, plans(), st.integers(1, 9), st.integers(0, 12))
def test_batches_are_the_same_resumed_and_on_any_number_of_processes(counts, plan, half, step):
    mixture = mixed(counts, plan, 1)
    stream = sf.batches(mixture, 2 * half)
    whole = [next(stream).tolist() for _ in range(step)]
    saved = json.loads(json.dumps(stream.get_state()))
    examples = [int(mixture[i]) for i in range(2 * half * step)]
    assert np.ravel(whole).tolist() == examples
    wanted = next(stream).tolist()
    resumed = sf.batches(mixed(counts, plan, 1), 2 * half)
    resumed.set_state(saved)
    assert next(resumed).tolist() == wanted
    parts = [
        sf.batches(mixture, 2 * half, process_index=index, process_count=2).at(step)
        for index in range(2)
    ]
    assert np.concatenate(parts).tolist() == wanted
    other = sf.mix(list(zip(sources(counts), plan[0], strict=True)), seed=1, stages=[(70, [1] * 3)])
    with pytest.raises(sf.errors.DataError, match="source was"):
        sf.batches(other, 2 * half).set_state(saved)


def test_stages_far_away_are_found_at_once():
    far = 10**15
    mixture = sf.mix([(range(10**9), 3), (range(10), 1)], seed=0, stages=[(far, (1, 3))])
    for start, shares in ((far - 400, [300, 100]), (far, [100, 300])):
        which, _ = mixture.locate(np.arange(start, start + 400))
        assert np.bincount(which).tolist() == shares


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (5, r"mix: stages: expected pairs \(first example, weights\), .* got 5"),
        ([(5, 1, 2)], r"expected pairs .* got \[\(5, 1, 2\)\]"),
        ([(5, (1,))], r"with 2 weights as there are sources, got \[\(5, \(1,\)\)\]"),
        ([(5, 1)], r"with 2 weights as there are sources, got \[\(5, 1\)\]"),
        ([(0, (1, 1))], "stages: first example: expected an integer of at least 1, got 0"),
        ([(5, (1, 1)), (5, (1, 2))], "first example: expected an integer of at least 6, got 5"),
        ([(5, (1, -1))], "a finite weight of at least 0 in the stage from 5 on, got -1"),
        ([(5, (0, 0))], "expected a weight above 0 from example 5 on, got only 0"),
    ],
)
def test_invalid_stages_are_refused(stages, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        sf.mix([(range(3), 1), (range(3), 1)], stages=stages)
