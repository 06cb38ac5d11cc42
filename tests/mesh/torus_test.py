"""Rings along mesh axes: on grids of chips a hop takes at most two links."""

import importlib.util

import jax
import numpy as np
import pytest

import meshpar
from meshpar import layouts, mesh
from meshpar.mesh import torus

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='the TPU compiler comes with pip install -e ".[aot-tpu]"',
)


def longest_hops(chips: jax.sharding.Mesh, axis: str) -> list[int]:
    """Links of the longest hop in each dim of the torus of a mesh axis."""
    dim, size = chips.axis_names.index(axis), chips.shape[axis]
    rows, longest, stride = np.moveaxis(chips.devices, dim, 0), [], size
    for n in torus.ring_shape(chips, axis):
        whole, stride = stride, stride // n
        hops = [
            sum(abs(a - b) for a, b in zip(chip.coords, other.coords, strict=True))
            for j in range(size)
            for chip, other in zip(
                rows[j].flat,
                rows[j // whole * whole + (j + stride) % whole].flat,
                strict=True,
            )
        ]
        longest.append(max(hops))
    return longest


@tpu
@pytest.mark.parametrize(
    "topology, layout, axis, shape, hops",
    [
        ("v5e:8x8", "fsdp=64", "fsdp", (8, 8), [2, 2]),
        ("v5e:4x4", "fsdp=16", "fsdp", (4, 4), [2, 2]),
        ("v5p:4x4x2", "fsdp=32", "fsdp", (4, 4, 2), [2, 2, 1]),
        # The rest of a line that tensor splits comes last, where least is moved.
        ("v5e:8x8", "fsdp=16,tensor=4", "fsdp", (8, 2), [2, 4]),
        ("v5e:8x8", "fsdp=16,tensor=4", "tensor", (4,), [2]),
        ("2*v5e:4x4", "data=4,fsdp=8", "fsdp", (4, 2), [2, 1]),
        ("2*v5e:4x4", "data=4,fsdp=8", "data", (2, 2), [0, 2]),
    ],
)
def test_rings_join_near_neighbors(topology, layout, axis, shape, hops):
    chips = mesh.make_mesh(layouts.parse(layout), mesh.topology(topology))
    assert len({device.id for device in chips.devices.flat}) == chips.size
    assert torus.ring_shape(chips, axis) == shape
    assert longest_hops(chips, axis) == hops


@tpu
def test_a_chain_over_chips_that_are_apart_is_not_folded():
    """A stage of a pipeline sends to the next one over two links, not four."""
    layout = layouts.parse("pipe=4,data=2,fsdp=4")
    chips = mesh.make_mesh(layout, mesh.topology("v5e:4x8"))
    places = [device.coords for device in chips.devices[0, :, 0, 0, ..., 0].ravel()]
    assert [b[1] - a[1] for a, b in zip(places, places[1:], strict=False)] == [2, 2, 2]


@pytest.mark.parametrize("size, shape", [(8, (2, 4)), (4, (2, 2)), (7, (7,)), (1, ())])
def test_other_devices_form_the_most_square_torus(size, shape):
    devices = meshpar.mesh.make_mesh(layouts.Layout(fsdp=size), jax.devices()[:size])
    assert torus.ring_shape(devices, "fsdp") == shape
