"""Every warning points to the line of the user, however deep in stepfold it is raised."""

import contextlib
import re
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
from tests.adapter import digits
from tests.small import STEP, TX, batches, loss_fn, start

import stepfold as sf
from stepfold import errors


@contextlib.contextmanager
def points_here(message):
    """Expect one such warning, at a line of this file that is marked so."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    (warning,) = [each for each in caught if re.search(message, str(each.message))]
    assert warning.filename == __file__
    line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert line.endswith("# here")


def fit(tmp_path, steps, **options):
    options = {"hooks": sf.progress("none"), "log_every": 2, **options}
    return sf.fit(STEP, start(), batches(), steps=steps, run_dir=tmp_path, **options)  # here


def test_of_fit(tmp_path):
    fit(tmp_path, 2)
    with points_here("its files are now in"):
        fit(tmp_path, 4)


def test_of_a_loss_that_jax_traces_inside_fit():
    step = sf.make_train_step(loss_fn, TX)  # which ignores the mask
    with points_here("mask"):
        sf.fit(step, start(), batches(remainder="pad"), steps=1)  # here


def test_of_a_resume(tmp_path):
    fit(tmp_path, 4, checkpoints=sf.Checkpoints(every=2))
    for path in (tmp_path / "checkpoints" / "4").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-1])
    with points_here("step 4 is damaged"):
        assert fit(tmp_path, 6, checkpoints=sf.Checkpoints(every=2)).resumed == 2


def test_of_checkpoints_at_a_save(tmp_path, monkeypatch):
    now, save = [0.0], sf.checkpoint.Series.save

    def save_slowly(*args, **options):
        now[0] += 100
        save(*args, **options)

    def take_a_second(event):
        now[0] += 1

    monkeypatch.setattr(sf.checkpoint.Series, "save", save_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for module in ("fold", "run", "saves"):
        monkeypatch.setattr(f"stepfold.loop.{module}.perf_counter", lambda: now[0])
    hooks = [sf.progress("none"), take_a_second]
    with points_here("saves took"):
        fit(tmp_path, 8, log_every=1, hooks=hooks, checkpoints=sf.Checkpoints(every=2))


def test_of_temporary_checkpoints_at_a_save(tmp_path, monkeypatch):
    from stepfold.checkpoint import tier

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier, "sync", fail)
    temporary = sf.Temporary(tmp_path / "local", every=1)
    with points_here("temporary saves fail"):
        fit(tmp_path / "run", 4, checkpoints=sf.Checkpoints(every=4, temporary=temporary))


def test_of_a_trainer(tmp_path):
    made = digits.train_only(max_steps=1)
    made.train()
    with points_here("nothing was trained"):
        made.train()  # here


def test_of_a_trainer_that_resumes(tmp_path):
    options = {"output_dir": tmp_path, "report_to": ("jsonl",)}
    digits.train_only(max_steps=1, **options).train()
    again = digits.train_only(max_steps=2, weight_decay=0.1, **options)
    with points_here("config: changed"):
        again.train()  # here


def module(name, source, monkeypatch):
    """Make a module of this name."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(compile(source, f"<{name}>", "exec"), made.__dict__)
    return made


CALLER = "def call(function): return function()"
# The `__init__` of a dataclass is in no file.
OWN = """
from dataclasses import dataclass
from stepfold.errors import warn

def function():
    warn("which")

@dataclass
class Record:
    def __post_init__(self):
        warn("which")
"""


@pytest.mark.parametrize("name", ["function", "Record"])
@pytest.mark.parametrize("package", ["stepfold", "jax", "contextlib"])
def test_frames_of_stepfold_and_of_what_calls_it_are_skipped(package, name, monkeypatch):
    caller = module(f"{package}.caller", CALLER, monkeypatch)
    own = module("stepfold.module", OWN, monkeypatch)
    with points_here("which"):
        caller.call(lambda: caller.call(getattr(own, name)))  # here


def test_frames_of_other_packages_are_not_skipped(monkeypatch):
    plugin = module("stepfold_plugin", CALLER, monkeypatch)
    with warnings.catch_warnings(record=True, action="always") as caught:
        plugin.call(module("stepfold.module", OWN, monkeypatch).function)
    assert caught[0].filename == "<stepfold_plugin>"


def test_a_thread_without_a_frame_of_the_user_warns_too():
    with warnings.catch_warnings(record=True, action="always") as caught:
        thread = threading.Thread(target=errors.warn, args=("alone", RuntimeWarning))
        thread.start()
        thread.join()
    (warning,) = caught
    assert (str(warning.message), warning.category) == ("alone", RuntimeWarning)


def test_a_line_warns_once_by_default():
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(2):
            errors.warn("twice")
    assert len(caught) == 1
    with pytest.raises(UserWarning, match="twice"):
        errors.warn("twice")  # pytest makes it an error
