"""One file: the package reads what is written, and what is broken is refused in words."""

import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import stepfold as sf
from stepfold.checkpoint.tensors import CODES, Spec, read_tensors, write_tensors


def write(file, arrays, metadata=None):
    specs = {name: Spec(array.shape, array.dtype) for name, array in arrays.items()}
    write_tensors(file, specs, arrays.values(), metadata or {})


def raw(file, header, data=b"", length=None):
    """Write any bytes as a header, and say any length of it."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(header) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + header + data)


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize("name", CODES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, name):
    array = np.arange(6).reshape(2, 3).astype(jnp.dtype(name))
    write(tmp_path / "t.safetensors", {"a": array})
    with safetensors.safe_open(tmp_path / "t.safetensors", framework="numpy") as file:
        part = file.get_slice("a")
        assert (part.get_dtype(), part.get_shape()) == (CODES[name], [2, 3])
        if not name.startswith("float8"):  # which the package cannot give numpy
            assert file.get_tensor("a").tobytes() == array.tobytes()
    back = read_tensors(tmp_path / "t.safetensors")["a"]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, (2, 3), array.tobytes())


def test_the_package_writes_what_is_read(tmp_path):
    arrays = {"b": np.arange(3, dtype=np.int8), "a": np.ones((2, 2)), "none": np.ones((0, 4))}
    safetensors.numpy.save_file(arrays, tmp_path / "t.safetensors", metadata={"x": "y"})
    back = read_tensors(tmp_path / "t.safetensors")
    assert {n: (a.dtype, a.tolist()) for n, a in back.items()} == {
        n: (a.dtype, a.tolist()) for n, a in arrays.items()
    }


def test_arrays_that_are_not_aligned_are_read(tmp_path):
    raw(tmp_path / "t.safetensors", b'{"a":%s} ' % json.dumps(entry(0, 8)).encode(), b"\0" * 8)
    assert read_tensors(tmp_path / "t.safetensors")["a"].tolist() == [0, 0]


def test_the_header_aligns_the_arrays_and_holds_the_metadata(tmp_path):
    write(tmp_path / "t.safetensors", {"é": np.ones(3)}, {"format": "pt", "note": "ü"})
    length = int.from_bytes((tmp_path / "t.safetensors").read_bytes()[:8], "little")
    assert length % 8 == 0
    with safetensors.safe_open(tmp_path / "t.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "note": "ü"}
        assert list(file.keys()) == ["é"]


def test_one_array_is_asked_for_at_a_time(tmp_path):
    asked = []

    def arrays():
        for i in range(3):
            asked.append(((tmp_path / "t.safetensors").exists(), i))
            yield np.full(100_000, i, np.float64)

    specs = {f"{i}": Spec((100_000,), np.dtype(np.float64)) for i in range(3)}
    write_tensors(tmp_path / "t.safetensors", specs, arrays(), {})
    assert asked == [(True, 0), (True, 1), (True, 2)]


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "t.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "t.safetensors", {"a": np.ones(2)})
    assert (tmp_path / "t.safetensors").read_text() == "mine"


def test_a_file_that_does_not_hold_what_its_header_says_is_noticed_when_written(tmp_path):
    specs = {"a": Spec((3,), np.dtype(np.float32))}
    with pytest.raises(sf.CheckpointError, match="expected a whole safetensors file"):
        write_tensors(tmp_path / "t.safetensors", specs, [np.ones(2, np.float32)], {})


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({"a": entry(0, 8)}, b"x" * 7, None, "got one of 76 bytes of which the safetensors"),
        ({"a": entry(0, 8)}, b"x" * 9, None, "file not fully covered"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, None, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, None, "invalid offset for tensor `b`"),
        ({"a": entry(8, 0)}, b"x" * 8, None, "invalid offset for tensor `a`"),
        ({"a": entry(0, 80)}, b"x" * 8, None, "invalid shape, data type, or offset"),
        ({"a": entry(0, 8, shape=(2**40, 2**40))}, b"x" * 8, None, "overflow"),
        ({"a": entry(0, 8, dtype="F99")}, b"x" * 8, None, "unknown variant `F99`"),
        ({}, b"", 1 << 60, "header too large"),
        ({}, b"", 50, "invalid header length"),
        (b"no json {", b"", None, "invalid JSON in header"),
        (b"\xff\xff", b"", None, "invalid UTF-8 in header"),
        (b"[1]", b"", None, "invalid JSON in header"),
    ],
)
def test_what_is_broken_is_refused_with_its_name(tmp_path, header, data, length, words):
    file = tmp_path / "t.safetensors"
    raw(file, header, data, length)
    with pytest.raises(sf.CheckpointError, match=re.escape(words)) as caught:
        read_tensors(file)
    assert str(caught.value).startswith(f"{file}: expected a whole safetensors file, got one of ")


@pytest.mark.parametrize("size", range(0, 100, 9))
def test_no_beginning_of_a_file_is_taken_for_one(tmp_path, size):
    file = tmp_path / "t.safetensors"
    write(file, {"a": np.arange(4.0), "b": np.ones((), np.int8)})
    whole = file.read_bytes()
    assert size < len(whole)
    file.write_bytes(whole[:size])
    with pytest.raises(sf.CheckpointError, match="expected a whole safetensors file"):
        read_tensors(file)


def test_a_dtype_that_jax_has_not_is_refused_by_name(tmp_path):
    raw(tmp_path / "t.safetensors", {"a": entry(0, 4, (8,), "F4")}, b"x" * 4)
    with pytest.raises(sf.CheckpointError, match=r"a: expected a dtype of BOOL, .*, got F4; conv"):
        read_tensors(tmp_path / "t.safetensors")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(sf.CheckpointError, match="nothing: cannot be read: No such file"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(sf.CheckpointError, match="expected a safetensors file, got a directory"):
        read_tensors(tmp_path)


def test_without_the_package_it_is_said_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (
        lambda: sf.export_params(tmp_path, {"a": np.ones(2)}),
        lambda: sf.load_params(tmp_path, {"a": np.ones(2)}),
    ):
        with pytest.raises(sf.ConfigError, match=r'pip install "stepfold\[safetensors\]"'):
            use()
    assert list(tmp_path.iterdir()) == []
