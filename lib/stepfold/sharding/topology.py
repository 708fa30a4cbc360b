"""Devices of TPUs that are not here, to compile for."""

import os
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.experimental import topologies

from stepfold.errors import ConfigError, ShardingError
from stepfold.internals import texts
from stepfold.internals.jax import can_run

# libtpu reads these when it is loaded: to load it in several processes, and away from a TPU host.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def devices_of(topology: str) -> list[jax.Device]:
    """Return the devices of a TPU slice that is not here, to compile steps for.

    `describe`, `compile_step` and `choose` take a mesh of them, with abstract state and batch. The
    devices hold no arrays and run nothing. Their compiler is libtpu, of the extra `stepfold[tpu]`.
    GPUs are not supported, since their compiler needs one.

    Args:
      topology: the generation and the chips along each axis. A chip of v2, v3 or 7x is two devices.

    Raises:
      ConfigError: if libtpu is not installed, or does not know the topology.

    >>> import stepfold as sf
    >>> sf.sharding.devices_of("h100:8")
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: topology: expected a TPU slice such as "v5e:4x4", ..., got 'h100:8'
    """
    expected = 'a TPU slice such as "v5e:4x4", "v6e:2x4", "v5p:2x2x2", "v4:2x2x1" or "tpu7x:2x2x1"'
    message = f"topology: expected {expected}, got {topology!r}"
    if not re.fullmatch(r"(tpu ?)?v?\d\w*:\d+(x\d+)*", str(topology), re.IGNORECASE):
        raise ConfigError(message)
    # The two cores of a TPU v4 are one device, as they are on its hosts by default.
    options: Any = {"chip_config_name": "megacore"} if topology.lower().startswith("v4:") else {}
    if set(re.split("[:x]", topology)[1:]) == {"1"}:  # libtpu assumes four chips per host
        options["chips_per_host_bounds"] = [1, 1, 1]
    # jax sets this variable if there is no TPU. If there is one, it must find its host's settings.
    missing = set(_ENVIRONMENT) - set(os.environ) if "TPU_SKIP_MDS_QUERY" in os.environ else set()
    os.environ.update({name: _ENVIRONMENT[name] for name in missing})
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except RuntimeError as error:
        if texts.NO_LIBTPU.search(str(error)):
            raise ConfigError(
                "topology: libtpu is not installed; run pip install 'stepfold[tpu]'"
            ) from None
        if not texts.UNKNOWN_TOPOLOGY.match(str(error)):
            raise
        raise ConfigError(f"{message}; libtpu reports: {error}") from None
    finally:
        for name in missing:
            os.environ.pop(name, None)


def check_here(devices: Iterable[Any]) -> None:
    """Refuse devices of `devices_of`."""
    if not can_run(devices):
        raise ShardingError(
            "devices: expected devices of this machine, got those of sf.sharding.devices_of, which "
            "hold no arrays and run nothing; describe and compile steps for them, with abstract "
            "arrays"
        )
