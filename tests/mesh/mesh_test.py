"""Meshes: all axes are present, no device is idle, slow links are for outer axes."""

import jax
import pytest

import meshpar
from meshpar import layouts, mesh
from meshpar.errors import LayoutError


def test_all_axes_are_present_outer_first():
    devices = meshpar.mesh.make_mesh(layouts.parse("fsdp=4,tensor=2"))
    sizes = dict.fromkeys(layouts.AXES, 1) | {"fsdp": 4, "tensor": 2}
    assert list(devices.shape.items()) == list(sizes.items())


def test_too_few_devices_are_an_error():
    with pytest.raises(LayoutError, match="needs 16 devices"):
        meshpar.mesh.make_mesh(layouts.parse("data=16"))


def test_idle_devices_are_refused_unless_allowed():
    with pytest.raises(
        LayoutError, match="fills 4 of 8 devices.*devices= of 4.*--devices=4"
    ):
        meshpar.mesh.make_mesh(layouts.parse("data=4"))
    assert meshpar.mesh.make_mesh(layouts.parse("data=4,allow=idle_devices")).size == 4
    assert meshpar.mesh.make_mesh(layouts.parse("data=4"), jax.devices()[:4]).size == 4


def test_simulate_after_the_start_is_an_error():
    with pytest.raises(RuntimeError, match="call it first"):
        meshpar.simulate(4)
    meshpar.simulate(8)  # As many as there are: a cell of a notebook runs twice.


class Device:
    """The attributes of a TPU in one of several slices that `make_mesh` reads."""

    platform, device_kind = "tpu", "a TPU"

    def __init__(self, number, per_slice):
        self.id, self.slice_index = number, number // per_slice


@pytest.mark.parametrize(
    "layout, slices, across",
    [
        ("replica=2,fsdp=4", 2, {"replica": 2}),
        ("pipe=2,data=2,fsdp=2", 4, {"pipe": 2, "data": 2}),
        ("data=4,tensor=2", 2, {"data": 2}),
        ("data=2,fsdp=4,allow=slow_links", 4, {"data": 2, "fsdp": 2}),
    ],
)
def test_only_outer_axes_cross_the_links_between_slices(layout, slices, across):
    layout = layouts.parse(layout)
    devices = [Device(i, 8 // slices) for i in range(8)]
    sizes = dict.fromkeys(layouts.AXES, 1) | across
    assert mesh.mesh._over_slices(layout, devices, slices) == list(sizes.values())


def test_a_layout_that_would_need_fast_links_between_slices_is_an_error():
    devices = [Device(i, 4) for i in range(8)]
    words = "2 slices of 4 a TPU devices: only replica, pipe, data.*allow=slow_links"
    with pytest.raises(LayoutError, match=words):
        mesh.make_mesh(layouts.parse("fsdp=8"), devices)


def test_slices_that_are_filled_unequally_are_an_error():
    devices = [Device(i, 4) for i in range(8)]
    with pytest.raises(LayoutError, match="6 devices of 2 slices, with 2 to 4 devices"):
        mesh.make_mesh(layouts.parse("data=6,allow=idle_devices"), devices)
