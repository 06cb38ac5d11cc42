"""The grammar of layout strings: "data=2,fsdp=4,params.mlp=none,allow=bias$"."""

import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshpar.errors import LayoutError, nearest, shown

_ITEM = re.compile(r'((?:"(?:\\.|[^"\\])*"|[^,"=])+)=((?:"(?:\\.|[^"\\])*"|[^,"])*)')

LONGEST = 10_000
"""Most characters of a layout string."""

RULES = {"axes": "+", "params": "+", "activations": "+", "paths": "/"}
"""{kind: separator} of items KIND.NAME=PART[separator PART]..."""

REGEXES = ("prefetch", "allow")
"""Items that hold a regex and may be repeated."""

FORMER_NAMES = {"stash": "save", "control": "tick_loop", "waive": "allow"}
"""{former name: name} of options; layout strings may still use the former name."""


def check_regex(regex: Any) -> None:
    """Raises LayoutError unless a value is a regex."""
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise LayoutError(
            f"{shown(repr(regex))} is not a regex: {error}; write one for the paths of "
            "parameters, such as attention/q"
        ) from error


def _quote(text: str) -> str:
    """A regex or name for a layout string, in JSON quotes if it needs them."""
    return text if re.fullmatch(r"[\w/*.^$-]+", text) else json.dumps(text)


def _rule_item(kind: str, name: str, entry: Iterable[Any]) -> str:
    """The item of one rule, such as params.mlp=fsdp+tensor."""
    parts = ["none" if part is None else str(part) for part in entry]
    text = RULES[kind].join(parts) or "none"
    return f"{kind}.{_quote(name)}={_quote(text) if kind == 'paths' else text}"


def write_items(values: Mapping[str, Any]) -> str:
    """The layout string of {name: value of a Layout's field}."""
    items = []
    for name, value in values.items():
        if name in RULES:
            items += [_rule_item(name, *rule) for rule in value]
        elif name in REGEXES:
            items += [f"{name}={_quote(regex)}" for regex in value]
        else:
            items.append(f"{name}={value}")
    return ",".join(items)


@functools.cache
def _current_name(key: str) -> str:
    """The name of an option; warns once per process of a former name."""
    if key not in FORMER_NAMES:
        return key
    name = FORMER_NAMES[key]
    logging.warning("layout option %s= is now called %s=", key, name)
    return name


def _unquote(text: str) -> str:
    """A text without its JSON quotes, if it has them.

    Raises:
      LayoutError: an escape that JSON does not have.
    """
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise LayoutError(
            f"{shown(text)} is not a text in JSON quotes ({error}); write a backslash "
            "twice"
        ) from error


def read_items(text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a layout string.

    Args:
      text: the string.
      defaults: {name: default} of every field of a layout.

    Returns:
      {name: value} of the fields that the string gives.

    Raises:
      LayoutError: an item that is malformed, unknown or given twice.
    """
    if len(text) > LONGEST:
        raise LayoutError(
            f"layout {shown(text)!r}: use at most {LONGEST:,} characters; shorter "
            "regexes hold several parameters"
        )
    values: dict[str, Any] = {}
    position, text = 0, re.sub(r"\s*,\s*", ",", text.strip())
    where = f'layout "{shown(text)}"'
    while position < len(text):
        item = _ITEM.match(text, position)
        if not item or (item.end() < len(text) and text[item.end()] != ","):
            rest = shown(text[position:].split(",")[0])
            raise LayoutError(f"{rest!r} in {where}: write name=value")
        position = item.end() + 1
        key, value = _current_name(item.group(1).strip()), item.group(2).strip()
        kind, _, name = key.partition(".")
        if kind in RULES and name:
            rules, name = values.setdefault(kind, {}), _unquote(name)
            if name in rules:
                raise LayoutError(
                    f"{shown(key)} is given twice in {where}; give it once"
                )
            parts = _unquote(value).split(RULES[kind])
            entry = tuple(None if part == "none" else part for part in parts)
            rules[name] = () if kind != "paths" and entry == (None,) else entry
        elif key in REGEXES:
            values[key] = (*values.get(key, ()), _unquote(value))
        elif key not in defaults or key in RULES:
            items = [*defaults, "axes.NAME", "params.DIM", "activations.DIM"]
            known = nearest(shown(key), items)
            raise LayoutError(f"{shown(key)!r} in {where} ({known})")
        elif key in values:
            raise LayoutError(f"{key} is given twice in {where}; give it once")
        elif isinstance(defaults[key], str):
            values[key] = value
        elif not re.fullmatch("[0-9]{1,15}", value):
            raise LayoutError(f"{key}={shown(value)!r} in {where}: use a whole number")
        else:
            values[key] = int(value)
    return values
