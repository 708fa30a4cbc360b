"""What a script may change before a resume: rates, the optimizer, the head."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.run import FORMAT

from .runs import Cut, assert_same, cut_at

PARTS = ("params", "model_state", "step", "key")
NEW_RATES = ("(?!.*/hyperparams/).*",)
DATA = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)


@functools.cache
def adam(rate):
    return optax.inject_hyperparams(optax.adam)(learning_rate=rate)


@functools.cache
def parts(tx):
    """Make the step and the first state, once for each optimizer."""
    loss = lambda params, x, key: sf.mean((x @ params["w"] - 1) ** 2)
    return sf.make_train_step(loss, tx), sf.init_state({"w": jnp.ones(3)}, tx, jax.random.key(0))


def run(folder, tx, steps, resume=True, **options):
    step, state = parts(tx)
    return sf.fit(
        step, jax.tree.map(jnp.copy, state), sf.batches(DATA, 4, seed=0), steps=steps,
        resume=resume, checkpoints=sf.Checkpoints(folder, every=4, keep=None), **options,
    )  # fmt: skip


def rate(result):
    return float(result.state.opt_state.hyperparams["learning_rate"])


def test_a_rate_that_the_script_has_changed_is_named_at_every_resume(tmp_path):
    run(tmp_path, adam(1e-2), 4)
    message = "learning_rate: expected 0.01 as in the checkpoint, got 0.0001; .* resume="
    for steps in (8, 12):
        with pytest.warns(UserWarning, match=message):
            result = run(tmp_path, adam(1e-4), steps)
    assert rate(result) == pytest.approx(1e-2)


def test_a_new_rate_can_be_taken_in_place_and_stays(tmp_path):
    run(tmp_path, adam(1e-2), 4)
    first = run(tmp_path, adam(1e-4), 8, NEW_RATES)
    assert (first.resumed, rate(first)) == (4, pytest.approx(1e-4))
    assert first.state.opt_state.inner_state[0].count == 8  # the moments are kept
    second = run(tmp_path, adam(1e-4), 12, NEW_RATES)
    third = run(tmp_path, adam(1e-4), 16)  # the option may go, once it has had its effect
    assert (second.resumed, rate(second)) == (8, pytest.approx(1e-4))
    assert (third.resumed, rate(third)) == (12, pytest.approx(1e-4))


def test_another_optimizer_continues_in_place_and_resumes_bit_for_bit(tmp_path):
    run(tmp_path / "cut", adam(1e-2), 4)
    sgd, hook = optax.sgd(0.1, momentum=0.9), cut_at(8)
    words = r"another optimizer; .* give resume=\('params', 'model_state', 'step', 'key'\), and to"
    with pytest.raises(sf.errors.TreeMismatchError, match=words):
        run(tmp_path / "cut", sgd, 12)
    with pytest.raises(Cut):
        run(tmp_path / "cut", sgd, 12, PARTS, log_every=1, hooks=hook)
    resumed = run(tmp_path / "cut", sgd, 12, PARTS, log_every=1, hooks=hook)
    assert resumed.resumed == 8
    run(tmp_path / "uncut", adam(1e-2), 4)
    uncut = run(tmp_path / "uncut", sgd, 12, PARTS, log_every=1)
    assert_same(resumed.state, uncut.state)
    # A second change is made as the first was.
    assert run(tmp_path / "cut", adam(1e-2), 16, PARTS).resumed == 12


def test_a_schedule_is_no_rate_that_changes(tmp_path):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 20))
    run(tmp_path, tx, 4)
    run(tmp_path, tx, 8)  # warnings are errors here


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("params", "resume: expected True, False, or parts such as .* got str 'params'"),
        ((), "resume: expected True, False, or parts"),
        (("params",), "resume: expected `step` among the parts, for the data position, got"),
        (("parms", "step"), "parts: expected patterns of paths, got 'parms'"),
    ],
)
def test_parts_are_checked(tmp_path, resume, message):
    run(tmp_path, adam(1e-2), 4)
    with pytest.raises(sf.errors.ConfigError, match=message):
        run(tmp_path, adam(1e-2), 8, resume)


# Hooks


def stop(name=None, metric="train/loss"):
    return sf.hooks.stop_early(metric, patience=99, name=name)


def count(event):
    """Return nothing."""


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (stop(), stop("other"), "stop_early train/loss, but fit has no such hook"),
        (stop("mine"), [], "mine, but fit has no such hook, so the state is dropped"),
        (stop(), sf.hooks.only_warn(stop()), "stop_early train/loss, but fit has"),
        (stop(), stop(metric="eval/loss"), "stop_early train/loss, but fit has"),
        (
            sf.hooks.every(2, stop()),
            sf.hooks.every(2, sf.hooks.on_spike()),
            "every stop_early train/loss, but fit has",
        ),
        (stop(), stop(), None),
        (sf.hooks.every(2, count), sf.hooks.every(2, lambda event: None), None),
        ([], stop(), None),
        (sf.log_to(sf.writers.console()), [], None),
    ],
)
def test_a_state_that_no_hook_takes_is_named(tmp_path, before, after, says):
    evaluation = sf.Evaluation(lambda state: {"loss": 1.0}, every=4)
    run(tmp_path, adam(1e-2), 4, hooks=before, evaluation=evaluation)
    with warnings.catch_warnings(record=True, action="always") as caught:
        run(tmp_path, adam(1e-2), 8, hooks=after, evaluation=evaluation)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (says is not None)
    assert all(f"hooks: the checkpoint has the state of {says}" in message for message in messages)
    assert all(warning.filename == __file__ for warning in caught)
    run(tmp_path, adam(1e-2), 12, hooks=after, evaluation=evaluation)  # warnings are errors here


def test_a_checkpoint_of_which_the_run_is_damaged_is_named(tmp_path):
    _, state = parts(adam(1e-2))
    position = sf.batches(DATA, 4, seed=0).get_state()
    sf.save(tmp_path, state, step=4, data=position, extra={"fit": {"format": FORMAT}})
    says = "fit cannot continue from step 4: KeyError.*; restore the state with sf.restore instead"
    with pytest.raises(sf.errors.CheckpointError, match=says):
        run(tmp_path, adam(1e-2), 8)


def test_damaged_lines_are_left_out_of_the_history_with_a_warning(tmp_path):
    hooks = lambda event: {"one": 1.0}
    run(tmp_path / "checkpoints", adam(1e-2), 4, run_dir=tmp_path, hooks=hooks, log_every=2)
    result = run(tmp_path / "checkpoints", adam(1e-2), 8, run_dir=tmp_path, hooks=hooks)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("}\n", "x\n", 1))
    says = r"metrics.jsonl: damaged lines are left out of the history: 1$"
    with pytest.warns(RuntimeWarning, match=says):
        assert result.history["one"].steps[0] == 4
