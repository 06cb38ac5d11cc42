"""The table of chips: figures are complete, and kinds of devices are unambiguous."""

import collections
import dataclasses

import pytest

from meshpar.mesh import chips


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_figures_are_positive_and_plausible(chip):
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, int | float) and field.name != "torus_dims":
            assert value > 0 or value is False, field.name
    assert min(chip.tile) > 0
    assert (
        chip.torus_dims == {chips.TPU: chip.num_links // 2, chips.GPU: 0}[chip.platform]
    )
    # Bounds that hold for any chip find a figure in the wrong unit.
    assert 1e14 < chip.peak_flops < 1e16
    assert 8 <= chip.memory_bytes / chips.GIB < 1024
    assert 100 < chip.peak_flops / chip.memory_bandwidth < 1000
    assert chip.link_bandwidth * chip.num_links < chip.memory_bandwidth


def test_every_device_kind_is_one_chip():
    kinds = [kind for chip in chips.CHIPS.values() for kind in chip.device_kinds]
    assert collections.Counter(kinds).most_common(1)[0][1] == 1
    assert all(chip.device_kinds for chip in chips.CHIPS.values())


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_the_exact_kind(kind, peak):
    assert chips.peak_flops(kind) == peak
