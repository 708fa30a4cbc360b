import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter.for_torch import check_names, torch_layout, torch_names
from stepfold.adapter.saving import save_for_torch

SHAPES = [((2, 3), (3, 2)), ((5, 6, 2, 3), (3, 2, 5, 6)), ((2, 3, 4), (2, 3, 4)), ((2,), (2,))]


@pytest.mark.parametrize(("shape", "turned"), SHAPES)
def test_kernels_are_turned(shape, turned):
    found = torch_layout({"a": {"kernel": jnp.ones(shape), "w": jnp.ones(shape)}})["a"]
    assert (found["kernel"].shape, found["w"].shape) == (turned, shape)


def test_a_dense_layer_gives_what_torchs_gives():
    kernel, x = np.arange(6.0).reshape(2, 3), np.arange(4.0).reshape(2, 2)
    weight = torch_layout({"kernel": jnp.asarray(kernel)})["kernel"]
    np.testing.assert_allclose(x @ np.asarray(weight).T, x @ kernel)


@pytest.mark.torch
def test_torch_loads_what_was_saved_and_computes_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    params = {"0": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}
    save_for_torch(tmp_path, params)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3))
    layers.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = np.ones((4, 2), np.float32)
    wanted = x @ params["0"]["kernel"] + params["0"]["bias"]
    np.testing.assert_allclose(layers(torch.tensor(x)).detach().numpy(), wanted)


def test_names_are_torchs_or_ones_own():
    called = torch_names()
    names = [called(path) for path in ("a/kernel", "a/scale", "embed/embedding", "a/0/bias", "w")]
    assert names == ["a.weight", "a.weight", "embed.weight", "a.0.bias", "w"]
    assert torch_names(str.upper)("a/b") == "A/B"
    assert torch_names({"a/kernel": "b"})("a/kernel") == "b"
    with pytest.raises(sf.ConfigError, match="names: expected a function of a path, or names by"):
        torch_names(["a"])


def test_a_name_of_what_is_not_there_is_refused():
    with pytest.raises(sf.ConfigError, match="names: expected paths of parameters, of which there"):
        check_names({"w": jnp.ones(1)}, {"v": "weight"})
    check_names({"w": jnp.ones(1)}, {"w": "weight"})
