import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.adapter import resuming

from . import digits


@pytest.fixture
def run(tmp_path):
    made = digits.trainer(output_dir=tmp_path, save_steps=5, max_steps=10)
    made.train()
    return made


def test_parts_of_a_state_are_named():
    tx = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    state = sf.init_state({"w": jnp.ones(1)}, tx, jax.random.key(0))
    paths = lambda **which: resuming.paths_of(state, **which)
    always = ["params", "model_state"]
    assert paths(optimizer=False, scheduler=False) == always
    assert paths(optimizer=False, scheduler=True) == [*always, "opt_state/1/count"]
    assert "opt_state/1/count" not in paths(optimizer=True, scheduler=False)
    assert {"step", "key", "opt_state/0/mu/w"} <= set(paths(optimizer=True, scheduler=False))


def test_a_path_to_ones_own_checkpoints_is_a_plain_resume(run, tmp_path):
    own, folder = resuming.own_place(run), "checkpoints"
    assert resuming.has_steps(own)
    assert resuming.is_own(tmp_path, own, folder)
    assert resuming.is_own(own / "10", own, folder)
    assert not resuming.is_own(tmp_path, None, folder)
    with pytest.raises(sf.ConfigError, match="is an older checkpoint than step 10 of the same run"):
        resuming.is_own(own / "5", own, folder)


def test_to_begin_with_something_else_takes_another_directory(run, tmp_path):
    with pytest.raises(
        sf.ConfigError, match="model_parameters: expected an output_dir without che"
    ):
        run.train(model_parameters=run.state.params)
    resuming.check_begins(resuming.own_place(run), 10, "state")
    resuming.check_begins(tmp_path / "nowhere", 0, "state")


def test_an_older_step_of_another_run_is_gone_on_from(run, tmp_path):
    whole = digits.trainer(max_steps=10).train().state
    other = digits.trainer(output_dir=tmp_path / "other", max_steps=10)
    output = other.train(ckpt_path=tmp_path / "checkpoints" / "5")
    assert digits.bits(output.state) == digits.bits(whole)


def test_the_last_saved_state_takes_the_place_of_one_that_was_donated(run):
    wanted = digits.bits(run.state)
    jax.tree.map(lambda leaf: leaf.delete(), run.state)
    assert digits.bits(resuming.last_good(run)) == wanted
    alone = digits.trainer()
    assert resuming.last_good(alone) is alone.model_state


# What is asked for, where there are checkpoints to go on from


def used(tmp_path, **changes):
    """Train in a folder, and make another trainer that would go on there."""
    digits.trainer(output_dir=tmp_path, max_steps=10, save_steps=5).train()
    return digits.trainer(output_dir=tmp_path, max_steps=20, save_steps=5, **changes)


def test_a_checkpoint_that_was_loaded_is_not_quietly_left(tmp_path):
    other = digits.trainer(output_dir=tmp_path / "other", max_steps=5, seed=7)
    other.train()
    made = used(tmp_path / "own")
    made.load_checkpoint(tmp_path / "other")
    with pytest.raises(sf.ConfigError, match="goes on from step 10"):
        made.train()


def test_a_state_of_the_same_step_is_not_quietly_left(tmp_path):
    made = used(tmp_path)
    zeros = jax.tree.map(jnp.zeros_like, made.state.params)
    given = made.state._replace(params=zeros, step=made.state.step + 10)
    with pytest.raises(sf.ConfigError, match="state"):
        made.train(state=given)


def test_an_older_checkpoint_that_the_arguments_name_is_not_quietly_left(tmp_path):
    """As `train(ckpt_path=…)` refuses it."""
    made = used(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoints" / "5"))
    with pytest.raises(sf.ConfigError, match="is an older checkpoint than step 10"):
        made.train()


def test_a_checkpoint_that_is_nowhere_is_said_though_there_are_others(tmp_path):
    made = used(tmp_path, resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(sf.CheckpointError, match="nowhere: expected a checkpoint"):
        made.train()


def test_parameters_are_no_state_to_go_on_from(run):
    with pytest.raises(sf.ConfigError, match="state: expected a state, .* as model_parameters"):
        run.train(state=run.state.params)
