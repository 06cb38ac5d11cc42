"""Units: numbers are shown in the one that fits."""

import math

import pytest

from meshpar.units import readable_bytes, readable_seconds


@pytest.mark.parametrize(
    "size, text",
    [(999, "999 B"), (1e3, "1.00 kB"), (2.5e9, "2.50 GB"), (math.inf, "unbounded")],
)
def test_bytes(size, text):
    assert readable_bytes(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.0 ms"),
        (2e-6, "2.0 µs"),
        (1e-3, "1.0 ms"),
        (9.5, "9500.0 ms"),
        (61.0, "61.0 s"),
    ],
)
def test_seconds(seconds, text):
    assert readable_seconds(seconds) == text
