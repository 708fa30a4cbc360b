"""Metric files hold each step once, exactly, through full disks and foreign files."""

import csv
import json
import math
import os
import resource
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.writers.jsonl import (
    RunWriter,
    jsonl,
    last_step,
    read_rows,
    write_csv,
)

NUMBERS = [0.1, 1e-310, -0.0, 2**70, -3, 1 / 3, math.inf, -math.inf, math.nan]


def with_csv(path):
    return jsonl(path, csv=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def table(tmp_path):
    return tmp_path / "run" / "metrics.csv"


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while the list has an element."""
    full, write = [], os.write

    def write_unless_full(file, data):
        if full:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    return full


@contextmanager
def full_at(size):
    """Let no file grow beyond a size, as a disk that is full in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_rows(path):
    with path.open(newline="") as file:
        found = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in found), "not rectangular"
    return found


def write(make, path, written):
    writer = make(path)
    for step, scalars in written:
        writer.write_scalars(step, scalars)
    writer.close()


def test_a_step_is_one_line_in_the_order_of_names(path):
    writer = jsonl(path)
    writer.write_scalars(10, {"train/loss": 0.5, "train/accuracy": np.float32("nan")})
    writer.write_scalars(10, {"eval/loss": jnp.float32(0.25)})
    writer.write_scalars(15, {})  # adds no line
    writer.write_scalars(jnp.int32(20), {"b": 1, "a": 1})
    writer.close()
    writer.write_scalars(20, {"a": 2, "c": 3})  # the later value counts, even now
    writer.close()
    assert path.read_text() == (
        '{"step": 10, "train/loss": 0.5, "train/accuracy": NaN, "eval/loss": 0.25}\n'
        '{"step": 20, "b": 1, "a": 2, "c": 3}\n'
    )


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_round_trip(path, table, value):
    writer = jsonl(path, csv=table)
    writer.write_scalars(1, {"x": value})
    writer.close()
    ((_, row),) = read_rows(path)
    for number in (rows(path)[0]["x"], row["x"], type(value)(table_rows(table)[0]["x"])):
        assert type(number) is type(value)
        assert repr(number) == repr(value)


def test_texts_histograms_images_and_settings(path):
    writer = jsonl(path)
    writer.write_hparams({"lr": np.float32(0.5), "widths": (8, 8)})
    writer.write_texts(5, {"sample": "ein Wörtchen\nand more"})
    writer.write_histograms(5, {"w": np.array([0.0, 1.0, np.nan])}, {"w": 2})
    writer.write_images(5, {"digits": np.zeros((2, 4, 3, 1))})
    writer.close()
    assert rows(path) == [
        {"step": 0, "hparams": {"lr": 0.5, "widths": "(8, 8)"}},
        {
            "step": 5,
            "sample": "ein Wörtchen\nand more",
            "w": {"counts": [1, 1], "edges": [0.0, 0.5, 1.0], "nonfinite": 1},
            "digits": {"shape": [2, 4, 3, 1]},
        },
    ]


