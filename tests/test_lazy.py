"""Packages whose names load on first use."""

import importlib
import pickle
import subprocess
import sys

import pytest

import stepfold as sf

PACKAGES = [
    *("core", "optim", "data", "sharding", "checkpoint", "inspect", "loop", "writers", "hooks"),
    *("cluster", "runs", "debug"),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_names_that_it_lists(package):
    module = importlib.import_module(f"stepfold.{package}")
    assert dir(module) == module.__all__ == sorted(module.__all__)
    assert not [name for name in module.__all__ if not hasattr(module, name)]
    with pytest.raises(AttributeError, match=f"module 'stepfold.{package}' has no attribute 'x'"):
        module.x  # noqa: B018


def test_a_function_with_the_name_of_its_module_is_the_attribute():
    code = """
import stepfold as sf
from stepfold.data.collate import collate
import stepfold.data.batches
assert sf.data.collate is collate is sf.collate, sf.data.collate
assert callable(sf.data.batches)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_can_be_patched(monkeypatch):
    monkeypatch.setattr(sf.data, "collate", 1)
    assert sf.data.collate == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_can_be_sent_to_another_process(package):
    module = importlib.import_module(f"stepfold.{package}")
    assert pickle.loads(pickle.dumps(module)) is module


def test_cloudpickle_sends_a_function_that_uses_a_package():
    """It also sends `stepfold.data` if `data` is the name of any attribute or variable in it."""
    cloudpickle = pytest.importorskip("cloudpickle")
    names = {"sf": sf, "data": [1]}
    exec("def f():\n    return len(data), sf.data.collate, sf.fit", names)  # a script's function
    sent = pickle.loads(cloudpickle.dumps(names["f"]))
    assert sent() == (1, sf.collate, sf.fit)
