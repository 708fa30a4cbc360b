"""`RunDirectory(upload=URL)` copies the files of a run to object storage."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf

from .runs import rows

FILES = ("run.json", "metrics.jsonl", "metrics.csv", "report.html")


@pytest.fixture
def bucket(tmp_path):
    return tmp_path / "bucket"


def run(tmp_path, bucket, steps, **options):
    batches = sf.batches({"x": np.arange(8, dtype=np.float32)}, 4, seed=0)
    options.setdefault("checkpoints", sf.Checkpoints(f"file://{bucket}", every=4))
    return sf.fit(
        STEP, start(), batches, steps=steps, log_every=2,
        run_dir=sf.RunDirectory(tmp_path / "run", upload=f"file://{bucket}"), **options,
    )  # fmt: skip


def test_the_files_of_a_run_are_copied(tmp_path, bucket):
    run(tmp_path, bucket, 6)
    for name in FILES:
        assert (bucket / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name


def test_at_a_checkpoint_the_copy_has_the_rows_up_to_it(tmp_path, bucket):
    copied_rows = []

    class Look(sf.writers.Writer):
        def flush(self):  # before the files are copied
            path = bucket / "metrics.jsonl"
            copied_rows.append(path.read_text().count("\n") if path.exists() else 0)

    checkpoints = sf.Checkpoints(f"file://{bucket}", every=4, async_=False)
    run(tmp_path, bucket, 8, hooks=sf.log_to(Look()), checkpoints=checkpoints)
    assert copied_rows[:2] == [0, 2]  # the rows of steps 2 and 4, with the checkpoint of step 4
    assert (bucket / "metrics.jsonl").read_text().count("\n") == 4


def test_a_bucket_that_is_not_writable_is_found_out_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    run_dir = sf.RunDirectory(tmp_path / "run", upload=f"file://{tmp_path}/file")
    with pytest.raises(sf.errors.CheckpointError, match="cannot be written"):
        sf.fit(STEP, start(), [{"x": np.ones(4)}], run_dir=run_dir)


def test_a_copy_that_fails_later_causes_a_warning(tmp_path, bucket):
    def remove(event):
        if event.step == 2:
            for name in FILES:
                (bucket / name).unlink(missing_ok=True)
                (bucket / name).mkdir(parents=True)

    with pytest.warns(RuntimeWarning, match="upload: the files of the run are not up to date"):
        result = run(tmp_path, bucket, 8, hooks=remove)
    assert result.steps == 8


URL = "upload: expected a URL such as 's3://bucket/run', g"


@pytest.mark.parametrize(
    ("upload", "has_directory", "message"),
    [
        *((value, True, URL) for value in ("runs/a", 3, b"s3://a", "")),
        ("s3://bucket/run", False, "upload: expected the path of a directory to copy"),
    ],
)
def test_it_needs_a_url_and_a_directory(tmp_path, upload, has_directory, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.RunDirectory(tmp_path if has_directory else None, upload=upload)


def test_a_run_that_returns_to_an_earlier_host_continues_the_copy_of_the_later_one(
    tmp_path, bucket
):
    run(tmp_path / "first", bucket, 4)
    second = run(tmp_path / "second", bucket, 8)
    assert (second.resumed, second.history["train/loss"].steps) == (4, [2, 4, 6, 8])
    assert rows(bucket / "metrics.jsonl") == [2, 4, 6, 8]
    result = run(tmp_path / "first", bucket, 12)
    assert result.resumed == 8
    assert result.history["train/loss"].steps == [2, 4, 6, 8, 10, 12]
    assert (
        rows(tmp_path / "first/run/metrics.jsonl")
        == rows(bucket / "metrics.jsonl")
        == [2, 4, 6, 8, 10, 12]
    )
    attempts = json.loads((bucket / "run.json").read_text())["attempts"]
    assert [attempt["to"] for attempt in attempts] == [4, 8, 12]


def test_local_metrics_that_go_further_than_the_copy_stay(tmp_path, bucket):
    run(tmp_path, bucket, 8)
    complete = (bucket / "metrics.jsonl").read_text()
    (bucket / "metrics.jsonl").write_text("".join(complete.splitlines(keepends=True)[:2]))
    assert run(tmp_path, bucket, 12).history["train/loss"].steps == [2, 4, 6, 8, 10, 12]
    assert rows(bucket / "metrics.jsonl") == [2, 4, 6, 8, 10, 12]


def test_a_fetch_that_is_cut_is_done_again(tmp_path, bucket, monkeypatch):
    run(tmp_path, bucket, 8)
    shutil.rmtree(tmp_path / "run")
    write = Path.write_bytes

    def cut(path, content):
        if path.name.startswith("metrics.jsonl"):
            write(path, content[: len(content) // 2])
            raise KeyboardInterrupt
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", cut)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, bucket, 12)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert run(tmp_path, bucket, 12).history["train/loss"].steps == [2, 4, 6, 8, 10, 12]
    assert rows(bucket / "metrics.jsonl") == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_damaged_copy_causes_a_warning_and_the_local_file_stays(tmp_path, bucket, name):
    run(tmp_path, bucket, 4)
    (bucket / name).write_text('{"step": 2, "train/lo\n')
    with pytest.warns(
        RuntimeWarning, match=f"upload: .*{name}.*; the run continues with the local f"
    ):
        result = run(tmp_path, bucket, 8)
    assert result.history["train/loss"].steps == [2, 4, 6, 8]
    assert rows(bucket / "metrics.jsonl") == [2, 4, 6, 8]
