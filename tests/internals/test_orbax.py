"""A release of orbax that lacks a part that stepfold uses is refused before anything is saved."""

import sys
from operator import attrgetter

import orbax.checkpoint as ocp
import pytest

import stepfold as sf
from stepfold.internals import orbax as internals
from stepfold.internals.texts import ORBAX_UNFINISHED


@pytest.mark.parametrize("name", internals._USED)
def test_a_release_without_a_part_is_refused(monkeypatch, tmp_path, name):
    owner, _, attribute = name.rpartition(".")
    monkeypatch.delattr(attrgetter(owner)(ocp) if owner else ocp, attribute)
    monkeypatch.delitem(sys.modules, "stepfold.internals.orbax")
    monkeypatch.delitem(sys.modules, "stepfold.checkpoint.writer", raising=False)
    says = f"^orbax-checkpoint: expected a release with {name}, got version .*; install >=0.12,<1"
    with pytest.raises(sf.errors.ConfigError, match=says):
        sf.Checkpoints(every=1).open(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_handler_without_the_name_that_orbax_records(monkeypatch):
    assert "PyTreeCheckpointHandler" in internals._Handler(use_compression=False).typestr()
    monkeypatch.delattr(ocp.CheckpointHandler, "typestr")
    assert isinstance(internals._Handler(use_compression=False), ocp.PyTreeCheckpointHandler)


def test_orbax_writes_into_folders_of_the_known_name():
    assert f".{ORBAX_UNFINISHED}" == ocp.utils.TMP_DIR_SUFFIX
