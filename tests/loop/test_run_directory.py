"""The directory of a run, which one run uses at a time."""

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf

BATCHES = [{"x": np.ones(4, np.float32)}] * 3


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    def run_another(event):
        with pytest.raises(sf.ConfigError, match="run_dir: expected"):
            sf.fit(STEP, start(), BATCHES, run_dir=tmp_path)
        seen.append(event.step)

    seen = []
    sf.fit(STEP, start(), BATCHES, run_dir=tmp_path, hooks=run_another)
    assert seen == [3]
    sf.fit(STEP, start(), BATCHES, run_dir=tmp_path / "other")
