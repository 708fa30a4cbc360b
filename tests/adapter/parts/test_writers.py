"""What metrics are written to."""

import json

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments, wandb_options, writers, writes_everywhere


def write(**fields):
    writer = writers(TrainingArguments(**fields))
    writer.write_scalars(1, {"train/loss": 0.5})
    writer.close()


def test_files_are_in_the_folder_of_logs(tmp_path):
    write(output_dir=str(tmp_path), report_to=("jsonl", "csv", "tensorboard"))
    logs = tmp_path / "logs"
    assert json.loads((logs / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 0.5}
    assert (logs / "metrics.csv").read_text() == "step,train/loss\n1,0.5\n"
    assert [*(logs / "tensorboard").iterdir()]


def test_every_process_has_a_folder_where_every_one_writes(tmp_path):
    write(output_dir=tmp_path, log_all_workers=True, logs_dir="told")
    assert (tmp_path / "told" / "process_0" / "metrics.csv").exists()


def test_what_is_written_is_printed_too(capsys):
    write(verbose=True)
    assert "train/loss 0.5" in capsys.readouterr().out


def test_where_nothing_is_written_there_is_none(tmp_path):
    assert writers(TrainingArguments()) is None  # no folder, and nothing else
    assert writers(TrainingArguments(output_dir=tmp_path, report_metrics=False)) is None
    assert writers(TrainingArguments(output_dir=tmp_path, performance_mode=True)) is None


def test_files_that_are_asked_for_have_to_go_somewhere():
    with pytest.raises(
        sf.ConfigError, match=r"report_to=\('csv',\): .* where files go; give output"
    ):
        writers(TrainingArguments(report_to=("csv",)))
    assert writers(TrainingArguments(report_to=())) is None


def test_wandb_is_told_whose_run_it_is():
    arguments = TrainingArguments(
        output_dir="runs/a",
        use_wandb=True,
        wandb_entity="team",
        wandb_name="first",
        trainer_prefix="sft",
    )
    assert wandb_options(arguments) == {
        "project": "sft-model",
        "entity": "team",
        "name": "first",
        "dir": "runs/a",
    }


def test_a_run_of_wandb_is_written_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(output_dir=tmp_path, use_wandb=True, report_to=())
    assert [*(tmp_path / "wandb").glob("offline-run-*")]


def test_who_writes():
    assert not writes_everywhere(TrainingArguments())
    assert writes_everywhere(TrainingArguments(log_all_workers=True))
    assert writes_everywhere(TrainingArguments(process_zero_is_admin=False))
