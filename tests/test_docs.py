"""Every example in a docstring and in the README runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import stepfold
from stepfold import adapter

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [module.name for module in pkgutil.walk_packages(stepfold.__path__, "stepfold.")]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


PUBLIC = [(stepfold, name) for name in stepfold.__all__]
PUBLIC += [(adapter, name) for name in adapter.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=str)
def test_every_public_name_has_an_example(module, name):
    assert ">>> " in (inspect.getdoc(getattr(module, name)) or "")


def blocks():
    text = (ROOT / "README.md").read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 1, match.group(1)) for match in found]


def test_readme_links_exist():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:tests|examples|benchmarks)/[\w/.]*)`", text)
    linked = re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(named) > 5
    assert len(linked) > 40
    assert not [path for path in (*named, *linked) if not (ROOT / path).exists()]


def test_readme_links_every_example():
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"](examples/{path.name})" in text


def test_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert blocks()
    for line, code in blocks():
        # Blank lines in front make a traceback point at the README's own lines.
        exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), names)
