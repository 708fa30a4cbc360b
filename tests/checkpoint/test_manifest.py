"""Manifests, and JSON files with a checksum."""

import json
import shutil
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import ones

import stepfold as sf
from stepfold.checkpoint.leaves import to_json
from stepfold.checkpoint.manifest import (
    ForeignError,
    NewerError,
    checked_form,
    read_checked,
    read_leaf,
    write_checked,
)
from stepfold.checkpoint.store import open_store
from stepfold.errors import ConfigError


def read_metadata(step):
    return open_store(step.parent).read_metadata(int(step.name))


def read_manifest(step):
    return open_store(step.parent).read_manifest(int(step.name))


STATE = {"params": {"w": ones(8)}, "key": jax.random.wrap_key_data(np.zeros(2, np.uint32))}


@pytest.fixture
def step(tmp_path):
    """Give the folder of a step that is good."""
    sf.save(tmp_path, STATE, step=7, data={"step": 7}, metrics={"loss": 0.5}, extra=b"x")
    return tmp_path / "7"


def rewrite(step, change):
    path = step / "state" / "leaves-0.json"
    content = read_checked(path)
    change(content)
    write_checked(path, content)
    files = step / "state" / "files.json"
    write_checked(files, read_checked(files) | {path.name: path.stat().st_size})


def test_an_unknown_field_is_of_a_newer_stepfold(step):
    rewrite(step, lambda content: content["metadata"].update(later_field=1))
    for read in (read_metadata, read_manifest):
        with pytest.raises(NewerError, match="later_field as well; it was saved by a newer stepf"):
            read(step)


def test_a_copy_under_another_number_is_not_that_step(step):
    shutil.copytree(step, step.with_name("20"))
    for read in (read_metadata, read_manifest):
        with pytest.raises(ForeignError, match="20: expected the checkpoint of step 20, got a cop"):
            read(step.with_name("20"))
    assert sf.checkpoint.latest_step(step.parent) == 7
    assert sf.restore(step.parent, STATE).step == 7
    assert (step.parent / "20").is_dir()


def test_what_json_has_another_word_for_becomes_plain():
    given = {"a": (1, np.float32(0.5)), "b": OrderedDict(c=np.bool_(True)), "d": np.int8(3)}
    made = to_json(given, "extra")
    assert made == {"a": [1, 0.5], "b": {"c": True}, "d": 3}
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {1: "b"}}, "extra/a: expected keys of text, got 1; JSON has no others"),
        ({"a": [0, jnp.ones(2)]}, r"extra/a/1: expected what JSON can hold, got float32\[2\]; wri"),
        (np.ones(3), r"extra: expected what JSON can hold, got float64\[3\]; write it as te"),
        ({"f": print}, "extra/f: expected what JSON can hold, got builtin_function_or_method "),
        ({1, 2}, r"extra: expected what JSON can hold, got set \{1, 2\}; .*as text or numbers"),
    ],
)
def test_what_is_no_json_is_refused_with_its_path(value, words):
    with pytest.raises(ConfigError, match=words):
        to_json(value, "extra")


@pytest.mark.parametrize("shape", [[2**30, 2**30], [0, 2**40, 2**40]])
def test_a_shape_that_no_memory_holds_is_damage(shape):
    with pytest.raises(ValueError, match="leaf w cannot be"):
        read_leaf("w", shape, "float32", None)


def test_a_step_that_no_checkpoint_can_count_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="step: expected an integer below 2.*got 9223372036854"):
        sf.save(tmp_path, {"w": np.ones(2)}, step=2**63)
    assert list(tmp_path.iterdir()) == []


def test_manifests_of_another_form_are_damage():
    says = r"^runs/a/3: the manifests are not those of stepfold: KeyError\('arrays'\)$"
    with pytest.raises(sf.errors.CheckpointError, match=says), checked_form("runs/a/3"):
        _ = {}["arrays"]
