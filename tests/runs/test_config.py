"""The hyper-parameters of a run: what it writes, compares and warns of."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.__main__ import main
from stepfold.runs.info import config_changes, flatten_config, read_config

BATCHES = [{"x": np.ones(4, np.float32)}] * 4


@dataclasses.dataclass
class Optimizer:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


@dataclasses.dataclass
class Config:
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    name: str = "small"
    seed: int | None = None


def run(folder, config, steps=4, **options):
    batches, plan = sf.batches({"x": np.ones(8, np.float32)}, 4), sf.Checkpoints(every=2)
    options |= {"run_dir": sf.RunDirectory(folder, config=config), "checkpoints": plan}
    return sf.fit(STEP, start(), batches, steps=steps, **options)


def test_the_report_times_no_hook_that_the_user_did_not_give(tmp_path):
    """A hook of the loop has a row only if it writes, prints, or stops the run."""
    run(tmp_path, Config(), hooks=[sf.hooks.stop_early("train/loss", patience=9)])
    parts = [part for part, _ in info(tmp_path)["attempts"][0]["parts"] if part.startswith("hook ")]
    names = ["on_nonfinite", "stop_early train/loss", "metrics.jsonl", "report.html"]
    names.append("progress")
    assert sorted(parts) == sorted(f"hook {name}" for name in names)


def info(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize(
    "config", [Config(), {"optimizer": Optimizer(), "name": "small", "seed": None}]
)
def test_hyper_parameters_have_a_place_in_the_run_and_its_page(tmp_path, config):
    run(tmp_path, config)
    plain = {"optimizer": {"rate": 0.001, "betas": [0.9, 0.999]}, "name": "small", "seed": None}
    assert info(tmp_path)["config"] == plain
    assert "config/optimizer/rate" in (tmp_path / "report.html").read_text()


def test_two_runs_with_other_rates_differ_by_them(tmp_path):
    for name, rate in [("a", 1e-3), ("b", 1e-2)]:
        run(tmp_path / name, Config(Optimizer(rate)))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    page = (tmp_path / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    rows = {name: values for name, *values in data["tables"]["What differs"]}
    assert rows["config/optimizer/rate"] == ["0.001", "0.01"]
    assert "config/name" not in rows


def test_a_resume_names_what_has_changed(tmp_path):
    run(tmp_path, Config())
    with pytest.warns(UserWarning, match="config: changed since .*: optimizer/rate from 0.001 to"):
        run(tmp_path, Config(Optimizer(0.01)), steps=6)
    assert info(tmp_path)["attempts"][1]["config_changes"] == {"optimizer/rate": [0.001, 0.01]}
    page = (tmp_path / "report.html").read_text()
    assert "config/optimizer/rate changed from 0.001 to 0.01 at step 4" in page
    run(tmp_path, Config(Optimizer(0.01)), steps=8)  # warnings are errors here


def test_a_config_that_a_resume_leaves_out_is_named(tmp_path):
    run(tmp_path, {"rate": 0.1, "clip": 1})
    says = "config: changed since the checkpoint: clip, which was 1, is left out, .*seed is new"
    with pytest.warns(UserWarning, match=says):
        run(tmp_path, {"rate": 0.1, "seed": 3}, steps=6)
    says = "config: expected that of the checkpoint, got none; give it again: rate, which was 0.1"
    with pytest.warns(UserWarning, match=says) as caught:
        run(tmp_path, None, steps=8)
    assert "{}" not in str(caught[0].message)


def test_writers_get_the_config_by_path():
    class Settings(sf.writers.Writer):
        def write_hparams(self, hparams):
            written.append(dict(hparams))

    written = []
    hooks = [sf.log_to(Settings()), sf.log_to(Settings(), every=2, name="other")]
    sf.fit(STEP, start(), BATCHES, run_dir=sf.RunDirectory(config=Config()), hooks=hooks)
    flat = {"optimizer/rate": 0.001, "optimizer/betas": [0.9, 0.999], "name": "small", "seed": None}
    assert written == [flat, flat]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": {"f": print}}, "config/a/f: expected what JSON can hold, got builtin_function_or_"),
        ({"a": [1, object()]}, "config/a/1: expected what JSON can hold, got object"),
        ({1: 2}, "config: expected keys of text, got 1"),
        ([1], "config: expected a mapping or a dataclass, got list"),
        (Config, "config: expected what JSON can hold, got type"),
        ({"a": {"b": 1}, "a/b": 2}, "config: expected a path for each value, got 'a/b' for two; r"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_path(config, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.RunDirectory(config=config)


def test_a_config_is_flattened_and_its_changes_name_new_and_missing_values():
    assert read_config({"clip": math.inf, "n": np.int64(3)}) == {"clip": "inf", "n": 3}
    flat = flatten_config({"a": {"b": 1, "c": {}}, "d": [1, 2]})
    assert flat == {"a/b": 1, "a/c": {}, "d": [1, 2]}
    changes = config_changes({"a": 1, "b": 2}, {"a": 1, "c": None})
    assert changes == {"b": [2, None], "c": [None, None]}
    assert config_changes(None, None) == {}
