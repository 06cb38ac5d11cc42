"""Meshes: every axis present, no idle device, no second start."""

import jax
import pytest

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError


def test_axes_are_all_there_outer_first():
    mesh = meshpar.make_mesh(layouts.parse("fsdp=4,tensor=2"))
    assert dict(mesh.shape) == {"pipe": 1, "data": 1, "fsdp": 4, "tensor": 2}
    assert mesh.axis_names == layouts.AXES


def test_too_many_devices_wanted():
    with pytest.raises(LayoutError, match="needs 16 devices"):
        meshpar.make_mesh(layouts.parse("data=16"))


def test_idle_devices_are_refused_unless_waived():
    with pytest.raises(LayoutError, match="fills 4 of 8 devices.*--devices=4"):
        meshpar.make_mesh(layouts.parse("data=4"))
    assert meshpar.make_mesh(layouts.parse("data=4,waive=idle_devices")).size == 4
    assert meshpar.make_mesh(layouts.parse("data=4"), jax.devices()[:4]).size == 4


def test_simulate_after_the_start_is_an_error():
    with pytest.raises(RuntimeError, match="call it first"):
        meshpar.simulate(4)
