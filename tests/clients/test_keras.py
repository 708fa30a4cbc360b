"""A model of Keras 3 on jax, in a process of its own since Keras reads the environment once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import pathlib, jax, keras
from tests.clients import course, models
assert keras.backend.backend() == "jax"
trained = course.train(models.of_keras(), pathlib.Path("run"))
course.check_it_learned(trained)
course.check_it_is_measured_alike(trained)
course.check_the_model_is_left_whole(trained)
course.check_it_goes_on(trained)
"""


@pytest.mark.full
def test_a_model_with_batch_norm_and_dropout(tmp_path):
    run_python(tmp_path, "-W", "error", "-c", CODE)


@pytest.mark.full
def test_what_the_page_on_keras_says(tmp_path):
    run_python(tmp_path, "-m", "tests.clients.moving_from_keras")


def run_python(folder, *arguments):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    # Its settings would go into the home folder.
    own = {"KERAS_BACKEND": "jax", "KERAS_HOME": str(folder), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
