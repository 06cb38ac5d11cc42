"""Rings along mesh axes: on grids of chips no hop over more than two links."""

import importlib.util

import jax
import numpy as np
import pytest

import meshpar
from meshpar import layouts, mesh
from meshpar.mesh import torus

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='topologies come with pip install "meshpar[aot-tpu]"',
)


def longest_hops(chips: jax.sharding.Mesh, axis: str) -> list[int]:
    """Of the rings in every dim of the torus that a mesh axis is."""
    dim, size = chips.axis_names.index(axis), chips.shape[axis]
    rows, found, stride = np.moveaxis(chips.devices, dim, 0), [], size
    for n in torus.ring_shape(chips, axis):
        whole, stride = stride, stride // n
        hops = [
            sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
            for j in range(size)
            for one, other in zip(
                rows[j].flat,
                rows[j // whole * whole + (j + stride) % whole].flat,
                strict=True,
            )
        ]
        found.append(max(hops))
    return found


@tpu
@pytest.mark.parametrize(
    "topology, layout, axis, shape, hops",
    [
        ("v5e:8x8", "fsdp=64", "fsdp", (8, 8), [2, 2]),
        ("v5e:4x4", "fsdp=16", "fsdp", (4, 4), [2, 2]),
        ("v5p:4x4x2", "fsdp=32", "fsdp", (4, 4, 2), [2, 2, 1]),
        # Whatever is left of a line that tensor cut up goes last: it moves the least.
        ("v5e:8x8", "fsdp=16,tensor=4", "fsdp", (8, 2), [2, 4]),
        ("v5e:8x8", "fsdp=16,tensor=4", "tensor", (4,), [2]),
        ("2*v5e:4x4", "data=4,fsdp=8", "fsdp", (4, 2), [2, 1]),
        ("2*v5e:4x4", "data=4,fsdp=8", "data", (2, 2), [0, 2]),
    ],
)
def test_rings_of_near_neighbours(topology, layout, axis, shape, hops):
    chips = mesh.make_mesh(layouts.parse(layout), mesh.topology(topology))
    assert len({device.id for device in chips.devices.flat}) == chips.size
    assert torus.ring_shape(chips, axis) == shape
    assert longest_hops(chips, axis) == hops


@tpu
def test_a_chain_over_chips_that_lie_apart_is_not_folded():
    """Stages of a pipeline send to the next one: two links, not four."""
    layout = layouts.parse("pipe=4,data=2,fsdp=4")
    chips = mesh.make_mesh(layout, mesh.topology("v5e:4x8"))
    places = [device.coords for device in chips.devices[0, :, 0, 0, 0]]
    assert [b[1] - a[1] for a, b in zip(places, places[1:], strict=False)] == [2, 2, 2]


@pytest.mark.parametrize("size, shape", [(8, (2, 4)), (4, (2, 2)), (7, (7,)), (1, ())])
def test_elsewhere_the_most_square_torus(size, shape):
    made = meshpar.make_mesh(layouts.Layout(fsdp=size), jax.devices()[:size])
    assert torus.ring_shape(made, "fsdp") == shape
