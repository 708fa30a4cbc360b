import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import STEP, masked_loss_fn, start

import stepfold as sf


def state():
    return start()._replace(params={"w": jnp.float32(2)})


MEASURE = sf.make_eval_step(lambda params, batch, key: sf.mean(params["w"] * batch["x"]))
DATA = {"x": np.arange(10, dtype=np.float32)}


def test_no_batch_at_all_is_refused():
    with pytest.raises(sf.DataError, match="evaluate: expected at least one batch, got none; an"):
        sf.evaluate(MEASURE, state(), [])


def test_batches_that_were_gone_through_are_refused_the_second_time():
    once = sf.batches(DATA, 5, epochs=1)
    sf.evaluate(MEASURE, state(), once)
    with pytest.raises(sf.DataError, match="be made again for each evaluation"):
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
    with pytest.raises(sf.ConfigError, match=words):
        sf.evaluate(measure, state(), sf.batches(DATA, 5, epochs=1))


@pytest.mark.parametrize(
    "form", [jax.jit, lambda step: sf.compile_step(step, state(), {"x": DATA["x"][:5]})]
)
def test_a_step_may_be_jitted_or_compiled(form):
    assert sf.evaluate(form(MEASURE), state(), sf.batches(DATA, 5, epochs=1)) == {"loss": 9.0}


def test_a_metric_that_some_batches_lack_is_merged_over_the_others():
    def measure(state, batch):
        names = ("first", "both") if len(batch["x"]) == 4 else ("both", "last")
        return {name: sf.mean(batch["x"]) for name in names}

    given = [{"x": np.float32(x)} for x in ([0, 0, 2, 2], [4, 4, 4, 4], [9, 9])]
    assert sf.evaluate(measure, state(), given) == {"first": 2.5, "both": 3.8, "last": 9.0}


def test_a_compiled_step_stays_what_it_is(compiles):
    compiled, given = sf.compile_step(MEASURE, state(), {"x": DATA["x"][:5]}), state()
    compiled(given, {"x": DATA["x"][:5]})
    compiles.clear()
    sf.evaluate(compiled, given, sf.batches(DATA, 5, epochs=1))
    assert compiles == []


def test_a_compiled_step_refuses_another_batch():
    compiled = sf.compile_step(MEASURE, state(), {"x": DATA["x"][:5]})
    with pytest.raises(sf.RetraceError, match=r"batch/x: expected float32\[5\], got float32\[4\]"):
        sf.evaluate(compiled, state(), sf.batches(DATA, 4, epochs=1, remainder="drop"))


@pytest.mark.parametrize("given", [None, {"x": DATA["x"]}])
def test_batches_that_are_none_are_refused(given):
    with pytest.raises(sf.ConfigError, match="batches: expected an iterable of batches, got"):
        sf.evaluate(MEASURE, state(), given)


def test_it_compiles_once_however_often_it_is_asked(compiles):
    given = state()
    measure = sf.make_eval_step(masked_loss_fn)
    one = lambda: sf.evaluate(measure, given, sf.batches(DATA, 4, epochs=1, remainder="pad"))
    one()
    compiles.clear()
    one()
    assert compiles == []


def test_the_state_is_still_there_afterwards():
    given = state()
    sf.evaluate(MEASURE, given, sf.batches(DATA, 5, epochs=1))
    assert float(given.params["w"]) == 2.0


# Evaluation


def test_an_evaluation_has_its_name_and_makes_its_batches_anew():
    one = sf.Evaluation(MEASURE, lambda: sf.batches(DATA, 5, epochs=1), name="test")
    assert one(state()) == one(state()) == {"test/loss": 9.0}


def test_a_function_of_the_state_may_give_numbers_arrays_and_metrics():
    one = sf.Evaluation(lambda state: {"w": state.params["w"], "m": sf.mean(jnp.array([1.0, 2.0]))})
    assert one(state()) == {"eval/w": 2.0, "eval/m": 1.5}


@pytest.mark.parametrize("found", [3.0, None, [1.0]])
def test_a_function_of_the_state_that_gives_no_names_is_refused(found):
    with pytest.raises(sf.ConfigError, match="eval: expected numbers by name, got "):
        sf.Evaluation(lambda state: found)(state())


