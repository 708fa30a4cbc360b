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
LINES = re.compile(
    r"a process has ended, of \d, resumed from step \w+|lost a process of \d, starting again|"
    r"(?:whole|lost): \d+ rows, \w{16}"
)


def run_example(folder, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    # Ray prints in a thread, even between a line of the example and its end.
    return LINES.findall(done.stdout)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_that_loses_the_node_of_process_0_has_the_same_rows(lost, tmp_path):
    *lines, last = run_example(tmp_path, str(lost))
    whole = ["a process has ended, of 2, resumed from step None"] * 2
    assert lines[:2] == whole
    (rows,) = re.findall(r"whole: 100 rows, (\w{16})", lines[2])
    assert last == f"lost: 100 rows, {rows}"
    # Ray may try a lost node once more before it sees the loss.
    losses = [line for line in lines[3:] if line.startswith("lost a process")]
    assert len(losses) >= lost
    assert losses[0] == "lost a process of 2, starting again"
    ends = lines[3 + len(losses) :]
    ended = [re.fullmatch(r"a process has ended, of (\d), resumed from step (\d+)", line)
             for line in ends]  # fmt: skip
    assert [int(found[1]) for found in ended] == ([2, 2] if lost == 1 else [1])
    assert all(int(found[2]) >= 100 * lost for found in ended)
    if lost == 1:
        shown = SHOWN.read_text().splitlines()
        alike = lambda line: re.sub(r"step \d+|\w{16}", "", line)
        assert [*map(alike, shown)] == [*map(alike, [*lines[:3], losses[0], *ends, last])]


def test_start_distributed_says_what_an_actor_of_several_has_to_pass():
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def start():
        try:
            return sf.start_distributed().how
        except sf.errors.ConfigError as error:
            return str(error)

    ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        found = []
        for count in (1, 2):
            group = placement_group([{"CPU": 1}] * count)
            place = PlacementGroupSchedulingStrategy(group)
            remote = ray.remote(num_cpus=1)(start).options(scheduling_strategy=place)
            found.append(ray.get(remote.remote(), timeout=120))
            remove_placement_group(group)  # or it keeps a CPU of the two that the next one needs
        assert sf.start_distributed().how == "alone"  # in the driver
    finally:
        ray.shutdown()
    alone, refused = found
    assert alone == "alone"
    assert refused.startswith("Ray does not number the actors of a placement group of 2 bundles; ")
    assert "pass coordinator, processes and process from the driver" in refused
