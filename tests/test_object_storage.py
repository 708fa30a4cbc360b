"""Objects in storage: ranges of bytes, the end of an object, lists, and kinds of errors."""

import pytest
from tests.s3 import shared_server, use_credentials

import stepfold as sf
from stepfold.object_storage import Bucket


@pytest.fixture(params=["file", "s3"])
def bucket(request, tmp_path, monkeypatch):
    if request.param == "file":
        return Bucket(f"file://{tmp_path}/objects", kind=sf.errors.DataError)
    use_credentials(monkeypatch)
    return Bucket(shared_server().url(tmp_path.name), kind=sf.errors.DataError)


def test_ranges_of_bytes_are_read_up_to_the_end(bucket):
    content = bytes(range(200)) * 5
    bucket.write("a", content)
    bucket.write("empty", b"")
    assert bucket.start_read("a", slice(3, 9))().value == content[3:9]
    for start in (0, 1, 500, 990, 1000):
        for size in (1, 7, 64, 1024, 3000):
            assert bucket.read_from("a", start, size) == content[start : start + size]
    assert bucket.read_from("empty", 0, 100) == b""
    assert bucket.start_read("missing", slice(0, 0))().state == "missing"


def test_the_generation_changes_with_the_content(bucket):
    generation = lambda: bucket.start_read("a", slice(0, 0))().stamp.generation
    bucket.write("a", b"one")
    first = generation()
    assert generation() == first
    bucket.write("a", b"two")
    assert generation() != first


def test_names_are_listed_by_prefix(bucket):
    for name in ("b/2", "b/1", "bc", "c"):
        bucket.write(name, b"")
    assert bucket.list_names("b/") == ["b/1", "b/2"]
    assert bucket.list_names("b") == ["b/1", "b/2", "bc"]
    assert bucket.list_names("") == ["b/1", "b/2", "bc", "c"]


def test_errors_are_of_the_given_kind(bucket):
    bucket.write("a", b"one")
    with pytest.raises(sf.errors.DataError, match="a: cannot be read: OUT_OF_RANGE"):
        bucket.start_read("a", slice(2, 9))()
