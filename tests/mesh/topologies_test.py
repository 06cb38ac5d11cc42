"""Topology strings: every example of the error message is one that works."""

import importlib.util
import math
import re

import pytest

from meshpar import layouts, mesh
from meshpar.errors import LayoutError, MeshparError
from meshpar.mesh import chips, slices, topologies

with pytest.raises(MeshparError) as error:
    mesh.topology("")
EXAMPLES = re.findall(r"[\w*]+:\w+", str(error.value))
COMPILERS = {chips.TPU: "libtpu", chips.GPU: "jax_cuda12_plugin"}


def test_the_message_has_an_example_of_every_chip_with_a_compiler():
    names = {example.split(":")[0] for example in EXAMPLES}
    with_compiler = {
        name
        for name, chip in chips.CHIPS.items()
        if chip.platform == chips.TPU or chip.xla_target
    }
    assert EXAMPLES == topologies.examples() and names == with_compiler


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_topologies_of_their_chip(text):
    chip, shape, num_slices = topologies.parse_topology(text)
    assert text.startswith(chip.name) and num_slices is None
    if importlib.util.find_spec(COMPILERS[chip.platform]) is None:
        return  # The form is checked; the devices need the compiler.
    devices = mesh.topology(text)
    assert len(devices) == math.prod(shape)  # Every device is a whole chip.
    assert {chips.chip_of(device.device_kind) for device in devices} == {chip}


@pytest.mark.parametrize(
    "text, name, shape, num_slices",
    [
        ("v5e:4x4", "v5e", (4, 4), None),
        ("v5p:4x4x2", "v5p", (4, 4, 2), None),
        ("12*v5e:4x4", "v5e", (4, 4), 12),
        ("h200:16", "h200", (16,), None),
        ("8*h100:8", "h100", (8,), 8),
    ],
)
def test_parts_of_a_topology(text, name, shape, num_slices):
    assert topologies.parse_topology(text) == (chips.CHIPS[name], shape, num_slices)


@pytest.mark.parametrize(
    "text",
    [
        "v5e:4",
        "v5e:0x4",
        "v5e:4x4x4x4",
        "0*v5e:4x4",
        "*v5e:4x4",
        "2*h100:2x4",
        "h100:2x4",
        "a100:8",
    ],
)
def test_other_forms_are_an_error(text):
    with pytest.raises(MeshparError, match="write one such as v4:4x4"):
        topologies.parse_topology(text)


@pytest.mark.parametrize("text", ["2*h100:4", "2*v5e:2x2"])
def test_axes_over_slow_links_span_slices(text):
    chip = topologies.parse_topology(text)[0]
    if importlib.util.find_spec(COMPILERS[chip.platform]) is None:
        pytest.skip("the devices need the compiler")
    devices = mesh.topology(text)
    arranged = mesh.make_mesh(layouts.parse("data=2,fsdp=4"), devices).devices
    numbers = [[*map(slices.slice_of, line.flat)] for line in arranged.reshape(2, 4)]
    assert numbers == [[0] * 4, [1] * 4]
    with pytest.raises(LayoutError, match="slow_links"):
        mesh.make_mesh(layouts.parse("fsdp=8"), devices)
