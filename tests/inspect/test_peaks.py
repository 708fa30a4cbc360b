"""Peaks of devices, and the share of them that is reached."""

from types import SimpleNamespace

import jax
import pytest

import stepfold as sf
from stepfold.inspect import peaks


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v2", 23),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_of_known_devices(kind, teraflops):
    assert peaks.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("cpu", "bfloat16"),
        ("TPU v99", "bfloat16"),
        ("NVIDIA A1000", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("Tesla T4", "bfloat16"),  # has no bfloat16
        ("NVIDIA H100 PCIe", "complex64"),
    ],
)
def test_unknown_peaks_are_none(kind, dtype):
    assert peaks.peak_flops(kind, dtype) is None


def test_peaks_depend_on_the_dtype():
    found = [peaks.peak_flops("NVIDIA H200", dtype) for dtype in ("float32", "float8_e5m2")]
    assert found == [494e12, 1979e12]
    assert peaks.peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12


def test_mfu_is_the_share_of_the_peak():
    assert peaks.mfu(197e12, 2.0, device=SimpleNamespace(device_kind="TPU v5e")) == 0.5
    assert peaks.mfu(1e12, 1.0, peak=4e12, device=jax.devices()[0]) == 0.25


def test_mfu_says_what_is_missing():
    with pytest.raises(
        sf.errors.ConfigError, match=r"the bfloat16 peak of 'cpu' is not known; give peak"
    ):
        peaks.mfu(1e12, 1.0, device=jax.devices()[0])
    with pytest.raises(sf.errors.ConfigError, match=r"mfu: got no device; give peak=\.\.\."):
        peaks.mfu(1e12, 1.0)
    with pytest.raises(sf.errors.ConfigError, match=r"expected seconds above 0, got 0\.0"):
        peaks.mfu(1e12, 0.0, peak=1e12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "kind", ["TPU v2", "TPU v3", "TPU v4", "TPU v4 lite", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"]
)
def test_a_peak_that_is_not_published_is_not_known(kind, dtype):
    assert peaks.peak_flops(kind, dtype) is None
