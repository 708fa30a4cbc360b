"""A tree as JSON, and back: arrays bit for bit, containers as they were, and the rest by name."""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from stepfold.core.state import TrainState
from stepfold.errors import ConfigError

_KIND = "stepfold"  # the key of what stands for something that JSON does not know


class LeftOut:
    """Stand for something that JSON could not hold, and say so when it is used.

    >>> gone = LeftOut("function train_step")
    >>> gone
    LeftOut('function train_step')
    >>> gone(1)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: function train_step: JSON holds no such thing, only its name; ...
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Say that it is not there."""
        raise ConfigError(
            f"{self.what}: JSON holds no such thing, only its name; make it anew, and put it in "
            "its place with replace"
        )

    def __iter__(self) -> NoReturn:
        self()

    def __repr__(self) -> str:
        return f"LeftOut({self.what!r})"


def to_text(value: Any, **options: Any) -> str:
    """Write a tree as JSON."""
    return json.dumps(_plain(value), **options)


def from_text(text: str) -> Any:
    """Read a tree that `to_text` wrote.

    Raises:
      ConfigError: if it did not.
    """
    try:
        return _lively(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"from_json: expected what to_json wrote, got {text[:60]!r}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # also NaN and the infinities, which JSON does not have
        return value if np.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _plain_array(value)
    if isinstance(value, TrainState):
        fields = {name: _plain(leaf) for name, leaf in value._asdict().items()}
        return {_KIND: "TrainState", "fields": fields}
    if isinstance(value, Mapping):
        return _plain_dict(value)
    if type(value) in (list, tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, Mesh):
        ids = [device.id for device in value.devices.flat]
        return {_KIND: "mesh", "names": list(value.axis_names), "ids": ids, "shape": _shape(value)}
    return _plain_record(value)


def _shape(mesh: Mesh) -> list[int]:
    return [int(size) for size in mesh.devices.shape]


def _plain_dict(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(key, str) for key in value) and _KIND not in value:
        return {key: _plain(item) for key, item in value.items()}
    items = [[_plain(key), _plain(item)] for key, item in value.items()]
    return {_KIND: "dict", "items": items}


def _plain_record(value: Any) -> Any:
    """Write a NamedTuple, such as an optimizer's state, by its type, and anything else by name."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields") and _found(kind) is kind:
        fields = {name: _plain(getattr(value, name)) for name in kind._fields}
        return {_KIND: "record", "of": _place(kind), "fields": fields}
    if isinstance(value, LeftOut):
        return {_KIND: "left out", "what": value.what}
    name = getattr(value, "__qualname__", None)
    return {_KIND: "left out", "what": f"{kind.__name__} {name}" if name else kind.__name__}


def _plain_array(value: Any) -> Any:
    key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    numbers = np.ascontiguousarray(jax.random.key_data(value) if key else value)
    return {
        _KIND: "key" if key else "numpy" if not isinstance(value, jax.Array) else "array",
        "dtype": str(jax.random.key_impl(value)) if key else str(numbers.dtype),
        "shape": list(np.shape(numbers) if key else np.shape(value)),
        "bytes": base64.b64encode(numbers.tobytes()).decode(),
    }


def _lively(value: Any) -> Any:
    if isinstance(value, list):
        return [_lively(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _lively(item) for key, item in value.items()}
    return _READERS[value[_KIND]](value)


def _read_array(value: Any) -> Any:
    kind = np.uint32 if value[_KIND] == "key" else jnp.dtype(value["dtype"])
    numbers = np.frombuffer(base64.b64decode(value["bytes"]), kind).reshape(value["shape"])
    if value[_KIND] == "key":
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=value["dtype"])
    return numbers.copy() if value[_KIND] == "numpy" else jnp.asarray(numbers)


def _read_mesh(value: Any) -> Any:
    devices = {device.id: device for device in jax.devices()}
    if not set(value["ids"]) <= devices.keys():
        return LeftOut(f"mesh of {len(value['ids'])} devices, of which {len(devices)} are here")
    grid = np.array([devices[index] for index in value["ids"]]).reshape(value["shape"])
    return Mesh(grid, tuple(value["names"]), axis_types=(AxisType.Auto,) * grid.ndim)


def _read_record(value: Any) -> Any:
    module, _, name = value["of"].partition(":")
    kind: Any = _named(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return LeftOut(f"a {name} of {module}, which is not imported here")
    return kind(**{name: _lively(item) for name, item in value["fields"].items()})


def _place(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(kind: type) -> Any:
    return _named(kind.__module__, kind.__qualname__)


def _named(module: str, name: str) -> Any:
    """Look up a type among the modules that are there, so that text never imports anything."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "float": lambda value: float(value["value"]),
    "tuple": lambda value: tuple(map(_lively, value["items"])),
    "dict": lambda value: {_lively(key): _lively(item) for key, item in value["items"]},
    "TrainState": lambda value: TrainState(**_lively(value["fields"])),
    "record": _read_record,
    "array": _read_array,
    "numpy": _read_array,
    "key": _read_array,
    "mesh": _read_mesh,
    "left out": lambda value: LeftOut(value["what"]),
}
