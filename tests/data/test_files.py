"""Files: paths and formats, indexes, memory, object storage, and what a position knows of them."""

import gc
import gzip
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet
from tests.s3 import Proxy, shared_server, use_credentials

import stepfold as sf
from stepfold.data import file_formats, file_reader
from stepfold.data.file_reader import Cache, FileReader

pytestmark = pytest.mark.not_optimized


def write(folder, contents, suffix="txt"):
    """Write files, all at the same time, so that their positions do not depend on the clock."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / f"{name}.{suffix}"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, (1000, 1000))
    return f"{folder}/*.{suffix}"


# Paths


def test_paths_patterns_and_lists_are_read_in_their_order(tmp_path):
    write(tmp_path / "a", {"1": "a1\n", "2": "a2\n"})
    write(tmp_path / "b", {"1": "b1\n", ".hidden": "hidden\n"})
    a, b = f"{tmp_path}/a/*.txt", tmp_path / "b" / "1.txt"
    assert list(sf.files(a)) == ["a1", "a2"]
    assert list(sf.files(f"{tmp_path}/**/*.txt")) == ["a1", "a2", "b1"]
    assert list(sf.files([b, a])) == ["b1", "a1", "a2"]
    assert list(sf.files(b.as_uri())) == ["b1"]
    assert repr(sf.files([b, a])) == "files(b/1.txt, a/1.txt, a/2.txt: 3 rows)"
    odd = write(tmp_path / "c", {"what? [1]": "odd\n"})
    assert list(sf.files(odd)) == list(sf.files(tmp_path / "c" / "what? [1].txt")) == ["odd"]


@pytest.mark.parametrize(
    ("paths", "kind", "says"),
    [
        (
            [],
            sf.errors.ConfigError,
            r"files: expected a path, a URL, or a list of these, got list \[\]",
        ),
        (3, sf.errors.ConfigError, "got int 3; give a pattern such as 'corpus/"),
        ("none-*.txt", sf.errors.DataError, "files: expected files, got none that fit .*none-"),
        (
            "a/1.txt/b.txt",
            sf.errors.DataError,
            "that can be read, got .*a/1.txt/b.txt: Not a directory",
        ),
        (
            "none.txt",
            sf.errors.DataError,
            r"files: expected files that exist, got .*none.txt: no such",
        ),
        ("a", sf.errors.DataError, "got a directory: .*/a; give a pattern of the files in it"),
        (
            ["a/1.txt", "a/*.txt"],
            sf.errors.DataError,
            "expected each file once, got .*a/1.txt twice",
        ),
        (
            "a/1.log",
            sf.errors.DataError,
            "one suffix of jsonl, .*, got .*a/1.log; give file_format=…",
        ),
        (["a/1.txt", "a/1.jsonl"], sf.errors.DataError, "expected files of one suffix of jsonl"),
        (
            "a/1.jsonl.gz",
            sf.errors.DataError,
            "found by number, got a .gz file; decompress it, or read",
        ),
        (
            "a/zip.txt",
            sf.errors.DataError,
            r"a/zip.txt: expected rows .*, got a gzip file; decompress",
        ),
        ("a/empty.txt", sf.errors.DataError, "files: expected rows, got none in 1 files"),
        (
            "s3://bucket/a.parquet",
            sf.errors.DataError,
            "paths for parquet, got s3://.*; copy the files",
        ),
    ],
)
def test_invalid_paths_are_refused(paths, kind, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", {"1": "1\n"})
    write(tmp_path / "a", {"1": "1\n"}, "log")
    write(tmp_path / "a", {"1": "1\n"}, "jsonl")
    write(tmp_path / "a", {"1": "1\n"}, "jsonl.gz")
    write(tmp_path / "a", {"zip": gzip.compress(b"1\n"), "empty": ""})
    if paths == ["a/1.txt", "a/*.txt"]:
        (tmp_path / "a" / "zip.txt").unlink()
    with pytest.raises(kind, match=says):
        sf.files(paths)


def test_invalid_arguments_are_refused(tmp_path):
    pattern = write(tmp_path, {"1": "1\n"})
    with pytest.raises(
        sf.errors.ConfigError, match=r"file_format: expected one of 'jsonl', .* got 'csv'"
    ):
        sf.files(pattern, file_format="csv")
    with pytest.raises(sf.errors.ConfigError, match="parse: expected a function"):
        sf.files(pattern, parse=3)
    source = sf.files(pattern)
    for index in (1, -2):
        with pytest.raises(IndexError, match=f"files: expected an index below 1, got {index}"):
            source[index]


@pytest.mark.parametrize("package", ["pyarrow", "array_record"])
def test_a_package_that_is_missing_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "find_spec", lambda name: None)
    suffix = "parquet" if package == "pyarrow" else package
    with pytest.raises(
        sf.errors.ConfigError, match=f"files: {package} is not installed; run pip install"
    ):
        sf.files(write(tmp_path, {"1": ""}, suffix))


# Formats


def test_json_is_read_and_parsed(tmp_path):
    pattern = write(tmp_path, {"1": '{"x": 1}\n[2]\n', "2": '"é\\n"'}, "jsonl")
    assert list(sf.files(pattern)) == [{"x": 1}, [2], "é\n"]
    assert list(sf.files(pattern, parse=len)) == [1, 1, 2]
    assert sf.files(pattern, file_format="lines", parse=str.upper)[0] == '{"X": 1}'


@pytest.mark.parametrize(
    ("content", "suffix", "says"),
    [
        (b"1\n\n3\n", "jsonl", r"1.jsonl, row 1: expected JSON, got b'': .* delete blank lines"),
        (b"1\n{'x'}\n", "jsonl", "1.jsonl, row 1: expected JSON, got b\"{'x'}\": Expecting"),
        (b"1\n\xff\xfe\n", "txt", r"1.txt, row 1: expected UTF-8 text, got b'\\xff\\xfe': 'utf-8'"),
    ],
)
def test_an_invalid_row_is_named(content, suffix, says, tmp_path):
    source = sf.files(write(tmp_path, {"1": content}, suffix))
    assert source[0] in (1, "1")
    with pytest.raises(sf.errors.DataError, match=says):
        source[1]


def test_an_error_of_parse_names_the_row(tmp_path):
    source = sf.files(write(tmp_path, {"1": "1\n2\n", "2": "x\n"}), parse=int)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        source[2]
    assert caught.value.__notes__ == ["parsing row 0 of 2.txt, row 2 of the source"]


def write_parquet(folder, sizes, group):
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        table = pyarrow.table(
            {"x": range(start, start + size), "t": [f"t{i}" for i in range(size)]}
        )
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    return f"{folder}/*.parquet"


def write_records(folder, sizes, group):
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        writer = ArrayRecordWriter(f"{folder}/{number}.array_record", f"group_size:{group}")
        for row in range(size):
            writer.write(f"{sum(sizes[:number]) + row}".encode())
        writer.close()
    return f"{folder}/*.array_record"


@pytest.mark.parametrize("write_all", [write_parquet, write_records])
@pytest.mark.parametrize("group", [1, 3, 100])
def test_rows_of_binary_formats_are_found(write_all, group, tmp_path):
    sizes = [5, 0, 7, 1]
    number = (lambda row: row["x"]) if write_all is write_parquet else int
    source = sf.files(write_all(tmp_path, sizes, group), parse=number)
    assert list(source) == list(range(13))
    order = np.array([12, 3, 3, 4, 5, 0, 11])
    assert source.examples(order) == order.tolist()
    assert pickle.loads(pickle.dumps(sf.files(f"{tmp_path}/*")))[0] == sf.files(f"{tmp_path}/*")[0]
    other = tmp_path / f"3.{'parquet' if write_all is write_parquet else 'array_record'}"
    os.utime(other, (1, 1))
    with pytest.raises(
        sf.errors.DataError, match="the file changed or was deleted after the source was"
    ):
        source[12]


def test_a_group_of_parquet_is_read_once(tmp_path, monkeypatch):
    reads, read = [], parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_group",
        lambda file, group: reads.append(group) or read(file, group),
    )
    assert [row["x"] for row in sf.files(write_parquet(tmp_path, [9], 5))] == list(range(9))
    assert reads == [0, 1]


@pytest.mark.parametrize(
    ("suffix", "says"), [("parquet", "a Parquet file"), ("array_record", "an ArrayRecord file")]
)
def test_another_format_is_refused(suffix, says, tmp_path):
    with pytest.raises(sf.errors.DataError, match=f"1.{suffix}: expected {says}, got"):
        sf.files(write(tmp_path, {"1": "no such format" * 9}, suffix))


# Indexes


def test_a_file_is_read_once_and_its_index_is_used(tmp_path, monkeypatch):
    pattern = write(tmp_path / "data", {"1": "a\nb\n", "2": "c"})
    reads, chunks = [], FileReader.chunks
    monkeypatch.setattr(
        FileReader, "chunks", lambda reader, path: reads.append(path) or chunks(reader, path)
    )
    for _ in range(2):
        assert list(sf.files(pattern)) == ["a", "b", "c"]
    assert len(reads) == 2
    names = {path.name for path in (tmp_path / "data" / ".stepfold").iterdir()}
    assert names == {"1.txt.index", "2.txt.index"}
    assert list(sf.files(pattern, index=tmp_path / "elsewhere")) == ["a", "b", "c"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
    assert len(reads) == 4


def test_indexes_keep_their_form(tmp_path, monkeypatch):
    """Those of a corpus were made by earlier releases."""
    monkeypatch.setattr(file_formats, "_BLOCK_BYTES", 6)
    pattern = write(tmp_path, {"1": "a\nb\nc\ndd\ne"})
    sf.files(pattern)
    content = (tmp_path / ".stepfold" / "1.txt.index").read_bytes()
    assert json.loads(content[:4096]) == {
        "version": 1,
        "kind": "Lines",
        "stamp": [10, "1000000000000"],
        "size": 10,
        "rows": 5,
        "stride": 2,
        "bytes": 4096 + 8 * 4,
        "checksum": "972727b8",
    }
    assert np.frombuffer(content[4096:], "<i8").tolist() == [0, 4, 9, 10]
    write(tmp_path / "b", {"1": "a\nb\nc\nd\n"})
    sf.files(tmp_path / "b" / "1.txt")
    content = (tmp_path / "b" / ".stepfold" / "1.txt.index").read_bytes()
    assert np.frombuffer(content[4096:], "<i8").tolist() == [0, 6, 8]


def test_only_the_changed_file_is_indexed_again(tmp_path, monkeypatch):
    pattern = write(tmp_path, {"1": "a\nb\n", "2": "c\n"})
    sf.files(pattern)
    write(tmp_path, {"2": "c\nd\ne\n"})
    reads, chunks = [], FileReader.chunks
    monkeypatch.setattr(
        FileReader, "chunks", lambda reader, path: reads.append(path) or chunks(reader, path)
    )
    with pytest.warns(
        UserWarning, match=r"changed since they were indexed, and indexed again: .*/2\.txt"
    ) as caught:
        assert list(sf.files(pattern)) == ["a", "b", "c", "d", "e"]
    assert caught[0].filename == __file__
    assert reads == [f"{tmp_path}/2.txt"]


def test_what_is_left_of_an_index_is_replaced(tmp_path):
    pattern, index = write(tmp_path, {"1": "a\nb\n"}), tmp_path / ".stepfold" / "1.txt.index"
    sf.files(pattern)
    whole = index.read_bytes()
    index.write_bytes(b"")
    assert list(sf.files(pattern)) == ["a", "b"]
    for content in (whole[:100], whole[:-1], b"x" * len(whole), b"[1]".ljust(len(whole))):
        index.write_bytes(content)
        with pytest.warns(UserWarning, match=DAMAGED) as caught:
            assert list(sf.files(pattern)) == ["a", "b"]
        assert caught[0].filename == __file__
        assert index.read_bytes() == whole


DAMAGED = r"files: damaged indexes were made again: .*\.index"
WRONG = {
    "version": [None, "1", 10**30],
    "kind": [None, "Parquet", ["Lines"]],
    "stamp": [None, 3, [], ["x", "y"], [10**30, "1"]],
    "size": [0, 10, -1, 2.0, "4", None, True, 10**30],
    "rows": [0, 123, 499, 501, -1, 1e300, "500", [500], True, 10**30],
    "stride": [0, 1, 7, -64, 0.5, None, 10**30],
    "bytes": [0, 4096, -8, None, 10**30],
    "checksum": [0, None, "0" * 8, []],
}


def change_header(index, change):
    """Change the header of an index as damage would: without another checksum."""
    content = index.read_bytes()
    header = json.loads(content[:4096])
    change(header)
    index.write_bytes(json.dumps(header).encode().ljust(4096) + content[4096:])


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_an_index_with_another_header_is_made_again_with_a_warning(file_format, tmp_path):
    rows = [{"n": i} for i in range(500)]
    path = tmp_path / f"1.{file_format}"
    if file_format == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert list(sf.files(path)) == rows
    index = tmp_path / ".stepfold" / f"{path.name}.index"
    whole = index.read_bytes()
    header = json.loads(whole[:4096])
    for name, values in WRONG.items():
        for value in values:
            if header[name] == value and type(header[name]) is type(value):
                continue
            change_header(
                index, lambda header, name=name, value=value: header.update({name: value})
            )
            with pytest.warns(UserWarning, match=DAMAGED):
                source = sf.files(path)
            assert len(source) == 500
            assert source[499] == {"n": 499}
            assert index.read_bytes() == whole
    deep = b"[" * 2000 + b"]" * 2000
    index.write_bytes(deep.ljust(4096) + whole[4096:])
    with pytest.warns(UserWarning, match=DAMAGED):
        assert len(sf.files(path)) == 500


def test_each_flipped_bit_of_a_header_is_seen(tmp_path):
    pattern = write(tmp_path, {"1": "a\nb\n" * 30})
    sf.files(pattern)
    index = tmp_path / ".stepfold" / "1.txt.index"
    whole = index.read_bytes()
    for position in range(len(whole[:4096].rstrip())):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        index.write_bytes(changed)
        with pytest.warns(UserWarning, match=DAMAGED):
            assert len(sf.files(pattern)) == 60
    assert index.read_bytes() == whole


def test_an_index_of_an_older_stepfold_is_used_if_it_fits(tmp_path, monkeypatch):
    pattern = write(tmp_path, {"1": "a\nb\n" * 500})
    sf.files(pattern)
    index = tmp_path / ".stepfold" / "1.txt.index"
    change_header(index, lambda header: header.pop("checksum"))
    old = index.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(FileReader, "chunks", None)  # the file is not read again
        assert len(sf.files(pattern)) == 1000
    for name, value in (("rows", 123), ("stride", 0), ("size", 10**30), ("bytes", 4096)):
        index.write_bytes(old)
        change_header(index, lambda header, name=name, value=value: header.update({name: value}))
        with pytest.warns(UserWarning, match=DAMAGED):
            assert len(sf.files(pattern)) == 1000


def test_an_index_with_other_offsets_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "_BLOCK_BYTES", 4)
    index = tmp_path / ".stepfold" / "1.txt.index"
    lines = [f"{i:03}" for i in range(20)]
    pattern = write(tmp_path, {"1": "\n".join(lines)})
    assert list(sf.files(pattern)) == lines
    whole = bytearray(index.read_bytes())
    for position in range(file_formats.HEADER_BYTES, len(whole)):
        for bit in (0, 2, 7):
            damaged = whole.copy()
            damaged[position] ^= 1 << bit
            index.write_bytes(damaged)
            try:
                assert list(sf.files(pattern)) == lines
            except sf.errors.DataError as error:
                assert "1.txt.index: the index does not fit the lines of" in str(error)  # noqa: PT017


def test_an_index_is_small_and_memory_is_bounded(tmp_path, monkeypatch):
    lines = [f"{i:>{20 + i % 50}}" for i in range(20_000)]
    pattern = write(tmp_path, {"1": "\n".join(lines)})
    source = sf.files(pattern)
    size = (tmp_path / ".stepfold" / "1.txt.index").stat().st_size - file_formats.HEADER_BYTES
    assert size < (tmp_path / "1.txt").stat().st_size / 250
    cache = source._form._cache = Cache(50_000)
    order = np.random.default_rng(0).permutation(len(lines))
    assert source.examples(order[:2000]) == [lines[i] for i in order[:2000]]
    assert 40_000 < sum(len(content) for content, _ in cache._contents.values()) <= 50_000


def test_rows_in_order_are_read_in_few_requests(tmp_path, monkeypatch):
    lines = [f"{i:>60}" for i in range(20_000)]
    source = sf.files(write(tmp_path, {"1": "\n".join(lines)}))
    reads, start_read = [], FileReader.start_read
    monkeypatch.setattr(
        FileReader, "start_read", lambda *call: reads.append(call) or start_read(*call)
    )
    stream = sf.batches(source, 100, epochs=1, collate=list)
    assert [line for batch in stream for line in batch] == lines
    assert len(reads) < 20


@pytest.mark.parametrize("order", [slice(0, 40), slice(3000, 3040), np.array([3050, 3001])])
def test_long_lines_after_short_ones_are_read_in_small_pieces(order, tmp_path, monkeypatch):
    lines = ["short"] * 3000 + [f"{i:>10000}" for i in range(100)]
    source = sf.files(write(tmp_path, {"1": "\n".join(lines)}))
    sizes, start_read = [], FileReader.start_read
    monkeypatch.setattr(
        FileReader,
        "start_read",
        lambda reader, location, start, stop, *stamp: (
            sizes.append(stop - start) or start_read(reader, location, start, stop, *stamp)
        ),
    )
    assert source.examples(order) == [lines[i] for i in np.arange(3100)[order]]
    assert max(sizes) < 1_000_000


def test_a_source_is_pickled_without_what_it_has_read(tmp_path):
    source = sf.files(write(tmp_path, {"1": "line\n" * 1000}))
    before = pickle.dumps(source)
    assert source[500] == "line"
    assert pickle.dumps(source) == before
    assert pickle.loads(before)[999] == "line"


def test_many_files_are_open_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(file_reader, "_OPEN", 4)
    source = sf.files(write(tmp_path, {f"{i:03}": f"{i}" for i in range(40)}))
    before = len(os.listdir("/proc/self/fd"))
    assert source.examples(np.arange(40)) == [f"{i}" for i in range(40)]
    assert len(os.listdir("/proc/self/fd")) <= before + 4


# Use


def test_a_slice_is_a_source_of_these_rows(tmp_path):
    pattern = write(tmp_path, {"1": "a\nb\nc\n", "2": "d\ne\nf\n"})
    source = sf.files(pattern)
    held_out, rest = source[:2], source[2:]
    assert (len(held_out), list(held_out), list(rest)) == (2, ["a", "b"], ["c", "d", "e", "f"])
    assert (list(rest[::-2]), rest[-1], list(source[6:])) == (["f", "d"], "f", [])
    assert repr(rest) == "files(1.txt, 2.txt: 4 rows)"
    batches = sf.batches(rest, 2, seed=0, epochs=1, collate=list)
    assert sorted(row for batch in batches for row in batch) == ["c", "d", "e", "f"]
    assert list(pickle.loads(pickle.dumps(rest))) == list(rest)
    with pytest.raises(IndexError, match="files: expected an index below 2, got 2"):
        held_out[2]
    with pytest.raises(sf.errors.DataError, match="source"):
        sf.batches(source[6:], 2)
    failing = sf.files(pattern, parse=int)[2:]
    with pytest.raises(ValueError, match="invalid") as caught:
        failing[1]
    assert caught.value.__notes__ == ["parsing row 0 of 2.txt, row 1 of the source"]


def test_files_are_closed_when_nothing_reads_them(tmp_path):
    reader = FileReader()
    write(tmp_path, {"1": "a\n"})
    assert reader.start_read(f"{tmp_path}/1.txt", 0, 1)() == b"a"
    descriptor = reader._open(f"{tmp_path}/1.txt").fd
    assert os.fstat(descriptor).st_size == 2
    del reader
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.full
def test_a_source_that_is_left_at_the_end_of_a_program_causes_no_message(tmp_path):
    pattern = write(tmp_path, {"1": "a\nb\n"})
    script = f"import stepfold as sf; source = sf.files({pattern!r}); print(source[1])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b\n", "")


@pytest.mark.full
def test_workers_mixtures_and_packing_take_it(tmp_path):
    ids = lambda text: np.frombuffer(text.encode(), np.uint8)
    make = lambda name, count: sf.files(
        write(tmp_path / name, {f"{i}": f"{name}{i}\n" * 3 for i in range(count)}), parse=ids
    )
    a, b = make("aa", 3), make("bb", 2)
    whole = [batch.tolist() for batch in sf.batches(a, 2, seed=0, epochs=2)]
    with sf.workers(sf.batches(a, 2, seed=0, epochs=2), 2) as stream:
        assert [batch.tolist() for batch in stream] == whole
    mixture = sf.mix({"a": (a, 1), "b": (b, 1)}, seed=0)
    assert [chr(row[0]) for row in next(sf.batches(mixture, 4))] == ["a", "b", "a", "b"]
    rows = list(sf.pack(a, length=8, seed=0))
    assert sum(int(row["mask"].sum()) for row in rows) == 27
    packed = sf.batches(sf.pack(mixture, length=8, window=4), 2)
    first, position = next(packed), json.loads(json.dumps(packed.get_state()))
    wanted = next(packed)
    resumed = sf.batches(sf.pack(mixture, length=8, window=4), 2)
    resumed.set_state(position)
    assert np.array_equal(next(resumed)["tokens"], wanted["tokens"])
    assert first.keys() == wanted.keys()


# Positions


def position(pattern, wrap=lambda source: source):
    stream = sf.batches(wrap(sf.files(pattern)), 2, collate=list)
    next(stream)
    return json.loads(json.dumps(stream.get_state()))


def resume(pattern, state, wrap=lambda source: source):
    stream = sf.batches(wrap(sf.files(pattern)), 2, collate=list)
    stream.set_state(state)
    return next(stream)


ROWS = {"1": "a\nb\n", "2": "c\nd\n", "3": "e\n"}


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (
            {**ROWS, "2": "c\nd\nD\n"},
            "length was 5 and is 6; source was 3 files and is 3, .*: 2.txt",
        ),
        ({**ROWS, "4": "f\n"}, "source was 3 files and is 4, of which these are new .*: 4.txt"),
        ({"1": "a\nb\n", "2": "c\n", "3": "d\ne\n"}, ": 2.txt, 3.txt"),
    ],
)
@pytest.mark.filterwarnings("ignore:files. changed since they were indexed")
def test_a_position_in_files_whose_rows_have_moved_is_refused(contents, says, tmp_path):
    pattern = write(tmp_path, ROWS)
    state = position(pattern)
    assert resume(pattern, state) == ["c", "d"]
    write(tmp_path, contents)
    with pytest.raises(sf.errors.DataError, match=says):
        resume(pattern, state)


def test_a_position_in_other_files_is_refused(tmp_path):
    state = position(write(tmp_path, ROWS))
    (tmp_path / "3.txt").rename(tmp_path / "0.txt")
    with pytest.raises(sf.errors.DataError, match="source .*: 0.txt"):
        resume(f"{tmp_path}/*.txt", state)
    (tmp_path / "0.txt").unlink()
    with pytest.raises(sf.errors.DataError, match="source was 3 files and is 2 of them;"):
        resume(f"{tmp_path}/*.txt", state)
    swapped = [tmp_path / "2.txt", tmp_path / "1.txt"]
    state = position(swapped)
    with pytest.raises(
        sf.errors.DataError, match="source was 2 files and is 2 of them, in another order"
    ):
        resume(swapped[::-1], state)


def test_a_position_in_another_slice_is_refused(tmp_path):
    pattern = write(tmp_path, ROWS)
    whole = position(pattern)
    part = position(pattern, lambda source: source[1:])
    assert resume(pattern, part, lambda source: source[1:]) == ["d", "e"]
    assert resume(pattern, whole, lambda source: source[:]) == ["c", "d"]
    for state, rows, says in (
        (part, slice(0, 4), r"rows were range\(1, 5\) and are range\(0, 4\)"),
        (whole, slice(1, 5), r"rows were all and are range\(1, 5\)"),
        (part, slice(None), r"rows were range\(1, 5\) and are all"),
    ):
        with pytest.raises(sf.errors.DataError, match=says):
            resume(pattern, state, lambda source, rows=rows: source[rows])
    write(tmp_path, {"4": "f\n"})
    with pytest.raises(sf.errors.DataError, match=r"new or have other rows: 4.txt"):
        resume(pattern, part, lambda source: source[1:])


@pytest.mark.filterwarnings("ignore:files. changed since they were indexed")
@pytest.mark.parametrize("content", ["c\nd\n", "C\nD\n", "c\nddd\n"])
def test_other_contents_in_as_many_rows_cause_a_warning(content, tmp_path):
    pattern = write(tmp_path, ROWS)
    state = position(pattern)
    write(tmp_path, {"2": content})
    os.utime(tmp_path / "2.txt", (2, 2))
    with pytest.warns(
        UserWarning, match=r"files: the contents of 2\.txt changed since the position"
    ):
        assert resume(pattern, state) == content.split()


def test_a_moved_folder_is_the_same(tmp_path):
    state = position(write(tmp_path / "a", ROWS))
    (tmp_path / "a").rename(tmp_path / "b")
    assert resume(f"{tmp_path}/b/*.txt", state) == ["c", "d"]


def test_a_fingerprint_of_many_files_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["stepfold.data.files"], "_DIGESTS", 3)
    contents = {f"{i}": "a\n" for i in range(8)}
    pattern = write(tmp_path, contents)
    state = position(pattern)
    assert len(state["pipeline"]["source"]["rows"]) == 3
    write(tmp_path, {"4": "a\nb\n"})
    with (
        pytest.warns(UserWarning, match="changed since they were indexed"),
        pytest.raises(sf.errors.DataError, match=r"rows: 3.txt, 4.txt, 5.txt; make"),
    ):
        resume(pattern, state)


@pytest.mark.filterwarnings("ignore:files. changed since they were indexed")
def test_positions_of_mixtures_and_packing_know_the_files(tmp_path):
    pattern = write(tmp_path, ROWS)
    mixed = lambda source: sf.mix({"web": (source, 1), "other": (["x"], 1)})
    packed = lambda source: sf.pack(
        sf.files(pattern, parse=lambda text: [1] * len(text)) if source else 0, length=4
    )
    states = position(pattern, mixed), packed(True).get_state()
    assert resume(pattern, states[0], mixed)
    packed(True).set_state(states[1])
    os.utime(tmp_path / "2.txt", (2, 2))
    with pytest.warns(UserWarning, match="files: the contents of"):
        resume(pattern, states[0], mixed)
    with pytest.warns(UserWarning, match="files: the contents of"):
        packed(True).set_state(states[1])
    write(tmp_path, {"2": "c\n", "3": "d\ne\n"})
    with pytest.raises(
        sf.errors.DataError, match=r"another mixture: in 'web', the source .*2.txt, 3.txt"
    ):
        resume(pattern, states[0], mixed)
    with pytest.raises(sf.errors.DataError, match=r"source .*: 2.txt, 3.txt"):
        packed(True).set_state(states[1])


class Numbered:
    """A source of a user."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index


