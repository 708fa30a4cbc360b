import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import stepfold as sf
from stepfold.adapter import (
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureModelOutput,
)

from . import digits


@pytest.fixture(autouse=True)
def as_a_user_would():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_an_optimizer_that_a_subclass_gives_is_the_one_that_is_used():
    class Still(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model, optax.sgd(0.0), None, {"layers": 1})

    made = digits.trainer(Still)
    before = digits.bits(made.state.params)
    assert digits.bits(made.train().state.params) == before
    assert made.config == {"layers": 1}
    assert made.optimizer is made.tx


def test_a_state_that_a_subclass_gives_is_copied():
    mine = sf.init_state(digits.init, optax.sgd(0.1), jax.random.key(5))

    class Given(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model, optax.sgd(0.1), state=mine)

    made = digits.trainer(Given)
    assert digits.bits(made.state) == digits.bits(mine)
    made.train()
    assert not mine.params["kernel"].is_deleted()


def test_without_an_optimizer_from_a_subclass_it_is_that_of_the_arguments():
    class Stateless(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model)

    made = digits.trainer(Stateless, scheduler="linear")
    assert digits.bits(made.train().state) == digits.bits(
        digits.trainer(scheduler="linear").train().state
    )


def test_what_super_gives_can_be_changed():
    class Doubled(Trainer):
        def configure_model(self):
            made = super().configure_model()
            params = jax.tree.map(lambda leaf: 2 * leaf, made.state.params)
            return made.replace(state=made.state._replace(params=params))

    plain, doubled = digits.trainer(), digits.trainer(Doubled)
    np.testing.assert_allclose(
        doubled.state.params["kernel"], 2 * plain.state.params["kernel"], rtol=1e-6
    )
    assert int(doubled.train().state.step) == 20


def test_batches_of_a_subclass_are_those_that_are_trained_and_evaluated_on():
    rows = {name: values[:20] for name, values in digits.TRAIN.items()}
    batch = {**rows, "mask": np.ones(20, bool)}

    class Own(Trainer):
        def configure_dataloaders(self):
            return TrainerConfigureDataloaderOutput(
                dataloader_train=[batch] * 3, dataloader_eval=lambda: [batch]
            )

    made = digits.trainer(Own, max_steps=-1, num_train_epochs=1, given={"dataset_train": None})
    assert made.train().stopped == "the batches ended at step 3"
    assert made.evaluate()["eval_loss"] > 0


def test_parameters_are_drawn_anew_if_they_are_not_to_be_finetuned():
    given = {"model_state": digits.init(jax.random.key(9))}
    tuned, anew = (digits.trainer(given={**given, "finetune": yes}) for yes in (True, False))
    assert digits.bits(tuned.state.params) == digits.bits(given["model_state"])
    assert digits.bits(anew.state) == digits.bits(digits.trainer().state)


def test_the_state_is_spread_by_the_rules_that_were_given():
    made = digits.trainer(
        sharding_array=(1, -1, 2, 1),
        total_batch_size=16,
        given={"rules": [("kernel", PartitionSpec("fsdp", "tp"))]},
    )
    assert made.state.params["kernel"].sharding == made.state_shardings.params["kernel"]
    assert made.state_partition_spec.params["kernel"] == PartitionSpec("fsdp", "tp")
    whole = digits.trainer(
        sharding_array=(1, -1, 1, 1), auto_shard_states=False, total_batch_size=16
    )
    assert whole.state.params["kernel"].sharding.is_fully_replicated


def test_a_state_begins_where_it_is_told_to():
    made = digits.trainer(step_start_point=5, scheduler="linear")
    assert int(made.state.step) == 5
    made.train()
    assert int(made.state.step) == 20
    assert made.history["train/learning_rate"][-1] == pytest.approx(1.5e-3, rel=1e-3)


def test_columns_that_are_left_out_never_reach_the_loss():
    made = digits.trainer(
        ids_to_pop_from_dataset=("label", "mask"),
        given={
            "loss_fn": lambda p, b, k: sf.mean((b["image"] @ p["kernel"]) ** 2),
            "dataset_eval": None,
        },
    )
    assert next(made.dataloader_train).keys() == {"image"}
    assert int(made.train().state.step) == 20


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("hooks", 5, "a list of functions of an event"),
        ("hooks", [5], "a function"),
        ("callbacks", len, r"a list of functions \(trainer, epoch, metrics\)"),
        ("evaluations", sf.Evaluation(len), r"a list of sf.Evaluation\(…\)"),
        ("evaluations", [len], r"sf.Evaluation\(…\)"),
        ("data_collator", 5, "a function"),
        ("eval_loss_fn", 5, "a function"),
        ("scheduler", "linear", "a function"),
        ("finetune", "yes", "True or False"),
    ],
)
def test_what_is_given_is_read_when_it_is_given(name, value, wanted):
    with pytest.raises(sf.ConfigError, match=rf"^{name}.*: expected {wanted}, got "):
        digits.trainer(given={name: value})


def rows():
    return iter([{name: values[i] for name, values in digits.TRAIN.items()} for i in range(60)])


def test_a_stream_is_gone_through_as_often_as_there_are_epochs():
    """Nobody knows how many steps that is, so that without them it would never end."""
    made = digits.trainer(given={"dataset_train": rows}, num_train_epochs=2)
    assert made.train().stopped == "the batches ended at step 6"


def test_what_can_be_gone_through_once_is_no_data_for_evaluations():
    with pytest.raises(sf.ConfigError, match="dataset_eval: expected data that can be gone thr"):
        digits.trainer(given={"dataset_eval": rows()})
