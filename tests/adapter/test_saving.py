import json

import jax
import jax.numpy as jnp
import pytest
import safetensors.numpy

import stepfold as sf
from stepfold.adapter import saving

from . import digits


def test_path_and_state_are_told_apart():
    state = {"w": jnp.ones(1)}
    for given in ((state, "a", None), ("a", state, None), (state, None, "a")):
        path, found = saving.path_and_state(*given)
        assert (str(path), found is state) == ("a", True)
    for wrong in ((None, None, None), ("a", "b", None), (state, state, "a")):
        with pytest.raises(sf.ConfigError, match="save_pretrained: expected one path and at most"):
            saving.path_and_state(*wrong)


def test_gathering_is_refused():
    saving.refuse_gathering(None)
    with pytest.raises(sf.ConfigError, match="gather_fns: expected None, since arrays are saved"):
        saving.refuse_gathering({"w": max})


def test_an_option_that_is_none_is_refused():
    assert saving.torch_options({"names": {}}, "names") == {"names": {}}
    assert saving.torch_options(None, "names") == {}
    with pytest.raises(sf.ConfigError, match="there is no 'nams'; did you mean 'names'"):
        saving.torch_options({"nams": {}}, "names")


def test_a_checkpoint_is_found_by_its_run_its_folder_or_itself(tmp_path):
    sf.save(tmp_path / "checkpoints", {"w": jnp.ones(1)}, step=7)
    folder = tmp_path / "checkpoints"
    assert saving.find_checkpoint(tmp_path) == (folder, None)
    assert saving.find_checkpoint(str(folder)) == (folder, None)
    assert saving.find_checkpoint(folder / "7") == (folder, 7)
    for wrong in (folder / "8", tmp_path / "nowhere"):
        with pytest.raises(sf.CheckpointError, match="expected a checkpoint, a folder of them"):
            saving.find_checkpoint(wrong)


def test_names_for_torch_go_into_the_file(tmp_path):
    params = {"dense": {"kernel": jnp.ones((2, 3))}}
    names = {"dense/kernel": "lm_head"}
    saving.save_for_torch(tmp_path, params, names=names, metadata={"by": "stepfold"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["lm_head"]
        assert file.metadata() == {"by": "stepfold", "format": "pt"}


def test_arguments_that_are_code_are_said_to_be_left_out(tmp_path):
    made = digits.trainer(custom_scheduler=lambda step: 0.1, learning_rate=5e-5, max_steps=1)
    path = made.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "arguments.json").read_text())["arguments"]
    assert said.startswith("custom_scheduler: expected a value that JSON gives back")
    assert sf.restore(tmp_path, jax.eval_shape(lambda: made.state)).step == int(path.name) == 0


def test_a_card_goes_to_a_file_or_into_a_folder(tmp_path):
    saving.write_card(tmp_path / "new" / "card.md", "# a\n")
    saving.write_card(tmp_path / "folder", "# b\n")
    assert (tmp_path / "new" / "card.md").read_text() == "# a\n"
    assert (tmp_path / "folder" / "README.md").read_text() == "# b\n"


def test_a_place_that_is_none_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sf.CheckpointError, match="file: expected a directory, got a file"):
        saving.write_card(tmp_path / "file" / "card.md", "text")
    with pytest.raises(sf.ConfigError, match="checkpoint: expected a path, got 5"):
        saving.find_checkpoint(5)
