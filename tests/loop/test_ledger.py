import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average

from stepfold.checkpoint.sealed import opened, plain
from stepfold.loop.ledger import Ledger


def read(said):
    """Read what calls said, each a number: as metrics with a leading axis of steps."""
    totals = np.array(said, np.float32)
    pairs = np.stack([np.array([x, -x]).astype(jnp.bfloat16) for x in said])
    return {
        "a": Average(total=totals, count=np.ones_like(totals)),
        "b": Average(total=pairs, count=np.ones_like(pairs)),
    }


def shown(ledger):
    return [(one.step, one.each["train/a"].tolist()) for one in ledger.take(10**9)]


def filled(*said):
    ledger = Ledger(read)
    for one in said:
        ledger.add(one)
    return ledger


def again(ledger):
    """Save it and read it back, as JSON would."""
    other = Ledger(read)
    other.set_state(opened(json.loads(json.dumps(plain(ledger.get_state(), "ledger")))))
    return other


def test_an_interval_is_given_once():
    ledger = filled(1, 2)
    assert shown(ledger) == []
    ledger.close(2)
    ledger.add(3)
    assert shown(ledger) == [(2, [1.0, 2.0])]
    assert shown(ledger) == []
    ledger.close(3)
    assert shown(ledger) == [(3, [3.0])]


def test_an_interval_without_steps_is_none():
    ledger = Ledger(read)
    ledger.close(5)
    assert ledger.closed == []


def test_what_was_given_counts_as_shown_when_the_next_is_asked_for():
    ledger = filled(1)
    ledger.close(1)

    def fails():
        for _ in ledger.take(1):
            raise OSError

    with pytest.raises(OSError):
        fails()
    assert shown(ledger) == [(1, [1.0])]


def test_only_what_was_over_at_a_step_is_given():
    ledger = filled(1)
    ledger.close(1)
    ledger.add(2)
    ledger.close(2)
    assert [one.step for one in ledger.take(1)] == [1]
    assert [one.step for one in ledger.take(2)] == [2]


def test_the_time_of_an_interval_is_when_it_was_over_unless_it_has_to_be_waited_for():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, x: x @ x / 300, x)[0, 0])
    times = {}
    for name, wait in {"there": True, "waited for": False}.items():
        ledger = Ledger(lambda said: read([float(one) for one in said]))
        ledger.add(slow(jnp.full((300, 300), 1.0 + len(times))))
        if wait:
            jax.block_until_ready(ledger._open)
        closed = time.perf_counter()
        ledger.close(1)
        time.sleep(0.01 if wait else 0)
        (taken,) = ledger.take(1)
        times[name] = taken.time - closed
    assert times["there"] < 0.005
    assert times["waited for"] > 0.005


def test_the_device_is_not_read_before_an_interval_is_taken():
    reads = []
    ledger = Ledger(lambda said: reads.append(len(said)) or read(said))
    ledger.add(1)
    ledger.close(1)
    assert reads == []


def test_an_interval_that_was_cut_in_two_is_given_whole():
    other = again(filled(1, 2))
    other.add(3)
    other.close(3)
    (found,) = other.take(3)
    assert (found.step, found.metrics["train/a"]) == (3, 2.0)
    assert found.each["train/a"].tolist() == [1.0, 2.0, 3.0]
    assert found.each["train/b"].tolist() == [[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]


def test_the_digits_of_what_was_cut_are_those_of_the_device():
    saved = filled(1, 2).get_state()["ledger"]
    assert [dtype for dtype, *_ in saved] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_an_interval_that_was_cut_is_given_though_no_step_comes_after_it():
    other = again(again(filled(1, 2)))
    other.close(2)
    assert shown(other) == [(2, [1.0, 2.0])]
    other.close(2)
    assert shown(other) == []


def test_intervals_that_were_over_and_not_shown_come_first():
    ledger = filled(1, 2)
    ledger.close(2)
    ledger.add(3)
    ledger.close(3)
    ledger.add(4)
    other = again(again(ledger))
    other.add(5)
    other.close(5)
    assert shown(other) == [(2, [1.0, 2.0]), (3, [3.0]), (5, [4.0, 5.0])]


def test_it_may_be_cut_twice():
    other = again(filled(1))
    other.add(2)
    last = again(other)
    last.add(3)
    last.close(3)
    assert shown(last) == [(3, [1.0, 2.0, 3.0])]


def test_an_empty_one_comes_back_empty():
    other = again(Ledger(read))
    other.close(1)
    assert shown(other) == []
