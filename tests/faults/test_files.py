"""Files that vanish, change or are truncated while they are read, and indexes that are interrupted.

Each is an error that names the file, or has no effect on the rows.
"""

import json
import os
import pickle
import shutil

import pytest

import stepfold as sf
from stepfold.data.file_reader import FileReader

pytestmark = pytest.mark.not_optimized

LINES = [f"{i:>30}" for i in range(5000)]
GONE = r"1\.txt: the file changed or was deleted after the source was made; make the source"


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path)


def write(folder):
    (folder / "1.txt").write_text("\n".join(LINES))
    (folder / "2.txt").write_text("two\n")
    return folder


def truncate(path):
    os.truncate(path, 100_000)


def replace_by_another(path):
    new = path.with_suffix(".new")
    new.write_text("\n".join(reversed(LINES)))
    os.utime(new, (1, 1))
    new.replace(path)


def write_in_place(path):
    with path.open("r+") as file:
        file.write("other")
    os.utime(path, (1, 1))


def append(path):
    with path.open("a") as file:
        file.write("more\n")


@pytest.mark.parametrize("change", [truncate, write_in_place, append])
def test_a_file_that_is_changed_while_it_is_read_is_an_error(change, corpus):
    source = sf.files(corpus / "*.txt")
    stream = sf.batches(source, 1, collate=list)
    assert next(stream) == [LINES[0]]
    change(corpus / "1.txt")
    with pytest.raises(sf.errors.DataError, match=GONE):
        source[4990]
    assert source[5000] == "two"


@pytest.mark.parametrize("change", [truncate, replace_by_another, write_in_place, append])
def test_a_file_that_is_changed_before_it_is_read_is_an_error(change, corpus):
    source = sf.files(corpus / "*.txt")
    change(corpus / "1.txt")
    with pytest.raises(sf.errors.DataError, match=GONE):
        source[0]
    with pytest.warns(UserWarning, match=r"changed since they were indexed, .*: .*1\.txt"):
        again = sf.files(corpus / "*.txt")
    assert [*again] == [*(corpus / "1.txt").read_text().splitlines(), "two"]


def test_a_file_that_vanishes_is_an_error(corpus):
    source = sf.files(corpus / "*.txt")
    other = pickle.loads(pickle.dumps(source))  # as in another process
    assert source[0] == LINES[0]
    (corpus / "1.txt").unlink()
    assert source[2500] == LINES[2500]  # it is open
    with pytest.raises(
        sf.errors.DataError, match="files that can be read, got .*1.txt: No such file"
    ):
        other[0]
    with pytest.raises(sf.errors.DataError, match=r"files that exist, got .*1\.txt: no such file"):
        sf.files(corpus / "1.txt")


def test_an_index_that_vanishes_is_an_error_and_made_again(corpus):
    source = sf.files(corpus / "*.txt")
    shutil.rmtree(corpus / ".stepfold")
    with pytest.raises(sf.errors.DataError, match=r"got .*/\.stepfold/1\.txt\.index: No such file"):
        source[0]
    assert sf.files(corpus / "*.txt")[0] == LINES[0]


def test_a_file_that_changes_while_it_is_indexed_is_an_error(corpus, monkeypatch):
    chunks = FileReader.chunks

    def append_meanwhile(reader, location):
        yield from chunks(reader, location)
        if location.endswith("1.txt"):
            append(corpus / "1.txt")

    with monkeypatch.context() as patch:
        patch.setattr(FileReader, "chunks", append_meanwhile)
        with pytest.raises(sf.errors.DataError, match=GONE):
            sf.files(corpus / "*.txt")
    assert sf.files(corpus / "*.txt")[4999] == LINES[4999] + "more"


def open_as_nobody(folder, index):
    os.setuid(65534)
    results = []
    for options in ({}, {"index": index}):
        try:
            results.append(len(sf.files(f"{folder}/*.txt", **options)))
        except sf.errors.DataError as error:
            results.append(str(error))
    print(json.dumps(results))


def test_without_permission_to_write_the_index_goes_elsewhere(forks, public_path):
    folder, index = public_path / "data", public_path / "index"
    folder.mkdir()
    index.mkdir()
    index.chmod(0o777)
    write(folder)
    end = forks.run(open_as_nobody, str(folder), str(index))
    assert end.code == 0, end
    refused, count = json.loads(end.output)
    assert refused == (
        f"files: expected a directory for indexes, got {folder}/.stepfold: Permission denied; "
        "give index=…, a directory that can be written"
    )
    assert count == 5001
    others = public_path / "others"
    others.mkdir()
    end = forks.run(open_as_nobody, str(folder), str(others))
    assert f"got {others}: no permission to write; give index=" in json.loads(end.output)[1]
    # Another user has made it.
    sf.files(folder / "*.txt")
    end = forks.run(open_as_nobody, str(folder), str(index))
    assert json.loads(end.output) == [5001, 5001]
    (folder / "1.txt").chmod(0)
    end = forks.run(open_as_nobody, str(folder), str(index / "new"))
    count, refused = json.loads(end.output)  # the first one only counts
    assert count == 5001
    assert refused.endswith(f"can be read, got {folder}/1.txt: Permission denied")


def test_a_full_disk_is_an_error_that_names_the_index(corpus, small_disk):
    disk = small_disk("size=8k")
    (disk / "filler").write_bytes(b"x" * 8192)
    with pytest.raises(
        sf.errors.DataError, match="directory for indexes, got .*: No space left on device"
    ):
        sf.files(corpus / "1.txt", index=disk)
    assert {path.name for path in disk.iterdir()} == {"filler"}


def index_and_print(folder):
    source = sf.files(f"{folder}/*.txt")
    print(json.dumps([len(source), source[0], source[5000]]))


def test_processes_may_index_at_once(forks, tmp_path):
    write(tmp_path)
    running = [forks.start(index_and_print, str(tmp_path)) for _ in range(3)]
    for each in running:
        end = each.wait()
        assert json.loads(end.output) == [5001, LINES[0], "two"], end
    assert len(list((tmp_path / ".stepfold").iterdir())) == 2


def stop_while_indexing(folder):
    import signal

    replace = os.replace

    def stop_before(*paths):
        os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = stop_before
    sf.files(f"{folder}/*.txt")


def test_a_process_that_is_killed_while_it_indexes_leaves_no_index(forks, tmp_path):
    write(tmp_path)
    assert forks.run(stop_while_indexing, str(tmp_path)).code == -9
    left = {path.name for path in (tmp_path / ".stepfold").iterdir()}
    assert not {name for name in left if not name.startswith(".")}
    assert [*sf.files(tmp_path / "*.txt")] == [*LINES, "two"]
