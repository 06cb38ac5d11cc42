"""Single values of Hugging Face's config.json, read strictly."""

from collections.abc import Mapping
from typing import Any

from meshpar.errors import ConfigError, shown

CONFIG = "config.json"


def check_values(
    description: Mapping[str, Any], supported: Mapping[str, tuple]
) -> None:
    """Raises ConfigError for a value that the decoder does not support."""
    for name, values in supported.items():
        if name in description and description[name] not in values:
            raise ConfigError(
                f"{name}={shown(repr(description[name]))}: only {values[0]!r} is "
                "supported"
            )


def number(description: Mapping[str, Any], name: str, default: Any) -> Any:
    """A number of a config.json; null stands for the default.

    Raises:
      ConfigError: another kind of value, or a size below 1.
    """
    value = description.get(name)
    if value is None:
        return default
    whole = isinstance(default, int)
    is_number = isinstance(value, int if whole else (int, float))
    if not is_number or isinstance(value, bool) or (whole and value < 1):
        kind = "a whole number of at least 1" if whole else "a number"
        raise ConfigError(f"{CONFIG}: {name}={shown(repr(value))}: use {kind}")
    return value if whole else float(value)


def switch(description: Mapping[str, Any], name: str) -> bool:
    """A switch of a config.json, which is off if it is missing or null.

    Raises:
      ConfigError: another kind of value.
    """
    value = description.get(name) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{CONFIG}: {name}={shown(repr(value))}: use true or false")
    return value
