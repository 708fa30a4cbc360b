"""Every example in a docstring and in the README runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from tests.small import full_but

import stepfold
from stepfold import adapter
from stepfold.adapter import hezar, qurious

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# What the examples print does not depend on optimizations.
pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.not_optimized]
MODULES = [module.name for module in pkgutil.walk_packages(stepfold.__path__, "stepfold.")]

SLOW = {  # whose examples compile most
    *("stepfold.optim.cross_entropy", "stepfold.optim.ema", "stepfold.core.gradients"),
    *("stepfold.core.precision", "stepfold.core.step", "stepfold.sharding.ordered"),
    *("stepfold.inspect.choose", "stepfold.inspect.report"),
    *("stepfold.loop.fold", "stepfold.debug.rerun"),
    *("stepfold.adapter.from_arguments", "stepfold.adapter.hezar", "stepfold.adapter.qurious"),
    *("stepfold.adapter.trainer", "stepfold.checkpoint.names", "stepfold.checkpoint.series"),
    *("stepfold.core.loss", "stepfold.optim.spikes", "stepfold.data.workers"),
    *("stepfold.inspect.compiled", "stepfold.sharding.reduce", "stepfold.testing"),
}


@pytest.mark.parametrize("name", full_but({*MODULES} - SLOW, MODULES))
def test_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


def test_no_field_begins_with_what_sphinx_takes_for_its_type():
    """That is all before a colon in the first line of its docstring."""
    fields = inspect.getsource(adapter.TrainingArguments)
    docstrings = re.findall(r'^    """(.*)', fields, re.MULTILINE)
    assert len(docstrings) > 80
    assert [line for line in docstrings if ": " in line] == []


def test_every_public_name_has_an_example():
    modules = [stepfold, *(getattr(stepfold, name) for name in stepfold._PUBLIC)]
    public = [getattr(module, name) for module in modules for name in module.__all__]
    public += [qurious.Model, qurious.Trainer]
    public += [hezar.Trainer, hezar.TrainerConfig, hezar.MetricConfig, hezar.MetricsHandler]
    aliases = [stepfold.LossFn, stepfold.GradFn, stepfold.StepFn, stepfold.EvalFn]
    # Aliases have no docstring. That of `check_resume` would start processes; its recipe does.
    public = [one for one in public if one not in (*aliases, stepfold.testing.check_resume)]
    assert [one for one in public if ">>> " not in (inspect.getdoc(one) or "")] == []


def test_readme_links_exist():
    text = (ROOT / "README.md").read_text()
    linked = re.findall(r"\]\(([\w/.-]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(linked) > 30
    assert not [path for path in linked if not (ROOT / path).exists()]


def test_guide_lists_every_example():
    folder = ROOT / "examples" / "guide" / "examples"
    text = (folder / "index.md").read_text()
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {*re.findall(r"\[`(\w+)\.py`\]\(\1\.md\)", text)} == names
    assert {path.stem for path in folder.glob("*.txt")} == names


def test_guide_names_files_that_exist():
    folders = "|".join(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
    for page in (ROOT / "examples" / "guide").rglob("*.md"):
        text = page.read_text()
        named = re.findall(r"`((?:lib|tests|examples|benchmarks)/[\w/.-]+)`", text)
        named += [f"tests/{path}" for path in re.findall(rf"`((?:{folders})/test_\w+\.py)`", text)]
        # Without lib/, where the installed package is tested.
        named = [path for path in named if (ROOT / path.split("/")[0]).exists()]
        assert [path for path in named if not (ROOT / path).exists()] == [], page


def test_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, text = {}, (ROOT / "README.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        # Blank lines in front make a traceback point at the README's own lines.
        code = "\n" * (text[: block.start()].count("\n") + 1) + block.group(1)
        exec(compile(code, str(ROOT / "README.md"), "exec"), names)
