"""Batches that depend on the state, and whose position holds arrays."""

import itertools
import signal

import jax
import numpy as np
import pytest
from tests.small import STEP, full_but, start

import stepfold as sf
from stepfold.loop import feed as data

from .runs import Cut, assert_same, cut_at


class Actor:
    """Batches of a reservoir, to which each pull adds the newest weight."""

    def __init__(self, size=8):
        self.reservoir, self.count, self.weight = np.zeros(size, np.float32), 0, None
        self.random = np.random.default_rng(0)
        self.fails_at = None

    def __iter__(self):
        return self

    def read_state(self, state):
        self.weight = float(state.params["w"])

    def __next__(self):
        if self.count == self.fails_at:
            self.fails_at = None
            raise OSError("the environment is gone")
        self.reservoir[self.random.integers(len(self.reservoir))] = self.weight + 1
        self.count += 1
        return {"x": self.reservoir[:4].copy()}

    def get_state(self):
        random = self.random.bit_generator.state
        return {"reservoir": self.reservoir, "count": self.count, "random": random}

    def set_state(self, state):
        self.reservoir, self.count = np.array(state["reservoir"]), state["count"]
        self.random.bit_generator.state = state["random"]


def run(folder, batches, steps=10, **options):
    plan = sf.Checkpoints(folder, every=3)
    return sf.fit(STEP, start(), batches, steps=steps, checkpoints=plan, **options)


@pytest.fixture(scope="module")
def whole():
    """Return the state after a run that was not cut."""
    return sf.fit(STEP, start(), Actor(), steps=10).state


LARGE = (1 << 20, 0)  # bytes, from which on a position is copied only to save it


@pytest.mark.parametrize(
    ("cut", "large"),
    full_but(
        [(1, LARGE[0]), (3, LARGE[1]), (5, LARGE[0]), (8, LARGE[1])],
        itertools.product(range(1, 10), LARGE),
    ),
)
def test_a_replay_buffer_resumes_bit_for_bit(tmp_path, monkeypatch, cut, large, whole):
    monkeypatch.setattr(data, "_LARGE", large)
    hook = cut_at(cut)
    with pytest.raises(Cut):
        run(tmp_path, Actor(), hooks=hook, log_every=1)
    resumed = run(tmp_path, Actor(), hooks=hook, log_every=1)
    assert resumed.resumed
    assert_same(resumed.state, whole)


@pytest.mark.parametrize("large", full_but([LARGE[1]], LARGE))
def test_a_signal_while_an_actor_acts_loses_nothing(tmp_path, monkeypatch, large):
    class Preempted(Actor):
        """It has acted when the signal comes."""

        signals = ()

        def __next__(self):
            if self.count == 5:
                self.reservoir[0] = 3.0
                for number in self.signals:
                    signal.raise_signal(number)
            elif self.count > 5 and self.signals:
                pytest.fail("pulled after the signal")
            return super().__next__()

    monkeypatch.setattr(data, "_LARGE", large)
    first = Preempted()
    first.signals = (signal.SIGTERM,)
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", first)
    resumed = run(tmp_path / "cut", Preempted())
    assert resumed.resumed == 6
    assert_same(resumed.state, run(tmp_path / "uncut", Preempted()).state)


def test_each_batch_depends_on_the_newest_state(whole):
    actor, step, state = Actor(), jax.jit(STEP), start()
    for _ in range(10):
        actor.read_state(state)
        state, _ = step(state, next(actor))
    assert_same(state, whole)


def test_a_failing_environment_costs_no_more_than_the_steps_since_the_checkpoint(tmp_path, whole):
    actor = Actor()
    actor.fails_at = 5
    with pytest.raises(OSError, match="gone") as caught:
        run(tmp_path, actor)
    assert "step 5 was not saved, since the batches are ahead of it" in caught.value.__notes__[-1]
    resumed = run(tmp_path, Actor())
    assert resumed.resumed == 3
    assert_same(resumed.state, whole)


def test_the_last_batch_of_an_actor_is_kept_for_a_capsule():
    class Broken(Actor):
        def __next__(self):
            batch = super().__next__()
            return {"x": np.full(4, np.nan, np.float32)} if self.count == 4 else batch

    capsule = sf.fit(STEP, start(), Broken(), steps=10, log_every=2).capsule
    assert (capsule.step, capsule.has_batch) == (4, True)
    assert np.isnan(capsule.batch["x"]).all()


def test_several_steps_per_call_are_refused_for_an_actor():
    words = "steps_per_call: expected 1 for batches that read the"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.fit(STEP, start(), Actor(), steps=4, steps_per_call=2)


def test_large_positions_are_not_copied_for_log_points(tmp_path):
    class Counting(Actor):
        def get_state(self):
            states.append(self.count)
            return super().get_state()

    class Odd(Actor):
        def get_state(self):
            return {1: "a", "b": 2}

    states = []
    run(tmp_path, Counting(1 << 19), log_every=1, steps=9)
    # At the start, where they are checked, and at the saves of steps 3, 6 and 9.
    assert len(states) <= 10
    assert sf.fit(STEP, start(), Odd(), steps=3).steps == 3  # not looked into without checkpoints


def test_a_hook_keeps_an_array(tmp_path):
    class Histogram:
        def __init__(self):
            self.counts = np.zeros((2, 3), np.int64)

        def __call__(self, event):
            self.counts += event.step

        def get_state(self):
            return {"counts": self.counts.copy()}

        def set_state(self, state):
            self.counts = np.array(state["counts"])

    batches = lambda: sf.batches({"x": np.ones(8, np.float32)}, 4)
    run(tmp_path, batches(), steps=4, log_every=1, hooks=Histogram())
    again = Histogram()
    run(tmp_path, batches(), steps=6, log_every=1, hooks=again)
    assert again.counts.tolist() == [[21] * 3] * 2
