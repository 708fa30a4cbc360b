import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.checkpoint.choosing import candidates
from stepfold.errors import CheckpointError, ConfigError


@pytest.fixture
def folder(tmp_path):
    with sf.Checkpoints(tmp_path, keep=None, best="loss") as series:
        for step, loss in {2: 3.0, 9: 1.0, 10: 2.0}.items():
            series.save({"w": jnp.ones(2)}, step=step, metrics={"loss": loss})
    return tmp_path


def test_the_wanted_step_comes_first(folder):
    assert candidates(folder, "latest") == [10, 9, 2]
    assert candidates(folder, "best") == [9, 10, 2]
    assert candidates(folder, "best", ("loss", "max")) == [2, 10, 9]
    assert candidates(folder, 9) == [9]


@pytest.mark.parametrize(
    ("step", "wanted"), [(3, "step 3"), (-1, "step -1"), ("latest", ""), ("best", "")]
)
def test_what_is_not_there_is_told_with_what_is(folder, tmp_path, step, wanted):
    if wanted:
        words = f"expected {wanted} to restore, got steps 2, 9, 10; look at the path, or save first"
        with pytest.raises(CheckpointError, match=words):
            candidates(folder, step)
    words = f"expected {wanted or 'a checkpoint'} to restore, got none; look at the path"
    with pytest.raises(CheckpointError, match=words):
        candidates(tmp_path / "none", step)


@pytest.mark.parametrize("step", ["newest", None, True, 2.0, "3"])
def test_what_is_no_step_is_refused(folder, step):
    words = f"step: expected 'latest', 'best' or a number, got {step!r}"
    with pytest.raises(ConfigError, match=words):
        candidates(folder, step)


def test_a_steps_own_folder_is_answered_with_what_to_give(folder):
    words = f"this is one of the steps in {folder}: give that, with step=9"
    with pytest.raises(CheckpointError, match=words):
        candidates(folder / "9", "latest")
