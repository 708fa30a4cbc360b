"""Fields of `TrainingArguments`: what each declares, and the check of its value."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import numpy as np
from jax.sharding import PartitionSpec

from stepfold import tree
from stepfold.core.gradients import RematPolicy
from stepfold.core.validation import suggest
from stepfold.errors import refuse

Truncation = Literal["keep_end", "keep_start"]
Strategy = Literal["no", "steps", "epoch"]
Bar = Literal["tqdm", "rich", "json", "none"]
MetricFile = Literal["jsonl", "csv", "tensorboard"]
Mixed = Literal["bf16", "fp16", "full"]
Remat = Literal["none", RematPolicy]
MIXED: Mapping[Mixed, str] = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "full": "float32"}
)


# Checks of single fields. Values are stored so that equal arguments compare equal and survive JSON:
# a list as a tuple, an integer rate as a float, a numpy scalar as Python's, dtypes and policies by
# their names.


def _is_int(value: Any, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(str(value).strip())


def is_function(value: Any) -> bool:
    """Whether a value is a function, and not a class."""
    return callable(value) and not isinstance(value, type)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _dtype(value: Any) -> str | None:
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
    short |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}
    dtype = tree.floating(short.get(value, value) if isinstance(value, str) else value)
    # numpy reads float as float64. Nothing scales the values of an 8-bit float.
    is_vague = value is float or str(value) == "float"
    return None if dtype is None or is_vague or dtype.itemsize < 2 else str(dtype.name)


def _dims(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a mesh, which may be written as a text with commas."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", value):
        value = [int(size) for size in value.split(",")]
    if not _is_list(value) or not value or not all(_is_int(size, -1) and size for size in value):
        return None
    return tuple(value) if value.count(-1) <= 1 else None


def _policy(value: Any) -> Any:
    """Return the name of a policy of jax."""
    policies = {name: getattr(jax.checkpoint_policies, name) for name in get_args(Remat)[1:]}
    same = [name for name, policy in policies.items() if policy is value]
    return "none" if value in ("", None) else same[0] if same else value


def seconds(value: float | str) -> float:
    """Convert a duration, such as 20 or "1h30m", to seconds; 0 if it is not one."""
    if not isinstance(value, str):
        return float(value) if _is_finite(value) else 0.0
    units = {"d": 86400, "h": 3600, "min": 60, "m": 60, "sec": 1, "s": 1}
    part = rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})\s*"
    text = value.strip().lower()
    parts = re.findall(part, text) if re.fullmatch(f"({part})+", text) else []
    return sum(float(count) * units[unit] for count, unit in parts) or 0.0


class FieldRule(NamedTuple):
    """What a field accepts, and how it stores that."""

    expected: str
    accepts: Callable[[Any], Any]
    convert: Callable[[Any], Any] = lambda value: value


_RULES = {
    bool: FieldRule("True or False", lambda v: isinstance(v, bool)),
    int: FieldRule("an integer of at least 1", lambda v: _is_int(v, 1)),
    float: FieldRule("a number above 0", lambda v: _is_finite(v) and v > 0, float),
    str: FieldRule("a text", _is_text),
    tuple: FieldRule("a tuple or a list", _is_list, tuple),
    dict: FieldRule(
        "a dict with names as keys",
        lambda v: isinstance(v, Mapping) and all(isinstance(key, str) for key in v),
        dict,
    ),
    get_origin(Callable[..., Any]): FieldRule("a function", is_function),
}
"""Rules by type, for fields that declare none."""
FROM_ZERO = FieldRule("an integer of at least 0", lambda v: _is_int(v, 0))
SEED = FieldRule(f"an integer from 0 to {2**63 - 1}", lambda v: _is_int(v, 0) and v < 2**63)
NOT_NEGATIVE = FieldRule("a number of at least 0", lambda v: _is_finite(v) and v >= 0, float)
STEPS = FieldRule(
    "an integer of at least 1, or a fraction between 0 and 1",
    lambda v: _is_int(v, 1) or (type(v) is float and 0 < v < 1),
)
DTYPE = FieldRule("a floating dtype, such as 'float32' or 'bfloat16'", _dtype, _dtype)
PATTERN = FieldRule("a regular expression", _is_text, lambda v: re.compile(v).pattern)
DIMS = FieldRule("sizes of at least 1, at most one of them -1, such as (1, -1, 1, 1)", _dims, _dims)
SPEC = FieldRule(
    'a PartitionSpec, or a tuple such as (("dp", "fsdp"), None, "sp")',
    lambda v: _is_list(v) or isinstance(v, PartitionSpec),
    lambda v: tuple(tuple(entry) if _is_list(entry) else entry for entry in v),
)
PATH = FieldRule("a path", _is_path, str)
RESUME = FieldRule(
    "True, False, or the path of a checkpoint",
    lambda v: isinstance(v, bool) or _is_path(v),
    lambda v: v if isinstance(v, bool) else str(v),
)
DURATION = FieldRule(
    "a time above 0, such as 20, '90s', '45min', '1h30m' or '2d'",
    lambda v: seconds(v) > 0,
    lambda v: v if isinstance(v, str) else float(v),
)
PRUNING = FieldRule(
    "a function of an optimizer, or an object with wrap_optax(tx)",
    lambda v: callable(v) or callable(getattr(v, "wrap_optax", None)),
)


def setting(
    default: Any = None,
    rule: FieldRule | None = None,
    *,
    alias: str = "",
    none: tuple[int, ...] = (),
    unused: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """Declare a field with more than a default.

    Args:
      default: the default, or the class dict for an empty one.
      rule: what it accepts, if its type does not say it.
      alias: other names, separated by spaces, by which it is set and read too.
      none: integers that stand for None, as in other libraries.
      unused: other fields, each with a value with which this field has no effect.
    """
    metadata = {"rule": rule, "aliases": alias.split(), "none": none, "unused": unused}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def declarations(cls: type) -> dict[str, Mapping[str, Any]]:
    """Return what `setting` declares of each field; a subclass may change a default alone."""
    declared: dict[str, Mapping[str, Any]] = {}
    for base in reversed(cls.__mro__):
        for each in vars(base).get("__dataclass_fields__", {}).values():
            declared[each.name] = each.metadata or declared.get(each.name, {})
    return declared


def aliases_of(cls: type) -> dict[str, str]:
    """Return the names of fields by their aliases."""
    declared = declarations(cls).items()
    return {alias: name for name, each in declared for alias in each.get("aliases", ())}


def check_field(
    name: str, hint: Any, value: Any, metadata: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return a value as a field of a type stores it, or raise a ConfigError."""
    value = value.item() if isinstance(value, np.generic) else value
    types = get_args(hint)
    if NoneType in types or hint is Any:
        if value is None or (type(value) is int and value in metadata.get("none", ())):
            return None
        hint = types[0] if types else hint
    origin, choices = get_origin(hint) or hint, ()
    if origin is Literal:
        choices = get_args(hint)
        value = _policy(value) if choices == get_args(Remat) else value
        rule = FieldRule(
            f"one of {', '.join(choices)}", lambda v: isinstance(v, str) and v in choices
        )
    else:
        rule = metadata.get("rule") or _RULES[origin]
    try:
        if not rule.accepts(value):
            refuse(name, rule.expected, f"{value!r:.80}", suggest(value, choices))
        value = rule.convert(value)
    except re.error as error:
        refuse(name, rule.expected, f"{value!r:.80}", str(error))
    if rule is not _RULES[tuple]:
        return value
    kind = get_args(hint)[0]
    return tuple(check_field(f"{name}[{i}]", kind, item) for i, item in enumerate(value))


def store_fields(instance: Any, hints: Mapping[str, Any]) -> None:
    """Check the fields of a frozen dataclass that have these types, and store them."""
    declared = declarations(type(instance))
    for name, hint in hints.items():
        value = check_field(name, hint, getattr(instance, name), declared[name])
        object.__setattr__(instance, name, value)


def default_of(each: Field[Any]) -> Any:
    """Return the default of a field."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def is_changed(arguments: Any, name: str) -> bool:
    """Whether a field differs from its default."""
    each = next(each for each in fields(arguments) if each.name == name)
    return bool(getattr(arguments, name) != default_of(each))
