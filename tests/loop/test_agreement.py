import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from stepfold.loop.agreement import first_said


def test_alone_the_first_reason_counts():
    assert first_said([]) is None
    assert first_said(["a", "b"]) == "a"


@pytest.fixture
def together(monkeypatch):
    """Be one of three processes, of which the others ask for what they are told to."""
    others = []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    gather = lambda mine: np.array([*others, mine])
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    return others


def test_together_nobody_stops_without_a_reason(together):
    together[:] = [False, False]
    assert first_said([]) is None


def test_together_all_stop_where_one_has_a_reason(together):
    together[:] = [False, True]
    assert first_said([]) == "process 1 asked to stop"
    assert first_said(["my own"]) == "my own"
