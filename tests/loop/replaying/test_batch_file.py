from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stepfold.loop.replaying.batch_file import pack, read, unpack, written


def there_and_back(batch):
    packed = pack(batch)
    return unpack(packed.structure, read(written(packed.arrays))), packed.lost


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "int64", "uint32", "float16", "float32", "float64", "complex64"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)], ids=str)
def test_every_bit_of_an_array_comes_back(dtype, shape):
    array = np.random.default_rng(0).integers(0, 7, shape).astype(dtype)
    back, lost = there_and_back(array)
    assert (back.dtype, back.shape, back.tobytes(), lost) == (
        array.dtype,
        array.shape,
        array.tobytes(),
        [],
    )


def test_arrays_in_another_order_come_back_too():
    array = np.arange(12.0).reshape(3, 4)[:, ::2].T
    assert there_and_back(array)[0].tolist() == array.tolist()


def test_nan_with_its_payload_comes_back():
    array = np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    assert there_and_back(array)[0].tobytes() == array.tobytes()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_come_back(impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    back, _ = there_and_back({"keys": keys})
    assert back["keys"].dtype == keys.dtype
    assert (jax.random.key_data(back["keys"]) == jax.random.key_data(keys)).all()


def test_the_structure_comes_back():
    batch = {"a": [1, 2.5, (None, "text")], "b": {3: True, "c": ()}, "d": {}}
    assert there_and_back(batch) == (batch, [])


def test_an_array_of_a_device_comes_back_on_the_host():
    back, _ = there_and_back(jnp.ones(3, jnp.bfloat16))
    assert isinstance(back, np.ndarray)
    assert back.dtype == jnp.bfloat16


class Pair(NamedTuple):
    one: object
    two: object


def test_another_container_is_written_as_a_dict_and_said():
    back, lost = there_and_back({"pair": Pair(np.ones(2), {"x": 3}), "rest": 4})
    assert back["pair"]["one"].tolist() == [1, 1]
    assert (back["pair"]["two"], back["rest"]) == ({"x": 3}, 4)
    assert lost == ["batch/pair: a Pair, written as a dict"]


class Text:
    def __repr__(self):
        return "Text()"


def test_what_is_no_array_is_said_and_nothing_else_is_lost():
    array = np.array([object()])
    back, lost = there_and_back({"text": Text(), "objects": array, "x": np.ones(2)})
    assert back["x"].tolist() == [1, 1]
    assert lost == [
        "batch/text: Text Text() is no array",
        "batch/objects: object[1] holds no numbers",
    ]
