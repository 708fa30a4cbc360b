"""`devices_of` describes the devices of slices that are not here."""

import importlib.util
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import stepfold as sf

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
EXAMPLES = r'expected a TPU slice such as "v5e:4x4", "v6e:2x4", .*, got '


@pytest.mark.parametrize(
    "name", ["h100:8", "v5e", "v5e:", "v5e:4x", "4x4", "v5litepod-16", 3, None]
)
def test_other_names_are_refused_with_examples(name):
    with pytest.raises(sf.errors.ConfigError, match=f"^topology: {EXAMPLES}{name!r}$"):
        sf.sharding.devices_of(name)


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_without_libtpu_the_extra_is_named():
    words = r"^topology: libtpu is not installed; run pip install .stepfold\[tpu\].$"
    before = dict(os.environ)
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.sharding.devices_of("v5e:4x4")
    assert dict(os.environ) == before


@pytest.fixture
def libtpu():
    return pytest.importorskip("libtpu")


tpu = [pytest.mark.tpu, pytest.mark.usefixtures("libtpu")]


class TestTopologies:
    pytestmark = tpu

    @pytest.mark.parametrize(
        ("name", "kind", "count"),
        [
            ("v5e:4x4", "TPU v5 lite", 16),
            ("v5e:1x1", "TPU v5 lite", 1),
            ("v5p:1x1x1", "TPU v5", 1),
            ("v4:1x1x1", "TPU v4", 1),
            ("v6e:2x4", "TPU v6 lite", 8),
            ("v5p:2x2x2", "TPU v5", 8),
            ("v4:2x2x2", "TPU v4", 8),  # two cores of a chip are one device
            ("v3:2x2", "TPU v3", 8),
            ("tpu7x:2x2x1", "TPU7x", 8),
        ],
    )
    def test_a_mesh_of_a_slice(self, name, kind, count):
        devices = sf.sharding.devices_of(name)
        assert {device.device_kind for device in devices} == {kind}
        assert sf.make_mesh(devices=devices).shape["fsdp"] == len(devices) == count

    @pytest.mark.parametrize("name", ["v9:2x2", "v5e:3x5", "v5p:16"])
    def test_a_slice_that_libtpu_does_not_know(self, name):
        words = f"^topology: {EXAMPLES}{name!r}; libtpu reports: INVALID_ARGUMENT: "
        with pytest.raises(sf.errors.ConfigError, match=words):
            sf.sharding.devices_of(name)

    def test_arrays_cannot_be_put_there(self):
        mesh = sf.make_mesh(devices=sf.sharding.devices_of("v5e:2x2"))
        words = "^devices: expected devices of this machine, got those of sf.sharding.devices_of"
        with pytest.raises(sf.errors.ShardingError, match=words):
            sf.shard_batch(np.ones((8, 3)), mesh)
        params = {"w": np.ones((64, 64))}
        with pytest.raises(sf.errors.ShardingError, match=words):
            sf.sharding.place(params, sf.make_sharding(params, mesh))

    def test_an_abstract_batch_has_the_rows_of_all_hosts(self):
        mesh = sf.make_mesh(devices=sf.sharding.devices_of("v5e:4x4"))
        assert len({device.process_index for device in mesh.devices.flat}) == 4
        batch = sf.shard_batch(jax.ShapeDtypeStruct((32, 3), np.float32), mesh)
        assert batch.shape == (32, 3)
        assert batch.sharding.shard_shape(batch.shape) == (2, 3)
        with pytest.raises(sf.errors.ShardingError, match="expected a multiple of 16 rows"):
            sf.shard_batch(jax.ShapeDtypeStruct((24, 3), np.float32), mesh)

    def test_two_processes_at_once_and_the_environment_stays(self):
        code = """
import os
import jax
import stepfold as sf
before = dict(os.environ)
print(len(sf.sharding.devices_of("v5e:2x2")), dict(os.environ) == before, flush=True)
input()
"""
        start = lambda: subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes = [start(), start()]
        assert [process.stdout.readline() for process in processes] == ["4 True\n"] * 2
        for process in processes:
            _, errors = process.communicate("\n", timeout=60)
            assert (process.returncode, errors) == (0, "")

    def test_a_users_setting_is_respected(self):
        code = "import stepfold as sf; print(len(sf.sharding.devices_of('v5e:2x2'))); input()"
        own = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], env=own, **pipes) as first:
            assert first.stdout.readline() == "4\n"
            second = subprocess.run(
                [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False
            )
            first.communicate("\n")
        assert "libtpu_lockfile" in second.stderr
