import json

import jax
import pytest

import stepfold as sf
from stepfold.adapter.protocol import BaseTrainerProtocol
from stepfold.adapter.trainer import Trainer

from . import digits


def test_a_trainer_has_all_methods_of_the_protocol():
    methods = [name for name, value in vars(BaseTrainerProtocol).items() if callable(value)]
    public = [name for name in methods if not name.startswith("_")]
    assert len(public) > 20
    assert [name for name in public if not callable(getattr(Trainer, name, None))] == []


def test_gathering_is_refused(tmp_path):
    trainer = digits.trainer(max_steps=1)
    trainer.save_pretrained(tmp_path / "a", gather_fns=None)
    with pytest.raises(sf.ConfigError, match="gather_fns: expected None, since arrays are saved"):
        trainer.save_pretrained(tmp_path / "b", gather_fns={"w": max})


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
    with pytest.raises(sf.ConfigError, match=f"there is no '{name[:-1]}'; did you mean '{name}'"):
        trainer.save_pretrained(tmp_path, to_torch=True, **{option: {name[:-1]: {}}})


def test_parameters_alone_are_written_for_torch(tmp_path):
    trainer = digits.trainer(max_steps=1)
    trainer.save_pretrained(tmp_path / "a", trainer.state.params, to_torch=True)
    trainer.save_pretrained(tmp_path / "b", to_torch=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_a_trainer_starts_from_and_writes_the_names_of_others(tmp_path):
    names = sf.NameMap([
        sf.NameRule("kernel", "dense.weight", transpose=(1, 0)),
        ("bias", "dense.bias"),
    ])  # fmt: skip
    params = digits.init(jax.random.key(3))
    sf.export_params(tmp_path / "hub", params, names=names)
    trainer = digits.trainer(given={"names": names}, init_weights_from=tmp_path / "hub")
    assert digits.bits(trainer.state.params) == digits.bits(params)
    assert trainer.loaded == ["params/bias", "params/kernel"]
    trainer.save_pretrained(tmp_path / "back", to_torch=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hub", "back")]
    assert files[0] == files[1]
    with pytest.raises(sf.ConfigError, match="names: expected a NameMap, got dict"):
        digits.trainer(given={"names": {"kernel": "weight"}})


def test_arguments_without_json_leave_the_reason(tmp_path):
    trainer = digits.trainer(custom_scheduler=lambda step: 0.1, learning_rate=5e-5, max_steps=1)
    path = trainer.save_pretrained(tmp_path)
    reason = json.loads((tmp_path / "arguments.json").read_text())["arguments"]
    assert reason.startswith("custom_scheduler: expected a value that JSON gives back")
    assert sf.restore(tmp_path, jax.eval_shape(lambda: trainer.state)).step == int(path.name) == 0


def test_the_json_of_an_output_refers_to_the_checkpoint(tmp_path):
    output = digits.trainer(output_dir=tmp_path, max_steps=5, do_eval=False).train()
    again = type(output).from_json(output.to_json(), like=output.state)
    assert digits.bits(again.state) == digits.bits(output.state)
    with pytest.raises(sf.ConfigError, match="checkpoint_path: expected '<directory>/<step>'"):
        digits.trainer(max_steps=5).train().to_json()
