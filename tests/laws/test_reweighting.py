"""A run whose hook changes the weights of a mixture is one of a mixture with these stages.

The random runs hold it for changes at log points, cuts, and runs that go back.
"""

import contextlib
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfold as sf
from stepfold.adapter.loading import TrainingLoader
from stepfold.loop.feed import BatchFeed

pytestmark = pytest.mark.not_optimized

NAMES, SIZE, STEPS = ("web", "code", "books"), 8, 24
PARTS = {
    name: ({"x": 1000 * number + np.arange(count, dtype=np.float32)}, weight)
    for number, (name, count, weight) in enumerate(zip(NAMES, (50, 30, 9), (4, 2, 1), strict=True))
}
STAGE = (130, {"web": 1, "code": 1, "books": 1})
TX = optax.sgd(0.0)


def loss_fn(params, batch, key):
    return sf.mean(0.0 * params["w"].sum() + batch["x"]), {"bad": (batch["x"] < 0).any()}


def new_state():
    return sf.init_state({"w": jnp.zeros(8)}, TX, jax.random.key(0))


STEP = sf.make_train_step(loss_fn, TX)


def mixture(changes=()):
    """Make the mixture with changes as stages: pairs (batch, weights)."""
    stages = dict([STAGE]) | {batch * SIZE: weights for batch, weights in changes}
    return sf.mix(PARTS, seed=3, stages=sorted(stages.items()))


CHANGES = {  # by the step of the event; what a hook returns depends on nothing else
    6: {"web": 0, "code": 3, "books": 1},
    12: {"code": 1, "web": 1, "books": 0},
}


class Spy:
    """Batches that note each one, from the position that it is read at."""

    def __init__(self, batches, seen):
        self.batches, self.seen = batches, seen

    def __iter__(self):
        return self

    def __next__(self):
        step = self.batches.get_state()["step"]
        batch = next(self.batches)
        self.seen[step] = batch["x"].tolist()
        return batch

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def without(self, ranges):
        return Spy(self.batches.without(ranges), self.seen)


class Cut(Exception):
    """The run was cut."""


class Hook:
    """Change the weights after some events, and cut the run once each at some events."""

    replaces_state = True

    def __init__(self, kind, cuts, go_back, is_once):
        self.kind, self.cuts, self.go_back = kind, list(cuts), go_back
        self.is_once, self.changes = is_once, dict(CHANGES)

    def __call__(self, event):
        if self.cuts and event.kind == "train" and event.step >= self.cuts[0]:
            self.cuts.pop(0)
            raise Cut
        if self.go_back and event.kind == "eval" and event.step == self.go_back[0]:
            (_, skip), self.go_back = self.go_back, None
            return sf.hooks.GoBack(skip=skip)
        if event.kind == self.kind and event.step in self.changes:
            weights = self.changes[event.step]
            if self.is_once:
                del self.changes[event.step]
            return sf.hooks.Reweight(weights, f"at {event.step}")
        return None


def run(folder, *, cuts=(), go_back=None, is_once=False, log_every=6):
    """Run to the end, as often as it is cut; return the examples of each step, and the result."""
    seen, hook = {}, Hook("eval", cuts, go_back, is_once)
    for _ in range(1 + len(cuts)):
        with contextlib.suppress(Cut):
            batches = Spy(sf.prefetch(sf.batches(mixture(), SIZE), size=3), seen)
            result = sf.fit(
                STEP, new_state(), batches, steps=STEPS, run_dir=folder, log_every=log_every,
                checkpoints=sf.Checkpoints(every=8), hooks=hook,
                evaluation=sf.Evaluation(lambda state: {"one": 1.0}, every=6),
            )  # fmt: skip
    assert not hook.cuts
    assert result.steps == STEPS
    return seen, result


def check(seen, skip=(1000, 1001)):
    """Compare with batches of a mixture with stages, which skip a range."""
    index = sf.batches(mixture(), SIZE).without([skip]).batch_index
    changes = [(index(step), weights) for step, weights in CHANGES.items()]
    expected = sf.batches(mixture(changes), SIZE).without([skip])
    assert seen == {step: next(expected)["x"].tolist() for step in range(STEPS)}


def test_a_resumed_run_has_the_same_batches(tmp_path):
    check(run(tmp_path, cuts=[9, 12, 18], log_every=3)[0])
    notes = json.loads((tmp_path / "run.json").read_text())["replacements"]
    assert notes == [[step, f"at {step}", "weights"] for step in CHANGES]


def keep_if_none(self, changes):
    """Keep the changes if a position has none."""
    if changes:
        keep_if_none.own(self, changes)


def one_example_late(self, changes):
    one_example_late.own(self, [[first + 1, weights] for first, weights in changes])


def one_batch_late(self, weights, step):
    one_batch_late.own(self, weights, step + 1)


def not_saved(self, step):
    state = not_saved.own(self, step)
    return {name: value for name, value in state.items() if name != "weights"}


