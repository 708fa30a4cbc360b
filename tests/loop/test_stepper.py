import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.stepper import Stepper

TX = optax.adam(0.1)
STEP = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2, b["mask"]), TX)


def start():
    return sf.init_state({"w": jnp.ones(3)}, TX, jax.random.key(0))


def batch(seed, rows=3):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=rows).astype(np.float32), "mask": rng.uniform(size=rows) < 0.7}


FORMS = {
    "step": lambda: STEP,
    "jitted": lambda: jax.jit(STEP),
    "compiled": lambda: sf.compile_step(STEP, start(), batch(0)),
}


def values(metrics):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), metrics)


@pytest.mark.parametrize("form", FORMS)
def test_what_it_says_is_what_the_step_says_step_by_step(form):
    stepper, state, said = Stepper(FORMS[form]()), start(), []
    for seed in range(3):
        state, one = stepper(state, [batch(seed)])
        said.append(one)
    theirs, run, wanted = start(), jax.jit(STEP), []
    for seed in range(3):
        theirs, metrics = run(theirs, batch(seed))
        wanted.append(metrics)
    assert values(state.params) == values(theirs.params)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *wanted)
    assert values(stepper.metrics(said)) == values(stacked)


def test_several_in_one_call_say_the_same_as_one_by_one():
    one, state, said = Stepper(STEP), start(), []
    for seed in range(5):
        state, row = one(state, [batch(seed)])
        said.append(row)
    many, other, told = Stepper(STEP), start(), []
    for seeds in ([0, 1], [2], [3, 4]):
        other, rows = many(other, [batch(seed) for seed in seeds])
        told.append(rows)
    assert values(other.params) == values(state.params)
    assert values(many.metrics(told)) == values(one.metrics(said))


def test_each_count_is_compiled_once(compiles):
    stepper, state = Stepper(STEP), start()
    for _ in range(2):
        for count in (1, 3):
            state, _ = stepper(state, [batch(seed) for seed in range(count)])
            compiles.append(str(count))
    made = [name for name in compiles if name not in "13"]
    assert len(made) == 2
    assert compiles[-2:] == ["1", "3"]


def test_it_tells_whether_several_can_go_in_one_dispatch():
    assert {form: Stepper(make()).scans for form, make in FORMS.items()} == {
        "step": True,
        "jitted": False,
        "compiled": False,
    }


def test_another_form_of_batch_is_refused():
    stepper, state = Stepper(STEP), start()
    state, _ = stepper(state, [batch(0)])
    with pytest.raises(sf.RetraceError, match=r"batch/x: expected float32\[3\], got float32\[1\]"):
        stepper(state, [batch(0, rows=1)])


def test_batches_of_several_forms_in_one_call_are_refused():
    words = r"batch.*/x: expected float32\[3\], got float32\[1\]"
    with pytest.raises((sf.RetraceError, sf.DataError), match=words):
        Stepper(STEP)(start(), [batch(0), batch(1, rows=1)])


@pytest.mark.parametrize("step", [None, "step", 3])
def test_what_is_no_step_is_refused(step):
    with pytest.raises(sf.ConfigError, match=r"step: expected a step \(state, batch\) -> …, got "):
        Stepper(step)


@pytest.mark.parametrize(
    "step",
    [
        lambda state, batch: state,
        lambda state, batch: (state, {}, None),
        lambda state, batch: {"loss": sf.mean(batch["x"])},
        lambda state, batch: None,
    ],
)
def test_a_step_that_gives_no_pair_is_refused(step):
    with pytest.raises(sf.ConfigError, match=r"step: expected \(state, metrics\) from it, got "):
        Stepper(step)(start(), [batch(0)])


@pytest.mark.parametrize("metrics", [{"loss": jnp.float32(1)}, None, jnp.float32(1)])
def test_a_step_that_says_no_metrics_is_refused(metrics):
    with pytest.raises(sf.ConfigError, match=r"step: expected metrics by name from it, got "):
        Stepper(lambda state, batch: (state, metrics))(start(), [batch(0)])


def test_a_run_takes_its_step_from_the_directory_where_one_before_has_left_it(tmp_path):
    states = []
    for _ in range(2):
        run = sf.fit(STEP, start(), [batch(0), batch(1)], compilation_cache=tmp_path, log_every=1)
        states.append(values(run.state.params))
        assert len(list(tmp_path.glob("*-cache"))) == 1
    assert states[0] == states[1]


def test_a_loss_function_is_no_step():
    said = r"step: expected .* got loss_fn\(params, batch, key\); of a loss .* sf.make_train_st"

    def loss_fn(params, batch, key): ...

    with pytest.raises(sf.ConfigError, match=said):
        Stepper(loss_fn)
