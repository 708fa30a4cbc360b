"""`fit` is the fold: optimized programs give the same bits in every form of the loop.

The random runs hold what a run does at which step, and what its history says.
"""

import itertools

import jax
import pytest
from tests.small import full_but

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


@pytest.mark.parametrize("form", full_but(["step"], FORMS))
def test_fit_gives_the_bits_of_a_loop_by_hand(form, wanted):
    result = course.run(step=FORMS[form]())
    assert network.bits(result.state) == wanted[0]
    assert course.curves(result.history) == course.whole()[1]


@pytest.mark.parametrize("count", full_but([3], [2, 3, 16]))
def test_several_steps_in_a_call_give_the_bits_of_one(count, wanted):
    result = course.run(steps_per_call=count)
    assert network.bits(result.state) == wanted[0]
    assert course.curves(result.history) == course.whole()[1]


def test_an_evaluation_in_the_run_is_that_of_the_state_at_its_step():
    result = course.run(steps=12)
    state, _ = by_hand(12)
    found = course.evaluation()(state)
    assert {name: result.history[name][-1] for name in found} == found


@pytest.mark.parametrize("count", full_but([4], [1, 4]))
def test_a_saved_state_is_that_of_its_step(count, tmp_path):
    course.run(tmp_path, steps=20, steps_per_call=count)
    for step in (7, 14):
        restored = sf.restore(tmp_path / "checkpoints", course.start(), step=step)
        assert network.bits(restored.state) == network.bits(by_hand(step)[0])