def test_a_source_of_a_user_may_have_a_fingerprint():
    make = lambda fingerprint: sf.batches(Numbered(fingerprint), 2)
    state = json.loads(json.dumps(make(("v1", 3)).get_state()))
    make(("v1", 3)).set_state(state)
    with pytest.raises(sf.errors.DataError, match=r"source was \['v1', 3\] and is \['v2', 3\]"):
        make(("v2", 3)).set_state(state)
    packed = lambda fingerprint: sf.pack(Numbered(fingerprint), length=4)
    with pytest.raises(sf.errors.DataError, match="source was 'v1' and is 'v2'"):
        packed("v2").set_state(packed("v1").get_state())
    with pytest.raises(
        sf.errors.DataError, match="source: fingerprint: expected a value that JSON can"
    ):
        make({1, 2})


def test_a_position_that_was_saved_without_a_fingerprint_is_read(tmp_path):
    pattern = write(tmp_path, ROWS)
    state = position(pattern, list)
    assert state["pipeline"]["source"] is None
    assert resume(pattern, state) == ["c", "d"]
    with pytest.raises(sf.errors.DataError, match=r"source was \{'files': 3, "):
        resume(pattern, position(pattern), list)


# Object storage


@pytest.fixture
def server(monkeypatch):
    use_credentials(monkeypatch)
    return shared_server()


