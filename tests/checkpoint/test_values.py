"""Numpy arrays in the data position and in `extra`, such as the replay buffer of a hook."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.small import ones

import stepfold as sf
from stepfold.checkpoint import bucket
from stepfold.checkpoint.__main__ import main
from stepfold.checkpoint.leaves import STORED
from stepfold.checkpoint.manifest import read_checked, write_checked
from stepfold.errors import CheckpointError, ConfigError

STATE = {"w": ones(4)}
BUFFER = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    """Give the path and the location of a series."""
    folder = tmp_path / "series"
    return folder, str(folder) if request.param == "directory" else f"file://{folder}"


def same(one, other):
    """Whether two values are equal, with the types, dtypes, shapes and bits of all arrays."""
    if isinstance(one, np.ndarray):
        is_array = type(other) is np.ndarray and (one.dtype, one.shape) == (
            other.dtype,
            other.shape,
        )
        return is_array and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return isinstance(other, list) and all(same(*pair) for pair in pairs)
    return type(one) is type(other) and one == other


@st.composite
def numpy_arrays(draw):
    """Draw arrays of every dtype, of 0 to 3 axes, some of them empty, of any bits."""
    dtype = np.dtype(getattr(ml_dtypes, name := draw(st.sampled_from(STORED)), name))
    shape = draw(hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    if name in ("bool", "int4"):  # whose bytes have some values only
        return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1))).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
VALUES = st.recursive(
    ATOMS | st.text("ab/ é") | numpy_arrays(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text("ab/é"), inner)
    ),
    max_leaves=12,
)


@given(data=VALUES, extra=VALUES)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_arrays_come_back_with_their_dtype_shape_and_bits(tmp_path_factory, scheme, data, extra):
    folder = f"{scheme}{tmp_path_factory.mktemp('series')}"
    sf.save(folder, STATE, step=1, data=data, extra=extra)
    found = sf.restore(folder, STATE)
    assert same(data, found.data)
    assert same(extra, found.extra)
    assert sf.checkpoint.verify(folder) == {1: []}


def test_strided_and_big_endian_arrays_come_back_with_their_values(tmp_path):
    strided = np.arange(24.0).reshape(4, 6)[::-2, 1::2].T
    sf.save(tmp_path, STATE, step=1, data={"s": strided, "b": strided.astype(">f8")})
    found = sf.restore(tmp_path, STATE).data
    assert same(found, {"s": strided.copy("C"), "b": strided.copy("C")})


def test_a_buffer_may_be_modified_as_soon_as_save_returns(place):
    buffer, before = BUFFER.copy(), BUFFER.copy()
    with sf.Checkpoints(place[1]) as series:
        series.save(STATE, step=1, data={"buffer": buffer}, extra=[buffer])
        buffer += 1
    found = sf.restore(place[1], STATE)
    assert same(found.data, {"buffer": before})
    assert same(found.extra, [before])
    found.data["buffer"] += 1  # it is writable


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([None]), r"data/a/0: expected a dtype that can be stored \(bool, .*got object"),
        (np.zeros(2, "f4,i4"), "data/a/0: expected a dtype that can be stored"),
        (np.array(["text"]), "data/a/0: expected a dtype that can be stored"),
        (np.ma.masked_array([1, 2], [0, 1]), "data/a/0: expected an array, got a masked one; save"),
        (
            jnp.ones(2),
            r"data/a/0: expected JSON or numpy arrays, got float32\[2\]; ",
        ),
        (
            {"number of an array": 1},
            "data/a/0: the key 'number of an array' is reserved",
        ),
    ],
)
def test_an_array_that_has_no_place_is_refused_with_its_path(tmp_path, value, words):
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, STATE, step=1, data={"a": [value]})
    assert sf.checkpoint.latest_step(tmp_path) is None


# Reading without arrays


def test_contents_describe_arrays_without_reading_them(place):
    sf.save(place[1], STATE, step=1, data={"n": 1, "buffer": BUFFER}, extra=(b"x", BUFFER[0]))
    found = sf.checkpoint.contents(place[1])
    assert {path: str(leaf) for path, leaf in found.arrays.items()} == {
        "data/buffer": "float32[2,3,4]",
        "extra/1": "float32[3,4]",
    }
    assert str(found.data["buffer"]) == "float32[2,3,4]"
    assert found.extra[0] == b"x"
    assert list(found.leaves) == ["w"]
    without = place[1] + "-without"
    sf.save(without, STATE, step=1)
    assert found.bytes - sf.checkpoint.contents(without).bytes >= 36 * 4


def test_the_command_shows_arrays(place, capsys):
    sf.save(place[1], STATE, step=1, data={"buffer": BUFFER}, extra=np.int8([1]))
    assert main(["show", place[1]]) == 0
    shown = capsys.readouterr().out
    assert '"buffer": "float32[2,3,4]"' in shown
    assert "1 leaves, 4 elements" in shown
    assert "2 arrays in data and extra, 97 B" in shown
    assert main(["verify", place[1]]) == 0


def test_parts_are_restored_with_the_arrays_of_the_position(place):
    sf.save(place[1], STATE | {"b": jnp.ones(1)}, step=1, data=BUFFER)
    assert same(sf.restore(place[1], STATE, parts=("w",)).data, BUFFER)


# Temporary steps, later metadata


def test_arrays_are_added_after_a_save(place):
    with sf.Checkpoints(place[1]) as series:
        series.save(STATE, step=1, data=BUFFER, extra={"buffer": BUFFER})
        for n in range(1, 5):
            series.wait()
            series.add_later(1, metrics={"n": n}, extra={"buffer": BUFFER[:1] + n, "n": n})
            found = sf.restore(place[1], STATE)
            assert same(found.data, BUFFER)
            assert same(found.extra, {"buffer": BUFFER[:1] + n, "n": n})
            assert found.metrics == {"n": n}
            assert sf.checkpoint.verify(place[1]) == {1: []}
        # A reader that has the metadata from before finds its arrays. Older ones are gone.
        assert len({path.name.split(".")[0] for path in place[0].rglob("later-*")}) == 2
        series.add_later(1, metrics={}, extra=None)
    assert sf.restore(place[1], STATE).extra is None


def test_later_arrays_that_are_damaged_are_found(place):
    with sf.Checkpoints(place[1]) as series:
        series.save(STATE, step=1)
        series.wait()
        series.add_later(1, metrics={}, extra={"buffer": BUFFER})
    (path,) = place[0].rglob("later-1.*")
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + b"\1", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert sf.checkpoint.verify(place[1])[1]
        with pytest.raises(CheckpointError):
            sf.restore(place[1], STATE, step=1)


# Damage


@pytest.mark.parametrize("size", [20, 1 << 24])
def test_damage_of_an_array_is_found(place, size, monkeypatch):
    monkeypatch.setattr(bucket, "_OBJECT", size)
    sf.save(place[1], STATE, step=1, data={"n": 1})
    sf.save(place[1], STATE, step=2, data={"n": 2, "buffer": BUFFER}, extra=[BUFFER + 1])
    (first, *_) = paths = sorted(place[0].rglob("arrays-0.*"))
    assert sum(path.stat().st_size for path in paths) == 2 * BUFFER.nbytes
    for path in (first, paths[-1]):
        content = path.read_bytes()
        flipped = bytes([content[0] ^ 4]) + content[1:]
        for damaged in (flipped, content[:-1], b"", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            problems = sf.checkpoint.verify(place[1])
            assert (problems[1], bool(problems[2])) == ([], True)
            with pytest.raises(CheckpointError):
                sf.restore(place[1], STATE, step=2)
            path.write_bytes(content)
        assert sf.checkpoint.verify(place[1]) == {1: [], 2: []}
    path = first
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 4]) + content[1:])
    assert any(
        "data/buffer: the values are not those that" in line
        for line in sf.checkpoint.verify(place[1])[2]
    )
    with pytest.warns(RuntimeWarning, match="step 2 is damaged, and .*data/buffer: the values"):
        assert sf.restore(place[1], STATE).data == {"n": 1}


def test_a_save_that_fails_with_arrays_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepfold.checkpoint.manifest.write_stream", fail)
    with pytest.raises(CheckpointError, match="no space left on the device"):
        sf.save(tmp_path, STATE, step=1, data=BUFFER)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_format_1_are_restored(tmp_path):
    sf.save(tmp_path, STATE, step=1, data={"n": b"1"}, metrics={"loss": 1.0}, extra=[1])
    state = tmp_path / "1" / "state"
    content = read_checked(state / "leaves-0.json")
    content["words"] = content.pop("metadata")
    write_checked(state / "leaves-0.json", content | {"format": 1})
    files = read_checked(state / "files.json")
    files["leaves-0.json"] = (state / "leaves-0.json").stat().st_size
    write_checked(state / "files.json", files)
    found = sf.restore(tmp_path, STATE)
    assert found[1:5] == (1, {"n": b"1"}, [1], {"loss": 1.0})
    assert sf.checkpoint.verify(tmp_path) == {1: []}
