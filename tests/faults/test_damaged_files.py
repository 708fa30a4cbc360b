"""Damaged files of a run: one of stepfold's errors says what to do, or the run goes on without.

Checkpoints are in test_corruption.py and test_hostile_checkpoints.py, locks in test_run_lock.py.
"""

import itertools
import json
import os
import shutil
import signal
import warnings
import zlib

import jax
import numpy as np
import pytest
from tests.small import STEP, full_but, start

import stepfold as sf
from stepfold.__main__ import main
from stepfold.checkpoint.manifest import encode_checked, read_checked
from stepfold.runs.report.read import read_metrics_file, read_run_data

DEEP = {"too deep to parse": 100_000, "deep": 500}
DAMAGE = {
    **{name: b"[" * depth + b"]" * depth for name, depth in DEEP.items()},
    "cut": b'{"step": 2, "tr',
    "an integer of 5000 digits": b'{"step": %s}' % (b"9" * 5000),
    "an integer of 400 digits": b'{"step": 2, "train/loss": %s, "attempts": []}' % (b"9" * 400),
    "not UTF-8": b'{"step": 2, "train/loss\xed\xa0\x80": 1.0}',
    "zeros": b"\0" * 64,
    "other JSON": b"3",
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
}
SURROGATE = "train/\\ud800"
USUAL = ("too deep to parse", "an integer of 400 digits", "not UTF-8", "a pipe")
KINDS = [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.full) for kind in DAMAGE]


def damage(path, kind, end=b""):
    content = DAMAGE[kind]
    if callable(content):
        path.unlink(missing_ok=True)
        content(path)
    else:
        path.write_bytes(content + end)


@pytest.fixture(autouse=True)
def a_pipe_does_not_block():
    def fail(*_):
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run(folder, steps, **options):
    batches = sf.batches({"x": np.arange(8, dtype=np.float32)}, 4, seed=0)
    options = {"checkpoints": sf.Checkpoints(every=2, keep=None), **options}
    return sf.fit(STEP, start(), batches, steps=steps, log_every=2, run_dir=folder, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    run(folder, 4)
    return folder


@pytest.fixture
def folder(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


# run.json


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_without_a_damaged_run_json(folder, kind):
    damage(folder / "run.json", kind)
    with pytest.warns(UserWarning, match=r"run\.json: expected .*; it is now .*run\.json\.aside"):
        result = run(folder, 8)
    assert (result.resumed, result.steps) == (4, 8)
    assert result.history["train/loss"].steps == [2, 4, 6, 8]
    (attempt,) = json.loads((folder / "run.json").read_bytes())["attempts"]
    assert (attempt["from"], attempt["to"]) == (4, 8)
    assert "2 of" not in (folder / "report.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_refuses_a_damaged_run_json(folder, capsys, kind):
    damage(folder / "run.json", kind)
    assert main(["report", str(folder)]) == 1
    assert "run.json: expected " in (error := capsys.readouterr().err)
    assert "move it away, and the rest of the run is shown without it" in error


def test_half_of_a_surrogate_pair_in_run_json_is_replaced(folder):
    info = json.loads((folder / "run.json").read_text())
    info["attempts"][0]["stop"]["message"] = "\ud800 stopped"
    (folder / "run.json").write_text(json.dumps({**info, "program": "\udcff.py"}))
    assert read_run_data(folder).attempts[0]["stop"]["message"] == "? stopped"
    assert main(["report", str(folder)]) == 0
    run(folder, 8)


# metrics.jsonl


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values != ("zeros",)])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_refuses_damaged_metrics_before_its_first_step(folder, kind, resumes):
    damage(folder / "metrics.jsonl", kind, b"\n")
    if not resumes:
        shutil.rmtree(folder / "checkpoints")
    with pytest.raises(
        sf.errors.ConfigError, match=r"metrics\.jsonl.*; (correct it|move it away|give a)"
    ):
        run(folder, 8)


NULS = {  # what a power loss may leave of the rows of steps 2 and 4, and which of them are left
    "a row": (lambda rows: rows + b"\0" * 40 + b"\n", {2, 4}),
    "a row that is not complete": (lambda rows: rows + b"\0" * 40, {2, 4}),
    "the end of a row": (lambda rows: rows[:-9] + b"\0" * 9 + b"\n", {2}),
    "all": (lambda rows: b"\0" * len(rows), set()),
    "all, and another row": (lambda rows: b"\0" * len(rows) + b"\n\0\0\n", set()),
}


def run_with_files(folder, steps):
    files = [
        sf.writers.jsonl(folder / "own.jsonl"),
        sf.writers.jsonl(folder / "own.csv", csv=True),
    ]
    hooks = [sf.log_to(file, name=f"{i}") for i, file in enumerate(files)]
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = run(folder, steps, hooks=hooks)
    return result, [str(warning.message) for warning in caught]


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "lost"),
    full_but(
        [("metrics.jsonl", "a row")],
        itertools.product(["metrics.jsonl", "own.jsonl", "own.csv.jsonl"], NULS),
    ),
)
def test_nul_bytes_are_cut_from_the_rows_with_one_warning(tmp_path, name, lost):
    run_with_files(tmp_path, 4)
    path, (change, left) = tmp_path / name, NULS[lost]
    path.write_bytes(change(path.read_bytes()))
    result, (message,) = run_with_files(tmp_path, 8)
    assert (result.resumed, result.steps) == (4, 8)
    assert f"{name}: the file ended in NUL bytes, as after a power loss; they are" in message
    kept = left | ({4} if name == "metrics.jsonl" else set())  # the checkpoint has the last row
    assert steps_of(path) == [*sorted(kept), 6, 8]


