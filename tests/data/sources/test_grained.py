import itertools

import pytest

import stepfold as sf
from stepfold.data.sources import grained
from stepfold.data.sources.grained import Grained


def epochs(stream, count=2, steps=3):
    return [[next(stream).tolist() for _ in range(steps)] for _ in range(count)]


def test_every_example_comes_once_an_epoch_in_an_order_of_its_own():
    first, second = epochs(sf.batches(Grained(range(6), seed=0), 2))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(6))
    assert first != second
    assert epochs(sf.batches(Grained(range(6), seed=0, threads=2), 2)) == [first, second]


def test_without_a_seed_it_is_the_sources_order():
    assert epochs(sf.batches(Grained(range(6)), 2)) == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert len(Grained(range(6))) == 6


def test_it_goes_on_in_mid_epoch():
    stream = sf.batches(Grained(range(6), seed=0), 2)
    seen = [next(stream).tolist() for _ in range(4)]
    saved = stream.get_state()
    rest = [next(stream).tolist() for _ in range(4)]
    resumed = sf.batches(Grained(range(6), seed=0), 2)
    resumed.set_state(saved)
    assert [next(resumed).tolist() for _ in range(4)] == rest
    assert len(seen) == 4


def test_what_grain_cannot_read_is_refused():
    with pytest.raises(sf.ConfigError, match="use_grain: expected a source with len and"):
        Grained(iter(range(6)))


def test_without_grain_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setattr(grained, "find_spec", lambda name: None)
    with pytest.raises(sf.ConfigError, match=r"pip install 'stepfold\[grain\]'"):
        Grained(range(6))
