import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import stepfold as sf
from stepfold.adapter.saving import save_for_torch

SHAPES = [((2, 3), (3, 2)), ((5, 6, 2, 3), (3, 2, 5, 6)), ((2, 3, 4), (2, 3, 4)), ((2,), (2,))]
SHAPES += [((4, 5, 6, 2, 3), (3, 2, 4, 5, 6))]


def saved(folder, params, **options):
    save_for_torch(folder, params, **options)
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("shape", "torch_shape"), SHAPES)
def test_kernels_are_transposed(tmp_path, shape, torch_shape):
    arrays = saved(tmp_path, {"a": {"kernel": jnp.ones(shape), "w": jnp.ones(shape)}})
    assert (arrays["a.weight"].shape, arrays["a.w"].shape) == (torch_shape, shape)


def test_a_dense_layer_computes_the_same(tmp_path):
    kernel, x = np.arange(6.0).reshape(2, 3), np.arange(4.0).reshape(2, 2)
    weight = saved(tmp_path, {"kernel": jnp.asarray(kernel)})["weight"]
    np.testing.assert_allclose(x @ weight.T, x @ kernel)


@pytest.mark.torch
def test_torch_loads_the_file_and_computes_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    params = {"0": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}
    save_for_torch(tmp_path, params)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3))
    layers.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = np.ones((4, 2), np.float32)
    wanted = x @ params["0"]["kernel"] + params["0"]["bias"]
    np.testing.assert_allclose(layers(torch.tensor(x)).detach().numpy(), wanted)


def test_names_are_those_of_torch_or_your_own(tmp_path):
    one = jnp.ones(1)
    params = {
        "a": {"kernel": one, "0": {"bias": one}},
        "b": {"scale": one},
        "embed": {"embedding": one},
        "w": one,
    }
    names = {"a.weight", "b.weight", "embed.weight", "a.0.bias", "w"}
    assert saved(tmp_path, params).keys() == names
    upper = {"A/KERNEL", "A/0/BIAS", "B/SCALE", "EMBED/EMBEDDING", "W"}
    assert saved(tmp_path, params, names=str.upper).keys() == upper
    renamed = saved(tmp_path, params, names={"a/kernel": "c"})
    assert renamed.keys() == names - {"a.weight"} | {"c"}
    for wrong in (["a"], []):
        with pytest.raises(sf.ConfigError, match="names: expected a function of a path, or names "):
            save_for_torch(tmp_path, params, names=wrong)


def test_names_and_metadata_are_in_the_file(tmp_path):
    params = {"dense": {"kernel": jnp.ones((2, 3))}}
    names = {"dense/kernel": "lm_head"}
    save_for_torch(tmp_path, params, names=names, metadata={"by": "stepfold"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["lm_head"]
        assert file.metadata() == {"by": "stepfold", "format": "pt"}


def test_a_name_for_a_missing_path_is_refused(tmp_path):
    with pytest.raises(sf.ConfigError, match="names: expected paths of parameters, such as w, got"):
        save_for_torch(tmp_path, {"w": jnp.ones(1)}, names={"v": "weight"})
    assert saved(tmp_path, {"w": jnp.ones(1)}, names={"w": "weight"}).keys() == {"weight"}
