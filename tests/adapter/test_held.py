import jax
import pytest

from stepfold.adapter.held import Held

from . import digits

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def made():
    return digits.trainer()


def test_one_thing_has_several_names(made):
    assert made.state is made._model_state is made.model_state
    assert made.optimizer is made.tx
    assert made.train_step_fn is made.sharded_training_step_function
    assert made.eval_step_fn is made.sharded_evaluation_step_function


def test_they_can_be_set_by_any_of_them():
    held = Held()
    held.state, held.model, held.mesh = 1, 2, 3
    assert (held.model_state, held.model, held.mesh) == (1, 2, 3)


def test_sizes_are_those_of_the_plan(made):
    assert (made.training_batch_size, made.evaluation_batch_size) == (20, 20)
    sized = digits.trainer(eval_batch_size=50)
    assert sized.evaluation_batch_size == 50


def test_who_writes(made, monkeypatch):
    assert (made.is_process_zero, made.is_enable) == (True, True)
    everywhere = digits.trainer(log_all_workers=True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert (made.is_process_zero, made.is_enable) == (False, False)
    assert everywhere.is_enable


def test_there_is_no_run_of_wandb_unless_asked_for(made):
    assert made.wandb_runtime is None
