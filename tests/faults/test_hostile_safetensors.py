"""Hostile safetensors files and indexes raise a CheckpointError, and never give wrong numbers.

Those that are merely broken are in tests/checkpoint/test_safetensors.py.
"""

import json
import os
import random
import threading

import jax
import numpy as np
import pytest

import stepfold as sf

PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int32)}
LIKE = jax.eval_shape(lambda: PARAMS)
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
HEADER = {"a": ENTRY, "b": {"dtype": "I32", "shape": [4], "data_offsets": [24, 40]}}
DATA = b"".join(np.asarray(leaf).tobytes() for leaf in PARAMS.values())


def load(path):
    """Load in a thread that has two minutes; return the parameters or the error."""
    found = []

    def call():
        try:
            found.append(sf.checkpoint.load_params(path, LIKE))
        except BaseException as error:  # noqa: BLE001  compared by the caller
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(120)
    assert found, "still running after 120 s"
    return found[0]


def as_bytes(header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changed):
    return as_bytes(HEADER | {"a": ENTRY | changed})


FILES = {
    "empty": b"",
    "a header of 2**63 bytes": as_bytes(HEADER, length=2**63),
    "no utf-8": as_bytes(b"\xff\xfe"),
    "deep": as_bytes(b"[" * 100_000 + b"]" * 100_000),
    "an entry of null": as_bytes(HEADER | {"a": None}),
    "metadata in a list": as_bytes(HEADER | {"__metadata__": [1]}),
    "a negative shape": entry(shape=[-2, -3]),
    "a huge shape": entry(shape=[2**62, 2**62]),
    "a shape that overflows to the size": entry(shape=[2**62 + 3, 4, 1]),
    "negative offsets": entry(data_offsets=[-24, 0]),
    "offsets beyond the end": entry(data_offsets=[24, 48]),
    "overlapping offsets": as_bytes(
        HEADER | {"b": {"dtype": "I32", "shape": [4], "data_offsets": [8, 24]}}
    ),
    "a hole": as_bytes(
        {"a": ENTRY, "b": {"dtype": "I32", "shape": [4], "data_offsets": [28, 44]}}, DATA + b"1234"
    ),
    "a name with a surrogate": as_bytes(
        b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', b""
    ),
}


@pytest.mark.parametrize("content", FILES)
def test_malformed_file_is_an_error(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(FILES[content])
    error = load(tmp_path)
    assert isinstance(error, sf.errors.CheckpointError), repr(error)


def index(weight_map):
    return json.dumps({"weight_map": weight_map}).encode()


FULL = dict.fromkeys(PARAMS, "part.safetensors")
INDEXES = {
    "empty": b"",
    "no utf-8": b"\xff",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a number of 5,000 digits": b"1" * 5000,
    "a map of null": index(None),
    "an absolute file": index(FULL | {"a": "/part.safetensors"}),
    "a file with a null": index(FULL | {"a": "\0.safetensors"}),
    "a file with a long name": index(FULL | {"a": "a" * 5000 + ".safetensors"}),
    "a file with a surrogate": index(FULL | {"a": "\ud800.safetensors"}),
}


@pytest.mark.parametrize("content", INDEXES)
def test_malformed_index_is_an_error(tmp_path, content):
    (tmp_path / "part.safetensors").write_bytes(as_bytes(HEADER))
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEXES[content])
    error = load(tmp_path)
    assert isinstance(error, sf.errors.CheckpointError), repr(error)
    str(error).encode()


SPECIAL = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a full device": lambda path: path.symlink_to("/dev/full"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "part"])
def test_special_file_is_an_error(tmp_path, name, kind):
    if name == "part":
        (tmp_path / "model.safetensors.index.json").write_bytes(index(FULL))
        name = "part.safetensors"
    SPECIAL[kind](tmp_path / name)
    error = load(tmp_path)
    assert isinstance(error, sf.errors.CheckpointError), repr(error)


def test_no_random_change_gives_a_raw_error(tmp_path, count):
    good = as_bytes(HEADER)
    path = tmp_path / "model.safetensors"
    header_end = len(good) - len(DATA)
    for seed in range(count(100, 5000)):
        draw = random.Random(seed)
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(header_end)] = draw.choice(b'0123456789[]{}",:ab\xff\0')
        path.write_bytes(bad)
        found = load(path)
        if not isinstance(found, sf.StepfoldError):
            assert not isinstance(found, BaseException), repr(found)
            # The order of names may change, but not what is read for a name.
            for name, leaf in found.items():
                assert leaf.shape == PARAMS[name].shape
