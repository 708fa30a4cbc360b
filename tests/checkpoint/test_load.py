"""What is loaded has to be what is wanted; what is not is told, every path of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stepfold as sf


def params():
    return {
        "layers": [
            {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)},
            {"kernel": jnp.arange(12).reshape(3, 4), "bias": jnp.zeros((), bool)},
        ],
        "empty": jnp.zeros((0, 4), jnp.float8_e4m3fn),
        "none": None,
    }


@pytest.fixture
def mesh():
    return sf.make_mesh((2, 4), ("dp", "fsdp"))


def test_every_difference_is_listed(tmp_path, key):
    sf.export_params(tmp_path, params())
    like = params()
    like["layers"][0] = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(3), "scale": jnp.ones(3)}
    like |= {"empty": None, "key": key}
    with pytest.raises(sf.TreeMismatchError) as caught:
        sf.load_params(tmp_path, like)
    head, *lines = str(caught.value).splitlines()
    assert head == (
        f"{tmp_path}: expected the tree that was saved, got one that differs at 5 paths; names=… "
        "says what arrays are called there, and cast=True converts dtypes"
    )
    assert {tuple(line.split()) for line in lines[2:]} == {
        ("key", "nothing", "key<threefry2x32>[]"),
        ("layers/0/scale", "nothing", "float32[3]"),
        ("empty", "float8_e4m3fn[0,4]", "None"),
        ("layers/0/bias", "bfloat16[3]", "float32[3]"),
        ("layers/0/kernel", "float32[2,3]", "float32[3,2]"),
    }


def test_a_key_is_not_made_of_numbers(tmp_path, key):
    sf.export_params(tmp_path, {"a": jax.random.key_data(key)})
    for cast in (False, True):
        with pytest.raises(sf.TreeMismatchError, match=r"a +uint32\[2\] +key<threefry2x32>\[\]"):
            sf.load_params(tmp_path, {"a": key}, cast=cast)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float8_e5m2"),
     ("int8", "int32"), ("int32", "uint8"), ("float32", "float32")],
)  # fmt: skip
def test_dtypes_are_converted_only_if_asked(tmp_path, mesh, saved, wanted):
    values = jnp.arange(8.0).astype(saved)
    sf.export_params(tmp_path, {"a": values})
    for place in (None, NamedSharding(mesh, PartitionSpec("fsdp"))):
        like = {"a": jax.ShapeDtypeStruct((8,), jnp.dtype(wanted), sharding=place)}
        if saved != wanted:
            with pytest.raises(sf.TreeMismatchError, match=rf"a +{saved}\[8\] +{wanted}\[8\]"):
                sf.load_params(tmp_path, like)
        back = sf.load_params(tmp_path, like, cast=True)["a"]
        assert back.dtype == wanted
        assert back.tobytes() == values.astype(wanted).tobytes()


@pytest.mark.parametrize(
    ("saved", "wanted"), [("float32", "int32"), ("int32", "float32"), ("bool", "int32")]
)
def test_kinds_of_numbers_are_not_converted(tmp_path, saved, wanted):
    sf.export_params(tmp_path, {"a": jnp.ones(3, saved)})
    with pytest.raises(sf.TreeMismatchError, match=rf"a +{saved}\[3\] +{wanted}\[3\]"):
        sf.load_params(tmp_path, {"a": jnp.ones(3, wanted)}, cast=True)


@pytest.mark.parametrize("values", [[0, 300], [-1, 5]])
def test_integers_that_do_not_fit_are_refused(tmp_path, values):
    sf.export_params(tmp_path, {"a": np.int64(values)})
    words = r"a: saved int64\[2\], wanted uint8\[2\], but not every value fits"
    with pytest.raises(sf.TreeMismatchError, match=words):
        sf.load_params(tmp_path, {"a": jnp.zeros(2, jnp.uint8)}, cast=True)


def test_what_jax_would_narrow_is_refused(tmp_path):
    sf.export_params(tmp_path, {"a": np.float64([1, 1e300])})
    like = {"a": jax.ShapeDtypeStruct((2,), np.float64)}
    words = r"a: wanted float64\[2\], which jax makes only with jax_enable_x64"
    with pytest.raises(sf.TreeMismatchError, match=words):
        sf.load_params(tmp_path, like)
    with jax.enable_x64(True):
        back = sf.load_params(tmp_path, like)
    assert back["a"].dtype == np.float64
    assert np.asarray(back["a"]).tolist() == [1, 1e300]


def test_what_says_no_shape_or_no_device_is_refused(tmp_path):
    sf.export_params(tmp_path, {"a": jnp.ones(3)})
    with pytest.raises(
        sf.ConfigError, match=r"a: expected an array or a jax.ShapeDtypeStruct, got"
    ):
        sf.load_params(tmp_path, {"a": 1.0})
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    like = {"a": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)}
    with pytest.raises(sf.ConfigError, match="a: expected a sharding over devices, got one over"):
        sf.load_params(tmp_path, like)


def test_what_is_broken_is_a_checkpoint_error(tmp_path):
    sf.export_params(tmp_path, params())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(sf.CheckpointError, match="expected a whole safetensors file"):
        sf.load_params(tmp_path, params())
    with pytest.raises(
        sf.CheckpointError, match=r"expected .*, or x.safetensors.index.json beside"
    ):
        sf.load_params(tmp_path / "x.safetensors", params())
