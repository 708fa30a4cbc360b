"""Whatever happens to processes and to the directories of hosts, a run ends with the same bits."""

import pytest

from . import schedules

DEFAULT, ALL = 3, 300


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.full] * (seed >= DEFAULT)) for seed in range(ALL)],
)
def test_a_random_schedule_ends_with_the_bits_of_an_undisturbed_run(tmp_path, seed):
    for line in schedules.run_schedule(tmp_path, seed):
        print(line)
