"""Chip constants."""

import pytest

from meshpar.mesh import chips


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_peak_flops_by_the_longest_match(kind, peak):
    assert chips.peak_flops(kind) == peak
