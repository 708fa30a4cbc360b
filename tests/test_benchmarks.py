"""Every benchmark runs in its quick form, and its claims that do not depend on time hold.

Only with --full: other tests make the same claims of the library.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = sorted(
    path
    for path in (ROOT / "benchmarks").glob("*.py")
    if "def main(" in path.read_text() and path.stem != "__main__"
)

pytestmark = pytest.mark.full


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_runs_and_claims_without_a_clock_hold(path, program_server, tmp_path):
    # Outside the checkout, only installed packages can be imported.
    printed = program_server.run([path, "--quick"], cwd=tmp_path)
    # Claims about time need a full run on a quiet machine. All others have to hold here.
    assert re.search("^(holds|does not hold by this clock): ", printed, re.MULTILINE)
    assert "does not hold: " not in printed
    assert "def judge(rows):" in path.read_text()  # `python -m benchmarks` reads its claims


def test_one_command_runs_all_benchmarks_and_fails_only_for_claims_without_a_clock(tmp_path):
    for name in ("__main__", "measure"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", tmp_path)
    claim = "def main(argv):\n    return [{'n': 2}]\n\n\ndef judge(rows):\n    return [%s]\n"
    (tmp_path / "slow.py").write_text(claim % "('it is fast', rows[0]['n'], 1)")
    command = [sys.executable, str(tmp_path), "--write", str(tmp_path / "table.md")]
    assert subprocess.run([*command, "slow"], capture_output=True).returncode == 0
    (tmp_path / "wrong.py").write_text(claim % "('it is right', rows[0]['n'], 1, False)")
    (tmp_path / "broken.py").write_text("def main(argv):\n    raise SystemExit(3)\n")
    assert subprocess.run(command, capture_output=True).returncode == 1
    table = (tmp_path / "table.md").read_text()
    assert f"jax {jax.__version__}" in table
    assert table.splitlines()[-3:] == [
        "| broken | it runs, exit code 3 |  |  | does not hold |",
        "| slow | it is fast | 2.000 | 1 | does not hold by this clock |",
        "| wrong | it is right | 2.000 | 1 | does not hold |",
    ]
