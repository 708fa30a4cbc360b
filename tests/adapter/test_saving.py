import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.adapter import saving
from stepfold.adapter.arguments import TrainingArguments

from . import digits


def test_path_and_state_may_come_in_either_order():
    state = {"w": jnp.ones(1)}
    for values in ((state, "a", None), ("a", state, None), (state, None, "a")):
        path, found = saving.path_and_state(*values)
        assert (path, found is state) == (Path("a").absolute(), True)
    for wrong in ((None, None, None), ("a", "b", None), (state, state, "a")):
        with pytest.raises(sf.ConfigError, match="save_pretrained: expected one path and at most"):
            saving.path_and_state(*wrong)


def test_a_state_is_saved_with_its_arguments_position_and_metrics(tmp_path):
    trainer = digits.train_only(learning_rate=1e-3, max_steps=9)
    trainer.state = trainer.state._replace(step=trainer.state.step + 7)
    trainer.history = {"eval/loss": [0.75, 0.5], "eval/none": []}
    path = trainer.save_pretrained(tmp_path / "a")
    assert path == tmp_path / "a" / "7"
    restored = sf.restore(path.parent, trainer.abstract_state)
    assert (restored.step, restored.metrics) == (7, {"eval/loss": 0.5})
    assert restored.data == {**trainer.dataloader_train.get_state(), "step": 7}
    assert TrainingArguments.from_json(path.parent / "arguments.json") == trainer.arguments


def test_a_card_goes_to_a_file_or_into_a_folder(tmp_path):
    saving.write_card(tmp_path / "new" / "card.md", "# a\n")
    saving.write_card(tmp_path / "folder", "# b\n")
    assert (tmp_path / "new" / "card.md").read_text() == "# a\n"
    assert (tmp_path / "folder" / "README.md").read_text() == "# b\n"


def test_a_card_cannot_go_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sf.CheckpointError, match="file: expected a directory, got a file"):
        saving.write_card(tmp_path / "file" / "card.md", "text")


@pytest.fixture(scope="module")
def card():
    """Make the card of a run from what differs between the tests."""
    fields = {"model_name": "digits", "learning_rate": 0.1, "frozen_parameters": "a|b"}
    parts = digits.parts(devices=jax.devices(), state_shape={"w": jnp.ones((3, 2))})
    return functools.partial(saving.make_card, TrainingArguments(**fields), parts)


@pytest.mark.parametrize(
    "reason", ["all 2 steps were done", sf.Stop("completed", "all 2 steps were done")]
)
def test_a_card_lists_arguments_parameters_devices_and_curves(card, reason):
    text = card({"eval/loss": [2.0, 1.0]}, {"checkpoint": "runs/2", "not loaded": {}}, reason)
    assert text.startswith("# digits\n\nThe run ended: all 2 steps were done.\n")
    for part in ("| learning_rate | `0.1` |", "`'a\\|b'`", "| w    | (3, 2)", "'fsdp': 8"):
        assert part in text
    assert "| eval/loss | 2 | 2 | 1 | 1 | 2 | █▁ |" in text
    assert "| checkpoint | `'runs/2'` |" in text
    assert "| not loaded | `{}` |" in text
    assert "warmup_steps" in text
    assert "clip_grad" not in text  # which is None
    assert f"| stepfold | `'{sf.__version__}'` |" in text
    heads = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["Notes", "Results", "Arguments", "Parameters", "Devices", "Versions"]


def test_a_card_leaves_empty_sections_out(card):
    text = card({"x": [jnp.nan]}, {})
    assert "## Results" not in text
    assert "The run ended" not in text


def test_a_long_curve_is_thinned_and_a_flat_one_is_low():
    assert saving.sparkline(range(1000))[0] == "▁"
    assert saving.sparkline(range(1000))[-1] == "█"
    assert len(saving.sparkline(range(1000))) == 32
    assert saving.sparkline([3.0, 3.0]) == "▁▁"
    assert saving.sparkline([]) == ""
    assert saving.sparkline([0, 1, 2, float("nan"), 3]) == "▁▃▆ █"