def test_files_in_object_storage_are_read_in_ranges(server, tmp_path, monkeypatch):
    monkeypatch.setattr(file_reader, "_CHUNK", 1000)
    name = tmp_path.name
    lines = [f"{i:>50}" for i in range(300)]
    server.write(f"{name}/a/1.txt", "\n".join(lines[:200]).encode())
    server.write(f"{name}/a/2.txt", "\r\n".join(lines[200:]).encode())
    server.write(f"{name}/a/3.txt", b"")
    server.write(f"{name}/a/b/4.txt", b"deeper")
    source = sf.files(server.url(f"{name}/a/*.txt"))
    assert len(source) == 300
    order = np.random.default_rng(0).permutation(300)
    assert source.examples(order) == [lines[i] for i in order]
    assert f"{name}/a/.stepfold/1.txt.index" in server.objects(name)
    assert list(sf.files(server.url(f"{name}/a/b/4.txt"), index=tmp_path)) == ["deeper"]
    assert f"{name}/a/b/.stepfold/4.txt.index" not in server.objects(name)

    stream = sf.batches(source, 10, collate=list)
    state = json.loads(json.dumps(stream.get_state()))
    with Proxy(server) as proxy:
        again = sf.files(proxy.url(f"{name}/a/*.txt"))
        opened = len(proxy.log)
        assert list(again.examples(slice(0, 300))) == lines
        assert len(proxy.log) - opened < 12
    server.write(f"{name}/a/2.txt", "\n".join(reversed(lines[200:])).encode())
    with pytest.raises(sf.errors.DataError, match=r"2.txt.*: the file changed or was deleted"):
        pickle.loads(pickle.dumps(source))[250]
    with pytest.warns(UserWarning, match="changed since they were indexed"):
        changed = sf.files(server.url(f"{name}/a/*.txt"))
    with pytest.warns(UserWarning, match=r"the contents of 2\.txt changed since"):
        sf.batches(changed, 10, collate=list).set_state(state)


def test_missing_objects_and_errors_of_the_server_are_errors_of_data(server, tmp_path):
    with pytest.raises(
        sf.errors.DataError, match=r"expected files that exist, got s3://.*none.txt.*no su"
    ):
        sf.files(server.url(f"{tmp_path.name}/none.txt"))
    with pytest.raises(sf.errors.DataError, match="none that fit"):
        sf.files(server.url(f"{tmp_path.name}/*.txt"))
    server.write(f"{tmp_path.name}/1.txt", b"a\nb")
    fault = lambda number, method, name: 403 if method == "PUT" else None
    with Proxy(server, fault) as proxy:
        with pytest.raises(sf.errors.DataError, match="cannot be written: .*credentials") as caught:
            sf.files(proxy.url(f"{tmp_path.name}/1.txt"))
        assert "index=a directory" in caught.value.__notes__[0]
        assert list(sf.files(proxy.url(f"{tmp_path.name}/1.txt"), index=tmp_path)) == ["a", "b"]