@pytest.mark.full
@pytest.mark.parametrize("lost", NULS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "own.jsonl"])
def test_a_new_run_starts_over_nul_bytes(tmp_path, name, lost):
    run_with_files(tmp_path, 4)
    path = tmp_path / name
    path.write_bytes(NULS[lost][0](path.read_bytes()))
    shutil.rmtree(tmp_path / "checkpoints")
    run_with_files(tmp_path, 8)
    assert steps_of(path) == [2, 4, 6, 8]


def test_a_file_of_another_program_that_begins_with_nul_bytes_is_left_alone(tmp_path):
    content = b"\0" * 40 + b"\nan image"
    (tmp_path / "own.jsonl").write_bytes(content)
    with pytest.raises(
        sf.errors.ConfigError, match=r"own\.jsonl: expected a file that begins with"
    ):
        run(tmp_path, 4, hooks=sf.log_to(sf.writers.jsonl(tmp_path / "own.jsonl")))
    assert (tmp_path / "own.jsonl").read_bytes() == content


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_shows_the_metrics_that_are_not_damaged(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    if callable(DAMAGE[kind]):
        damage(path, kind)
        with pytest.raises(sf.errors.DataError, match=r"metrics\.jsonl: expected .*; move it away"):
            read_metrics_file(path)
        return
    good = b'{"step": 1, "train/loss": 1.0}\n', b'{"step": 3, "train/loss": 3.0}\n'
    path.write_bytes(good[0] + DAMAGE[kind] + b"\n" + good[1])
    curves, _, damaged_lines = read_metrics_file(path)
    assert (curves["train/loss"].values.tolist(), damaged_lines) == ([1, 3], 1)


def test_half_of_a_surrogate_pair_in_a_name_is_replaced(folder, capsys):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("train/loss", SURROGATE))
    result = run(folder, 8)
    assert result.history["train/?"].steps == [2]
    assert "train/?" in (folder / "metrics.csv").read_text()
    assert main(["report", str(folder)]) == 0


def test_a_step_that_no_run_reaches_is_damage(folder):
    path = folder / "metrics.jsonl"
    path.write_text(f'{{"step": {2**63}, "train/loss": 1.0}}\n')
    with pytest.raises(sf.errors.ConfigError, match=r"metrics\.jsonl to hold lines like"):
        run(folder, 8)


# The note of rollbacks


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gone_back")
    requests = [sf.hooks.GoBack(skip=(4, 5), why="a spike")]
    hook = lambda event: requests.pop() if event.step == 4 and requests else None
    run(folder, 6, hooks=hook)
    return folder


@pytest.fixture
def series(gone_back, tmp_path):
    return shutil.copytree(gone_back, tmp_path / "run") / "checkpoints"


def saved(series):
    return sorted(path.name for path in series.iterdir() if path.name.isdecimal())


ADVICE = r"rollbacks\.json is damaged: .*; restore it from a copy, or move it away and give bat"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_damaged_note_is_refused_before_a_checkpoint_is_deleted(series, kind, is_checked):
    before, path = saved(series), series / "rollbacks.json"
    damage(path, kind)
    if is_checked and path.is_file():
        path.write_bytes(checked(path.read_bytes()))
    with pytest.raises(sf.errors.CheckpointError, match=ADVICE):
        run(series.parent, 8)
    assert saved(series) == before


def checked(text):
    """Return text with the checksum of its own, as `encode_checked` adds it to good JSON."""
    return b"stepfold crc32 %08x\n" % zlib.crc32(text) + text


GOOD = [4, 2, [3, 4], "a spike"]


@pytest.mark.parametrize(
    "note",
    [
        {}, [3], [GOOD[:3]], [[*GOOD, 1]], [[4, -1, [3, 4], "x"]], [[4, 4, [3, 4], "x"]],
        [[4, 2**63, [3, 4], "x"]], [[4, 2, [4, 3], "x"]], [[4, 2, [-1, 4], "x"]],
        [[4, 2, [3, 10**30], "x"]], [[4, 2, 3, "x"]], [[4, 2, [3, 4], 5]], [[4.0, 2, [3, 4], "x"]],
        [[True, False, [3, 4], "x"]], [GOOD, [4, -1, [3, 4], "x"]],
    ],
    ids=str,
)  # fmt: skip
def test_a_note_of_what_cannot_be_is_refused_before_a_checkpoint_is_deleted(series, note):
    before, path = saved(series), series / "rollbacks.json"
    assert read_checked(path) == [GOOD]
    path.write_bytes(encode_checked(note))
    with pytest.raises(sf.errors.CheckpointError, match=ADVICE):
        run(series.parent, 8)
    assert saved(series) == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values != ("a directory",)])
