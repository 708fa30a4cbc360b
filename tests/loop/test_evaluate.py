"""`evaluate` and `Evaluation`: exact means, compiled once, over batches that can be read again."""

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf


def state():
    return start()._replace(params={"w": jnp.float32(2)})


MEASURE = sf.make_eval_step(lambda params, batch, key: sf.mean(params["w"] * batch["x"]))
DATA = {"x": np.arange(10, dtype=np.float32)}


ITERABLE = "batches: expected an iterable of batches, got"
ENDLESS = r"evaluate: expected batches that end, .*epochs=1"


def packed_mixture(**options):
    return sf.pack(sf.mix([([[1, 2], [3]], 1)]), length=4, **options)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], sf.errors.DataError, "evaluate: expected at least one batch, got none; an"),
        (None, sf.errors.ConfigError, ITERABLE),
        ({"x": DATA["x"]}, sf.errors.ConfigError, ITERABLE),
        (sf.batches(DATA, 5), sf.errors.ConfigError, ENDLESS),
        (sf.batches(lambda: iter(range(9)), 5), sf.errors.ConfigError, ENDLESS),
        (packed_mixture(rows=2), sf.errors.ConfigError, ENDLESS),
        (sf.batches(packed_mixture(), 2), sf.errors.ConfigError, ENDLESS),
        (
            sf.batches(packed_mixture(), 2, epochs=1, remainder="pad"),
            sf.errors.ConfigError,
            ENDLESS,
        ),
        (sf.prefetch(sf.batches(packed_mixture(), 2)), sf.errors.ConfigError, ENDLESS),
    ],
)
def test_what_is_no_batches_that_end_is_refused(batches, error, message):
    with pytest.raises(error, match=message):
        sf.evaluate(MEASURE, state(), batches)


def test_batches_that_were_gone_through_are_refused_the_second_time():
    once = sf.batches(DATA, 5, epochs=1)
    sf.evaluate(MEASURE, state(), once)
    with pytest.raises(sf.errors.DataError, match="be made again for each evaluation"):
        sf.evaluate(MEASURE, state(), once)


@pytest.mark.parametrize(
    ("measure", "got"),
    [
        (lambda state, batch: batch["x"].sum(), r"float32\[\]"),
        (lambda state, batch: {"x": batch["x"].sum()}, "dict"),
        (lambda state, batch: (state, {}), "tuple"),
    ],
)
def test_what_gives_no_metrics_is_refused(measure, got):
    words = f"evaluate: expected metrics by name from the step, got .*{got}.*; make it with make_e"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.evaluate(measure, state(), sf.batches(DATA, 5, epochs=1))


@pytest.mark.parametrize(
    "form",
    [
        lambda step: step,
        jax.jit,
        lambda step: sf.compile_step(step, state(), {"x": DATA["x"][:5]}),
    ],
)
def test_it_compiles_once_and_keeps_the_state(form, compiles):
    measure, given = form(MEASURE), state()
    for _ in range(2):
        assert sf.evaluate(measure, given, sf.batches(DATA, 5, epochs=1)) == {"loss": 9.0}
        compiles.append("evaluated")
    assert compiles[-2:] == ["evaluated"] * 2


def test_a_metric_that_some_batches_lack_is_merged_over_the_others():
    def measure(state, batch):
        names = ("first", "both") if len(batch["x"]) == 4 else ("both", "last")
        return {name: sf.mean(batch["x"]) for name in names}

    given = [{"x": np.float32(x)} for x in ([0, 0, 2, 2], [4, 4, 4, 4], [9, 9])]
    assert sf.evaluate(measure, state(), given) == {"first": 2.5, "both": 3.8, "last": 9.0}


def test_a_compiled_step_refuses_another_batch():
    compiled = sf.compile_step(MEASURE, state(), {"x": DATA["x"][:5]})
    with pytest.raises(
        sf.errors.RetraceError, match=r"batch/x: expected float32\[5\], got float32\[4\]"
    ):
        sf.evaluate(compiled, state(), sf.batches(DATA, 4, epochs=1, remainder="drop"))


# Evaluation


