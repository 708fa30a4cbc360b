"""An offline run of Weights & Biases holds what was written."""

import json
import struct
import time

import numpy as np
import pytest

import stepfold as sf
from stepfold.writers.combinators import async_writer
from stepfold.writers.wandb import wandb

BLOCK = 32768


def records(folder):
    """Read the file of an offline run: a header of 7 bytes, and then leveldb's log format."""
    from wandb.proto.wandb_internal_pb2 import Record  # takes seconds, in each worker that collects

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts = path.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while at < len(data):
        if BLOCK - at % BLOCK < 7:  # what is left of a block has no room for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(b"".join(parts))
            parts = []


def wait_until_written(folder):
    """`finish` returns a moment before W&B's own process has put all on the disk."""
    until = time.monotonic() + 30
    while "exit" not in [record.WhichOneof("record_type") for record in records(folder)]:
        assert time.monotonic() < until
        time.sleep(0.05)


def history(folder):
    found = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            found.append({key: value for key, value in row.items() if key[0] != "_"})
            found[-1]["step"] = row["_step"]
    return found


def offline(folder, **options):
    from wandb import Settings

    quiet = Settings(
        silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True,
        x_disable_machine_info=True, x_save_requirements=False,
    )  # fmt: skip
    return wandb(project="tests", mode="offline", dir=str(folder), settings=quiet, **options)


def test_an_offline_run_holds_what_was_written(tmp_path):
    writer = async_writer(offline(tmp_path, config={"seed": 1}))
    writer.write_hparams({"lr": np.float32(0.5)})
    writer.write_scalars(10, {"train/loss": 0.1, "count": np.int64(3)})
    writer.write_scalars(10, {"eval/loss": 0.25})
    writer.write_texts(20, {"note": "Wörter"})
    writer.write_histograms(30, {"w": np.array([0.0, 1.0, 1.0, np.nan])}, {"w": 2})
    writer.write_images(30, {"digits": np.zeros((2, 5, 4, 1)), "colour": np.zeros((5, 4, 3))})
    writer.flush()
    writer.close()
    wait_until_written(tmp_path)
    first, second, third = history(tmp_path)
    assert first == {"step": 10, "train/loss": 0.1, "count": 3, "eval/loss": 0.25}
    assert second == {"step": 20, "note": "Wörter"}
    assert third["step"] == 30
    assert (third["w/values"], third["w/bins"]) == ([1, 2], [0, 0.5, 1])
    assert third["w/nonfinite"] == 1
    assert [third[f"digits/{name}"] for name in ("count", "width", "height")] == [2, 4, 5]
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))) == 2
    config = {}
    for record in records(tmp_path):
        for source in (record.config, record.run.config):
            config |= {item.key: json.loads(item.value_json) for item in source.update}
    assert config["lr"] == 0.5
    assert config["seed"] == 1


def test_no_run_is_started_before_the_first_write_or_after_close(tmp_path):
    writer = offline(tmp_path)
    writer.flush()
    with pytest.raises(TypeError, match="loss: expected one real number"):
        writer.write_scalars(1, {"loss": "x"})
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(sf.errors.ConfigError, match="write after close.*resume='must'"):
        writer.write_scalars(1, {"a": 1})