@pytest.mark.parametrize(("step", "kept"), [(9, 3), (5, 3), (4, 2), (2, 2), (1, 1), (0, 0)])
def test_resume_keeps_rows_up_to_the_step(path, step, kept):
    write(jsonl, path, [(1, {"a": 1}), (2, {"a": 2}), (5, {"a": 5})])
    lines = path.read_bytes().splitlines(keepends=True)
    writer = jsonl(path)
    writer.resume(step)
    assert path.read_bytes() == b"".join(lines[:kept])
    assert last_step(path) == [None, 1, 2, 5][kept]
    writer.write_scalars(9, {"a": 9})
    writer.close()
    assert path.read_bytes() == b"".join(lines[:kept]) + b'{"step": 9, "a": 9}\n'


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 5, "a', b'{"step": 5, "' * 700])
@pytest.mark.parametrize("complete", [b"", b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'])
def test_an_incomplete_last_line_is_ignored_and_removed(path, complete, torn):
    path.parent.mkdir()
    path.write_bytes(complete + torn)
    steps = [1, 2] if complete else []
    assert [step for step, _ in read_rows(path)] == steps
    assert last_step(path) == (steps[-1] if steps else None)
    write(jsonl, path, [(3, {"a": 3})])
    assert path.read_bytes() == complete + b'{"step": 3, "a": 3}\n'


def test_steps_do_not_decrease(path):
    write(jsonl, path, [(10, {"loss": 1.0})])
    writer = jsonl(path)
    says = r"expected step 10, the last in the file, or a later one, got 1; call resume\(1\) first"
    with pytest.raises(ValueError, match=f"metrics.jsonl: {says}"):
        writer.write_scalars(1, {"loss": 1.0})
    with pytest.raises(TypeError, match="loss: expected one real number, got str 'x'"):
        writer.write_scalars(20, {"other": 1.0, "loss": "x"})
    writer.close()
    assert rows(path) == [{"step": 10, "loss": 1.0}]


@pytest.mark.parametrize("content", ["x", "once upon a time", "{}\n", '{"step":1}\n', "step,a\n"])
def test_files_of_another_kind_are_refused_and_left_alone(path, content):
    path.parent.mkdir()
    path.write_text(content)
    writer = jsonl(path)
    with pytest.raises(
        sf.errors.ConfigError, match="expected a file that begins with '{\"step\": ', or"
    ):
        writer.write_scalars(1, {"a": 1})
    writer.close()
    assert path.read_text() == content


def test_what_is_not_a_file_is_refused(path):
    path.parent.mkdir()
    os.mkfifo(path)
    writer = jsonl(path)
    with pytest.raises(
        sf.errors.ConfigError, match="expected a file, got .*; move it away, or give ano"
    ):
        writer.write_scalars(1, {"a": 1})
    writer.close()
    assert path.is_fifo()


def test_damaged_lines_and_the_name_step_are_refused(path, tmp_path):
    path.parent.mkdir()
    path.write_text('{"step": 1, "a": 2}\n{"stop": 1}\n')
    message = r"to hold lines like .*, got b'{\"stop\": 1}\\n'; correct it"
    with pytest.raises(sf.errors.ConfigError, match=message):
        jsonl(path).write_scalars(3, {"a": 1})
    with pytest.raises(sf.errors.ConfigError, match=message):
        list(read_rows(path))
    with pytest.raises(sf.errors.ConfigError, match=message):
        last_step(path)
    assert [step for step, _ in read_rows(path, until=0)] == []
    for make in (jsonl, with_csv):
        with pytest.raises(ValueError, match="expected names other than 'step', got 'step'; r"):
            make(tmp_path / "new").write_scalars(3, {"step": 1})


def test_a_short_write_is_continued(path, monkeypatch):
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:2]))
    write(jsonl, path, [(1, {"a": 1})])
    assert path.read_text() == '{"step": 1, "a": 1}\n'


def test_a_write_that_fails_halfway_leaves_nothing(path):
    writer = jsonl(path)
    writer.write_scalars(1, {"a": 1})
    writer.write_scalars(2, {"a": 2})
    before = path.read_bytes()
    for step, row in [(2, {"long name": 2}), (3, {"long name": 3})]:
        with pytest.raises(OSError, match=f"File too large: '{path}'") as error, full_at(44):
            writer.write_scalars(step, row)
        assert error.value.__notes__[0].startswith(f"while writing {path}: rows written before")
        assert path.read_bytes() == before
    writer.close()
    assert rows(path)[1:] == [{"step": 2, "a": 2, "long name": 2}, {"step": 3, "long name": 3}]


ROWS = {
    jsonl: '{"step": 1, "a": 1}\n{"step": 2, "a": 2, "b": 0}\n{"step": 3, "a": 3}\n',
    with_csv: "step,a,b\n1,1,\n2,2,0\n3,3,\n",
}