BATCHES = sf.data.Batches


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("_change", keep_if_none),
        ("_change", one_example_late),
        ("reweight", one_batch_late),
        ("state_at", not_saved),
    ],
)
def test_what_is_nearly_right_fails_the_same_law(tmp_path, method, mutant):
    mutant.own = getattr(BATCHES, method)
    with mock.patch.object(BATCHES, method, mutant), pytest.raises(AssertionError):
        go_back_and_resume(tmp_path)


def go_back_and_resume(folder):
    with mock.patch.dict(CHANGES, {12: CHANGES[12]}, clear=True):
        seen, _ = run(folder / "a", go_back=(18, (9, 11)), is_once=True)
        with mock.patch.dict(CHANGES, clear=True):
            check(seen, skip=(8, 10))
        check(run(folder / "b", cuts=[18], log_every=3)[0])


def test_a_run_goes_back_and_resumes_with_the_same_batches(tmp_path):
    go_back_and_resume(tmp_path)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any)
        ),
        max_size=4,
    ),
    st.integers(0, 30),
    st.booleans(),
)
def test_batches_are_a_function_of_the_step_and_the_changes(changes, position, prefetch):
    stream, stages, step = sf.batches(mixture(), SIZE), {}, 0
    stream = sf.prefetch(stream) if prefetch else stream
    for steps, weights in changes:
        for _ in range(steps):
            next(stream)
        step += steps
        stages[step] = dict(zip(NAMES, weights, strict=True))
        stream.reweight(weights if step % 2 else stages[step])
    expected = sf.batches(sf.mix(PARTS, seed=3, stages=sorted(
        (dict([STAGE]) | {s * SIZE: w for s, w in stages.items() if s}).items()
    )), SIZE) if 0 not in stages else None  # fmt: skip
    saved = json.loads(json.dumps(stream.get_state()))
    other = sf.batches(mixture(), SIZE)
    other.set_state(saved)
    for _ in range(3):
        assert next(other)["x"].tolist() == next(stream)["x"].tolist()
    if expected is not None:
        assert other.at(position)["x"].tolist() == expected.at(position)["x"].tolist()
        two = [sf.batches(mixture(), SIZE, process_index=i, process_count=2) for i in range(2)]
        for half in two:
            half.set_state({**saved, "step": position})
        whole = np.concatenate([next(half)["x"] for half in two])
        assert whole.tolist() == expected.at(position)["x"].tolist()


@pytest.mark.full
def test_a_capsule_reads_the_batches_after_a_change_again(tmp_path):
    """The batch of step 15 is read again from the checkpoint of step 8, before a change at 12."""
    expected = sf.batches(mixture([(12, CHANGES[6])]), SIZE)
    bad = float(expected.at(14)["x"].sum())

    def loss(params, batch, key):
        x = batch["x"]
        return sf.mean(jnp.where(x.sum() == bad, jnp.nan, params["w"].sum() * x / 1000))

    tx = optax.sgd(0.01)
    new = lambda: sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0))
    step = sf.make_train_step(loss, tx)
    with mock.patch.dict(CHANGES, {9: CHANGES[6]}, clear=True):
        result = sf.fit(
            step, new(), sf.batches(mixture(), SIZE), steps=STEPS, run_dir=tmp_path, log_every=3,
            checkpoints=sf.Checkpoints(every=8), hooks=Hook("train", (), None, False),
        )  # fmt: skip
    assert result.capsule.step == 15
    assert np.array_equal(result.capsule.batch["x"], expected.at(14)["x"])
    fresh = sf.batches(mixture(), SIZE)
    replayed = sf.debug.replay(result.capsule.path, step, state=new(), batches=fresh)
    assert replayed.reproduced
    assert fresh.get_state() == sf.batches(mixture(), SIZE).get_state()


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"web": 1}, "reweight: expected a weight for each of the sources web, code, books, got"),
        ([1, 2], r"a weight for each of the sources .* got \[1, 2\]"),
        ([0, 0, 0], "reweight: expected a weight above 0, got only 0"),
        ([1, -1, 0], "a finite weight of at least 0 of code, got -1"),
    ],
)
def test_invalid_weights_are_refused(weights, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        sf.batches(mixture(), SIZE).reweight(weights)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_that_the_trainer_has_looked_at_is_made_again(prefetch):
    batches = sf.batches(mixture(), SIZE)
    loader = TrainingLoader(sf.prefetch(batches) if prefetch else batches)
    old = loader.peek()["x"].tolist()
    loader.reweight([0, 0, 1], 0)
    new = next(loader)["x"]
    assert min(old) < 2000 <= new.min()
    assert loader.get_state()["weights"] == [[0, ["0", "0", "1"]]]


def test_what_has_no_weights_is_refused():
    stream = sf.batches(np.arange(9), 2)
    with pytest.raises(sf.errors.ConfigError, match="reweight: expected those of a mixture"):
        stream.reweight([1])
    late = sf.batches(mixture(), SIZE, start=5)
    with pytest.raises(
        sf.errors.ConfigError, match="step: expected an integer of at least 5, got 4"
    ):
        late.reweight([1, 1, 1], 4)
    with pytest.raises(sf.errors.ConfigError, match="batches: expected those of a mixture"):
        BatchFeed([{"x": np.ones(2)}]).reweight([1], 0)
    assert not hasattr(sf.prefetch([1]), "reweight")
