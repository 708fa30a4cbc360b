"""Event files are those of TensorBoard, written without TensorFlow."""

import io
import itertools
import struct
import time

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from stepfold.writers.tensorboard import tensorboard


def crc32c(data):
    """The checksum of RFC 3720, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    """Read TFRecords: length, its checksum, data, its checksum."""
    data = path.read_bytes()
    while data:
        length, check = struct.unpack("<QI", data[:12])
        assert check == masked(data[:8])
        record, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4]) == (masked(record),)
        yield Event.FromString(record)
        data = data[4:]


def files(folder):
    return sorted(folder.glob("events.out.tfevents.*"))


def events(folder):
    """The events of all files, in the order in which TensorBoard reads them, without headers."""
    for path in files(folder):
        head, *rest = records(path)
        assert head.file_version == "brain.Event:2"
        yield from rest


def shown(folder):
    """The scalars that TensorBoard shows: a session start hides its step and later ones."""
    found = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            found = [one for one in found if one[0] < event.step]
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_scalars(tmp_path):
    writer = tensorboard(tmp_path / "run")
    writer.write_scalars(10, {"train/loss (mean)": 0.1, "count": np.int64(3)})
    writer.write_scalars(20, {"train/loss (mean)": float("nan")})
    first, second = events(tmp_path / "run")  # without close or flush
    assert [(value.tag, value.simple_value) for value in first.summary.value] == [
        ("train/loss (mean)", np.float32(0.1)),
        ("count", 3.0),
    ]
    assert (first.step, second.step) == (10, 20)
    assert np.isnan(second.summary.value[0].simple_value)
    assert 0 <= second.wall_time - first.wall_time < 60
    writer.close()


@pytest.fixture
def values(tmp_path):
    """Return a function that calls a method of a writer, and reads the values of its event."""

    def write(method, *arguments):
        writer = tensorboard(tmp_path)
        getattr(writer, method)(*arguments)
        writer.close()
        (event,) = events(tmp_path)
        return list(event.summary.value)

    return write


def test_texts(values):
    (value,) = values("write_texts", 3, {"sample": "**Wörter**"})
    assert value.tag == "sample/text_summary"
    assert value.metadata.plugin_data.plugin_name == "text"
    assert [text.decode() for text in value.tensor.string_val] == ["**Wörter**"]


def test_histograms(values):
    arrays = {"w (all)": np.array([0.0, 1.0, 1.0, 4.0]), "bad": np.array([np.nan, 2.0])}
    good, bad, nonfinite = values("write_histograms", 3, arrays, {"w (all)": 4})
    assert good.tag == "w (all)"
    assert list(good.histo.bucket_limit) == [0, 1, 2, 3, 4]
    assert list(good.histo.bucket) == [0, 1, 2, 0, 1]
    assert (good.histo.min, good.histo.max, good.histo.num) == (0, 4, 4)
    assert (good.histo.sum, good.histo.sum_squares) == (6, 18)
    assert bad.histo.num == 1
    assert (nonfinite.tag, nonfinite.simple_value) == ("bad/nonfinite", 1)


def test_images(values):
    batch = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), np.uint8)
    written = values("write_images", 3, {"digits": batch, "one (1)": np.full((5, 4, 1), 0.5)})
    assert [value.tag for value in written] == ["digits/0", "digits/1", "one (1)"]
    content = [io.BytesIO(value.image.encoded_image_string) for value in written]
    first, second, one = (np.asarray(Image.open(png)) for png in content)
    np.testing.assert_array_equal([first, second], batch)
    assert (one == 128).all()
    assert (written[0].image.height, written[0].image.width) == (5, 4)


def test_hparams(values):
    (value,) = values("write_hparams", {"lr": 0.5, "net": "mlp", "nesterov": True, "widths": (8,)})
    assert value.tag == "_hparams_/session_start_info"
    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    kept = content.session_start_info.hparams
    assert (kept["lr"].number_value, kept["nesterov"].bool_value) == (0.5, True)
    assert (kept["net"].string_value, kept["widths"].string_value) == ("mlp", "(8,)")


@pytest.mark.parametrize("passed", [0.1, -3600.0], ids=["within one second", "the clock goes back"])
def test_a_resumed_run_hides_later_steps(tmp_path, monkeypatch, passed):
    assert crc32c(b"123456789") == 0xE3069283  # the standard's
    clock = itertools.count(time.time(), passed)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    for start in (0, 20, 30):
        writer = tensorboard(tmp_path)
        writer.resume(start)
        for step in range(start + 10, 60, 10):
            writer.write_scalars(step, {"loss": start + step / 100})
        writer.close()
    assert len(files(tmp_path)) == 3
    assert [(step, round(value, 2)) for step, _, value in shown(tmp_path)] == [
        *((10, 0.1), (20, 0.2), (30, 20.3), (40, 30.4), (50, 30.5))
    ]


def test_errors_name_the_folder(tmp_path, monkeypatch):
    writer = tensorboard(tmp_path)
    writer.write_scalars(1, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
            writer.write_scalars(2, {"a": 2})
    writer.write_scalars(3, {"a": 3})
    writer.close()
    assert [step for step, *_ in shown(tmp_path)] == [1, 3]
