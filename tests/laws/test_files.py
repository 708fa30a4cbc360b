"""A source over files has each row of each file once, in order, however they end."""

import itertools
import json
import os
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data import file_formats, file_reader
from stepfold.data.file_formats import Lines
from stepfold.data.files import Files
from stepfold.data.sources import row_list

pytestmark = pytest.mark.not_optimized


@pytest.fixture(autouse=True, scope="module")
def small():
    """Let a few rows fill several blocks, chunks and parts of an index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_formats, "_BLOCK_BYTES", 12)
        patch.setattr(file_formats, "_BLOCKS_IN_ORDER", 3)
        patch.setattr(file_formats, "_BYTES_IN_ORDER", 30)
        patch.setattr(file_formats, "_MARKS", 2)
        patch.setattr(file_formats, "_CACHE_BYTES", 60)
        patch.setattr(file_reader, "_CHUNK", 9)
        yield


# Whatever else separates lines somewhere is text.
TEXTS = st.text(st.sampled_from("ab é\x85\u2028\x0b\t\"'{🙂"), max_size=9)


@st.composite
def corpora(draw):
    """Return the bytes of files, and the rows of each."""
    contents, rows = [], []
    for _ in range(draw(st.integers(1, 4))):
        lines, end = draw(st.lists(TEXTS, max_size=12)), draw(st.sampled_from(["\n", "\r\n"]))
        is_ended = bool(lines) and (not lines[-1] or draw(st.booleans()))
        mark = "\ufeff" * draw(st.booleans())
        contents.append((mark + end.join(lines) + end * is_ended).encode())
        rows.append(lines)
    return contents, rows


def write(folder, contents):
    for number, content in enumerate(contents):
        Path(folder, f"{number}.txt").write_bytes(content)


def check(contents, rows_of_files, order=(3, 0, 1), cut=2, size=3):
    """Read all rows by number, in order, shuffled, after a cut, and after a file has changed."""
    rows = [*itertools.chain(*rows_of_files)]
    with tempfile.TemporaryDirectory() as folder:
        write(folder, contents)
        make = lambda: sf.files(f"{folder}/*.txt")
        source = make()
        assert len(source) == len(rows)
        assert list(source) == rows
        assert source[-1] == rows[-1]
        for start in range(0, len(rows), size):
            stop = min(start + size, len(rows))
            assert source.examples(slice(start, stop)) == rows[start:stop]
        picked = np.array([i % len(rows) for i in order])
        assert source.examples(picked) == [rows[i] for i in picked]

        options = {"seed": 0, "epochs": 2, "remainder": "keep", "collate": list}
        batches = lambda: sf.batches(make(), size, **options)
        first = batches()
        whole, epoch = list(first), first.steps_per_epoch
        for batches_of_epoch in (whole[:epoch], whole[epoch:]):
            assert sorted(itertools.chain(*batches_of_epoch)) == sorted(rows)
        first = batches()
        made, resumed = list(itertools.islice(first, cut)), batches()
        resumed.set_state(json.loads(json.dumps(first.get_state())))
        assert made + list(resumed) == whole

        path = Path(folder, "0.txt")
        path.write_bytes(b"\n" * len(contents[0]))  # other rows in as many bytes
        os.utime(path, (1, 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            changed = make() if any([contents[0], *rows_of_files[1:]]) else []
        assert [*changed] == [""] * len(contents[0]) + [*itertools.chain(*rows_of_files[1:])]
        assert all(re.search("files: changed since .*0.txt", str(each.message)) for each in caught)


@given(
    corpora().filter(lambda corpus: any(corpus[1])),
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.integers(0, 6),
    st.integers(1, 5),
)
def test_every_row_is_there_once_wherever_a_run_is_cut(corpus, order, cut, size):
    check(*corpus, order, cut, size)


def lose_last(index):
    """Count the ends of lines."""

    def count(lines, location, marks):
        size, rows, stride = index(lines, location, marks)
        return size, rows - (not Path(location).read_bytes().endswith(b"\n")), stride

    return count


def add_last(index):
    """Count the empty string after the last end of a line."""

    def count(lines, location, marks):
        size, rows, stride = index(lines, location, marks)
        return size, rows + Path(location).read_bytes().endswith(b"\n"), stride

    return count


def row_twice(examples):
    """Return the row before the last one in its place."""

    def take(source, rows):
        return examples(source, np.minimum(np.asarray(row_list(rows)), len(source) - 2))

    return take


MUTANTS = {
    "the last row of a shard": (Lines, "index", lose_last),
    "a row too many": (Lines, "index", add_last),
    "a row twice": (Files, "examples", row_twice),
    "a stale index": (
        file_reader,
        "_stamp_of_status",
        lambda stamp: lambda status: stamp(status)._replace(version=""),
    ),
    "the mark of UTF-8": (file_formats, "_BYTE_ORDER_MARK", lambda _: b""),
    "the end of lines of Windows": (
        Lines,
        "_parse",
        lambda _: lambda lines, file, row, line: line.decode(),
    ),
    "lines of unicode": (
        Lines,
        "_parse",
        lambda parse: lambda *arguments: (parse(*arguments).splitlines() or [""])[0],
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_nearly_right_fails_the_same_law(mutant, monkeypatch):
    contents = ["\ufeffa\r\nb c\r\nd\r\n\r\n", "", "1\x85\n2\n\u20283\n4", "é\n🙂\n"]
    rows = [["a", "b c", "d", ""], [], ["1\x85", "2", "\u20283", "4"], ["é", "🙂"]]
    corpus = [content.encode() for content in contents], rows
    check(*corpus)
    where, name, change = MUTANTS[mutant]
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    with pytest.raises((AssertionError, sf.errors.DataError)):
        check(*corpus)
