"""The learning rate, step by step."""

import jax
import optax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments, make_schedule
from stepfold.adapter.arguments.shapes import SHAPES


@pytest.fixture(autouse=True)
def as_an_optimizer_calls_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def made(steps=110, **fields):
    return make_schedule(TrainingArguments(learning_rate=0.1, **fields), steps)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "constant"])
def test_every_shape_warms_up_to_its_peak_and_comes_down(name):
    schedule = made(scheduler=name, warmup_steps=10, learning_rate_end=0.001)
    assert [float(schedule(step)) for step in (0, 5, 10)] == pytest.approx([0.0, 0.05, 0.1])
    values = [float(schedule(step)) for step in range(10, 111)]
    assert min(values) >= 0.001 - 1e-6
    assert max(values) <= 0.1 + 1e-6
    if name != "inverse_sqrt":
        assert values[-1] == pytest.approx(0.001)


def test_it_is_that_of_optax():
    ours = made(scheduler="cosine", warmup_steps=10, learning_rate_end=0.01)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 110, 0.01)
    for step in range(0, 111, 5):
        assert float(ours(step)) == pytest.approx(float(theirs(step)), rel=1e-6)


def test_a_constant_rate_needs_no_length():
    assert float(made(None)(7)) == pytest.approx(0.1)
    assert float(made(None, scheduler="warmup_constant", warmup_steps=10)(5)) == pytest.approx(0.05)


def test_the_options_of_a_shape_reach_it():
    for name, options in [
        ("polynomial", {"power": 1.0}),
        ("cosine", {"exponent": 2.0}),
        ("inverse_sqrt", {"timescale": 10}),
        ("wsd", {"decay": 0.5}),
        ("cosine_restarts", {"cycles": 2}),
    ]:
        plain, other = made(scheduler=name), made(scheduler=name, scheduler_kwargs=options)
        assert any(float(plain(step)) != float(other(step)) for step in range(110)), name


def test_wsd_stays_and_then_comes_down():
    schedule = made(100, scheduler="wsd", scheduler_kwargs={"decay": 0.2})
    assert [float(schedule(step)) for step in (0, 79, 90, 100)] == pytest.approx(
        [0.1, 0.1, 0.05, 0]
    )


def test_a_schedule_of_ones_own_and_a_function_that_makes_one():
    for custom in (
        optax.constant_schedule(0.3),
        lambda steps: optax.linear_schedule(0.3, 0, steps),
    ):
        schedule = make_schedule(TrainingArguments(custom_scheduler=custom), 10)
        assert float(schedule(0)) == pytest.approx(0.3)
    assert float(schedule(10)) == 0.0


def test_what_needs_the_length_says_so():
    with pytest.raises(sf.ConfigError, match=r"scheduler='linear': .* how many steps .* max_steps"):
        made(None, scheduler="linear")
    arguments = TrainingArguments(custom_scheduler=lambda n: optax.linear_schedule(1, 0, n))
    with pytest.raises(sf.ConfigError, match="custom_scheduler: .* how many steps"):
        make_schedule(arguments, None)


def test_a_warm_up_that_does_not_end_is_refused():
    with pytest.raises(sf.ConfigError, match="fewer than the 10 steps of the run, got 10"):
        made(10, warmup_steps=10)


@pytest.mark.parametrize(
    ("name", "options"), [("wsd", {"decay": 1.5}), ("cosine_restarts", {"cycles": 0})]
)
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(sf.ConfigError, match="scheduler_kwargs"):
        made(scheduler=name, scheduler_kwargs=options)
