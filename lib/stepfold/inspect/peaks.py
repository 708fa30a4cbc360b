"""Peak FLOPs of devices, and the share of them that a step reaches."""

import re
from typing import Any

from stepfold.errors import ConfigError, refuse


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Return the dense peak of one jax device in FLOPs per second, or None if it is unknown.

    Args:
      device_kind: such as `jax.devices()[0].device_kind`.
      dtype: the dtype of the operands: bfloat16, float16, float32 (which XLA lets tensor cores
        round to TF32) or an 8-bit float such as `float8_e4m3fn`.

    >>> peak_flops("TPU v5p"), peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (459000000000000.0, 989000000000000.0, None)
    """
    column = "float8" if dtype.startswith("float8") else dtype
    if column not in _COLUMNS:
        return None
    rows = (peaks for pattern, *peaks in _PEAKS if re.fullmatch(pattern, device_kind))
    peak = next(rows, [0.0] * len(_COLUMNS))[_COLUMNS.index(column)]
    return peak * 1e12 or None


# Teraflops without sparsity and with float32 accumulation, from the vendors' data sheets and
# cloud.google.com/tpu/docs; 0 if unsupported or not published. One jax device is half a chip of a
# TPU v2, v3 or 7, and one of the two dies of an MI250. The first row that matches is used.
_COLUMNS = ("bfloat16", "float16", "float32", "float8")
_PEAKS: tuple[tuple[Any, ...], ...] = (
    (r"TPU v2", 23, 0, 0, 0),
    (r"TPU v3", 61.5, 0, 0, 0),
    (r"TPU v4", 275, 0, 0, 0),
    (r"TPU v4 lite", 137, 0, 0, 0),
    (r"TPU v5 ?(lite|e)", 197, 0, 0, 0),
    (r"TPU v5p?", 459, 0, 0, 0),
    (r"TPU v6 ?(lite|e)", 918, 0, 0, 918),
    (r"TPU ?v?7x?", 1153.5, 0, 0, 2307),
    (r".*\bGB300\b.*", 2500, 2500, 1250, 5000),
    (r".*\bGB200\b.*", 2500, 2500, 1250, 5000),
    (r".*\bB[23]00\b.*", 2250, 2250, 1100, 4500),
    (r".*\bH[12]00 NVL.*", 835, 835, 417, 1671),
    (r".*\bH100 PCIe\b.*", 756, 756, 378, 1513),
    (r".*\bG?H[12]00\b.*", 989, 989, 494, 1979),
    (r".*\bA100\b.*", 312, 312, 156, 0),
    (r".*\bA10G\b.*", 70, 70, 35, 0),
    (r".*\bA10\b.*", 125, 125, 62.5, 0),
    (r".*\bV100-PCIE\b.*", 0, 112, 14, 0),
    (r".*\bV100-SXM.*", 0, 125, 15.7, 0),
    (r".*\bT4\b.*", 0, 65, 8.1, 0),
    (r".*\bL40S\b.*", 362, 362, 183, 733),
    (r".*\bL4\b.*", 121, 121, 60, 242),
    (r".*\bRTX 5090\b", 209.5, 209.5, 104.8, 419),
    (r".*\bRTX 4090\b", 165.2, 165.2, 82.6, 330.3),
    (r".*\bRTX 3090\b", 71, 71, 35.6, 0),
    (r".*\bMI355X\b.*", 2516, 2516, 157.3, 5033),
    (r".*\bMI3(00|25)X\b.*", 1307.4, 1307.4, 163.4, 2614.9),
    (r".*\bMI300A\b.*", 980.6, 980.6, 122.6, 1961.2),
    (r".*\bMI250X\b.*", 191.5, 191.5, 47.9, 0),
    (r".*\bMI250\b.*", 181, 181, 45.3, 0),
)


def mfu(
    flops: float,
    seconds: float,
    *,
    device: Any = None,
    peak: float | None = None,
    dtype: str = "bfloat16",
) -> float:
    """Return the model FLOPs utilization of a step: the share of a device's peak that it reaches.

    Args:
      flops: the FLOPs of one device in one step.
      seconds: the duration of one step.
      device: a `jax.Device`, whose peak is looked up.
      peak: FLOPs per second of one device, instead.
      dtype: the dtype of the operands.

    >>> mfu(3e14, 1.0, peak=6e14)
    0.5
    """
    if not seconds > 0:
        refuse("mfu", "seconds above 0", f"{seconds}")
    if peak is None:
        kind = getattr(device, "device_kind", None)
        peak = kind and peak_flops(kind, dtype)
    if not peak:
        problem = f"the {dtype} peak of {kind!r} is not known" if kind else "got no device"
        raise ConfigError(f"mfu: {problem}; give peak=..., in FLOPs per second of one device")
    return flops / (seconds * peak)
