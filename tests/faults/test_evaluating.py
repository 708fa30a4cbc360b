"""A run and the process that evaluates it are killed; the history is as if neither had been.

The run resumes, and the other process starts again, until the run has ended and is evaluated.
"""

import json
import os
import random
import signal
import time

import jax
import pytest
from tests import s3

import stepfold as sf
from stepfold.checkpoint.results import FOLDER
from stepfold.checkpoint.store import open_store

STEPS, EVERY = 30, 3


def numbers(state):
    from tests import small

    batches = sf.batches(small.examples(), 4, epochs=1)
    return sf.evaluate(small.EVAL_STEP, state, batches)


def trains(folder, checkpoints, remote, environ, pause):
    """Train; print the curves, the best step and the rows."""
    from tests import small

    os.environ.update(environ)
    result = sf.fit(
        small.STEP, small.start(), small.batches(), steps=STEPS, run_dir=folder, log_every=2,
        checkpoints=sf.Checkpoints(checkpoints, every=5, keep=1, best="eval/loss"),
        evaluation=sf.Evaluation(numbers, every=EVERY, remote=remote),
        hooks=lambda event: time.sleep(pause),
    )  # fmt: skip
    curves = {name: (curve.steps, list(curve)) for name, curve in result.history.items()}
    with open(f"{folder}/metrics.jsonl") as lines:
        rows = [sorted(json.loads(line).items()) for line in lines]
    print(json.dumps([curves, result.best, rows]))


def evaluates(where, environ):
    """Evaluate until the run has ended; print each step."""
    from tests import small

    os.environ.update(environ)
    like = jax.eval_shape(small.start)
    evaluation = sf.Evaluation(numbers)
    result = sf.evaluate_run(where, like, evaluation, steps="all", timeout=60)
    print(json.dumps([*result.metrics]))


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """Return what a run prints that evaluates itself."""
    folder = tmp_path_factory.mktemp("whole")
    end = forks.run(trains, str(folder), None, False, {}, 0.0)
    assert end.code == 0, end.errors
    return json.loads(end.output)


@pytest.mark.full
@pytest.mark.parametrize("store", ["directory", "s3"])
def test_kills_of_either_side_leave_the_history_of_a_run_that_evaluates_itself(
    forks, request, whole, store, tmp_path, count, monkeypatch
):
    chance, kills = random.Random(store), {"run": 0, "other": 0}
    for number in range(count(1, 8)):
        folder, url, environ = tmp_path / f"{number}", None, {}
        if store == "s3":
            s3.use_credentials(monkeypatch)
            url = request.getfixturevalue("server").url(f"{tmp_path.name}-{number}")
            environ = s3.CREDENTIALS
        where = str(folder / "checkpoints") if url is None else url
        start = {
            "run": lambda: forks.start(trains, str(folder), url, True, environ, 0.1),
            "other": lambda: forks.start(evaluates, where, environ),
        }
        live = {side: begin() for side, begin in start.items()}
        for side in chance.choices(["run", "other"], k=count(3, 5)):
            time.sleep(chance.uniform(0.3, 1.5))
            if live["run"].child.poll() is not None:
                break
            live[side].kill()
            kills[side] += live[side].wait().code == -signal.SIGKILL
            live[side] = start[side]()
        ends = {side: live[side].wait() for side in ("run", "other")}
        assert [end.code for end in ends.values()] == [0, 0], ends
        # A run that ended while the other process was dead reads the rest later.
        end = forks.run(trains, str(folder), url, True, environ, 0.0)
        assert json.loads(end.output) == whole, end.errors
        due = [*range(EVERY, STEPS + 1, EVERY)]
        found = open_store(where).list_notes(FOLDER)
        assert sorted(int(name.split("-")[1]) for name in found if name != "run.json") == due
    print(f"killed: {kills}")
