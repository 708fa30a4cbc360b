"""Arguments as JSON, and back, without a change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold.errors import ConfigError


def written(values: Mapping[str, Any]) -> str:
    """Write values by name as JSON.

    Raises:
      ConfigError: if a value is of a kind that JSON does not give back.
    """
    for name, value in values.items():
        try:
            same = _alike(json.loads(json.dumps(value, allow_nan=False)), value)
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ConfigError(
                f"{name}: expected a value that JSON gives back as it is, got {value!r:.80}; "
                f"write the arguments without it, arguments.replace({name}=None), and give it "
                "again to what was read"
            )
    return json.dumps(dict(values), indent=2, ensure_ascii=False) + "\n"


def _alike(back: Any, value: Any) -> bool:
    """Tell whether what JSON gave back is the value; a list may stand for a field's own tuple."""
    if isinstance(value, tuple):
        return isinstance(back, list) and all(map(_alike, back, value))
    return bool(back == value)


def read_text(given: Any) -> dict[str, Any]:
    """Read values by name from JSON: a text of it, or the path of a file.

    Raises:
      ConfigError: if it is no JSON, or not of values by name.
    """
    text = given
    if isinstance(given, Path) or (isinstance(given, str) and not given.lstrip().startswith("{")):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"from_json: expected JSON, or a file of it: {error}") from None
        except UnicodeError as error:
            raise ConfigError(f"from_json: expected JSON in {given}: {error}") from None
    try:
        values = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"from_json: expected JSON, got {text!r:.60}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"from_json: expected values by name, got {values!r:.60}")
    return values
