"""Fields: where a run keeps what."""

from pathlib import Path

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments


def test_a_path_is_kept_as_a_text():
    assert TrainingArguments(output_dir=Path("runs") / "a").output_dir == "runs/a"
    for value in ("", 3, ["a"]):
        with pytest.raises(sf.ConfigError, match="output_dir: expected a path, got"):
            TrainingArguments(output_dir=value)


def test_what_would_lose_a_run_is_refused_with_what_to_do_instead():
    with pytest.raises(sf.ConfigError, match=r"save_optimizer_state=False: .* save_pretrained or"):
        TrainingArguments(save_optimizer_state=False)
    with pytest.raises(sf.ConfigError, match="remove_ckpt_after_load=True: .* save_total_limit=1"):
        TrainingArguments(remove_ckpt_after_load=True)
    for name in ("save_optimizer_state", "remove_ckpt_after_load"):
        with pytest.raises(sf.ConfigError, match=f"{name}: expected True or False, got 1"):
            TrainingArguments(**{name: 1})


def test_resuming_is_said_by_a_flag_or_a_path():
    for value in (True, False, "runs/b", None):
        assert TrainingArguments(resume_from_checkpoint=value).resume_from_checkpoint is value
    with pytest.raises(
        sf.ConfigError, match="resume_from_checkpoint: expected True, False, or the path"
    ):
        TrainingArguments(resume_from_checkpoint=3)
