"""Hostile messages to the start of a run: bytes, and texts that a token may sign."""

import json
import random

from meshpar.multihost.token import MAX_LINE

HELLO = {"process": 1, "num": 3, "challenge": "own"}
"""A message that would be taken."""

_VALUES = (
    *(None, True, False, -1, 1.0, 1.5, 2**31, 10**40, "", "1", "x" * 1001),
    *("\ud800", "a\nb", "\0", [], [1], {}, {"process": 1}, [[[[]]]]),
)

_TEXTS = (
    *("", " ", "null", "true", "7", "1.0", '"text"', "[]", "{}", "[{}]", "nonsense"),
    *("NaN", "-Infinity", "{'process': 1}", "\ufeff{}", "{}{}", "9" * 3000),
    *("[" * 3000, '{"a":' * 600, '{"process": ' + "9" * 3000 + "}"),
    '{"process": 1, "process": 2, "num": 3, "challenge": "own"}',
    '{"process": 1, "num": 3, "challenge": "own", "challenge": "own"}',
    '{"process": 1e400, "num": 3, "challenge": "own"}',
    '{"process": 1E0, "num": 3, "challenge": "own"}',
    json.dumps({"coordinator": "localhost:1", "num": 3, "process": 1}),
    json.dumps({"problem": "planted", "missing": False}),
    json.dumps({"place": ["localhost:1", 3, 1]}),
)


def _takes(name, value):
    """Whether a field of a hello takes a value, as most texts are challenges."""
    if name == "challenge":
        return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 1000
    return type(value) is int and 0 <= value < 2**31


def bodies(seed=0, number=40):
    """Bodies of messages that are none, for somebody who knows the token to sign."""
    yield from (text.encode("utf-8", "surrogatepass") for text in _TEXTS)
    yield from (b"\xff\xfe", b"\x80" * 50, json.dumps(HELLO).encode("utf-16"))
    for name in HELLO:
        yield json.dumps({k: v for k, v in HELLO.items() if k != name}).encode()
        yield json.dumps(HELLO | {name.upper(): 1}).encode()
        for value in _VALUES:
            if not _takes(name, value):
                yield json.dumps(HELLO | {name: value}).encode()
    draws = random.Random(seed)
    for _ in range(number):
        yield json.dumps(_drawn(draws, 5)).encode()
        cut = draws.randrange(1, len(json.dumps(HELLO)))
        yield json.dumps(HELLO).encode()[:cut]


def _drawn(draws, depth):
    """A random value of JSON, mostly with the keys of a message."""
    kind = draws.randrange(5 if depth else 1)
    if kind < 2:
        return draws.choice(_VALUES)
    if kind == 2:
        return [_drawn(draws, depth - 1) for _ in range(draws.randrange(4))]
    keys = draws.choices([*HELLO, "problem", "missing", "extra"], k=draws.randrange(5))
    return {key: _drawn(draws, depth - 1) for key in keys}


def unsigned():
    """Bytes of strangers."""
    for body in bodies():
        yield body + b"\n"
    line = json.dumps(HELLO).encode() + b"\n"
    yield from (line, b" " + line, b"0" * 64 + b" " + line, b"\n" * 100, b"\0" * 100)
    yield from (b"x" * 100 * MAX_LINE, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n")
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xff\xfe\n"