def test_a_function_of_the_state_may_give_numbers_arrays_and_metrics():
    one = sf.Evaluation(lambda state: {"w": state.params["w"], "m": sf.mean(jnp.array([1.0, 2.0]))})
    assert one(state()) == {"eval/w": 2.0, "eval/m": 1.5}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        *((x, "eval: expected numbers by name, got ") for x in (3.0, None, [1.0])),
        ({"text": "hello"}, "eval/text: expected a number, got 'hello'"),
    ],
)
def test_a_function_of_the_state_that_gives_no_numbers_by_name_is_refused(found, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.Evaluation(lambda state: found)(state())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"measure": None}, "measure: expected a function, got NoneType None"),
        (
            {"batches": iter([1])},
            r"batches: expected some that can be read again for .* got list_it",
        ),
        ({"batches": 3}, ITERABLE),
        ({"batches": sf.batches(DATA, 5)}, ENDLESS),
        ({"batches": sf.batches(packed_mixture(), 2)}, ENDLESS),
        ({"every": 0}, "every: expected an integer of at least 1, got 0"),
        ({"every": 2.0}, "every: expected an integer of at least 1, got 2.0"),
        ({"every": True}, "every: expected an integer of at least 1, got True"),
        ({"every_epochs": -1}, "every_epochs: expected an integer of at least 1, got -1"),
        ({"name": ""}, "name: expected a string of one line, got ''"),
        ({"name": None}, "name: expected a string of one line, got None"),
        ({"name": "a\nb"}, r"name: expected a string of one line, got 'a\\nb'"),
        (
            {},
            r"measure: .* a function \(state\) -> .* got eval_step\(state, batch\); .* batches",
        ),
        (
            {"measure": lambda p, b, key: 0.0, "batches": list},
            r"measure: expected a function \(state, batch\) -> .* got <lambda>\(p, b, key",
        ),
    ],
)
def test_what_describes_no_evaluation_is_refused(given, words):
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.Evaluation(**{"measure": MEASURE, **given})


@flax.struct.dataclass
class Median(clu.metrics.CollectingMetric.from_outputs(("value",))):
    def compute(self):
        return np.median(super().compute()["value"])


@pytest.mark.parametrize("count", [10, 600])  # metrics are merged every 64 batches
def test_values_are_collected_from_batches_of_two_sizes(count):
    values = np.random.default_rng(0).normal(size=count).astype(np.float32)
    step = lambda state, batch: {"median": Median.from_model_output(value=batch["x"])}
    batches = sf.batches({"x": values}, 4, epochs=1, remainder="keep")
    found = sf.evaluate(jax.jit(step), start(), batches)
    assert found == {"median": pytest.approx(np.median(values))}


def test_a_state_that_was_donated_is_refused():
    gone = state()
    jax.jit(lambda state: state, donate_argnums=0)(gone)
    with pytest.raises(
        sf.errors.ConfigError, match="^state/step, …: the arrays were donated to an"
    ):
        sf.evaluate(MEASURE, gone, sf.batches(DATA, 5, epochs=1))


def later():
    """Return batches of which one was taken already."""
    batches = sf.batches(DATA, 5, epochs=1)
    next(batches)
    return batches


@pytest.mark.parametrize(
    ("batches", "loss"),
    [
        ([{"x": DATA["x"]}], 9.0),
        (sf.batches(DATA, 5, epochs=1, seed=0), 9.0),
        (sf.prefetch(sf.batches(DATA, 5, epochs=1)), 9.0),
        (lambda: sf.batches(DATA, 5, epochs=1), 9.0),
        (later(), 14.0),
    ],
)
def test_an_evaluation_reads_its_batches_again_from_where_they_were_given(batches, loss):
    evaluation = sf.Evaluation(MEASURE, batches, name="test")
    assert [evaluation(state()) for _ in range(3)] == [{"test/loss": loss}] * 3


def test_an_evaluation_of_the_batches_of_the_training_is_refused():
    batches = sf.batches(DATA, 5, epochs=2)
    with pytest.raises(
        sf.errors.ConfigError, match="evaluation: expected other batches than those of"
    ):
        sf.fit(STEP, start(), batches, steps=2, evaluation=sf.Evaluation(MEASURE, batches))