def test_a_function_of_the_state_that_gives_no_number_is_refused():
    with pytest.raises(sf.ConfigError, match="eval/text: expected a number, got 'hello'"):
        sf.Evaluation(lambda state: {"text": "hello"})(state())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"measure": None}, "measure: expected a function, got NoneType None"),
        (
            {"batches": iter([1])},
            r"batches: expected some that can be read again for .* got list_it",
        ),
        ({"batches": sf.batches(DATA, 5)}, "evaluate: expected batches that end, .* epochs=1"),
        ({"every": 0}, "every: expected an integer of at least 1, got 0"),
        ({"every": 2.0}, "every: expected an integer of at least 1, got 2.0"),
        ({"every": True}, "every: expected an integer of at least 1, got True"),
        ({"every_epochs": -1}, "every_epochs: expected an integer of at least 1, got -1"),
        ({"name": ""}, "name: expected a string of one line, got ''"),
        ({"name": None}, "name: expected a string of one line, got None"),
        ({"name": "a\nb"}, r"name: expected a string of one line, got 'a\\nb'"),
        ({}, r"measure: expected a function \(state\) -> metrics, got eval_step\(state, batch\)"),
    ],
)
def test_what_describes_no_evaluation_is_refused(given, words):
    with pytest.raises(sf.ConfigError, match=words):
        sf.Evaluation(**{"measure": MEASURE, **given})


def test_batches_without_end_are_refused():
    for endless in (sf.batches(DATA, 5), sf.batches(lambda: iter(range(9)), 5)):
        with pytest.raises(
            sf.ConfigError, match=r"evaluate: expected batches that end, .*epochs=1"
        ):
            sf.evaluate(MEASURE, state(), endless)


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
    with pytest.raises(sf.ConfigError, match="^state/step, …: the arrays were donated to an"):
        sf.evaluate(MEASURE, gone, sf.batches(DATA, 5, epochs=1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (lambda p, b, key: 0.0, list),
            r"a function \(state, batch\) -> .* got <lambda>\(p, b, key",
        ),
        (
            (MEASURE,),
            r"a function \(state\) -> .* got eval_step\(state, batch\); .* batches, as sf",
        ),
    ],
)
def test_what_cannot_be_called_as_it_would_be_is_refused(given, said):
    with pytest.raises(sf.ConfigError, match=f"measure: expected {said}"):
        sf.Evaluation(*given)


# Batches that are given as they are.


def test_an_evaluation_takes_batches_as_well_as_a_function():
    measure = sf.make_eval_step(lambda p, b, key: sf.mean(p["w"] * b["x"]))
    data = {"x": np.arange(10.0, dtype=np.float32)}
    expected = {"eval/loss": 4.5}
    for batches in [
        [{"x": data["x"]}],
        sf.batches(data, 5, epochs=1, seed=0),
        sf.prefetch(sf.batches(data, 5, epochs=1)),
        lambda: sf.batches(data, 5, epochs=1),
    ]:
        evaluation = sf.Evaluation(measure, batches)
        assert [evaluation(start()) for _ in range(3)] == [expected] * 3


def test_batches_are_evaluated_from_where_they_were_given():
    measure = sf.make_eval_step(lambda p, b, key: sf.mean(b["x"]))
    batches = sf.batches({"x": np.arange(10.0, dtype=np.float32)}, 5, epochs=1)
    next(batches)
    evaluation = sf.Evaluation(measure, batches)
    assert [evaluation(start())["eval/loss"] for _ in range(2)] == [7.0, 7.0]


def test_batches_that_can_be_read_once_are_refused_for_an_evaluation():
    with pytest.raises(sf.ConfigError, match="batches: expected some that can be read again for"):
        sf.Evaluation(lambda state, batch: {}, iter([1]))
    with pytest.raises(sf.ConfigError, match="batches: expected an iterable of batches, got"):
        sf.Evaluation(lambda state, batch: {}, 3)


def test_an_evaluation_of_the_batches_of_the_training_is_refused():
    batches = sf.batches({"x": np.ones(8, np.float32)}, 4, epochs=2)
    evaluation = sf.Evaluation(sf.make_eval_step(lambda p, b, key: sf.mean(b["x"])), batches)
    with pytest.raises(sf.ConfigError, match="evaluation: expected other batches than those of"):
        sf.fit(STEP, start(), batches, steps=2, evaluation=evaluation)