@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("last", ["write_scalars", "flush", "close", "resume"])
def test_rows_that_a_full_disk_refused_are_written_later(make, last, disk, tmp_path):
    writer, path = make(tmp_path / "metrics"), tmp_path / "metrics"
    writer.write_scalars(1, {"a": 1})
    disk.append("full")
    for step, row in [(2, {"a": 2}), (2, {"b": 0}), (3, {"a": 3})]:
        with pytest.raises(OSError, match="No space left"):
            writer.write_scalars(step, row)
    for method in (writer.flush, writer.flush, writer.close):
        with pytest.raises(OSError, match="No space left"):
            method()
    disk.clear()
    getattr(writer, last)(*{"write_scalars": (3, {"a": 3}), "resume": (1,)}.get(last, ()))
    if last != "close":
        writer.close()
    dropped = {jsonl: '{"step": 1, "a": 1}\n', with_csv: "step,a\n1,1\n"}
    assert path.read_text() == (dropped if last == "resume" else ROWS)[make]
    names = {jsonl: ["metrics"], with_csv: ["metrics", "metrics.jsonl"]}
    assert sorted(each.name for each in tmp_path.iterdir()) == names[make]


def test_read_rows_yields_numbers_up_to_a_step(path):
    assert list(read_rows(path)) == []
    assert last_step(path) is None
    writer = jsonl(path)
    writer.write_hparams({"lr": 0.5})
    for step in (10, 20, 30):
        writer.write_scalars(step, {"loss": step / 4, "count": step})
    writer.write_texts(20 + 10, {"note": "7"})
    writer.close()
    assert list(read_rows(path, until=29)) == [
        (0, {}),
        (10, {"loss": 2.5, "count": 10}),
        (20, {"loss": 5.0, "count": 20}),
    ]
    assert [step for step, _ in read_rows(path)] == [0, 10, 20, 30]
    assert last_step(path) == 30


def test_csv_columns_are_in_order_of_first_appearance(path, table):
    write_csv(path, table)
    assert not table.parent.exists()  # without rows
    writer = jsonl(path, csv=table)
    writer.write_hparams({"lr": 0.5})
    writer.write_scalars(10, {"train/loss": 0.5})
    writer.write_texts(15, {"note": "hello"})
    writer.write_scalars(20, {"train/loss": 0.25})
    writer.write_scalars(20, {"eval/loss": np.float32(0.375)})
    writer.write_scalars(30, {"eval/loss": 2, "train/loss": 1})
    assert not table.exists()
    expected = "step,train/loss,eval/loss\n10,0.5,\n20,0.25,0.375\n30,1,2\n"
    for derive in (writer.flush, lambda: write_csv(path, table), writer.close):
        derive()
        assert table.read_text() == expected
        table.unlink()
    writer.close()
    assert not table.exists()  # nothing was written since then
    write_csv(path, table)
    writer.write_scalars(40, {"a": 2})
    path.unlink()
    writer.close()
    assert table.read_text() == expected  # it outlives the lines that it was derived from


def test_a_csv_file_of_another_program_is_not_replaced(path, table, tmp_path):
    table.parent.mkdir()
    table.write_text("steps,a\n1,2\n")
    with pytest.raises(sf.errors.ConfigError, match="begins with 'step,', or none, got one .* b'"):
        jsonl(path, csv=table).write_scalars(1, {"a": 1})
    assert not path.exists()
    write(jsonl, path, [(1, {"a": 1})])
    for replace in (lambda: write_csv(path, table), lambda: write(with_csv, table, [(1, {})])):
        with pytest.raises(sf.errors.ConfigError, match="begins with 'step,', or none"):
            replace()
    assert table.read_text() == "steps,a\n1,2\n"
    with pytest.raises(sf.errors.ConfigError, match=r"jsonl: csv: expected the path of a file"):
        jsonl(path, csv=tmp_path)


