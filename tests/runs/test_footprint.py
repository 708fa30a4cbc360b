"""How much of the library a run holds: the functions that run, their files, and the live classes.

A bound on what one has to know to follow a plain `fit`. Functions that a step, a state and batches
run count too. Modules that are imported on first use do not.
"""

import gc
import sys
from pathlib import Path

import pytest
from tests.small import STEP, batches, start

import stepfold as sf
from stepfold.hooks.progress import DefaultProgress

LIB = str(Path(sf.__file__).parent)
# Functions, files, and classes beyond those that the step, the state and the batches hold.
MOST = {"plain": (188, 26, 18), "everything": (508, 59, 35)}
NAMELESS = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def live_classes():
    """Return the classes of stepfold of which there are objects."""
    gc.collect()
    return {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in {type(thing) for thing in gc.get_objects()}
        if str(kind.__module__).startswith("stepfold")
    }


def walk(kind, folder):
    """Run 20 steps; return the functions of stepfold that ran, and the classes at a log point."""
    codes, classes = set(), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIB):
            codes.add(frame.f_code)

    def look(event):
        if event.step == 10 and event.is_train:
            sys.setprofile(None)
            classes.append(live_classes())
            sys.setprofile(note)

    options = {"steps": 20, "hooks": [look]}
    if kind == "everything":
        options["run_dir"] = folder
        options["checkpoints"] = sf.Checkpoints(every=10, best="eval/loss")
        options["evaluation"] = sf.Evaluation(lambda state: {"loss": 1.0}, every=10)
    state, data = start(), batches()
    held = live_classes()
    sys.setprofile(note)
    try:
        sf.fit(STEP, state, data, **options)
    finally:
        sys.setprofile(None)
    named = [code for code in codes if code.co_name not in NAMELESS]
    functions = sorted(
        f"{Path(code.co_filename).relative_to(LIB)}: {code.co_qualname}" for code in named
    )
    return functions, sorted(classes[0] - held)


@pytest.mark.parametrize("kind", MOST)
def test_a_run_holds_little_of_the_library(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(DefaultProgress, "_quiet_seconds", 1e9)  # a slow machine shows lines
    walk(kind, tmp_path / "first")  # modules are imported on first use
    functions, classes = walk(kind, tmp_path / "run")
    files = sorted({name.partition(":")[0] for name in functions})
    print(*functions, "", *files, "", *classes, sep="\n")
    found = len(set(functions)), len(files), len(classes)
    assert all(n <= most for n, most in zip(found, MOST[kind], strict=True)), found
