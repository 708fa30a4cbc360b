"""What fields are called."""

import inspect
from dataclasses import dataclass, fields

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.arguments.names import by_any_name, other_names

OTHERS = other_names(TrainingArguments)


@pytest.mark.parametrize(("other", "name"), OTHERS.items())
def test_either_name_gives_and_reads_the_value(other, name):
    values = {"output_dir": "a", "scheduler_kwargs": {"power": 1.0}, "scheduler": "cosine"}
    flags = {"shuffle_train_dataset": False, "do_eval": False}
    value = {**values, **flags}.get(name, 3)
    also = {"scheduler": "polynomial"} if name == "scheduler_kwargs" else {}
    arguments = TrainingArguments(**{other: value}, **also)
    assert getattr(arguments, name) == getattr(arguments, other) == value
    assert arguments == TrainingArguments(**{name: value}, **also)


def test_the_names_that_were_promised():
    assert {
        "max_training_steps": "max_steps",
        "evaluation_steps": "eval_steps",
        "save_directory": "output_dir",
        "logging_steps": "log_steps",
        "num_epochs": "num_train_epochs",
        "batch_size": "total_batch_size",
    }.items() <= OTHERS.items()


def test_two_names_that_disagree():
    with pytest.raises(
        sf.ConfigError, match=r"max_steps, max_training_steps: two names .* got 3 and 4"
    ):
        TrainingArguments(max_steps=3, max_training_steps=4)
    assert TrainingArguments(max_steps=3, max_training_steps=3).max_steps == 3


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rat", "did you mean 'learning_rate'?"),
        ("max_trainin_steps", "did you mean 'max_training_steps'?"),
        ("device", "jax chooses devices"),
        ("metrics", "the loss function returns them"),
        ("evaluate_with_generate", "any function of the state"),
    ],
)
def test_what_is_no_field_says_where_to_look(name, advice):
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(**{name: 1})
    assert str(error.value).startswith(f"{name}: TrainingArguments has no such field; ")
    assert advice in str(error.value)


def test_a_name_near_to_nothing():
    with pytest.raises(sf.ConfigError, match="^zzzzz: TrainingArguments has no such field$"):
        TrainingArguments(zzzzz=1)


def test_fields_are_given_by_name():
    with pytest.raises(sf.ConfigError, match="expected fields by name"):
        TrainingArguments("runs/a")


def test_it_is_a_plain_dataclass_to_those_who_look():
    names = [field.name for field in fields(TrainingArguments)]
    assert list(inspect.signature(TrainingArguments).parameters) == names
    assert not OTHERS.keys() & {*names}


def test_a_subclass_has_other_names_too():
    @by_any_name
    @dataclass(frozen=True, kw_only=True)
    class More(TrainingArguments):
        beta: float = 0.1

    more = More(beta=0.2, max_training_steps=7)
    assert (more.beta, more.max_steps) == (0.2, 7)
    assert More.from_json(more.to_json()) == more
    with pytest.raises(sf.ConfigError, match="bet: More has no such field; did you mean 'beta'"):
        More(bet=1.0)
