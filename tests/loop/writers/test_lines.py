import os
import resource
from contextlib import contextmanager

import pytest

import stepfold as sf
from stepfold.loop.writers.lines import Lines, append, read_path


def step_of(line):
    return int(line.split()[1])


def open_lines(path):
    return Lines(path, b"s ", step_of)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "lines.txt"


def test_lines_are_there_when_put_returns(path):
    lines = open_lines(path)
    assert lines.step == -1
    lines.put(1, b"s 1 a\n")
    assert path.read_bytes() == b"s 1 a\n"
    lines.put(3, b"s 3 b\n")
    lines.put(3, b"s 3 b c\n")
    assert path.read_bytes() == b"s 1 a\ns 3 b c\n"
    assert list(lines) == [b"s 1 a\n", b"s 3 b c\n"]
    lines.close()


def test_another_opening_goes_on(path):
    first = open_lines(path)
    first.put(1, b"s 1 a\n")
    first.close()
    lines = open_lines(path)
    assert (lines.step, lines.last) == (1, b"s 1 a\n")
    lines.put(1, b"s 1 ab\n")
    assert path.read_bytes() == b"s 1 ab\n"
    lines.close()


@pytest.mark.parametrize("torn", [b"", b"s", b"s 5", b"s 5 abc", b"s 5 " + b"x" * 9000])
@pytest.mark.parametrize("whole", [b"", b"s 1 a\ns 2 b\n"])
def test_what_is_half_written_is_cut_off(path, whole, torn):
    path.parent.mkdir()
    path.write_bytes(whole + torn)
    lines = open_lines(path)
    assert path.read_bytes() == whole
    assert lines.step == (2 if whole else -1)
    lines.close()


@pytest.mark.parametrize("there", [b"x", b"once upon a time", b"{}\n", b"s\t1\n"])
def test_a_file_of_another_kind_is_left_as_it_is(path, there):
    path.parent.mkdir()
    path.write_bytes(there)
    with pytest.raises(sf.ConfigError, match="expected a file that begins with 's ', as this"):
        open_lines(path)
    assert path.read_bytes() == there


def test_steps_do_not_go_back(path):
    lines = open_lines(path)
    lines.put(4, b"s 4\n")
    with pytest.raises(
        ValueError,
        match=r"lines.txt: expected step 4, which is there, or a later one, got 3; "
        r"call resume\(3\) first",
    ):
        lines.put(3, b"s 3\n")
    assert path.read_bytes() == b"s 4\n"
    lines.close()


@pytest.mark.parametrize(("step", "left"), [(9, 3), (5, 3), (4, 2), (2, 2), (1, 1), (0, 0)])
def test_later_lines_are_dropped(path, step, left):
    there = [b"s 1 a\n", b"s 2 b\n", b"s 5 c\n"]
    path.parent.mkdir()
    path.write_bytes(b"".join(there))
    lines = open_lines(path)
    lines.drop_after(step)
    assert path.read_bytes() == b"".join(there[:left])
    assert lines.step == [-1, 1, 2, 5][left]
    lines.put(9, b"s 9\n")
    assert list(lines) == [*there[:left], b"s 9\n"][-left - 1 :]
    lines.close()


def test_rewriting_keeps_permissions_and_links(path, tmp_path):
    link = tmp_path / "link"
    path.parent.mkdir()
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    lines = open_lines(link)
    lines.put(1, b"s 1\n")
    lines.rewrite([b"s 1 a\n", b"s 2\n"])
    lines.put(2, b"s 2 b\n")
    lines.close()
    assert link.is_symlink()
    assert path.read_bytes() == b"s 1 a\ns 2 b\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in path.parent.iterdir()] == ["lines.txt"]


def test_what_a_killed_rewriting_left_is_removed(path):
    path.parent.mkdir()
    path.with_name("lines.txt.new").write_bytes(b"s 1")
    open_lines(path).close()
    assert [file.name for file in path.parent.iterdir()] == ["lines.txt"]


def test_a_short_write_is_gone_on_with(path, monkeypatch):
    write = os.write
    lines = open_lines(path)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:2]))
    lines.put(1, b"s 1 abc\n")
    assert path.read_bytes() == b"s 1 abc\n"
    lines.close()


@contextmanager
def full_at(size):
    """Have the system refuse to write more than so many bytes into any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there(path):
    lines = open_lines(path)
    lines.put(1, b"s 1 a\n")
    lines.put(2, b"s 2 b\n")
    for step, line in [(3, b"s 3 long\n"), (2, b"s 2 b long\n")]:
        with pytest.raises(OSError, match=f"File too large: '{path}'") as error, full_at(16):
            lines.put(step, line)
        assert error.value.__notes__[0].startswith(f"while writing {path}: what was written before")
        assert path.read_bytes() == b"s 1 a\ns 2 b\n"
    with pytest.raises(OSError, match=f"File too large: '{path}"), full_at(16):
        lines.rewrite([b"s 1 a\n", b"s 2 b longer than that\n"])
    lines.put(2, b"s 2 b c\n")
    lines.put(3, b"s 3 long\n")
    lines.close()
    assert path.read_bytes() == b"s 1 a\ns 2 b c\ns 3 long\n"
    assert [file.name for file in path.parent.iterdir()] == ["lines.txt"]


def test_append_writes_all_or_nothing(tmp_path, monkeypatch):
    file = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    append(file, b"before")
    write, calls = os.write, []

    def failing(file, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        append(file, b"after")
    assert (tmp_path / "a").read_bytes() == b"before"
    os.close(file)


def test_paths_that_cannot_be_are_refused(tmp_path, monkeypatch):
    with pytest.raises(sf.ConfigError, match=r"x: expected a file, got the directory .*; name a"):
        read_path("x", tmp_path)
    with pytest.raises(sf.ConfigError, match=r"x: expected a path, got int 3"):
        read_path("x", 3)
    with pytest.raises(sf.ConfigError, match=r"x: expected a path, got str ''"):
        read_path("x", "")
    (tmp_path / "file").touch()
    with pytest.raises(sf.ConfigError, match=r"expected a path in a directory, .*file is a file"):
        read_path("x", tmp_path / "file" / "a.csv")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(sf.ConfigError, match=r"there is no permission to write to .*chmod"):
        read_path("x", tmp_path / "new" / "a.csv")


def test_reading_a_path_touches_nothing(tmp_path):
    read_path("x", tmp_path / "new" / "a.csv")
    assert list(tmp_path.iterdir()) == []
