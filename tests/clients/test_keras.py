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
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    # Its settings would go into the home folder.
    own = {"KERAS_BACKEND": "jax", "KERAS_HOME": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        cwd=tmp_path,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