def test_a_new_run_replaces_a_damaged_note(series, kind):
    for step in saved(series):
        shutil.rmtree(series / step)
    damage(series / "rollbacks.json", kind)
    (series.parent / "metrics.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match=r"rollbacks\.json is damaged: .*; it is replaced"):
        result = run(series.parent, 6)
    assert (result.resumed, result.steps) == (None, 6)
    assert read_checked(series / "rollbacks.json") == []


def test_half_of_a_surrogate_pair_in_the_note_is_replaced(series, capsys):
    (series / "rollbacks.json").write_bytes(encode_checked([[4, 2, [3, 4], "\ud800"]]))
    run(series.parent, 8)
    info = json.loads((series.parent / "run.json").read_text())
    assert info["rollbacks"][0]["why"] == "?"


# Capsules


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failed")
    data = np.arange(32, dtype=np.float32)
    data[23] = np.nan
    sf.fit(STEP, start(), [{"x": rows} for rows in data.reshape(8, 4)], run_dir=folder)
    return folder / "capsules" / "6"


@pytest.fixture
def capsule(failed, tmp_path):
    return shutil.copytree(failed, tmp_path / "capsules" / "6")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_damaged_capsule_is_refused(capsule, kind, is_checked):
    path = capsule / "capsule.json"
    damage(path, kind)
    if is_checked and path.is_file():
        path.write_bytes(checked(path.read_bytes()))
    with pytest.raises(sf.errors.CheckpointError, match=r"capsule(\.json|s/6)") as caught:
        sf.debug.read_capsule(capsule)
    assert any(advice in str(caught.value) for advice in ("copy it again", "check the path"))


DEEP_NODE = json.loads('{"list": [' * 200 + "1" + "]}" * 200)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1}, {"step": 1e9}, {"metric": 3}, {"metrics": [1]}, {"metrics": {"a": "x"}},
        {"key": [3, [1]]}, {"key": ["none", [1, 2]]}, {"key": ["threefry2x32", [-1, 2]]},
        {"key": ["threefry2x32", [1, 2, 3]]}, {"key": ["threefry2x32", [10**30, 2]]},
        {"checkpoint": 3}, {"checkpoint": ["x", "y"]}, {"checkpoint": ["\0", 3]},
        {"mark": 3}, {"mark": [-1, None]}, {"mark": [0, DEEP_NODE]},
        {"mark": [0, {"bytes in base64": 3}]}, {"mark": [0, {"bytes in base64": "é"}]},
        {"batch": {"dict": 3}}, {"batch": {"dict": [3]}}, {"batch": {"dict": [[[], 3]]}},
        {"batch": {"array": ["0", "float32", None]}}, {"batch": {"list": 3}}, {"batch": DEEP_NODE},
        {"arrays": "x"}, {"lost": 3},
        {"lost": [3]}, {"notes": 3}, {"rollbacks": [3]}, {"skipped": [[3]]}, {"skipped": [[3, 1]]},
        {"began": None}, {"can_reread": 3}, {"before": 3}, {"version": None}, {"version": []},
        *(name for name in ("step", "metric", "batch", "mark", "version", "skipped", "lost")),
    ],
    ids=lambda changes: str(changes)[:60],
)  # fmt: skip
def test_a_capsule_of_what_cannot_be_is_refused(capsule, changes):
    """Change entries, or leave one out."""
    path = capsule / "capsule.json"
    content = read_checked(path)
    assert sf.debug.read_capsule(capsule).step == 6
    if isinstance(changes, str):
        del content[changes]
    else:
        content |= changes
    path.write_bytes(encode_checked(content))
    with pytest.raises(sf.errors.CheckpointError, match=r"capsules/6: the capsule is damaged: "):
        sf.debug.read_capsule(capsule)


def test_a_batch_of_another_capsule_is_refused(capsule, tmp_path):
    data = {"step": 6, "batch": {"0": np.ones(3), "1": jax.random.key_data(jax.random.key(0))}}
    content = {**read_checked(capsule / "capsule.json"), "arrays": 1, "lost": []}
    sf.save(capsule / "batch", data, step=6)
    for node in (["0", "none", None], ["1", "uint32", "rbg"], ["9", "float32", None]):
        (capsule / "capsule.json").write_bytes(
            encode_checked({**content, "batch": {"array": node}})
        )
        with pytest.raises(
            sf.errors.CheckpointError, match=r"capsules/6: the capsule is damaged: "
        ):
            sf.debug.read_capsule(capsule)