def test_replacing_a_csv_keeps_permissions_and_links(path, table, tmp_path):
    link = tmp_path / "link"
    table.parent.mkdir()
    table.touch()
    table.chmod(0o640)
    link.symlink_to(table)
    write(jsonl, path, [(1, {"a": 1})])
    write_csv(path, link)
    assert link.is_symlink()
    assert table.read_text() == "step,a\n1,1\n"
    assert table.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in path.parent.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_csv_continues(table):
    write(with_csv, table, [(10, {"a": 1, "b": 0.5}), (20, {"b": 2})])
    write(with_csv, table, [(20, {"a": 4, "c": math.nan}), (30, {"c": 1})])
    assert table.read_text() == "step,a,b,c\n10,1,0.5,\n20,4,2,nan\n30,,,1\n"
    with pytest.raises(ValueError, match="expected step 30"):
        with_csv(table).write_scalars(9, {"b": 1})


@pytest.mark.parametrize(
    ("path", "csv", "lines", "table"),
    [
        ("a.jsonl", False, "a.jsonl", None),
        ("a.jsonl", None, "a.jsonl", None),
        ("a.jsonl", True, "a.jsonl", "a.csv"),
        ("a.csv", True, "a.csv.jsonl", "a.csv"),
        ("a", True, "a.jsonl", "a"),
        ("a.jsonl", "b.csv", "a.jsonl", "b.csv"),
        ("a.csv", "b.csv", "a.csv", "b.csv"),
    ],
)
def test_the_names_of_the_lines_and_the_csv(path, csv, lines, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(lambda path: jsonl(path, csv=csv), path, [(10, {"a": 1})])
    contents = {each.name: each.read_text() for each in tmp_path.iterdir()}
    tables = {} if table is None else {table: "step,a\n10,1\n"}
    assert contents == {lines: '{"step": 10, "a": 1}\n', **tables}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_csv_without_its_json_lines_is_refused_and_left_alone(table, is_named):
    lines = table.with_name("metrics.csv.jsonl")
    with_csv = lambda table: jsonl(lines, csv=table) if is_named else jsonl(table, csv=True)
    write(with_csv, table, [(10, {"a": 1})])
    lines.unlink()
    with pytest.raises(
        sf.errors.ConfigError, match=f"^jsonl: {table} is there without {lines}, .*; move"
    ):
        with_csv(table).write_scalars(20, {"a": 2})
    assert table.read_text() == "step,a\n10,1\n"
    assert list(table.parent.iterdir()) == [table]


def test_the_rows_of_a_run_take_numbers_of_earlier_steps(tmp_path):
    """They are inserted in order, and added to the row of their step."""
    path = tmp_path / "metrics.jsonl"
    writer = RunWriter(path, tmp_path / "metrics.csv")
    for step in (2, 4, 6):
        writer.write_scalars(step, {"a": step})
    writer.write_texts(6, {"text": "kept"})
    for step in (4, 3, 1, 6):
        writer.write_scalars(step, {"b": 1 / step})
    writer.write_scalars(8, {"a": 8})
    writer.flush()
    assert not (tmp_path / "metrics.csv").exists()  # a report may derive it before the end
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "b": 1.0},
        {"step": 2, "a": 2},
        {"step": 3, "b": 1 / 3},
        {"step": 4, "a": 4, "b": 0.25},
        {"step": 6, "a": 6, "text": "kept", "b": 1 / 6},
        {"step": 8, "a": 8},
    ]
    assert (tmp_path / "metrics.csv").read_text().startswith("step,b,a\n1,1.0,\n2,,2\n3,")


def test_a_table_of_nul_bytes_is_derived_again(path, table):
    write(jsonl, path, [(1, {"a": 2})])
    table.write_bytes(b"\0" * 20)
    write_csv(path, table)
    assert table.read_text() == "step,a\n1,2\n"
