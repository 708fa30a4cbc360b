"""Files as one thing: laid out as Hugging Face does, and replaced all or not at all."""

import json
import os
import re

import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.shards import file_of, read_shards, write_shards
from stepfold.checkpoint.tensors import Spec


def write(target, *files):
    """Write files of float32 arrays: dicts of name to values."""
    files = [{name: np.float32(values) for name, values in file.items()} for file in files]
    specs = [{n: Spec(a.shape, a.dtype) for n, a in file.items()} for file in files]
    write_shards(target, specs, (a for file in files for a in file.values()), {"format": "pt"})


def read(path):
    return {name: array.tolist() for name, array in read_shards(path).items()}


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_what_a_path_means(tmp_path):
    assert file_of("a/b.safetensors").as_posix() == "a/b.safetensors"
    assert file_of("a/b").as_posix() == "a/b/model.safetensors"
    with pytest.raises(sf.ConfigError, match="expected one on a disk, got gs://bucket/a; copy"):
        file_of("gs://bucket/a")


def test_one_file_is_called_as_wanted(tmp_path):
    write(tmp_path / "new" / "m.safetensors", {"a": [1, 2]})
    assert names(tmp_path / "new") == ["m.safetensors"]
    assert read(tmp_path / "new" / "m.safetensors") == {"a": [1, 2]}


def test_several_are_called_as_hugging_face_does(tmp_path):
    write(tmp_path / "model.safetensors", {"a": [1, 2], "b": 3}, {"c": [4]})
    assert names(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = tmp_path / "model.safetensors.index.json"
    assert json.loads(index.read_text()) == {
        "metadata": {"total_size": 16},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    for path in (tmp_path, tmp_path / "model.safetensors", index):
        assert read(path) == {"a": [1, 2], "b": 3, "c": [4]}


LAYOUTS = {
    "one": [{"a": 0, "b": 0, "c": 0}],
    "two": [{"a": 0, "b": 0}, {"c": 0}],
    "three": [{"a": 0}, {"b": 0}, {"c": 0}],
}


def version(layout, value):
    return [dict.fromkeys(file, value) for file in LAYOUTS[layout]]


class Stopped(BaseException):
    """What no handler of errors catches, as a kill."""


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_a_reader_finds_the_old_or_the_new_wherever_it_is_stopped(
    tmp_path, monkeypatch, before, after
):
    found, calls = [], []

    def stop_at(count):
        calls.clear()
        for module, name in ((os, "replace"), (os, "unlink"), (os, "fsync")):
            original = getattr(os, name)

            def counted(*args, original=original, **options):
                calls.append(args)
                if len(calls) == count:
                    raise Stopped
                return original(*args, **options)

            monkeypatch.setattr(module, name, counted)

    for count in range(1, 100):
        folder = tmp_path / str(count)
        write(folder / "model.safetensors", *version(before, 1))
        stop_at(count)
        try:
            write(folder / "model.safetensors", *version(after, 2))
            break
        except Stopped:
            pass
        finally:
            monkeypatch.undo()
        values = set(read(folder).values())
        assert values in ({1}, {2})
        found.append(values.pop())
        # The next export leaves itself, and nothing of those before.
        write(folder / "model.safetensors", *version(after, 3))
        assert set(read(folder).values()) == {3}
        assert len(names(folder)) == (1 if after == "one" else 1 + len(LAYOUTS[after]))
    assert found == sorted(found)
    assert found[0] == 1
    assert set(read(folder).values()) == {2}


def test_shards_do_not_take_the_name_of_one_that_is_there(tmp_path):
    target = tmp_path / "model.safetensors"
    for value, end in ((1, ""), (2, ".2"), (3, "")):
        write(target, *version("two", value))
        assert names(tmp_path) == [
            f"model-00001-of-00002{end}.safetensors",
            f"model-00002-of-00002{end}.safetensors",
            "model.safetensors.index.json",
        ]
        assert set(read(target).values()) == {value}


def test_files_of_others_stay(tmp_path):
    others = ["config.json", "model-ema.safetensors", "other-00001-of-00002.safetensors", ".x"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for layout in ("three", "one", "two"):
        write(tmp_path / "model.safetensors", *version(layout, 1))
        assert set(others) < set(names(tmp_path))
        assert {(tmp_path / name).read_text() for name in others} == {"mine"}


def test_what_a_killed_export_left_is_removed(tmp_path):
    (tmp_path / ".model.safetensors.abc").mkdir()
    (tmp_path / ".model.safetensors.abc" / "model.safetensors").write_text("half")
    write(tmp_path / "model.safetensors", {"a": 1})
    assert names(tmp_path) == ["model.safetensors"]


def test_others_may_read_the_files(tmp_path):
    mask = os.umask(0o022)
    try:
        write(tmp_path / "model.safetensors", *version("two", 1))
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o644}


def test_the_single_file_is_taken_before_the_index(tmp_path):
    write(tmp_path / "model.safetensors", *version("two", 1))
    write(tmp_path / "aside" / "model.safetensors", *version("one", 2))
    (tmp_path / "aside" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert set(read(tmp_path).values()) == {2}
    assert set(read(tmp_path / "model.safetensors.index.json").values()) == {1}


def test_nothing_there_is_an_error(tmp_path):
    words = f"{tmp_path}: expected {tmp_path}/model.safetensors, or model.safetensors.index.json"
    with pytest.raises(sf.CheckpointError, match=re.escape(words)):
        read(tmp_path)
    with pytest.raises(sf.CheckpointError, match="m.json: cannot be read: No such file"):
        read(tmp_path / "m.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected an index in JSON, got Expecting value"),
        ("\udc80", "expected an index in JSON, got 'utf-8' codec"),
        ("[]", "expected a weight_map of names to files beside it, got list []; export or copy"),
        ('{"weight_map": {"a": 1}}', "expected a weight_map of names to files beside it, got dict"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "expected a weight_map of names to files"),
        ('{"weight_map": {"a": "x.safetensors"}}', "expected x.safetensors beside it, got no such"),
    ],
)
def test_a_broken_index_is_refused_with_its_name(tmp_path, text, words):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(sf.CheckpointError, match=re.escape(f"{index}: {words}")):
        read(tmp_path)


def test_an_index_and_files_of_different_exports_are_refused(tmp_path):
    write(tmp_path / "model.safetensors", {"a": 1}, {"b": 2})
    write(tmp_path / "other.safetensors", {"a": 1, "x": 3})
    (tmp_path / "other.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    words = (
        "expected in model-00001-of-00002.safetensors what the index says, got a difference in x;"
    )
    with pytest.raises(sf.CheckpointError, match=re.escape(words)):
        read(tmp_path)
