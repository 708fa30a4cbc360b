"""A run on a cluster of Ray loses nodes, and ends as one that lost none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forks import clean_environ

import stepfold as sf

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

EXAMPLE = Path(__file__).parents[2] / "examples/ray_run.py"
SHOWN = EXAMPLE.parent / "guide/examples/ray_run.txt"


def run_example(folder, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    own = ("a process has ended", "lost a process", "whole:", "lost:")  # others are of Ray
    return [line for line in done.stdout.splitlines() if line.startswith(own)]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_that_loses_the_node_of_process_0_has_the_same_rows(lost, tmp_path):
    *lines, last = run_example(tmp_path, str(lost))
    counts = [2, 2, 1][: lost + 1]  # of three nodes, one is spare at first
    whole = ["a process has ended, of 2, resumed from step None"] * 2
    assert lines[:2] == whole
    (rows,) = re.findall(r"whole: 100 rows, (\w{16})", lines[2])
    assert last == f"lost: 100 rows, {rows}"
    after = lines[3:]
    assert after[:lost] == [f"lost a process of {count}, starting again" for count in counts[:lost]]
    ended = [re.fullmatch(r"a process has ended, of (\d), resumed from step (\d+)", line)
             for line in after[lost:]]  # fmt: skip
    assert [int(found[1]) for found in ended] == [counts[-1]] * counts[-1]
    assert all(int(found[2]) >= 100 * lost for found in ended)
    if lost == 1:
        shown = SHOWN.read_text().splitlines()
        alike = lambda line: re.sub(r"step \d+|\w{16}", "", line)
        assert [*map(alike, shown)] == [*map(alike, [*lines, last])]


def test_start_distributed_says_what_an_actor_of_several_has_to_pass():
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def start():
        try:
            return sf.start_distributed().how
        except sf.ConfigError as error:
            return str(error)

    ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        found = []
        for count in (1, 2):
            group = placement_group([{"CPU": 1}] * count)
            place = PlacementGroupSchedulingStrategy(group)
            remote = ray.remote(num_cpus=1)(start).options(scheduling_strategy=place)
            found.append(ray.get(remote.remote()))
        assert sf.start_distributed().how == "alone"  # in the driver
    finally:
        ray.shutdown()
    alone, refused = found
    assert alone == "alone"
    assert refused.startswith("Ray: expected coordinator, processes and process, since ")
    assert "in a placement group of 2 bundles; pass them from the driver" in refused
