"""`fit` is the fold: the same bits, and the right things at the right steps."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stepfold as sf

from . import course, network


def by_hand(steps=course.STEPS):
    step, state, seen = jax.jit(course.STEP, donate_argnums=0), course.start(), []
    for batch in itertools.islice(course.batches(), steps):
        state, metrics = step(state, batch)
        seen.append(jax.device_get(metrics))
    return state, seen


@pytest.fixture(scope="module")
def wanted():
    state, seen = by_hand()
    return network.bits(state), seen


def test_iterate_gives_the_bits_of_a_loop_by_hand(wanted):
    step = jax.jit(course.STEP, donate_argnums=0)
    batches = itertools.islice(course.batches(), course.STEPS)
    seen = []
    for state, metrics in sf.iterate(step, course.start(), batches):  # noqa: B007
        seen.append(jax.device_get(metrics))
    assert network.bits(state) == wanted[0]
    assert network.bits(seen) == network.bits(wanted[1])


FORMS = {
    "step": lambda: course.STEP,
    "jitted": lambda: jax.jit(course.STEP, donate_argnums=0),
    "compiled": lambda: sf.compile_step(course.STEP, course.start(), next(course.batches())),
}


@pytest.mark.parametrize("form", FORMS)
def test_fit_gives_the_bits_of_a_loop_by_hand(form, wanted):
    result = course.run(step=FORMS[form]())
    assert network.bits(result.state) == wanted[0]
    assert course.curves(result.history) == course.whole()[1]


@pytest.mark.parametrize("count", [2, 3, 16])
def test_several_steps_in_a_call_give_the_bits_of_one(count, wanted):
    result = course.run(steps_per_call=count)
    assert network.bits(result.state) == wanted[0]
    assert course.curves(result.history) == course.whole()[1]


@pytest.mark.parametrize("log_every", [1, 7, 100])
def test_the_history_is_what_the_steps_said_merged_by_hand(log_every, wanted):
    result = course.run(log_every=log_every, evaluation=())
    steps = sorted({*range(log_every, course.STEPS + 1, log_every), course.STEPS})
    assert {tuple(curve.steps) for curve in result.history.values()} == {tuple(steps)}
    for number, (start, stop) in enumerate(itertools.pairwise([0, *steps])):
        seen = wanted[1][start:stop]
        for name in ("fit", "size", "close", "grad_norm"):
            value = result.history[f"train/{name}"][number]
            assert value == _mean([metrics[name] for metrics in seen])
        terms = [metrics["loss"].terms for metrics in seen]
        means = [_mean([term[name] for term in terms]) for name in ("fit", "size")]
        assert result.history["train/loss"][number] == sum(means)


def _mean(averages):
    total, count = (
        np.sum([np.float64(getattr(average, part)) for average in averages])
        for part in ("total", "count")
    )
    return total / count


def test_an_evaluation_in_the_run_is_that_of_the_state_at_its_step():
    result = course.run(steps=12)
    state, _ = by_hand(12)
    found = course.evaluation()(state)
    assert {name: result.history[name][-1] for name in found} == found


class Plain:
    """A step that costs nothing, and a state that is a number, to count what is done when."""

    def __init__(self):
        self.shown, self.evaluated, self.epochs = [], [], []

    def step(self, state, batch):
        return {"n": state["n"] + 1}, {"at": sf.mean(state["n"] + 1)}

    def hook(self, event):
        if event.per_step:
            values = [int(value) for value in event.per_step["train/at"]]
            assert values == list(range(event.step - len(values) + 1, event.step + 1))
            self.shown.append(event.step)

    def evaluation(self, every):
        def measure(state):
            self.evaluated.append(int(state["n"]))
            return {"n": state["n"]}

        return sf.Evaluation(measure, every=every)


def multiples(every, total, *, last):
    return sorted({*range(every, total + 1, every), *([total] if last else [])})


some = st.integers(1, 12)
PLAIN = jax.jit(Plain().step)


@settings(max_examples=40)
@given(log=some, every=some, total=st.integers(1, 30), known=st.booleans())
@example(log=3, every=4, total=24, known=False)
@example(log=10, every=5, total=20, known=True)
@example(log=30, every=12, total=7, known=True)
def test_each_thing_is_done_at_its_steps(log, every, total, known):
    plain = Plain()
    state, batches = {"n": np.float32(0)}, [np.float32(0)] * (total + 5 * known)
    options = {"log_every": log, "hooks": plain.hook, "evaluation": plain.evaluation(every)}
    result = sf.fit(PLAIN, state, batches, steps=total if known else None, **options)
    assert result.steps == total
    assert plain.shown == multiples(log, total, last=True)
    assert plain.evaluated == multiples(every, total, last=True)
    assert result.history["train/at"].steps == plain.shown
    assert result.history["eval/n"] == result.history["eval/n"].steps == plain.evaluated


@settings(max_examples=4)
@given(log=some, every=some, total=st.integers(1, 30), count=st.integers(2, 7))
def test_several_steps_in_a_call_change_no_point(log, every, total, count):
    plain = Plain()
    state, batches = {"n": np.float32(0)}, [np.float32(0)] * total
    options = {"log_every": log, "hooks": plain.hook, "evaluation": plain.evaluation(every)}
    result = sf.fit(plain.step, state, batches, steps_per_call=count, **options)
    assert result.steps == total
    assert plain.shown == multiples(log, total, last=True)
    assert plain.evaluated == multiples(every, total, last=True)


@pytest.mark.parametrize(
    ("log", "every", "count", "total"), [(5, 7, 1, 20), (4, 6, 4, 18), (30, 3, 16, 10)]
)
def test_checkpoints_are_at_their_steps(log, every, count, total, tmp_path):
    options = {"log_every": log, "every": every, "steps_per_call": count, "steps": total}
    result = course.run(tmp_path, evaluation=(), **options)
    saved = multiples(every, total, last=True)
    assert sf.verify(tmp_path / "checkpoints") == {step: [] for step in saved}
    for step in saved:
        found = sf.contents(tmp_path / "checkpoints", step=step)
        assert found.data["step"] == step
    assert result.steps == total


@pytest.mark.parametrize("count", [1, 4])
def test_a_saved_state_is_that_of_its_step(count, tmp_path):
    course.run(tmp_path, steps=20, steps_per_call=count)
    for step in (7, 14):
        restored = sf.restore(tmp_path / "checkpoints", course.start(), step=step)
        assert network.bits(restored.state) == network.bits(by_hand(step)[0])
