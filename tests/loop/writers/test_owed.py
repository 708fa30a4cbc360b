import pytest

import stepfold as sf
from stepfold.loop.writers import lines
from stepfold.loop.writers.owed import Owed


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing while it is full."""
    full = []

    def write(file, data):
        if full:
            raise OSError(28, "No space left on device")
        return real(file, data)

    real = lines.os.write
    monkeypatch.setattr(lines.os, "write", write)
    return full


def test_what_is_refused_for_another_reason_is_not_owed():
    written = []

    def write(step, row):
        if "bad" in row:
            raise ValueError("bad")
        written.append(step)

    owed = Owed(write)
    with pytest.raises(ValueError, match="bad"):
        owed.put(1, {"bad": 0})
    owed.put(2, {})
    assert written == [2]


WANTED = {
    sf.jsonl_writer: '{"step": 1, "a": 1}\n{"step": 2, "a": 2, "b": 0}\n{"step": 3, "a": 3}\n',
    sf.csv_writer: "step,a,b\n1,1,\n2,2,0\n3,3,\n",
}


@pytest.mark.parametrize("make", WANTED)
@pytest.mark.parametrize("last", ["write_scalars", "flush", "close"])
def test_what_a_disk_refused_for_a_while_is_there_later(make, last, disk, tmp_path):
    writer = make(tmp_path / "metrics")
    writer.write_scalars(1, {"a": 1})
    disk.append("full")
    for step, row in [(2, {"a": 2}), (2, {"b": 0}), (3, {"a": 3})]:
        with pytest.raises(OSError, match="No space left"):
            writer.write_scalars(step, row)
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    disk.clear()
    again = (3, {"a": 3}) if last == "write_scalars" else ()
    getattr(writer, last)(*again)
    assert (tmp_path / "metrics").read_text() == WANTED[make]
    writer.close()


@pytest.mark.parametrize("make", WANTED)
def test_what_a_disk_refused_of_later_steps_is_dropped_when_the_run_goes_on(make, disk, tmp_path):
    writer = make(tmp_path / "metrics")
    writer.write_scalars(1, {"a": 1})
    disk.append("full")
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            writer.write_scalars(step, {"a": step})
    disk.clear()
    writer.resume(1)
    writer.close()
    kept = {sf.jsonl_writer: '{"step": 1, "a": 1}\n', sf.csv_writer: "step,a\n1,1\n"}
    assert (tmp_path / "metrics").read_text() == kept[make]
