"""The series of checkpoints."""

from pathlib import Path

import pytest

from stepfold.adapter import TrainingArguments, best_metric, best_mode, checkpoints, plan


def series(**fields):
    arguments = TrainingArguments(**fields)
    return checkpoints(arguments, plan(arguments))


def test_it_is_where_and_when_the_arguments_say():
    found = series(
        output_dir="runs/a",
        checkpoints_dir="kept",
        max_steps=100,
        save_steps=0.1,
        save_interval_minutes=5,
        save_total_limit=2,
    )
    assert found.directory == Path("runs/a/kept")
    assert (found.every, found.every_epochs, found.every_minutes, found.keep) == (10, None, 5.0, 2)
    assert series(output_dir="runs/a", save_strategy="epoch").every_epochs == 1


def test_without_a_limit_all_are_kept():
    assert series(output_dir="runs/a").keep is None


def test_where_nothing_is_saved_there_is_none():
    assert series() is None
    assert series(output_dir="runs/a", do_last_save=False) is None


@pytest.mark.parametrize(
    ("said", "called"),
    [
        ("cer", "eval/cer"),
        ("evaluation.f1", "eval/f1"),
        ("eval_loss", "eval/loss"),
        ("eval/loss", "eval/loss"),
        ("train.accuracy", "train/accuracy"),
        ("generated/cer", "generated/cer"),
        (None, None),
    ],
)
def test_the_best_is_by_a_metric_with_a_prefix(said, called):
    arguments = TrainingArguments(metric_for_best_model=said)
    assert best_metric(arguments) == called


@pytest.mark.parametrize(("greater", "mode"), [(True, "max"), (False, "min"), (None, None)])
def test_which_is_better(greater, mode):
    fields = {"metric_for_best_model": "cer", "greater_is_better": greater}
    assert best_mode(TrainingArguments(**fields)) == mode
    assert series(**fields, output_dir="a").mode == mode
