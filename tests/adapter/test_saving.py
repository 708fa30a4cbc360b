"""What a trainer writes: checkpoints, safetensors for torch, and the card of a run."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter import saving
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.saving import save_for_torch

from . import digits


def test_path_and_state_may_come_in_either_order():
    state = {"w": jnp.ones(1)}
    for values in ((state, "a", None), ("a", state, None), (state, None, "a")):
        path, found = saving.path_and_state(*values)
        assert (path, found is state) == (Path("a").absolute(), True)
    for wrong in ((None, None, None), ("a", "b", None), (state, state, "a")):
        with pytest.raises(
            sf.errors.ConfigError, match="save_pretrained: expected one path and at most"
        ):
            saving.path_and_state(*wrong)


def test_a_state_is_saved_with_its_arguments_position_and_metrics(tmp_path):
    trainer = digits.train_only(learning_rate=1e-3, max_steps=9)
    trainer.state = trainer.state._replace(step=trainer.state.step + 7)
    trainer.history = {"eval/loss": [0.75, 0.5], "eval/none": []}
    path = trainer.save_pretrained(tmp_path / "a")
    assert path == tmp_path / "a" / "7"
    restored = sf.restore(path.parent, trainer.abstract_state)
    assert (restored.step, restored.metrics) == (7, {"eval/loss": 0.5})
    assert restored.data == {**trainer.dataloader_train.get_state(), "step": 7}
    assert TrainingArguments.from_json(path.parent / "arguments.json") == trainer.arguments


def test_a_card_goes_to_a_file_or_into_a_folder(tmp_path):
    saving.write_card(tmp_path / "new" / "card.md", "# a\n")
    saving.write_card(tmp_path / "folder", "# b\n")
    assert (tmp_path / "new" / "card.md").read_text() == "# a\n"
    assert (tmp_path / "folder" / "README.md").read_text() == "# b\n"


def test_a_card_cannot_go_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sf.errors.CheckpointError, match="file: expected a directory, got a file"):
        saving.write_card(tmp_path / "file" / "card.md", "text")


def test_a_long_curve_is_thinned_and_a_flat_one_is_low():
    assert saving.sparkline(range(1000))[0] == "▁"
    assert saving.sparkline(range(1000))[-1] == "█"
    assert len(saving.sparkline(range(1000))) == 32
    assert saving.sparkline([3.0, 3.0]) == "▁▁"
    assert saving.sparkline([]) == ""
    assert saving.sparkline([0, 1, 2, float("nan"), 3]) == "▁▃▆ █"


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
        with pytest.raises(
            sf.errors.ConfigError, match="names: expected a function of a path, or names "
        ):
            save_for_torch(tmp_path, params, names=wrong)


def test_names_and_metadata_are_in_the_file(tmp_path):
    params = {"dense": {"kernel": jnp.ones((2, 3))}}
    names = {"dense/kernel": "lm_head"}
    save_for_torch(tmp_path, params, names=names, metadata={"by": "stepfold"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["lm_head"]
        assert file.metadata() == {"by": "stepfold", "format": "pt"}


def test_a_name_for_a_missing_path_is_refused(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="names: expected paths of parameters, such as w, got"
    ):
        save_for_torch(tmp_path, {"w": jnp.ones(1)}, names={"v": "weight"})
    assert saved(tmp_path, {"w": jnp.ones(1)}, names={"w": "weight"}).keys() == {"weight"}


@shows(
    "API reference",
    "Methods and properties",
    {"`gather_fns`": "refused, since arrays are saved from where they are"},
)
def test_gathering_is_refused(tmp_path):
    trainer = digits.trainer(max_steps=1)
    trainer.save_pretrained(tmp_path / "a", gather_fns=None)
    with pytest.raises(
        sf.errors.ConfigError, match="gather_fns: expected None, since arrays are saved"
    ):
        trainer.save_pretrained(tmp_path / "b", gather_fns={"w": max})


@shows(
    "API reference",
    "Methods and properties",
    {
        "`easystate_to_huggingface_model_kwargs`": "`names` of the parameters in torch; others "
        "are refused",
        "`torch_save_pretrained_kwargs`": "`metadata` of the file; others are refused",
    },
)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("easystate_to_huggingface_model_kwargs", {"names": {}}),
        ("torch_save_pretrained_kwargs", {"metadata": {"by": "stepfold"}}),
    ],
)
def test_an_unknown_option_is_refused(tmp_path, option, value):
    trainer = digits.trainer(max_steps=1)
    trainer.save_pretrained(tmp_path, to_torch=True, **{option: value})
    (name,) = value
    with pytest.raises(
        sf.errors.ConfigError, match=f"there is no '{name[:-1]}'; did you mean '{name}'"
    ):
        trainer.save_pretrained(tmp_path, to_torch=True, **{option: {name[:-1]: {}}})


def test_a_trainer_starts_from_and_writes_the_names_of_others(tmp_path):
    names = sf.checkpoint.NameMap([
        sf.checkpoint.NameRule("kernel", "dense.weight", transpose=(1, 0)),
        ("bias", "dense.bias"),
    ])  # fmt: skip
    params = digits.init(jax.random.key(3))
    sf.checkpoint.export_params(tmp_path / "hub", params, names=names)
    trainer = digits.trainer(given={"names": names}, init_weights_from=tmp_path / "hub")
    assert digits.bits(trainer.state.params) == digits.bits(params)
    assert trainer.loaded == ["params/bias", "params/kernel"]
    trainer.save_pretrained(tmp_path / "back", to_torch=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hub", "back")]
    assert files[0] == files[1]
    with pytest.raises(sf.errors.ConfigError, match="names: expected a NameMap, got dict"):
        digits.trainer(given={"names": {"kernel": "weight"}})


def test_a_state_that_is_there_already_is_not_saved_again_and_another_is_refused(tmp_path):
    trainer = digits.train_only(max_steps=2)
    trainer.train()
    path = trainer.save_pretrained(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    assert trainer.save_pretrained(tmp_path) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before
    assert digits.train_only(max_steps=3).train(ckpt_path=tmp_path).step == 3
    other = trainer.state._replace(params=jax.tree.map(jnp.negative, trainer.state.params))
    smaller = trainer.state._replace(params={"kernel": trainer.state.params["kernel"]})
    for state in (other, smaller):
        with pytest.raises(sf.errors.CheckpointError, match="step 2 already exists; delete it"):
            trainer.save_pretrained(tmp_path, state)


def test_arguments_without_json_leave_the_reason(tmp_path):
    trainer = digits.trainer(custom_scheduler=lambda step: 0.1, learning_rate=5e-5, max_steps=1)
    path = trainer.save_pretrained(tmp_path)
    reason = json.loads((tmp_path / "arguments.json").read_text())["arguments"]
    assert reason.startswith("custom_scheduler: expected a value that JSON gives back")
    assert sf.restore(tmp_path, jax.eval_shape(lambda: trainer.state)).step == int(path.name) == 0
