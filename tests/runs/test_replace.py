"""Hooks that replace the state, and hooks that only look at it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import STEP, start

import stepfold as sf

from .runs import Cut, assert_same, cut_at

TX = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
DATA = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
TRAIN = sf.make_train_step(lambda p, x, key: sf.mean((x @ p["w"] - 1) ** 2), TX)
INITIAL = sf.init_state({"w": jnp.ones(3)}, TX, jax.random.key(0))


def new_state():
    return jax.tree.map(jnp.copy, INITIAL)


def rate(state):
    return float(state.opt_state.hyperparams["learning_rate"])


def with_rate(state, value):
    rates = {**state.opt_state.hyperparams, "learning_rate": value}
    return state._replace(opt_state=state.opt_state._replace(hyperparams=rates))


class Halve:
    """Halve the rate at every third evaluation."""

    def __init__(self):
        self.count = 0

    def __call__(self, event):
        if event.kind != "eval":
            return None
        self.count += 1
        if self.count % 3:
            return None
        return sf.hooks.Replace(with_rate(event.state, 0.5 * rate(event.state)), "no better")

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


def run(folder=None, steps=12, hooks=(), **options):
    own = sf.Evaluation(lambda state: {"norm": jnp.sum(state.params["w"] ** 2)}, every=2)
    return sf.fit(
        TRAIN, new_state(), sf.batches(DATA, 4, seed=0), steps=steps, run_dir=folder,
        evaluation=own, checkpoints=folder and sf.Checkpoints(every=3), hooks=hooks, **options,
    )  # fmt: skip


def test_a_hook_that_writes_into_the_state_does_not_change_the_training():
    def hook(event):
        event.state.params["w"] = jnp.zeros(())
        event.state.params.clear()

    batches = [{"x": jnp.full(4, 2.0)}] * 6
    changed = sf.fit(STEP, start(), batches, hooks=hook, log_every=2)
    assert_same(changed.state, sf.fit(STEP, start(), batches, log_every=2).state)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_reducing_the_rate_on_a_plateau_is_that_of_an_own_loop(steps_per_call):
    state, step, batches = new_state(), jax.jit(TRAIN), sf.batches(DATA, 4, seed=0)
    for number in range(1, 13):
        state, _ = step(state, next(batches))
        if number % 6 == 0:
            state = with_rate(state, jnp.float32(0.5 * rate(state)))
    result = run(hooks=Halve(), steps_per_call=steps_per_call)
    assert rate(result.state) == pytest.approx(0.025)
    np.testing.assert_allclose(result.state.params["w"], state.params["w"], rtol=1e-5)


@pytest.mark.parametrize("cut", [6, 7])  # the random runs cut at any step
def test_a_replaced_state_resumes_and_is_noted_once(tmp_path, cut):
    hooks = [Halve(), cut_at(cut)]
    with pytest.raises(Cut):
        run(tmp_path, hooks=hooks, log_every=1)
    resumed = run(tmp_path, hooks=[Halve()], log_every=1)
    assert resumed.resumed
    assert_same(resumed.state, run(hooks=[Halve(), lambda event: None], log_every=1).state)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["replacements"] == [[6, "no better"], [12, "no better"]]


def test_later_hooks_see_the_new_state_and_metrics_are_of_the_old():
    seen = []
    watch = lambda event: seen.append((event.kind, event.step, rate(event.state)))
    run(steps=7, hooks=[Halve(), watch], log_every=7)
    assert seen[-3:] == [("eval", 6, pytest.approx(0.05)), ("train", 7, pytest.approx(0.05)),
                         ("eval", 7, pytest.approx(0.05))]  # fmt: skip


def test_a_replaced_state_is_placed_and_copied_as_the_old_one():
    mine = jnp.zeros(3)
    weights = {("eval", 2): mine, ("eval", 4): np.ones(3, np.float32)}

    def hook(event):
        w = weights.get((event.kind, event.step))
        return (
            None if w is None else sf.hooks.Replace(event.state._replace(params={"w": w}), "reset")
        )

    assert run(hooks=hook).steps == 12
    assert not mine.is_deleted()


def test_a_state_at_a_log_point_is_replaced_only_if_it_is_exact():
    def hook(event):
        return sf.hooks.Replace(event.state, "nothing") if event.is_train else None

    with pytest.raises(
        sf.errors.ConfigError,
        match=r"expected Hook\(exact=True\), for a hook that .*needs_exact_state = True",
    ):
        run(hooks=hook)
    hook.needs_exact_state = True
    assert run(hooks=hook).steps == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state._replace(params={"w": jnp.ones(4)}), "state/params/w: expected fl"),
        (lambda state: state._replace(params={"v": jnp.ones(3)}), "state/params/w: missing"),
        (lambda state: state._replace(step=state.step + 1), "state/step: expected 2, got 3"),
        (lambda state: None, "state/params/w: missing"),
    ],
)
def test_another_kind_of_state_is_refused(change, message):
    hook = lambda event: (
        sf.hooks.Replace(change(event.state), "x") if event.kind == "eval" else None
    )
    with pytest.raises(sf.errors.TreeMismatchError, match=message):
        run(hooks=hook)


def test_only_warn_does_not_replace():
    with pytest.warns(UserWarning, match="step 6: no better"):
        result = run(hooks=sf.hooks.only_warn(Halve()), steps=10)
    assert rate(result.state) == pytest.approx(0.1)


def test_a_run_that_goes_back_forgets_what_was_replaced_since(tmp_path):
    back = []

    def hook(event):
        if event.kind == "eval" and event.step == 8 and not back:
            back.append(event.step)
            return sf.hooks.GoBack(skip=1, to=3)
        return None

    result = run(tmp_path, hooks=[Halve(), hook])
    assert back == [8]
    assert rate(result.state) == pytest.approx(0.025)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["replacements"] == [[6, "no better"], [12, "no better"]]


def test_a_replay_says_that_the_state_was_replaced(tmp_path):
    data = DATA.copy()
    data[31] = np.inf
    slower = lambda event: sf.hooks.Replace(with_rate(event.state, jnp.float32(0.05)), "slower")
    hook = lambda event: slower(event) if event.step == 4 else None
    own = sf.Evaluation(lambda state: {}, every=4)
    result = sf.fit(
        TRAIN, new_state(), sf.batches(data, 4), steps=8, evaluation=own, hooks=hook, log_every=8,
        run_dir=tmp_path, checkpoints=sf.Checkpoints(every=100),
    )  # fmt: skip
    notes = sf.debug.replay(result.capsule, TRAIN, state=new_state()).notes
    assert "step 4: the state was replaced (slower), which a replay does not repeat" in notes
